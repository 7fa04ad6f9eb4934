"""The sweep over ρ: whether the score is best in between."""

from collections.abc import Iterator

import numpy as np

from dvp.analysis.estimates import Estimate, contrast
from dvp.analysis.parts import FEWEST_RHOS, swept
from dvp.analysis.statistics import Statistic
from dvp.analysis.training import where_of
from dvp.experiment.config import Experiment
from dvp.experiment.grid import GridPoint, parse_rho


def statistics(experiment: Experiment, score: dict[str, Estimate]) -> list[Statistic]:
    """score_over_small_rho and score_over_large_rho of every sweep.

    Both are the mean score over the middle three values of ρ (of an even number the smaller ones) minus the score at
    the smallest, or the largest: above 0, both, where the score is best in between. Which values are in the middle
    does not depend on the scores.
    """
    return [one for sweep in swept(experiment).items() for one in _contrasts(experiment, score, *sweep)]


def middle(rhos: list[str]) -> list[str]:
    """The middle three values, the smallest first."""
    ordered = sorted(rhos, key=parse_rho)
    start = (len(ordered) - FEWEST_RHOS) // 2
    return ordered[start : start + FEWEST_RHOS]


def _contrasts(
    experiment: Experiment, score: dict[str, Estimate], curve: GridPoint, rhos: list[str]
) -> Iterator[Statistic]:
    of = {rho: score[curve.model_copy(update={"rho": rho}).path] for rho in rhos}
    ordered, inside = sorted(rhos, key=parse_rho), middle(rhos)
    mean_R = np.mean([of[rho].value_R for rho in inside], axis=0)
    mean = Estimate(of[inside[0]].draws, mean_R, tuple(file for rho in inside for file in of[rho].sources))
    where = {key: value for key, value in where_of(experiment, curve).items() if key != "rho"}
    for name, end in (("score_over_small_rho", ordered[0]), ("score_over_large_rho", ordered[-1])):
        says = f"mean at ρ = {', '.join(inside)} minus the score at {end}"
        yield contrast(experiment, name, where, mean - of[end], says)
