"""Compare every estimator of the policy gradient with the exact on-policy gradient, at a fixed policy.

The exact gradient needs no engine: the trainer's own policy samples its batches, in fp32, by transformers' `generate`,
and RLOO without any correction is then unbiased. The estimators use batches of the same problems from the engine, with
weights, advantages and safe vocabularies as in training. Their i-th batches have the same seeds whatever the safe
vocabulary, so that differences between estimators are paired.

The squared bias is also measured from the engine's samples alone, paired with the same samples' own estimate of the
exact gradient (dvp.measurement.paired_bias). An estimator with a safe vocabulary is paired with the samples without one
that have the same seeds.

If the experiment asks for it, the gradient's variance is also measured by position in the response, and OTB's proxy is
compared with the quantity that it approximates, the squared norms of single tokens' gradients.

Shape suffixes: B responses of a batch, T tokens, N some of them, E estimators, K parts, n and m batches, D coordinates.
"""

import math
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from statistics import fmean

import numpy as np
import pandas as pd
import torch

from dvp.core.advantages import optimal_token_proxy
from dvp.core.batch import Rollout
from dvp.core.safe_vocabulary import EngineSets, SafeVocabulary
from dvp.experiment.config import Experiment
from dvp.experiment.grid import WHOLE, rho_in_path
from dvp.measurement.estimator_bias import (
    STATISTICS,
    VARIANCE_STATISTICS,
    Jackknifed,
    gradient_statistics,
    inner_products,
    squared_norm,
)
from dvp.measurement.files import PAIRED, SMALLEST_ESS, write_tables
from dvp.measurement.gradients import Estimator, Gradients, position_parts
from dvp.measurement.paired_bias import exact_coefficients, rloo_advantage, sequence_log_ratio, weight_diagnostics
from dvp.measurement.problems import FixedProblems
from dvp.progress import Progress
from dvp.rollout.seeds import derived_seed
from dvp.rollout.vllm import prove_safe_vocabulary
from dvp.training.backend import Policy

ENGINE_SEQUENCES = 256  # sampled by the engine at once
Statistics = dict[str, Jackknifed]


