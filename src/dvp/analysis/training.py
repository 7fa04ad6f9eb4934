"""Compute the statistics of training and final scores of every grid point."""

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from dvp.analysis.estimates import (
    Estimate,
    contrast,
    contrasts,
    mean,
    over_model,
    over_seeds,
    score,
    share_of_runs,
    t_over_seeds,
)
from dvp.analysis.load import Reader
from dvp.analysis.parts import FEWEST_RHOS, swept
from dvp.analysis.points import where_of
from dvp.analysis.statistics import Statistic, without_interval
from dvp.evaluation import bootstrap
from dvp.experiment.config import Experiment
from dvp.experiment.grid import GridPoint, parse_rho
from dvp.measurement.files import NORMAL_95

LAST_STEPS = 10
# Metrics reported as last_NAME: how the last steps of a run become one number, and its unit.
AT_THE_END = {
    "k1": ("mean", "nats per token"),
    "k3": ("mean", "nats per token"),
    "max_abs_log_ratio": ("max", "nats"),
    "ess": ("mean", "fraction"),
    "outside_safe_fraction": ("mean", "fraction of tokens"),
    "pruned_mass_mean": ("mean", "probability"),
    "masked_fraction": ("mean", "fraction of tokens"),
    "unpruned_k3": ("mean", "nats per token"),
    "set_overlap_mean": ("mean", "fraction"),
    "sets_bytes": ("mean", "bytes"),
    "tokens_per_second": ("mean", "tokens/s"),
}
DRIFT = {
    "drift_trainer": "nats per token",
    "drift_engine": "nats per token",
    "drift_apart": "nats per token",
    "drift_share": "ratio",
}
"""Measured every training.drift_every steps, with standard errors (dvp.training.drift)."""
_OF_PRUNED = ("outside_safe_fraction", "pruned_mass_mean")
_BETWEEN = {
    "full": "between the full policies; ",
    "pruned": "between the pruned policies, without tokens outside V_S; ",
    "full, pruned": "between the trainer's full and the engine's pruned policy; ",
    "pruned, full": "between the trainer's pruned and the engine's full policy, without tokens outside V_S; ",
}


def statistics(experiment: Experiment, reader: Reader) -> Iterator[Statistic]:
    """Yield the score of the base model, and of every grid point its score, last steps, growth of k3, and cost.

    score (fraction), seed_score of each seed, pass_at_k, maj_at_k (not with data.reward); mixed_at_k, the share of
    problems with correct and wrong samples, as a group must have to be learned from; score_change_percent against
    the reference; score_over_reference; score_over_unpruned of points with a safe vocabulary, against the same without;
    score_over_rloo of points with another baseline, against the same with RLOO's (fractions);
    smallest_change_percent and smallest_effect, how large a change or score_over_unpruned would have to be for the
    interval to exclude 0 in 80 % of such experiments. See `_training` and `_sweep` for the rest.
    """
    scores = {point: score(reader, point) for point in (None, *experiment.points)}
    for point in scores:
        yield from _scores(experiment, reader, scores, point)
    for point in experiment.points:
        yield from _training(experiment, reader, point)
    for curve, rhos in swept(experiment).items():
        yield from _sweep(experiment, scores, curve, rhos)


