"""At a fixed policy: every estimator of the policy gradient against the exact on-policy gradient.

The exact one needs no engine: the trainer's own policy samples its batches, in fp32, by transformers' `generate`, and
RLOO without any correction is then unbiased. The estimators get batches of the same problems from the engine, and
weights, advantages and safe vocabularies as training has them; their i-th batches have the same seeds whatever the safe
vocabulary, so that differences between estimators are paired.

The squared bias is also measured from the engine's samples alone, paired with the same samples' own estimate of the
exact gradient (dvp.measurement.paired_bias). For an estimator with a safe vocabulary those are the samples without one
that have the same seeds.

Where the experiment asks for it, the gradient's variance is also measured by position in the response, and OTB's proxy
is held against what it stands for, the true squared norms of single tokens' gradients.

Shape suffixes: B responses of a batch, T tokens, N some of them, E estimators, K parts, n and m batches, D coordinates.
"""

import math
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from statistics import fmean

import pandas as pd
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from dvp.core.advantages import Responses, optimal_token_proxy, rloo
from dvp.core.batch import Rollout
from dvp.core.safe_vocabulary import EngineSets, SafeVocabulary
from dvp.experiment.config import Experiment
from dvp.experiment.grid import WHOLE, rho_in_path
from dvp.files import atomic_path, sha256_file
from dvp.measurement.estimator_bias import (
    STATISTICS,
    VARIANCE_STATISTICS,
    Jackknifed,
    estimator_bias,
    gradient_variance,
    inner_products,
    squared_norm,
)
from dvp.measurement.files import PAIRED, SMALLEST_ESS
from dvp.measurement.gradients import Estimator, Gradients, position_parts
from dvp.measurement.paired_bias import (
    exact_coefficients,
    paired_squared_bias,
    sequence_log_ratio,
    weight_diagnostics,
)
from dvp.measurement.problems import FixedProblems
from dvp.measurement.rank_correlation import clustered_rank_correlation
from dvp.progress import Progress
from dvp.rollout.seeds import derived_seed
from dvp.rollout.vllm import VllmEngine, prove_safe_vocabulary
from dvp.training.backend import Policy

ENGINE_SEQUENCES = 256  # that the engine samples at once


