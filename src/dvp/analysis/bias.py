"""Pool the stage `bias` over seeds: bias and variance of the gradient estimators, their variance by baseline and
position in the response, and how well OTB's proxy ranks the true norms.
"""

import math
from collections.abc import Iterator
from itertools import product

import numpy as np
import pandas as pd
from scipy import stats

from dvp.analysis.estimates import LEVEL, over_seeds, pooled, spread_text
from dvp.analysis.load import Reader
from dvp.analysis.points import estimator_counterpart, estimator_places, variance_places
from dvp.analysis.statistics import Statistic, without_interval
from dvp.evaluation import bootstrap
from dvp.experiment.config import Experiment
from dvp.measurement.files import PAIRED, SMALLEST_ESS

# Statistic: column, unit, scale of the interval; a signal may come out below 0.
ESTIMATED: dict[str, tuple[str, str, bootstrap.Scale]] = {
    "squared_bias": ("squared_bias", "of |g|²", "plain"),
    "cosine": ("cosine", "1", "plain"),
    "variance": ("variance", "of |g|²", "ratio"),
    "mse": ("mse", "of |g|²", "ratio"),
}
BY_POSITION: dict[str, tuple[str, str, bootstrap.Scale]] = {
    "gradient_variance": ("variance", "of |g|²", "ratio"),
    "gradient_signal": ("signal", "of |g|²", "plain"),
    "variance_over_signal": ("variance_over_signal", "ratio", "ratio"),
}
RATIOS = {"variance_ratio": "variance", "variance_over_signal_ratio": "variance_over_signal"}
KEPT = {
    "kept_fraction": "fraction of responses",
    "mean_weight": "ratio",
    "outside_safe_fraction": "fraction of tokens",
    "reward": "fraction",
}
CHANGES = ("squared_bias", "variance")
# Diagnostics of the sequence weights behind a paired bias: how seeds are combined. The worst seed decides.
WEIGHTS = {"weight_ess": "min", "weight_largest_share": "max", "weight_mean": "mean"}


class Places:
    """Measured values of the estimators, and their jackknife replicates, by coordinates and seed."""

    def __init__(self, experiment: Experiment, reader: Reader, places: list[dict[str, str]], values: str, parts: str):
        """Index two of the reader's tables: `values`, and `parts`, the values with one batch left out."""
        self.experiment, self.seeds, index = experiment, experiment.seeds, [*places[0], "seed"]
        self.values, self.jackknife = (reader.bias[name].set_index(index).sort_index() for name in (values, parts))

    def rows(self, where: dict[str, str]) -> pd.DataFrame:
        """Return the values at some coordinates, one row per seed."""
        return self.values.loc[tuple(where.values())].loc[self.seeds]

    def without_batches(self, where: dict[str, str], seed: int) -> pd.DataFrame:
        """Return a seed's values at some coordinates, one row per batch left out."""
        return self.jackknife.loc[(*where.values(), seed)]

    def pooled(
        self, where: dict[str, str], measured: dict[str, tuple[str, str, bootstrap.Scale]]
    ) -> Iterator[Statistic]:
        """Pool each statistic in `measured` (column, unit, scale of its interval) over seeds, if it is defined."""
        rows = self.rows(where)
        for name, (column, unit, scale) in measured.items():
            numbers = pooled(rows[column], rows[f"{column}_se"], scale)
            if math.isfinite(numbers[0]):
                yield Statistic(name, where, *numbers, unit, over_problems(self.experiment), tuple(rows["source"]))


def statistics(experiment: Experiment, reader: Reader) -> Iterator[Statistic]:
    """Yield bias and variance of every estimator at every policy and engine, pooled over seeds.

    ESTIMATED, with values and intervals by `pooled`; those that are not defined, as a cosine may be, are left out.

    NAME_change of CHANGES: against the same correction without safe vocabulary, if there is one.

    PAIRED (dvp.measurement.files), left out where the sequence weights of any seed have an ESS below SMALLEST_ESS: the
    mean over seeds, with a t interval over seeds from three on, else over batches. With each, weight_mean or
    weight_mean_pruned, the mean of these weights: below 1 the engine does not reach all that the trainer samples.

    Without an interval: estimator_NAME of KEPT and WEIGHTS, estimator_response_tokens (of the reference), batches and
    empty_batches.
    """
    every = estimator_places(experiment)
    places = Places(experiment, reader, every, "estimators", "jackknife")
    for where in every:
        yield from places.pooled(where, ESTIMATED)
        if (partner := estimator_counterpart(experiment, where["method"], "unpruned")) is not None:
            how = f"{over_problems(experiment)}; paired with {partner}, the same seeds of the sampler"
            for name in CHANGES:
                numbers = _compared(places, where, where | {"method": partner, "rho": "none"}, name)
                sources = tuple(places.rows(where)["source"])
                yield Statistic(f"{name}_change", where, *numbers, "of |g|²", how, sources)
        yield from _paired_statistics(where, places.rows(where))
        yield from _others(where, places.rows(where))


