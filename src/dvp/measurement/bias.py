"""At a fixed policy: every estimator of the policy gradient against the exact on-policy gradient.

The exact one needs no engine: the trainer's own policy samples its batches, in fp32, by transformers' `generate`, and
RLOO without any correction is then unbiased. The estimators get batches of the same problems from the engine, and
weights, advantages and safe vocabularies as training has them; their i-th batches have the same seeds whatever the safe
vocabulary, so that differences between estimators are paired.

Shape suffixes: B responses of a batch, T tokens, E estimators, n and m batches, D coordinates.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import pandas as pd
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from dvp.core.advantages import Responses, rloo
from dvp.core.batch import Rollout
from dvp.core.estimator_bias import STATISTICS, Jackknifed, estimator_bias, inner_products, squared_norm
from dvp.core.safe_vocabulary import SafeVocabulary
from dvp.experiment.config import Experiment
from dvp.experiment.grid import rho_in_path
from dvp.files import atomic_path, sha256_file
from dvp.measurement.gradients import Estimator, Gradients
from dvp.measurement.problems import FixedProblems
from dvp.progress import Progress
from dvp.rollout.vllm import VllmEngine, prove_safe_vocabulary
from dvp.training.backend import Policy
from dvp.training.base import check_vocabulary

ENGINE_SEQUENCES = 256  # that the engine samples at once


@dataclass(frozen=True)
class BiasTables:
    """A table a row an estimator, what its intervals are made from, and what there is to know of all."""

    estimators: pd.DataFrame
    """method, rho (None without one) and label; each of STATISTICS with _se, _low and _high, in units of |g|² (the
    cosine in none); batches; empty_batches (nothing was kept: a gradient of 0); kept_fraction of the responses;
    mean_weight of their tokens, 0 for rejected ones; outside_safe_fraction of the sampled tokens; mean reward."""
    jackknife: pd.DataFrame
    """STATISTICS of each method and rho without one batch: of the engine's (sample `engine`) or of the reference."""
    summary: dict
    """Problems, batches, model, and the reference's own numbers; JSON-able."""

    def results(self) -> dict[str, dict[str, float]]:
        """The statistics that are defined, by estimator."""
        return {
            f"{row['method']}.{rho_in_path(row['rho'])}": {
                name: row[name] for name in STATISTICS if math.isfinite(row[name])
            }
            for row in self.estimators.to_dict("records")
        }


