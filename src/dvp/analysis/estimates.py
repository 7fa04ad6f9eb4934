"""Means over problems and seeds, and their differences: every part of the report that compares models makes them here.

A number has the same interval wherever it is quoted, and what is compared is paired: entry r of all replicates is of
the same problems and seeds.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import pandas as pd

from dvp.analysis.load import Scored
from dvp.analysis.statistics import Statistic
from dvp.evaluation import bootstrap
from dvp.experiment.config import Experiment
from dvp.experiment.grid import GridPoint

# Not twice for two numbers of the same problems.
_draws = lru_cache(maxsize=1)(bootstrap.draws)


@dataclass(frozen=True, eq=False)
class Estimate:
    """A mean over problems and seeds, or what is made of several."""

    draws: bootstrap.Draws
    value_R: np.ndarray
    """The value and its replicates."""
    sources: tuple[str, ...]

    def __sub__(self, other: "Estimate") -> "Estimate":
        return Estimate(self.draws, self.value_R - other.value_R, (*self.sources, *other.sources))

    def __truediv__(self, other: "Estimate") -> "Estimate":
        """NaN where that is over 0."""
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio_R = self.value_R / other.value_R
        ratio_R[~np.isfinite(ratio_R)] = np.nan
        return Estimate(self.draws, ratio_R, (*self.sources, *other.sources))

    def statistic(
        self, name: str, coordinates: dict[str, str], unit: str, how: str, scale: bootstrap.Scale = "plain"
    ) -> Statistic:
        """With its 95 % interval."""
        numbers = self.draws.estimate(self.value_R, scale)
        return Statistic(name, coordinates, *numbers, unit, how, tuple(dict.fromkeys(self.sources)))


def draws_of(experiment: Experiment, problems: int) -> bootstrap.Draws:
    """The replicates over so many problems, which all seeds share."""
    settings = experiment.evaluation
    return _draws(len(experiment.seeds), problems, settings.bootstrap_resamples, settings.seed, shared=True)


def estimates(
    experiment: Experiment, frame: pd.DataFrame, column: str, sources: Callable[[str], tuple[str, ...]]
) -> dict[str, Estimate]:
    """Of each point the mean of a column of a frame with point, seed and problem."""
    draws, result = draws_of(experiment, frame["problem"].nunique()), {}
    for point, own in frame.groupby("point", sort=False):
        mean_SP = own.pivot_table(index="seed", columns="problem", values=column, aggfunc="mean").to_numpy()
        # The base model is the same for all seeds.
        mean_SP = np.broadcast_to(mean_SP, (draws.seeds, draws.problems))
        result[point] = Estimate(draws, draws.count_RU @ mean_SP.ravel() / mean_SP.size, sources(point))
    return result


def scores(experiment: Experiment, loaded: Scored) -> dict[str, Estimate]:
    """Of each model, or model and sampler, the share of correct samples."""
    return estimates(experiment, loaded.samples, "correct", lambda point: score_files(loaded, point))


def contrast(
    experiment: Experiment,
    name: str,
    coordinates: dict[str, str],
    difference: Estimate,
    says: str,
    unit: str = "fraction",
) -> Statistic:
    """A difference of two estimates, of which `says` tells what is compared with what."""
    return difference.statistic(name, coordinates, unit, f"{says}; {over(experiment)}, paired")


def over(experiment: Experiment) -> str:
    """What intervals are over, and how they are made, in words."""
    return f"over {bootstrap.over(experiment.seeds)}"


def over_model(experiment: Experiment, point: GridPoint | None) -> str:
    """The same of a number of one model, the base model's without a point."""
    return over(experiment) + ("" if point else "; one base model for all seeds")


def score_files(loaded: Scored, point: str) -> tuple[str, ...]:
    """The scores.json of a point's models."""
    return tuple(loaded.scores.loc[loaded.scores["point"] == point, "source"])