def _compared(
    places: Places, where: dict[str, str], other: dict[str, str], column: str, *, logarithmic: bool = False
) -> tuple[float, float, float]:
    """Compare a column at two places, paired by the same samples and pooled over seeds: their difference.

    If `logarithmic`, their ratio instead: the geometric mean over seeds, with the interval of its logarithm.
    """

    def scaled(table: pd.DataFrame) -> pd.DataFrame:
        values = table[column]
        return table.assign(**{column: np.log(values.where(values > 0))}) if logarithmic else table

    rows, theirs = (scaled(places.rows(place)) for place in (where, other))
    errors = [
        jackknife_error(*(scaled(places.without_batches(place, seed)) for place in (where, other)), column)
        for seed in places.seeds
    ]
    numbers = pooled(rows[column] - theirs[column], errors)
    return tuple(map(math.exp, numbers)) if logarithmic else numbers


def variances(experiment: Experiment, reader: Reader) -> Iterator[Statistic]:
    """Yield the gradient's variance of every estimator at every policy, engine and position, pooled over seeds.

    BY_POSITION, and RATIOS to the same correction and safe vocabulary with RLOO's baseline, if that is compared too:
    the geometric mean over seeds, its interval that of the logarithm. Per policy and position also
    proxy_rank_correlation and proxy_tokens. Statistics that are not defined are left out.
    """
    every = variance_places(experiment)
    places = Places(experiment, reader, every, "variance", "variance_jackknife")
    for where in every:
        yield from places.pooled(where, BY_POSITION)
        if (partner := estimator_counterpart(experiment, where["method"], "rloo")) is not None:
            what, _, spread = over_problems(experiment, "geometric mean").partition("; ")
            how = f"{what}, over {partner} from the same responses (paired); {spread}, of logarithms"
            for name, column in RATIOS.items():
                numbers = _compared(places, where, where | {"method": partner}, column, logarithmic=True)
                if math.isfinite(numbers[0]):
                    yield Statistic(name, where, *numbers, "ratio", how, tuple(places.rows(where)["source"]))
    # The trainer's own policy sampled the tokens, so that the numbers are the same for every engine.
    proxy = reader.bias["proxy"][reader.bias["proxy"]["engine"] == experiment.bias.engines[0]]
    for (policy, position), rows in proxy.groupby(["policy", "position"], sort=False):
        where, sources = {"policy": policy, "position": position}, tuple(rows["source"])
        numbers = pooled(rows["rank_correlation"], rows["rank_correlation_se"])
        if math.isfinite(numbers[0]):
            how = f"Spearman; {spread_text(len(experiment.seeds))}"
            yield Statistic("proxy_rank_correlation", where, *numbers, "correlation", how, sources)
        yield without_interval("proxy_tokens", where, rows["tokens"].sum(), "tokens", "of all seeds", sources)


def over_problems(experiment: Experiment, mean: str = "mean") -> str:
    """Say in words what a number of this stage is, and how its interval is made."""
    count = len(experiment.seeds)
    over = "one seed" if count == 1 else f"the {mean} over {count} seeds (each with problems of its own)"
    return f"{over}; {spread_text(count)}"


def _paired_statistics(where: dict[str, str], rows: pd.DataFrame) -> Iterator[Statistic]:
    sources = tuple(rows["source"])
    for name, ess in PAIRED.items():
        if (rows[ess] >= SMALLEST_ESS).all():  # false for NaN, such as ∇J_mp's without a safe vocabulary
            numbers, over = over_seeds(list(rows[name])), f"{len(rows)} seeds"
            if not bootstrap.covers_seeds(rows.index):
                quantile = float(stats.t.ppf((1 + LEVEL) / 2, int((rows["batches"] - 1).sum())))
                numbers = pooled(rows[name], rows[f"{name}_se"], quantile=quantile)
                over = "batches, by the delete-one jackknife"
            how = f"paired with the exact gradient by the same samples of the engine; t interval over {over}"
            yield Statistic(name, where, *numbers, "of |g|²", how, sources)
            mean = ess.replace("ess", "mean")
            how = f"mean of the weights p(y)/q(y), 1 if q reaches all of p; t interval over {len(rows)} seeds"
            yield Statistic(mean, where, *over_seeds(list(rows[mean])), "ratio", how, sources)


def _others(where: dict[str, str], rows: pd.DataFrame) -> Iterator[Statistic]:
    sources = tuple(rows["source"])
    for name, unit in (KEPT | {"response_tokens": "tokens"}).items():
        yield without_interval(f"estimator_{name}", where, rows[name].mean(), unit, "mean over seeds", sources)
    for end, (name, of_seeds) in product(("", "_pruned"), WEIGHTS.items()):
        own = rows[f"{name}{end}"]
        if own.notna().all():
            how = f"of the weights p(y)/q(y); {of_seeds} of the seeds"
            yield without_interval(f"estimator_{name}{end}", where, own.agg(of_seeds), "ratio", how, sources)
    for name in ("batches", "empty_batches"):
        yield without_interval(name, where, rows[name].sum(), "batches", "of all seeds", sources)


def jackknife_error(own: pd.DataFrame, other: pd.DataFrame, name: str) -> float:
    """Return the standard error of a difference, by the jackknife over the batches that both share."""
    batches = ["sample", "batch"]
    differences = own.set_index(batches)[name] - other.set_index(batches)[name]
    return math.sqrt(sum((len(part) - 1) * part.var(ddof=0) for _, part in differences.groupby("sample")))