@dataclass(frozen=True)
class BiasTables:
    """A table a row an estimator, what its intervals are made from, and what there is to know of all."""

    estimators: pd.DataFrame
    """method, rho (None without one) and label; each of STATISTICS with _se, _low and _high, in units of |g|² (the
    cosine in none); batches; empty_batches (nothing was kept: a gradient of 0); kept_fraction of the responses;
    mean_weight of their tokens, 0 for rejected ones; outside_safe_fraction of the sampled tokens; mean reward.

    PAIRED, in units of |g|²: paired_squared_bias against ∇J, and paired_squared_bias_pruned against ∇J_mp (NaN without
    a safe vocabulary, and with mask replay, whose objective is another); weight_ess, weight_largest_share and
    weight_mean of the sequence weights behind the first, and the same names with _pruned of those behind the second.
    Not to be used where the weights' ESS is below SMALLEST_ESS."""
    jackknife: pd.DataFrame
    """STATISTICS of each method and rho without one batch: of the engine's (sample `engine`) or of the reference."""
    variance: pd.DataFrame
    """method, rho and position: `all`, and each bin of the experiment's; each of VARIANCE_STATISTICS of the gradient
    that the tokens there contribute, with _se, _low and _high."""
    variance_jackknife: pd.DataFrame
    """VARIANCE_STATISTICS of each method, rho and position without one batch, as `jackknife`."""
    proxy: pd.DataFrame
    """position; rank_correlation of OTB's proxy with the true squared norms of the tokens' gradients, and its _se, by
    the jackknife over problems; tokens. No rows if not asked for."""
    summary: dict
    """Problems, batches, model, and the reference's own numbers; JSON-able."""

    def results(self) -> dict[str, dict[str, float]]:
        """The statistics that are defined, by estimator; and the proxy's rank correlation, by position."""
        results: dict[str, dict[str, float]] = {}
        estimators = self.estimators.copy()
        for name, weights in PAIRED.items():
            estimators.loc[~(estimators[weights] >= SMALLEST_ESS), name] = math.nan
        for table, names in ((estimators, (*STATISTICS, *PAIRED)), (self.variance, VARIANCE_STATISTICS[1:])):
            for row in table.to_dict("records"):
                own = results.setdefault(f"{row['method']}.{rho_in_path(row['rho'])}", {})
                position = row.get("position", WHOLE)
                end = "" if position == WHOLE else f".{position}"
                own |= {f"{name}{end}": row[name] for name in names if math.isfinite(row[name])}
        correlations = {
            row["position"]: row["rank_correlation"]
            for row in self.proxy.to_dict("records")
            if math.isfinite(row["rank_correlation"])
        }
        return results | ({"proxy_rank_correlation": correlations} if correlations else {})


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
    tokenizer = AutoTokenizer.from_pretrained(model)
    context = AutoConfig.from_pretrained(model).max_position_embeddings
    fixed = FixedProblems(experiment, tokenizer, problems, where=where, seed=seed, context=context)
    estimators = [Estimator(experiment, *pair) for pair in experiment.estimators]

    # The paired bias needs samples without a safe vocabulary, whoever else does.
    rules = list(dict.fromkeys([None, *(estimator.safe.engine for estimator in estimators)]))
    replayed = {estimator.safe.engine for estimator in estimators if estimator.safe.replayed}
    started = VllmEngine(
        model,
        experiment.engines[engine],
        max_model_len=fixed.longest,
        max_num_seqs=ENGINE_SEQUENCES,
        seed=seed,
        rules=rules,
        report_sets=bool(replayed),
    )
    torch.set_num_threads(threads)  # starting an engine may change it
    progress = Progress(f"{name}: engine {engine}", len(rules) * settings.batches)
    rollouts: dict[SafeVocabulary | None, list[Rollout]] = {}
    for rule in rules:
        if rule is not None:
            prove_safe_vocabulary(started, fixed.prompts, rule)
        rollouts[rule] = []
        for rollout in fixed.from_engine(started, rule, settings.batches, report_sets=rule in replayed):
            rollouts[rule].append(rollout)
            progress.step(sum(map(len, rollouts.values())), f"reward {rollout.rewards_B.mean():.2f}")

    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    if torch.cuda.is_available():
        network = network.cuda()
    exact = fixed.from_trainer(network, settings.reference_batches, f"{name}: reference")
    policy = Policy(network)
    policy.check(fixed.prompts)
    gradients = Gradients(policy, training.temperature, training.tokens_per_micro_batch, seed)
    proxy = _proxy(experiment, exact, gradients, fixed, seed, name)
    return _compare(experiment, estimators, rollouts, exact, gradients, fixed, proxy, name)


def write_tables(measured: BiasTables, folder: Path) -> dict[str, str]:
    """Write every table as NAME.parquet; their SHA-256 by file name."""
    names = ("estimators", "jackknife", "variance", "variance_jackknife", "proxy")
    tables = {f"{name}.parquet": getattr(measured, name) for name in names}
    for name, table in tables.items():
        with atomic_path(folder / name) as temporary:
            table.to_parquet(temporary)
    return {name: sha256_file(folder / name) for name in tables}


@dataclass(frozen=True, eq=False)
class _Reference:
    """The exact gradient, by the trainer's own samples."""

    gradient_mD: torch.Tensor
    products_mm: torch.Tensor


@dataclass(frozen=True, eq=False)
class _OwnExact:
    """The exact gradient by the engine's samples (dvp.measurement.paired_bias), and how heavy its weights are."""

    gradient_nD: torch.Tensor
    weights: dict[str, float]


@dataclass(frozen=True, eq=False)
class _Measured:
    """Of one estimator: its row of the first table, and the statistics whose replicates are written."""

    row: dict
    bias: dict[str, Jackknifed]
    variance: dict[str, dict[str, Jackknifed]]
    """By position; WHOLE is all of a response."""


