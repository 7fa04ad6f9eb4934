"""Means over problems and seeds, their differences, and means over seeds alone, for every part of the report.

A number has the same interval wherever it is quoted, and comparisons are paired: entry r of all replicates is of the
same problems and seeds.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from scipy import stats

from dvp.analysis.load import Reader
from dvp.analysis.points import partner, seeds_text, where_of
from dvp.analysis.statistics import Statistic
from dvp.evaluation import bootstrap
from dvp.experiment.config import Experiment
from dvp.experiment.grid import GridPoint, Sampler
from dvp.measurement.files import NORMAL_95

LEVEL = 0.95

# Cached, so that numbers over the same problems share their draws; several, as tasks differ in their problems.
_draws = lru_cache(maxsize=4)(bootstrap.draws)


@dataclass(frozen=True, eq=False)
class Estimate:
    """A mean over problems and seeds, or a difference or ratio of such means."""

    draws: bootstrap.Draws
    value_R: np.ndarray
    """The value, then its replicates."""
    sources: tuple[str, ...]

    def __sub__(self, other: "Estimate") -> "Estimate":
        return Estimate(self.draws, self.value_R - other.value_R, (*self.sources, *other.sources))

    def __truediv__(self, other: "Estimate") -> "Estimate":
        """Return the ratio, NaN where it is not finite."""
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio_R = self.value_R / other.value_R
        ratio_R[~np.isfinite(ratio_R)] = np.nan
        return Estimate(self.draws, ratio_R, (*self.sources, *other.sources))

    def statistic(
        self, name: str, coordinates: dict[str, str], unit: str, how: str, scale: bootstrap.Scale = "plain"
    ) -> Statistic:
        """Return the estimate as a statistic with its 95 % interval, made on `scale`."""
        numbers = self.draws.estimate(self.value_R, scale)
        return Statistic(name, coordinates, *numbers, unit, how, tuple(dict.fromkeys(self.sources)))


def draws_of(experiment: Experiment, problems: int) -> bootstrap.Draws:
    """Return the bootstrap's replicates over a number of problems, which all seeds share."""
    settings = experiment.evaluation
    return _draws(len(experiment.seeds), problems, settings.bootstrap_resamples, settings.seed, shared=True)


def mean(experiment: Experiment, value_SP: np.ndarray, sources: Iterable[str]) -> Estimate:
    """Average (S, P) values over the problems and seeds that have one; NaN without any.

    A single row stands for all seeds.
    """
    draws = draws_of(experiment, value_SP.shape[1])
    value_U = np.broadcast_to(value_SP, (draws.seeds, draws.problems)).ravel()
    defined_U = np.isfinite(value_U)
    sum_R, count_R = draws.count_RU @ np.nan_to_num(value_U), np.full(len(draws.count_RU), float(value_U.size))
    if not defined_U.all():
        count_R = draws.count_RU @ defined_U
    return Estimate(
        draws, np.divide(sum_R, count_R, out=np.full_like(sum_R, np.nan), where=count_R > 0), tuple(sources)
    )


def score(reader: Reader, point: GridPoint | None, sampler: Sampler | None = None) -> Estimate:
    """Return the score of a point's models, or of the base model, on report.task; see `Reader.scored`."""
    scored = reader.scored(point, sampler)
    return mean(reader.experiment, scored.share_SP["all"], scored.sources)


def contrast(
    experiment: Experiment,
    name: str,
    coordinates: dict[str, str],
    difference: Estimate,
    says: str,
    unit: str = "fraction",
) -> Statistic:
    """Return a difference of two estimates as a statistic; `says` tells what is compared with what."""
    return difference.statistic(name, coordinates, unit, f"{says}; {over(experiment)}, paired")


def contrasts(
    experiment: Experiment,
    name: str,
    point: GridPoint,
    pairings: Iterable[str],
    of: Callable[[GridPoint], Estimate],
    says: Callable[[str, GridPoint], str],
    **where: str,
) -> Iterator[tuple[Statistic, Estimate]]:
    """Compare a point with its partner (`points.partner`) in each pairing in which it has one.

    Yields NAME_over_PAIRING, `of` the point minus `of` the partner, as a statistic and as an estimate.
    """
    for pairing in pairings:
        if (other := partner(experiment, point, pairing)) is not None:
            difference, place = of(point) - of(other), where_of(experiment, point) | where
            yield contrast(experiment, f"{name}_over_{pairing}", place, difference, says(pairing, other)), difference


def over(experiment: Experiment) -> str:
    """Say in words what intervals are over, and how they are made."""
    return f"over {bootstrap.over(experiment.seeds)}"


def over_model(experiment: Experiment, point: GridPoint | None) -> str:
    """Say in words what the interval of one model's number is over; without a point, the base model's."""
    return over(experiment) + ("" if point else "; one base model for all seeds")


def t_over_seeds(experiment: Experiment) -> str:
    """Say in words how `over_seeds` makes an interval."""
    return f"t interval over {seeds_text(experiment)}"


def over_seeds(values: Sequence[float], *, logarithmic: bool = False) -> tuple[float, float, float]:
    """Return the mean of some values and the ends of its 95 % t interval.

    If `logarithmic`, the geometric mean, with the interval of the logarithm. The interval is NaN with fewer than two
    values; all three are NaN if a value, or its logarithm, is not defined.
    """
    numbers = np.asarray(values, dtype=float)
    if not np.isfinite(numbers).all() or (logarithmic and (numbers <= 0).any()):
        return math.nan, math.nan, math.nan
    if logarithmic:
        return tuple(math.exp(value) for value in over_seeds(np.log(numbers)))
    value = float(numbers.mean())
    if len(numbers) < 2:
        return value, math.nan, math.nan
    reach = stats.t.ppf((1 + LEVEL) / 2, len(numbers) - 1) * stats.sem(numbers)
    return value, value - reach, value + reach


def share_of_runs(count: int, runs: int) -> tuple[float, float, float]:
    """Return count / runs with the ends of its 95 % Clopper-Pearson interval."""
    ends = stats.binomtest(count, runs).proportion_ci(LEVEL, method="exact")
    return count / runs, ends.low, ends.high


def pooled(
    values: Sequence[float],
    errors: Sequence[float],
    scale: bootstrap.Scale = "plain",
    quantile: float = NORMAL_95,
) -> tuple[float, float, float]:
    """Return the mean over seeds with a 95 % interval, made on `scale`.

    From three seeds on it is a t interval over seeds; with fewer, one from the mean squared error and `quantile`.

    The variance between seeds contains that within them. Where it is not larger, that is no sign that seeds do not
    differ: the larger of the two with a normal quantile covers 81 to 91 % where they do.
    """
    # As arrays, since pandas would skip NaN: a value that one seed leaves undefined is undefined.
    values, errors = np.asarray(values, dtype=float), np.asarray(errors, dtype=float)
    if bootstrap.covers_seeds(values):
        value, low, _ = over_seeds(values)
        half = value - low
    else:
        value = float(np.mean(values))
        half = quantile * math.sqrt(np.mean(np.square(errors)) / len(values))
    return value, *bootstrap.ends(value, half, scale)


def spread_text(count: int) -> str:
    """Say in words how `pooled` makes an interval over `count` seeds."""
    if bootstrap.covers_seeds(range(count)):
        return f"t interval over {count} seeds"
    return (
        "normal interval from the delete-one jackknife's variance (batches of the estimator and of the reference), not "
        "over seeds"
    )
