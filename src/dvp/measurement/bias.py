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
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from statistics import fmean

import pandas as pd
import torch

from dvp.core.advantages import optimal_token_proxy
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
    rloo_advantage,
    sequence_log_ratio,
    weight_diagnostics,
)
from dvp.measurement.problems import FixedProblems
from dvp.measurement.rank_correlation import clustered_rank_correlation
from dvp.progress import Progress
from dvp.rollout.seeds import derived_seed
from dvp.rollout.vllm import prove_safe_vocabulary
from dvp.training.backend import Policy

ENGINE_SEQUENCES = 256  # that the engine samples at once
Statistics = dict[str, Jackknifed]


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


def measure_bias(experiment: Experiment, fixed: FixedProblems, engine: str, name: str) -> BiasTables:
    """Measure every estimator of `experiment.bias` at a policy. Starts an engine, so it needs a process of its own.

    Args:
        engine: a name of experiment.engines.
        name: how progress is called.

    Raises:
        DvpError: the engine does not prune as it is told, or the exact gradient is not distinguishable from 0.
    """
    settings, training = experiment.bias, experiment.training
    estimators = [Estimator(experiment, *pair) for pair in experiment.estimators]

    # The paired bias needs samples without a safe vocabulary, whoever else does.
    rules = list(dict.fromkeys([None, *(estimator.safe.engine for estimator in estimators)]))
    replayed = {estimator.safe.engine for estimator in estimators if estimator.safe.replayed}
    started = fixed.engine(engine, ENGINE_SEQUENCES, rules=rules, report_sets=bool(replayed))
    progress = Progress(f"{name}: engine {engine}", len(rules) * settings.batches)
    rollouts: dict[SafeVocabulary | None, list[Rollout]] = {}
    for rule in rules:
        if rule is not None:
            prove_safe_vocabulary(started, fixed.prompts, rule)
        rollouts[rule] = []
        for rollout in fixed.from_engine(started, rule, settings.batches, report_sets=rule in replayed):
            rollouts[rule].append(rollout)
            progress.step(sum(map(len, rollouts.values())), f"reward {rollout.rewards_B.mean():.2f}")

    network = fixed.network()
    exact = fixed.from_trainer(network, settings.reference_batches, f"{name}: reference")
    policy = Policy(network)
    policy.check(fixed.prompts)
    gradients = Gradients(policy, training.temperature, training.tokens_per_micro_batch, fixed.seed)
    proxy = _proxy(experiment, exact, gradients, fixed, name)
    return _compare(experiment, estimators, rollouts, exact, gradients, fixed, proxy, name)


def write_tables(measured: BiasTables, folder: Path) -> dict[str, str]:
    """Write every table as NAME.parquet; their SHA-256 by file name."""
    names = ("estimators", "jackknife", "variance", "variance_jackknife", "proxy")
    for name in names:
        with atomic_path(folder / f"{name}.parquet") as temporary:
            getattr(measured, name).to_parquet(temporary)
    return {f"{name}.parquet": sha256_file(folder / f"{name}.parquet") for name in names}


