"""Bias and variance of the gradient estimators: the stage `bias`, pooled over seeds."""

import math
from collections.abc import Iterator
from itertools import product

import numpy as np
import pandas as pd
from scipy import stats

from dvp.analysis.estimates import LEVEL, over_seeds, pooled, spread_text
from dvp.analysis.load import Reader
from dvp.analysis.points import estimator_counterpart
from dvp.analysis.statistics import Statistic
from dvp.evaluation import bootstrap
from dvp.experiment.config import Experiment
from dvp.measurement.files import PAIRED, SMALLEST_ESS

# Of an estimator: its statistics, what else is known of it, and those whose change by DVP is told.
ESTIMATED = ("squared_bias", "cosine", "variance", "mse")
KEPT = {
    "kept_fraction": "fraction of responses",
    "mean_weight": "ratio",
    "outside_safe_fraction": "fraction of tokens",
    "reward": "fraction",
}
CHANGES = ("squared_bias", "variance")
# Of the sequence weights behind a paired bias: which seed's is told. The worst one's, as it decides.
WEIGHTS = {"weight_ess": "min", "weight_largest_share": "max", "weight_mean": "mean"}
_UNITS = {name: "1" if name == "cosine" else "of |g|²" for name in ESTIMATED}


def statistics(experiment: Experiment, reader: Reader) -> Iterator[Statistic]:
    """Of every estimator at every policy and engine, pooled over seeds: ESTIMATED, and its CHANGES by pruning.

    NAME_change is against the same correction without safe vocabulary, where there is one. Value and interval as of
    `pooled`. What is not defined, as a cosine may be, is left out.

    And PAIRED (dvp.measurement.files), left out where the sequence weights of any seed have an ESS below
    SMALLEST_ESS: the mean over seeds, with a t interval over seeds from three on, else over batches. Where those are,
    weight_mean and weight_mean_pruned, the mean of these weights: below 1 the engine does not reach all that the
    trainer samples.

    Without an interval: estimator_NAME of KEPT and WEIGHTS, estimator_response_tokens (of the reference), batches and
    empty_batches.
    """
    index = [*place_columns(experiment), "seed"]
    estimators, jackknife = (reader.bias[name].set_index(index).sort_index() for name in ("estimators", "jackknife"))
    for where in estimator_places(experiment):
        rows = estimators.loc[tuple(where.values())].loc[experiment.seeds]
        yield from _estimated(experiment, where, rows)
        yield from _changes(experiment, where, estimators, jackknife)
        yield from _paired_statistics(where, rows)
        yield from _others(where, rows)


def _estimated(experiment: Experiment, where: dict[str, str], rows: pd.DataFrame) -> Iterator[Statistic]:
    for name in ESTIMATED:
        scale = "ratio" if name in ("variance", "mse") else "plain"
        numbers = pooled(rows[name], rows[f"{name}_se"], scale)
        if math.isfinite(numbers[0]):
            yield Statistic(name, where, *numbers, _UNITS[name], over_problems(experiment), tuple(rows["source"]))


def over_problems(experiment: Experiment, mean: str = "mean") -> str:
    """What a number of this stage is, and how its interval is made, in words."""
    count = len(experiment.seeds)
    over = "one seed" if count == 1 else f"the {mean} over {count} seeds (each with problems of its own)"
    return f"{over}; {spread_text(count)}"


def _changes(
    experiment: Experiment, where: dict[str, str], estimators: pd.DataFrame, jackknife: pd.DataFrame
) -> Iterator[Statistic]:
    partner = estimator_counterpart(experiment, where["method"], "unpruned")
    if partner is None:
        return
    key, other = tuple(where.values()), tuple((where | {"method": partner, "rho": "none"}).values())
    rows, theirs = (estimators.loc[place].loc[experiment.seeds] for place in (key, other))
    for name in CHANGES:
        values = [rows.loc[seed, name] - theirs.loc[seed, name] for seed in experiment.seeds]
        errors = [
            jackknife_error(jackknife.loc[(*key, seed)], jackknife.loc[(*other, seed)], name)
            for seed in experiment.seeds
        ]
        how = f"{over_problems(experiment)}; paired with {partner}, the same seeds of the sampler"
        numbers = pooled(values, errors)
        yield Statistic(f"{name}_change", where, *numbers, _UNITS[name], how, tuple(rows["source"]))