def measure_bias(
    experiment: Experiment, model: Path, engine: str, problems: pd.DataFrame, *, where: str, seed: int, name: str
) -> BiasTables:
    """Measure every estimator of `experiment.bias` at the policy `model`, a Hugging Face directory.

    Starts an engine, so it needs a process of its own.

    Args:
        engine: a name of experiment.engines.
        problems: id, answer, prompt; the ones that are used are drawn by `seed`.
        where: where they come from, for messages.
        name: how progress is called.

    Raises:
        DvpError: the model or its problems cannot be used, a prompt is too long, the engine does not prune as it is
            told, or the exact gradient is not distinguishable from 0.
    """
    settings, training = experiment.bias, experiment.training
    threads = torch.get_num_threads()
    check_vocabulary(model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    context = AutoConfig.from_pretrained(model).max_position_embeddings
    fixed = FixedProblems(experiment, tokenizer, problems, where=where, seed=seed, context=context)
    estimators = [Estimator(experiment, *pair) for pair in experiment.estimators]

    rules = list(dict.fromkeys(estimator.safe.engine for estimator in estimators))
    started = VllmEngine(
        model,
        experiment.engines[engine],
        max_model_len=fixed.longest,
        max_num_seqs=ENGINE_SEQUENCES,
        seed=seed,
        rules=rules,
    )
    torch.set_num_threads(threads)  # starting an engine may change it
    progress = Progress(f"{name}: engine {engine}", len(rules) * settings.batches)
    rollouts: dict[SafeVocabulary | None, list[Rollout]] = {}
    for rule in rules:
        if rule is not None:
            prove_safe_vocabulary(started, fixed.prompts, rule)
        rollouts[rule] = []
        for rollout in fixed.from_engine(started, rule, settings.batches):
            rollouts[rule].append(rollout)
            progress.step(sum(map(len, rollouts.values())), f"reward {rollout.rewards_B.mean():.2f}")

    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    if torch.cuda.is_available():
        network = network.cuda()
    exact = fixed.from_trainer(network, settings.reference_batches, f"{name}: reference")
    policy = Policy(network)
    policy.check(fixed.prompts)
    gradients = Gradients(policy, training.temperature, training.tokens_per_micro_batch, seed)
    return _compare(estimators, rollouts, exact, gradients, fixed, name)


def write_tables(measured: BiasTables, folder: Path) -> dict[str, str]:
    """Write estimators.parquet and jackknife.parquet; their SHA-256 by name."""
    tables = {"estimators.parquet": measured.estimators, "jackknife.parquet": measured.jackknife}
    for name, table in tables.items():
        with atomic_path(folder / name) as temporary:
            table.to_parquet(temporary)
    return {name: sha256_file(folder / name) for name in tables}


def _compare(
    estimators: list[Estimator],
    rollouts: dict[SafeVocabulary | None, list[Rollout]],
    exact: list[Rollout],
    gradients: Gradients,
    fixed: FixedProblems,
    name: str,
) -> BiasTables:
    """Gradients of all batches, and what follows from their inner products."""
    together: dict[tuple[SafeVocabulary | None, SafeVocabulary | None], list[Estimator]] = {}
    for estimator in estimators:
        together.setdefault((estimator.safe.trainer, estimator.safe.engine), []).append(estimator)
    batches = len(next(iter(rollouts.values())))
    progress = Progress(f"{name}: gradients", len(exact) + batches * len(together))

    reference_mD = torch.empty(len(exact), gradients.sketch.length)
    for number, rollout in enumerate(exact, start=1):
        reference_mD[number - 1] = gradients.of_batch(rollout.batch, _exact_coefficients(rollout, fixed), None)
        progress.step(number, "reference")
    reference_mm = inner_products(reference_mD, reference_mD)
    norm = squared_norm(reference_mm)

    statistics: dict[Estimator, dict[str, Jackknifed]] = {}
    rows: dict[Estimator, dict] = {}
    for number, ((safe, rule), members) in enumerate(together.items()):
        gradient_EnD = torch.empty(len(members), batches, gradients.sketch.length)
        notes: dict[Estimator, list[dict]] = {estimator: [] for estimator in members}
        for index, rollout in enumerate(rollouts[rule]):
            kept = _fill(gradient_EnD[:, index], members, rollout, safe, gradients)
            for estimator, note in zip(members, kept, strict=True):
                notes[estimator].append(note)
            progress.step(len(exact) + number * batches + index + 1, f"safe vocabulary {rule}")
        cross_Enm = inner_products(gradient_EnD.flatten(0, 1), reference_mD).view(len(members), batches, -1)
        for estimator, gradient_nD, cross_nm in zip(members, gradient_EnD, cross_Enm, strict=True):
            batches_nn = inner_products(gradient_nD, gradient_nD)
            statistics[estimator] = estimator_bias(batches_nn, cross_nm, reference_mm)
            rows[estimator] = _row(estimator, statistics[estimator], notes[estimator])
            rows[estimator]["reward"] = _mean_reward(rollouts[rule])
        del gradient_EnD, gradient_nD  # before the next ones

    lengths = torch.cat([rollout.batch.response_BT.sum(dim=1) for rollout in exact]).float()
    summary = {
        "problems": fixed.ids,
        "responses_a_batch": fixed.responses,
        "batches": batches,
        "parameters": gradients.sketch.size,
        "coordinates": gradients.sketch.length,
        "sketched": not gradients.sketch.exact,
        "reference": {
            "batches": len(exact),
            "squared_norm": norm.value,
            "squared_norm_se": norm.se,
            "reward": _mean_reward(exact),
            "response_tokens_mean": lengths.mean().item(),
            "truncated_fraction": torch.cat([rollout.truncated_B for rollout in exact]).float().mean().item(),
        },
    }
    return BiasTables(
        pd.DataFrame([rows[estimator] for estimator in estimators]).assign(
            rho=pd.Series([estimator.rho for estimator in estimators], dtype=object)
        ),
        pd.concat([_replicates(estimator, statistics[estimator]) for estimator in estimators], ignore_index=True),
        summary,
    )


def _exact_coefficients(rollout: Rollout, fixed: FixedProblems) -> torch.Tensor:
    """RLOO's, for a mean over the responses."""
    mask_BT = rollout.batch.response_BT
    ones_BT = torch.ones(mask_BT.shape)
    return rloo(Responses(rollout.rewards_B, mask_BT, fixed.group_size, ones_BT, ones_BT)) / len(mask_BT)


def _fill(
    gradient_ED: torch.Tensor,
    members: list[Estimator],
    rollout: Rollout,
    safe: SafeVocabulary | None,
    gradients: Gradients,
) -> list[dict]:
    """Write a batch's gradient of each estimator that shares its samples and safe vocabularies; what they kept."""
    mask_BT, batch = rollout.batch.response_BT, rollout.batch
    statistics = gradients.score(batch, safe)
    in_safe_BT = mask_BT & statistics["target_in_safe"]
    # A response's first token in V_S; one without any has no gradient, and a coefficient of 0 there.
    first_B1 = in_safe_BT.float().argmax(dim=1, keepdim=True)
    notes, of_responses, places = [], [], []
    for place, estimator in enumerate(members):
        update = estimator.update(rollout, statistics)
        weights, coefficient_BT = update.weights, update.coefficients()
        notes.append(
            {
                "empty": not weights.kept_B.any().item(),
                "kept_fraction": weights.kept_B.float().mean().item(),
                "mean_weight": weights.weight_BT[mask_BT].mean().item(),
                "outside_safe_fraction": 1 - in_safe_BT.sum().item() / mask_BT.sum().item(),
            }
        )
        if estimator.by_token:
            gradient_ED[place] = gradients.of_batch(batch, coefficient_BT, safe)
        else:
            of_responses.append(coefficient_BT.gather(1, first_B1)[:, 0])
            places.append(place)
    if places:
        gradient_ED[places] = gradients.of_responses(batch, torch.stack(of_responses, dim=1), safe)
    return notes


def _row(estimator: Estimator, statistics: dict[str, Jackknifed], notes: list[dict]) -> dict:
    row = {"method": estimator.method, "rho": estimator.rho, "label": estimator.label}
    for name in STATISTICS:
        low, high = statistics[name].interval
        row |= {
            name: statistics[name].value,
            f"{name}_se": statistics[name].se,
            f"{name}_low": low,
            f"{name}_high": high,
        }
    row |= {"batches": len(notes), "empty_batches": sum(note["empty"] for note in notes)}
    means = ("kept_fraction", "mean_weight", "outside_safe_fraction")
    return row | {name: fmean(note[name] for note in notes) for name in means}


def _replicates(estimator: Estimator, statistics: dict[str, Jackknifed]) -> pd.DataFrame:
    parts = []
    for sample, attribute in (("engine", "over_batches_n"), ("reference", "over_reference_m")):
        values = {name: getattr(statistics[name], attribute).numpy() for name in STATISTICS}
        part = pd.DataFrame(values)
        parts.append(part.assign(method=estimator.method, rho=estimator.rho, sample=sample, batch=range(len(part))))
    return pd.concat(parts, ignore_index=True)[["method", "rho", "sample", "batch", *STATISTICS]]


def _mean_reward(rollouts: list[Rollout]) -> float:
    return torch.cat([rollout.rewards_B for rollout in rollouts]).mean().item()