def _scores(
    experiment: Experiment, reader: Reader, scores: dict[GridPoint | None, Estimate], point: GridPoint | None
) -> Iterator[Statistic]:
    own, where, how = scores[point], where_of(experiment, point), over_model(experiment, point)
    reference, scored = experiment.reference_point, reader.scored(point)
    k, sources = experiment.evaluation.samples_per_problem[experiment.report.task], own.sources

    def smallest(name: str, estimate: Estimate, scale: float, like: Statistic) -> Statistic:
        value = scale * estimate.draws.smallest_effect(estimate.value_R)
        seen = f"power {bootstrap.POWER:.0%}, at the measured standard error; {like.how}"
        return replace(like, name=name, value=value, low=math.nan, high=math.nan, how=seen)

    yield own.statistic("score", where, f"avg@{k}, fraction", how, "share")
    for key in ("pass", "maj"):
        value, unit = math.fsum(scored.scores[key]) / len(scored.scores), f"{key}@{k}, fraction"
        if not math.isnan(value):
            yield without_interval(f"{key}_at_k", where, value, unit, "mean over seeds", sources)
    share_SP = scored.share_SP["all"]
    mixed = mean(experiment, ((share_SP > 0) & (share_SP < 1)).astype(float), sources)
    yield mixed.statistic("mixed_at_k", where, f"share of problems with both rewards in {k} samples", how, "share")
    for row in scored.scores.itertuples():
        seed = where | {"seed": "none" if point is None else str(row.seed)}
        yield without_interval("seed_score", seed, row.avg, f"avg@{k}, fraction", "a single run", sources)
    # No change is defined against a reference without a correct answer.
    ratio = own / scores[reference]
    change = ratio.statistic("score_change_percent", where, "%", f"{how}, paired with the reference", "ratio")
    ends = {key: 100 * (getattr(change, key) - 1) for key in ("value", "low", "high")}
    yield replace(change, **ends)
    if point is None:
        return
    if point != reference:
        yield smallest("smallest_change_percent", ratio, 100, change)
    pairings = ("reference", "unpruned", "rloo")
    for compared, difference in contrasts(experiment, "score", point, pairings, scores.__getitem__, _minus):
        yield compared
        if compared.name == "score_over_unpruned":
            yield smallest("smallest_effect", difference, 1, compared)


def _minus(pairing: str, other: GridPoint) -> str:
    return f"score minus that of {other.path if pairing == 'reference' else f'{other.method} on the same engine'}"