def _compare(
    experiment: Experiment,
    estimators: list[Estimator],
    rollouts: dict[SafeVocabulary | None, list[Rollout]],
    exact: list[Rollout],
    gradients: Gradients,
    fixed: FixedProblems,
    proxy: pd.DataFrame,
    name: str,
) -> BiasTables:
    """Gradients of all batches, and what follows from their inner products."""
    # Those without a safe vocabulary come first: the others are paired with their samples.
    together: dict[tuple[SafeVocabulary | EngineSets | None, SafeVocabulary | None], list[Estimator]] = {
        (None, None): []
    }
    for estimator in estimators:
        together.setdefault((estimator.safe.trainer, estimator.safe.engine), []).append(estimator)
    batches, bins = len(next(iter(rollouts.values()))), experiment.bias.position_bins
    progress, done = Progress(f"{name}: gradients", len(exact) + batches * len(together)), count(1)

    reference_mD = torch.empty(len(exact), gradients.sketch.length)
    for gradient_D, rollout in zip(reference_mD, exact, strict=True):
        whole_1BT = position_parts(rollout.batch.response_BT, [])
        gradient_D.copy_(gradients.of_batch(rollout.batch, _exact_coefficients(rollout, fixed), None, whole_1BT)[0])
        progress.step(next(done), "reference")
    reference = _Reference(reference_mD, inner_products(reference_mD, reference_mD))
    norm = squared_norm(reference.products_mm)

    measured: dict[Estimator, _Measured] = {}
    unpruned = None
    for (safe, rule), members in together.items():
        gradient_EnKD = torch.empty(len(members) + 1, batches, len(bins) + 1, gradients.sketch.length)
        notes_nE, log_ratios = [], []
        for index, rollout in enumerate(rollouts[rule]):
            notes_E, log_ratio_B = _fill(
                gradient_EnKD[:, index], members, rollout, safe, gradients, bins, fixed.group_size
            )
            notes_nE.append(notes_E)
            log_ratios.append(log_ratio_B)
            progress.step(next(done), f"safe vocabulary {rule}")
        own = _OwnExact(gradient_EnKD[-1].sum(dim=1), weight_diagnostics(torch.cat(log_ratios)))
        unpruned = unpruned or own
        # Replayed sets are the engine's, and so is their objective.
        pruned = own if isinstance(safe, SafeVocabulary) else None
        for place, estimator in enumerate(members):
            about = _over_batches([notes_E[place] for notes_E in notes_nE], rollouts[rule])
            measured[estimator] = _measure_estimator(
                estimator, about, gradient_EnKD[place], experiment.positions, reference, unpruned, pruned
            )
        gradient_EnKD = None  # its memory, before the next one's

    summary = {
        "problems": fixed.ids,
        "responses_a_batch": fixed.responses,
        "batches": batches,
        "parameters": gradients.sketch.size,
        "coordinates": gradients.sketch.length,
        "sketched": not gradients.sketch.exact,
        "paired": unpruned.weights | {"smallest_ess": SMALLEST_ESS},
        "reference": _about_reference(exact, norm),
    }
    return _tables({estimator: measured[estimator] for estimator in estimators}, proxy, summary)


def _measure_estimator(
    estimator: Estimator,
    about: dict,
    gradient_nKD: torch.Tensor,
    positions: list[str],
    reference: _Reference,
    unpruned: _OwnExact,
    pruned: _OwnExact | None,
) -> _Measured:
    """What follows from an estimator's gradients.

    Args:
        about: columns of its row that need no gradients.
        gradient_nKD: of every batch, by the tokens' positions.
        positions: names of the K parts; none where there is one.
        unpruned: by the engine's samples without a safe vocabulary.
        pruned: by the estimator's own samples, if it is for the pruned objective.
    """
    gradient_nD = gradient_nKD.sum(dim=1)
    batches_nn = inner_products(gradient_nD, gradient_nD)
    cross_nm = inner_products(gradient_nD, reference.gradient_mD)
    bias = estimator_bias(batches_nn, cross_nm, reference.products_mm)
    variance = {WHOLE: gradient_variance(batches_nn, reference.products_mm)}
    if positions:
        for position, part_nD in zip(positions, gradient_nKD.unbind(dim=1), strict=True):
            variance[position] = gradient_variance(inner_products(part_nD, part_nD), reference.products_mm)
    row = {"method": estimator.method, "rho": estimator.rho, "label": estimator.label} | _numbers(bias) | about
    for own, end in ((unpruned, ""), (pruned, "_pruned")):
        if own is None:
            undefined = torch.full((1,), math.nan)
            squared, weights = Jackknifed(math.nan, undefined, undefined), dict.fromkeys(unpruned.weights, math.nan)
        else:
            difference_nD = gradient_nD - own.gradient_nD
            products_nn = inner_products(difference_nD, difference_nD)
            squared, weights = paired_squared_bias(products_nn, reference.products_mm), own.weights
        row |= _numbers({f"paired_squared_bias{end}": squared})
        row |= {f"{weight}{end}": value for weight, value in weights.items()}
    return _Measured(row, bias, variance)