def _paired_statistics(where: dict[str, str], rows: pd.DataFrame) -> Iterator[Statistic]:
    sources = tuple(rows["source"])
    for name, ess in PAIRED.items():
        if (rows[ess] >= SMALLEST_ESS).all():  # NaN, as of ∇J_mp without a safe vocabulary, is not
            numbers, over = _paired(rows[name], rows[f"{name}_se"], rows["batches"])
            how = f"paired with the exact gradient by the same samples of the engine; t interval over {over}"
            yield Statistic(name, where, *numbers, "of |g|²", how, sources)
            mean = ess.replace("ess", "mean")
            how = f"mean of the weights p(y)/q(y), 1 if q reaches all of p; t interval over {len(rows)} seeds"
            yield Statistic(mean, where, *over_seeds(list(rows[mean])), "ratio", how, sources)


def _paired(values: pd.Series, errors: pd.Series, batches: pd.Series) -> tuple[tuple[float, float, float], str]:
    """The mean over seeds with its 95 % t interval, and over what that is."""
    count = len(values)
    if bootstrap.covers_seeds(values):
        return over_seeds(list(values)), f"{count} seeds"
    value, error = float(values.mean()), math.sqrt(float(np.square(errors).sum())) / count
    half = float(stats.t.ppf((1 + LEVEL) / 2, int((batches - 1).sum()))) * error
    return (value, value - half, value + half), "batches, by the delete-one jackknife"


def _others(where: dict[str, str], rows: pd.DataFrame) -> Iterator[Statistic]:
    def statistic(name: str, value: float, unit: str, how: str) -> Statistic:
        return Statistic(name, where, float(value), math.nan, math.nan, unit, how, tuple(rows["source"]))

    for name, unit in (KEPT | {"response_tokens": "tokens"}).items():
        yield statistic(f"estimator_{name}", rows[name].mean(), unit, "mean over seeds")
    for end, (name, of_seeds) in product(("", "_pruned"), WEIGHTS.items()):
        if rows[f"{name}{end}"].notna().all():
            value, how = rows[f"{name}{end}"].agg(of_seeds), f"of the weights p(y)/q(y); {of_seeds} of the seeds"
            yield statistic(f"estimator_{name}{end}", value, "ratio", how)
    for name in ("batches", "empty_batches"):
        yield statistic(name, rows[name].sum(), "batches", "of all seeds")


def estimator_places(experiment: Experiment) -> list[dict[str, str]]:
    """Policy, engine, task if any, method and ρ of everything that the stage `bias` measures, as statistics name it."""
    settings = experiment.bias
    return [
        {"policy": policy if policy == "base" else policy.path, "engine": engine}
        | ({"task": task} if task else {})
        | {"method": method, "rho": rho or "none"}
        for policy, engine, task, (method, rho) in product(
            settings.policies, settings.engines, settings.tasks or [None], experiment.estimators
        )
    ]


def place_columns(experiment: Experiment) -> list[str]:
    """The keys of each of `estimator_places`, in their order."""
    return ["policy", "engine", *(["task"] if experiment.bias.tasks else []), "method", "rho"]


def jackknife_error(own: pd.DataFrame, other: pd.DataFrame, name: str) -> float:
    """Standard error of a difference, by the jackknife over what both share."""
    batches = ["sample", "batch"]
    differences = own.set_index(batches)[name] - other.set_index(batches)[name]
    return math.sqrt(sum((len(part) - 1) * part.var(ddof=0) for _, part in differences.groupby("sample")))