def _training(experiment: Experiment, reader: Reader, point: GridPoint) -> Iterator[Statistic]:
    """Yield how a point's runs trained and ended.

    Over a run's last ten steps: final_k3, final_gradient_norm, final_reward, final_pruned_mass (1 − Z per token, if the
    trainer prunes), k3_full (between the full policies) and kept (the share of tokens with a weight above 0), all with
    an interval over seeds, and last_NAME (AT_THE_END), with the smallest and the largest seed.

    k3_growth (k3 of the last ten steps over that of the first ten; left out where a run has not twice ten steps);
    seconds_per_step (of the median step) and sampled_tokens of a run; collapsed (fraction of runs), collapsed_runs,
    collapsed_at (of each seed the step, NaN where it did not); training_steps of all seeds, and skipped_steps of them.
    """
    own, training = reader.metrics[reader.metrics["point"] == point.path], experiment.training_of(point)
    steps = training.steps
    first = own[own["step"] <= LAST_STEPS].groupby("seed")
    last = own[own["step"] > steps - LAST_STEPS].groupby("seed")
    runs = reader.runs[reader.runs["point"] == point.path]
    where, sources = where_of(experiment, point), tuple(runs["source"])
    method = experiment.methods[point.method]
    between, prunes = _BETWEEN[method.policies], method.policies.startswith("pruned")
    over = t_over_seeds(experiment)
    tokens = training.prompts_per_step * training.group_size * own.groupby("seed")["response_tokens_mean"].sum()

    def bare(name: str, value: float, unit: str, how: str, **more: str) -> Statistic:
        return without_interval(name, where | more, value, unit, how, sources)

    # An engine that prunes reports its full policy itself; if only the trainer prunes, k3_full is not measured.
    full = "k3" if method.safe_vocabulary is None else "unpruned_k3"
    full_S = last[full].mean() if full in own and own[full].notna().all() else None
    mass_S = last["pruned_mass_mean"].mean() if prunes else None
    growth_S = last["k3"].mean() / first["k3"].mean() if steps >= 2 * LAST_STEPS else None
    for name, value_S, unit, logarithmic, what in (
        ("final_k3", last["k3"].mean(), "nats per token", True, between),
        ("k3_growth", growth_S, "ratio", True, between),
        ("final_gradient_norm", last["gradient_norm"].mean(), "norm", True, ""),
        ("final_reward", last["reward"].mean(), "fraction", False, ""),
        ("final_pruned_mass", mass_S, "probability", False, "1 − Z of the trainer a token; "),
        ("seconds_per_step", own.groupby("seed")["seconds"].median(), "s", True, "median step; "),
        ("k3_full", full_S, "nats per token", True, _BETWEEN["full"]),
        ("sampled_tokens", tokens, "tokens", False, "of a run in training; "),
    ):
        if value_S is not None:
            how = f"{what}{over}" + (", of the logarithm" if logarithmic else "")
            yield Statistic(name, where, *over_seeds(list(value_S), logarithmic=logarithmic), unit, how, sources)
    value, low, _ = over_seeds(list(1 - last["masked_fraction"].mean()))
    kept = (value, *bootstrap.ends(value, value - low, "share"))
    yield Statistic("kept", where, *kept, "fraction", f"{over}, on the logit scale", sources)
    for name, (one_number, unit) in AT_THE_END.items():
        if name in own and last[name].count().all() and (prunes or name not in _OF_PRUNED):
            seeds = last[name].agg(one_number)
            numbers, how = (seeds.mean(), seeds.min(), seeds.max()), "mean of the seeds; smallest and largest seed"
            yield Statistic(f"last_{name}", where, *numbers, unit, how, sources)
    for name, count in (("skipped_steps", own["skipped"].sum()), ("training_steps", len(own))):
        yield bare(name, count, "steps", "of all seeds")
    for run in runs.itertuples():
        step = math.nan if run.collapsed_at is None else run.collapsed_at
        yield bare("collapsed_at", step, "step", "not defined where it did not", seed=str(run.seed))
    for name, unit in DRIFT.items():
        for row in own[own[name].notna()].to_dict("records") if name in own else ():
            value, reach = row[name], NORMAL_95 * row[f"{name}_se"]
            of_step = where | {"seed": str(row["seed"]), "step": str(row["step"])}
            yield Statistic(name, of_step, value, value - reach, value + reach, unit, "over contexts, one run", sources)
    collapsed = sum(step is not None for step in runs["collapsed_at"])
    yield bare("collapsed_runs", collapsed, "runs", f"of {len(runs)}")
    how = f"Clopper-Pearson, {collapsed} of {len(runs)} seeds"
    yield Statistic("collapsed", where, *share_of_runs(collapsed, len(runs)), "fraction of runs", how, sources)


def _sweep(
    experiment: Experiment, scores: dict[GridPoint | None, Estimate], curve: GridPoint, rhos: list[str]
) -> Iterator[Statistic]:
    """Yield score_over_small_rho and score_over_large_rho of a sweep over ρ.

    They are the mean score over the middle three values of ρ (of an even number the smaller ones) minus the score at
    the smallest, or the largest. Both are above 0 if the score is best in between. Which values are in the middle does
    not depend on the scores.
    """
    of = {rho: scores[curve.model_copy(update={"rho": rho})] for rho in rhos}
    ordered, inside = sorted(rhos, key=parse_rho), middle(rhos)
    mean_R = np.mean([of[rho].value_R for rho in inside], axis=0)
    middle_mean = Estimate(of[inside[0]].draws, mean_R, tuple(file for rho in inside for file in of[rho].sources))
    where = {key: value for key, value in where_of(experiment, curve).items() if key != "rho"}
    for name, end in (("score_over_small_rho", ordered[0]), ("score_over_large_rho", ordered[-1])):
        says = f"mean at ρ = {', '.join(inside)} minus the score at {end}"
        yield contrast(experiment, name, where, middle_mean - of[end], says)


def middle(rhos: list[str]) -> list[str]:
    """Return the middle three values of ρ, the smallest first; of an even number the smaller ones."""
    ordered = sorted(rhos, key=parse_rho)
    start = (len(ordered) - FEWEST_RHOS) // 2
    return ordered[start : start + FEWEST_RHOS]