def _over_batches(notes: list[dict], rollouts: list[Rollout]) -> dict:
    """Columns of an estimator's row that need no gradients, from what `_fill` says of each batch."""
    means = ("kept_fraction", "mean_weight", "outside_safe_fraction")
    row = {"batches": len(notes), "empty_batches": sum(note["empty"] for note in notes)}
    row |= {name: fmean(note[name] for note in notes) for name in means}
    return row | {"reward": _mean_reward(rollouts)}


def _about_reference(exact: list[Rollout], norm: Jackknifed) -> dict:
    lengths = torch.cat([rollout.batch.response_BT.sum(dim=1) for rollout in exact]).float()
    return {
        "batches": len(exact),
        "squared_norm": norm.value,
        "squared_norm_se": norm.se,
        "reward": _mean_reward(exact),
        "response_tokens_mean": lengths.mean().item(),
        "truncated_fraction": torch.cat([rollout.truncated_B for rollout in exact]).float().mean().item(),
    }


def _tables(measured: dict[Estimator, _Measured], proxy: pd.DataFrame, summary: dict) -> BiasTables:
    variance = [
        {"method": estimator.method, "rho": estimator.rho, "position": position} | _numbers(statistics)
        for estimator, found in measured.items()
        for position, statistics in found.variance.items()
    ]
    variance_replicates = [
        _replicates(estimator, statistics).assign(position=position)
        for estimator, found in measured.items()
        for position, statistics in found.variance.items()
    ]
    return BiasTables(
        _table([found.row for found in measured.values()]),
        pd.concat([_replicates(estimator, found.bias) for estimator, found in measured.items()], ignore_index=True),
        _table(variance),
        pd.concat(variance_replicates, ignore_index=True),
        proxy,
        summary,
    )


def _table(rows: list[dict]) -> pd.DataFrame:
    """A ρ is a text, or None without one."""
    return pd.DataFrame(rows).assign(rho=pd.Series([row["rho"] for row in rows], dtype=object))