@dataclass(frozen=True, eq=False)
class _Exact:
    """The exact gradient: by the trainer's own samples, or by the engine's (dvp.measurement.paired_bias)."""

    gradient_nD: torch.Tensor
    weights: dict[str, float] = field(default_factory=dict)
    """How heavy the weights of the engine's samples are."""


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
    batches, bins = experiment.bias.batches, experiment.bias.position_bins
    progress, done = Progress(f"{name}: gradients", len(exact) + batches * len(together)), count(1)

    reference_mD = torch.empty(len(exact), gradients.sketch.length)
    for gradient_D, rollout in zip(reference_mD, exact, strict=True):
        mask_BT = rollout.batch.response_BT
        coefficient_BT = rloo_advantage(rollout, fixed.group_size) / len(mask_BT)
        gradient_D.copy_(gradients.of_batch(rollout.batch, coefficient_BT, None, position_parts(mask_BT, []))[0])
        progress.step(next(done), "reference")
    products_mm = inner_products(reference_mD, reference_mD)
    norm = squared_norm(products_mm)

    found: dict[Estimator, tuple[dict, Statistics, dict[str, Statistics]]] = {}
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
        own = _Exact(gradient_EnKD[-1].sum(dim=1), weight_diagnostics(torch.cat(log_ratios)))
        unpruned = unpruned or own
        # Replayed sets are the engine's, and so is their objective.
        paired = {"": unpruned, "_pruned": own if isinstance(safe, SafeVocabulary) else None}
        for place, estimator in enumerate(members):
            gradient_nKD = gradient_EnKD[place]
            gradient_nD = gradient_nKD.sum(dim=1)
            batches_nn = inner_products(gradient_nD, gradient_nD)
            bias = estimator_bias(batches_nn, inner_products(gradient_nD, reference_mD), products_mm)
            variance = {WHOLE: gradient_variance(batches_nn, products_mm)}
            for position, part_nD in zip(experiment.positions, gradient_nKD.unbind(dim=1), strict=False):
                variance[position] = gradient_variance(inner_products(part_nD, part_nD), products_mm)
            row = _numbers(bias) | _over_batches([notes_E[place] for notes_E in notes_nE], rollouts[rule])
            for end, exact_by in paired.items():
                row |= _paired(gradient_nD, exact_by, products_mm, end, unpruned.weights)
            found[estimator] = row, bias, variance
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
    measured = {estimator: found[estimator] for estimator in estimators}
    by_position = [
        (estimator, position, statistics)
        for estimator, (*_, variance) in measured.items()
        for position, statistics in variance.items()
    ]
    return BiasTables(
        estimators=_table(
            [
                {"method": each.method, "rho": each.rho, "label": each.label} | row
                for each, (row, *_) in measured.items()
            ]
        ),
        jackknife=pd.concat([_replicates(each, bias) for each, (_, bias, _) in measured.items()], ignore_index=True),
        variance=_table(
            [
                {"method": each.method, "rho": each.rho, "position": position} | _numbers(statistics)
                for each, position, statistics in by_position
            ]
        ),
        variance_jackknife=pd.concat(
            [_replicates(each, statistics).assign(position=position) for each, position, statistics in by_position],
            ignore_index=True,
        ),
        proxy=proxy,
        summary=summary,
    )


def _paired(
    gradient_nD: torch.Tensor, exact: _Exact | None, products_mm: torch.Tensor, end: str, names: Iterable[str]
) -> dict[str, float]:
    """The squared bias paired with the exact gradient by the same samples; undefined (NaN) without one."""
    if exact is None:
        undefined = torch.full((1,), math.nan)
        squared, weights = Jackknifed(math.nan, undefined, undefined), dict.fromkeys(names, math.nan)
    else:
        difference_nD = gradient_nD - exact.gradient_nD
        squared = paired_squared_bias(inner_products(difference_nD, difference_nD), products_mm)
        weights = exact.weights
    return _numbers({f"paired_squared_bias{end}": squared}) | {f"{name}{end}": of for name, of in weights.items()}


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


def _table(rows: list[dict]) -> pd.DataFrame:
    """A ρ is a text, or None without one."""
    return pd.DataFrame(rows).assign(rho=pd.Series([row["rho"] for row in rows], dtype=object))


def _proxy(
    experiment: Experiment, exact: list[Rollout], gradients: Gradients, fixed: FixedProblems, name: str
) -> pd.DataFrame:
    """OTB's proxy against the true norms, at all tokens of some of the reference's responses."""
    wanted, bins = experiment.bias.norm_responses, experiment.bias.position_bins
    available = len(exact) * fixed.responses
    columns = ["position", "rank_correlation", "rank_correlation_se", "tokens"]
    if not wanted:
        return pd.DataFrame({column: pd.Series(dtype=object if column == "position" else float) for column in columns})
    generator = torch.Generator().manual_seed(derived_seed(fixed.seed))
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