@dataclass(frozen=True)
class BiasTables:
    """Results of a measurement: one row per estimator, variances, jackknife replicates, OTB's proxy, and a summary."""

    estimators: pd.DataFrame
    """One row per estimator: method, rho (None without one) and label; each of STATISTICS with _se, _low and _high, in
    units of |g|² (the cosine has none); batches; empty_batches (no response was kept, and the gradient is 0);
    kept_fraction of the responses; mean_weight of the response tokens, 0 for rejected ones; outside_safe_fraction of
    the sampled tokens; mean reward.

    PAIRED, in units of |g|²: paired_squared_bias against ∇J, and paired_squared_bias_pruned against ∇J_mp (NaN without
    a safe vocabulary, and with mask replay, whose objective is another); weight_ess, weight_largest_share and
    weight_mean of the sequence weights behind the first, and the same names with _pruned of those behind the second.
    Not to be used where the weights' ESS is below SMALLEST_ESS."""
    jackknife: pd.DataFrame
    """STATISTICS of each method and rho with one batch left out: of the engine's (sample `engine`) or the reference's
    (sample `reference`)."""
    variance: pd.DataFrame
    """One row per method, rho and position (`all`, and each bin of the experiment's): each of VARIANCE_STATISTICS of
    the gradient that the tokens there contribute, with _se, _low and _high."""
    variance_jackknife: pd.DataFrame
    """VARIANCE_STATISTICS of each method, rho and position with one batch left out, as `jackknife`."""
    proxy: pd.DataFrame
    """One row per position: rank_correlation of OTB's proxy with the true squared norms of the tokens' gradients, its
    _se by the jackknife over problems, and the number of tokens. No rows if the experiment does not ask for it."""
    summary: dict
    """Problems, batches, parameters, and the reference's own numbers; serialisable as JSON."""

    def write(self, folder: Path) -> dict[str, str]:
        """Write every table to folder/NAME.parquet; return the files' SHA-256 by file name."""
        tables = {name: table for name, table in vars(self).items() if isinstance(table, pd.DataFrame)}
        return write_tables(tables, folder)

    def results(self) -> dict[str, dict[str, float]]:
        """Return the defined statistics by estimator, and the proxy's rank correlation by position.

        A paired bias is left out if its weights' ESS is below SMALLEST_ESS.
        """
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

    `name` labels the progress lines. Raises DvpError for an engine that does not prune as configured, for fewer than 4
    batches, and for an exact gradient that is not distinguishable from 0.
    """
    settings, training = experiment.bias, experiment.training
    estimators = [Estimator(experiment, *pair) for pair in experiment.estimators]

    # The paired bias needs samples without a safe vocabulary even if no estimator does.
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
    """Compute the gradients of all batches, and the tables that follow from their inner products."""
    # Estimators without a safe vocabulary come first: the others are paired with their samples.
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

    found: dict[Estimator, tuple[dict, dict[str, Statistics]]] = {}
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
        # The same samples' estimate of the exact gradient, and diagnostics of their weights.
        own = gradient_EnKD[-1].sum(dim=1), weight_diagnostics(torch.cat(log_ratios))
        unpruned = unpruned or own
        no_weights = dict.fromkeys(unpruned[1], math.nan)
        # Replayed sets are the engine's, so that their objective is not J_mp.
        paired = {"": unpruned, "_pruned": own if isinstance(safe, SafeVocabulary) else None}
        for place, estimator in enumerate(members):
            gradient_nKD = gradient_EnKD[place]
            gradient_nD = gradient_nKD.sum(dim=1)
            by_position = {
                WHOLE: gradient_statistics(
                    inner_products(gradient_nD, gradient_nD), products_mm, inner_products(gradient_nD, reference_mD)
                )
            }
            for position, part_nD in zip(experiment.positions, gradient_nKD.unbind(dim=1), strict=False):
                by_position[position] = gradient_statistics(inner_products(part_nD, part_nD), products_mm)
            notes = pd.DataFrame([notes_E[place] for notes_E in notes_nE])
            row = {"batches": batches, "empty_batches": int(notes.pop("empty").sum())}
            row |= {name: fmean(values) for name, values in notes.items()} | {"reward": _mean_reward(rollouts[rule])}
            for end, exact_by in paired.items():
                exact_nD, weights = exact_by or (torch.full_like(gradient_nD, math.nan), no_weights)
                difference_nD = gradient_nD - exact_nD
                squared = gradient_statistics(inner_products(difference_nD, difference_nD), products_mm)["signal"]
                row |= _numbers({f"paired_squared_bias{end}": squared})
                row |= {f"{name}{end}": of for name, of in weights.items()}
            found[estimator] = row, by_position
        gradient_EnKD = None  # freed before the next one is allocated

    summary = {
        "problems": fixed.ids,
        "responses_a_batch": fixed.responses,
        "batches": batches,
        "parameters": gradients.sketch.size,
        "coordinates": gradients.sketch.length,
        "sketched": not gradients.sketch.exact,
        "paired": unpruned[1] | {"smallest_ess": SMALLEST_ESS},
        "reference": _about_reference(exact, norm),
    }
    rows, parts, variances, replicates = [], [], [], []
    for each in estimators:
        (row, by_position), where = found[each], {"method": each.method, "rho": each.rho}
        bias = {name: by_position[WHOLE][name] for name in STATISTICS}
        rows.append(where | {"label": each.label} | _numbers(bias) | row)
        parts += _replicates(where, bias)
        for position, statistics in by_position.items():
            variance = {name: statistics[name] for name in VARIANCE_STATISTICS}
            variances.append(where | {"position": position} | _numbers(variance))
            replicates += [part.assign(position=position) for part in _replicates(where, variance)]
    return BiasTables(
        estimators=_table(rows),
        jackknife=pd.concat(parts, ignore_index=True),
        variance=_table(variances),
        variance_jackknife=pd.concat(replicates, ignore_index=True),
        proxy=proxy,
        summary=summary,
    )


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
    """Return the rows as a table whose column rho holds texts, or None."""
    return pd.DataFrame(rows).assign(rho=pd.Series([row["rho"] for row in rows], dtype=object))


def _proxy(
    experiment: Experiment, exact: list[Rollout], gradients: Gradients, fixed: FixedProblems, name: str
) -> pd.DataFrame:
    """Correlate OTB's proxy with the true gradient norms, at all tokens of some of the reference's responses."""
    wanted, bins = experiment.bias.norm_responses, experiment.bias.position_bins
    available = len(exact) * fixed.responses
    columns = ["position", "rank_correlation", "rank_correlation_se", "tokens"]
    if not wanted:
        return pd.DataFrame({column: pd.Series(dtype=object if column == "position" else float) for column in columns})
    generator = torch.Generator().manual_seed(derived_seed(fixed.seed))
    chosen = torch.randperm(available, generator=generator)[:wanted].tolist()
    progress = Progress(f"{name}: norms of single tokens' gradients", wanted)
    parts = []
    for number, response in enumerate(chosen, start=1):
        row = response % fixed.responses
        batch = exact[response // fixed.responses].batch.rows(torch.tensor([row]))
        scored, mask_BT = gradients.score(batch, None), batch.response_BT
        values_BT = {
            "proxy": optimal_token_proxy(scored["log_prob"], scored["sum_p_squared"]),
            "norm": gradients.squared_norms(batch, None),
            "place": position_parts(mask_BT, bins).int().argmax(dim=0),
        }
        tokens = pd.DataFrame({name: value_BT[mask_BT].numpy() for name, value_BT in values_BT.items()})
        parts.append(tokens.assign(problem=row // fixed.group_size))
        progress.step(number, f"{len(tokens)} tokens")
    tokens = pd.concat(parts)
    rows = []
    for place, position in enumerate([WHOLE, *experiment.positions], start=-1):
        here = tokens if position == WHOLE else tokens[tokens["place"] == place]
        rows.append((position, *clustered_rank_correlation(here), len(here)))
    return pd.DataFrame(rows, columns=columns)


def clustered_rank_correlation(tokens: pd.DataFrame) -> tuple[float, float]:
    """Return Spearman's ρ of the columns `proxy` and `norm`, and its standard error by the jackknife over `problem`.

    Either is NaN where it is not defined, as the error is for fewer than two problems.
    """
    problems = [tokens[tokens["problem"] != problem] for problem in np.unique(tokens["problem"])]
    value, *without = (part["proxy"].corr(part["norm"], method="spearman") for part in [tokens, *problems])
    return value, math.sqrt((len(without) - 1) * np.var(without)) if len(without) > 1 else math.nan


def _fill(
    gradient_EKD: torch.Tensor,
    members: list[Estimator],
    rollout: Rollout,
    safe: SafeVocabulary | EngineSets | None,
    gradients: Gradients,
    bins: list[int],
    group_size: int,
) -> tuple[list[dict], torch.Tensor]:
    """Write into `gradient_EKD` the gradients of one batch by all estimators that share its samples and V_S.

    The last entry is the same samples' estimate of the exact gradient (dvp.measurement.paired_bias).

    Returns:
        Per estimator, the shares of responses and tokens that it kept; and the responses' log-ratios (B,).
    """
    mask_BT, batch = rollout.batch.response_BT, rollout.batch
    parts_KBT = position_parts(mask_BT, bins)
    statistics = gradients.score(batch, safe)
    in_safe_BT = mask_BT & statistics["target_in_safe"]
    squared_norm_BT = None
    if any(estimator.true_norms for estimator in members):
        squared_norm_BT = gradients.squared_norms(batch, safe)
    # A response's coefficient is read at its first token in V_S; a response without any has no gradient, and reads 0.
    first_B1 = in_safe_BT.float().argmax(dim=1, keepdim=True)
    notes, of_responses = [], {}
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
            of_responses[place] = coefficient_BT
    log_ratio_B = sequence_log_ratio(rollout, statistics)
    exact_BT = exact_coefficients(rollout, log_ratio_B, group_size)
    if of_responses:
        of_responses[-1] = exact_BT
        coefficient_BE = torch.cat([each_BT.gather(1, first_B1) for each_BT in of_responses.values()], dim=1)
        gradient_EKD[list(of_responses)] = gradients.of_responses(batch, coefficient_BE, safe, parts_KBT)
    else:
        # One pass per batch instead of one per response.
        gradient_EKD[-1] = gradients.of_batch(batch, exact_BT, safe, parts_KBT)
    return notes, log_ratio_B


def _numbers(statistics: dict[str, Jackknifed]) -> dict[str, float]:
    """Return each statistic's value, standard error and interval as NAME, NAME_se, NAME_low and NAME_high."""
    row = {}
    for name, statistic in statistics.items():
        low, high = statistic.interval
        row |= {name: statistic.value, f"{name}_se": statistic.se, f"{name}_low": low, f"{name}_high": high}
    return row


def _replicates(where: dict, statistics: dict[str, Jackknifed]) -> list[pd.DataFrame]:
    """Return the statistics with one batch left out, a table for either sample."""
    parts = []
    for sample, attribute in (("engine", "over_batches_n"), ("reference", "over_reference_m")):
        values = {name: getattr(statistic, attribute).numpy() for name, statistic in statistics.items()}
        batches = range(len(next(iter(values.values()))))
        parts.append(pd.DataFrame({"batch": batches} | values).assign(**where, sample=sample))
    return [part[[*where, "sample", "batch", *statistics]] for part in parts]


def _mean_reward(rollouts: list[Rollout]) -> float:
    return torch.cat([rollout.rewards_B for rollout in rollouts]).mean().item()