def _proxy(
    experiment: Experiment, exact: list[Rollout], gradients: Gradients, fixed: FixedProblems, seed: int, name: str
) -> pd.DataFrame:
    """OTB's proxy against the true norms, at all tokens of some of the reference's responses."""
    wanted, bins = experiment.bias.norm_responses, experiment.bias.position_bins
    available = len(exact) * fixed.responses
    columns = ["position", "rank_correlation", "rank_correlation_se", "tokens"]
    if not wanted:
        return pd.DataFrame({column: pd.Series(dtype=object if column == "position" else float) for column in columns})
    generator = torch.Generator().manual_seed(derived_seed(seed))
    chosen = torch.randperm(available, generator=generator)[:wanted].tolist()
    progress = Progress(f"{name}: norms of single tokens' gradients", wanted)
    proxies, norms, problems, places = [], [], [], []
    for number, response in enumerate(chosen, start=1):
        row = response % fixed.responses
        batch = exact[response // fixed.responses].batch.rows(torch.tensor([row]))
        scored, mask_BT = gradients.score(batch, None), batch.response_BT
        proxies.append(optimal_token_proxy(scored["log_prob"], scored["sum_p_squared"])[mask_BT])
        norms.append(gradients.squared_norms(batch, None)[mask_BT])
        places.append(position_parts(mask_BT, bins).int().argmax(dim=0)[mask_BT])
        problems.append(torch.full_like(places[-1], row // fixed.group_size))
        progress.step(number, f"{len(norms[-1])} tokens")
    proxy_N, norm_N, problem_N, place_N = (torch.cat(parts) for parts in (proxies, norms, problems, places))
    rows = []
    for place, position in enumerate([WHOLE, *experiment.positions], start=-1):
        here_N = (place_N == place) if position != WHOLE else torch.ones_like(place_N, dtype=torch.bool)
        value, error = clustered_rank_correlation(proxy_N[here_N], norm_N[here_N], problem_N[here_N])
        rows.append(dict(zip(columns, (position, value, error, int(here_N.sum())), strict=True)))
    return pd.DataFrame(rows)


def _exact_coefficients(rollout: Rollout, fixed: FixedProblems) -> torch.Tensor:
    """RLOO's, for a mean over the responses."""
    mask_BT = rollout.batch.response_BT
    ones_BT = torch.ones(mask_BT.shape)
    return rloo(Responses(rollout.rewards_B, mask_BT, fixed.group_size, ones_BT, ones_BT)) / len(mask_BT)


def _fill(
    gradient_EKD: torch.Tensor,
    members: list[Estimator],
    rollout: Rollout,
    safe: SafeVocabulary | EngineSets | None,
    gradients: Gradients,
    bins: list[int],
    group_size: int,
) -> tuple[list[dict], torch.Tensor]:
    """Write a batch's gradient of each estimator that shares its samples and safe vocabularies.

    After them comes what the same samples say of the exact gradient (dvp.measurement.paired_bias).

    Returns:
        What each estimator kept, and the responses' log-ratios (B,).
    """
    mask_BT, batch = rollout.batch.response_BT, rollout.batch
    parts_KBT = position_parts(mask_BT, bins)
    statistics = gradients.score(batch, safe)
    in_safe_BT = mask_BT & statistics["target_in_safe"]
    squared_norm_BT = None
    if any(estimator.true_norms for estimator in members):
        squared_norm_BT = gradients.squared_norms(batch, safe)
    # A response's first token in V_S; one without any has no gradient, and a coefficient of 0 there.
    first_B1 = in_safe_BT.float().argmax(dim=1, keepdim=True)
    notes, of_responses, places = [], [], []
    for place, estimator in enumerate(members):
        update = estimator.update(rollout, statistics, squared_norm_BT)
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
            gradient_EKD[place] = gradients.of_batch(batch, coefficient_BT, safe, parts_KBT)
        else:
            of_responses.append(coefficient_BT.gather(1, first_B1)[:, 0])
            places.append(place)
    log_ratio_B = sequence_log_ratio(rollout, statistics)
    exact_B = exact_coefficients(rollout, log_ratio_B, group_size)
    if places:
        coefficient_BE = torch.stack([*of_responses, exact_B], dim=1)
        gradient_EKD[[*places, -1]] = gradients.of_responses(batch, coefficient_BE, safe, parts_KBT)
    else:
        # A pass a batch instead of one a response.
        gradient_EKD[-1] = gradients.of_batch(batch, exact_B[:, None] * mask_BT, safe, parts_KBT)
    return notes, log_ratio_B


def _numbers(statistics: dict[str, Jackknifed]) -> dict[str, float]:
    """Value, standard error and interval of each statistic."""
    row = {}
    for name, statistic in statistics.items():
        low, high = statistic.interval
        row |= {name: statistic.value, f"{name}_se": statistic.se, f"{name}_low": low, f"{name}_high": high}
    return row


def _replicates(estimator: Estimator, statistics: dict[str, Jackknifed]) -> pd.DataFrame:
    parts = []
    for sample, attribute in (("engine", "over_batches_n"), ("reference", "over_reference_m")):
        part = pd.DataFrame({name: getattr(statistic, attribute).numpy() for name, statistic in statistics.items()})
        parts.append(part.assign(method=estimator.method, rho=estimator.rho, sample=sample, batch=range(len(part))))
    return pd.concat(parts, ignore_index=True)[["method", "rho", "sample", "batch", *statistics]]


def _mean_reward(rollouts: list[Rollout]) -> float:
    return torch.cat([rollout.rewards_B for rollout in rollouts]).mean().item()
