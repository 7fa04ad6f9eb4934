"""Confidence intervals for statistics over problems, with one or several training seeds.

Every statistic is a function of sums over problems, and a replicate is a vector of how often each problem counts. All
models use the same replicates, so that differences are paired and a number has the same interval wherever it is quoted.

From three seeds on the interval is over problems and seeds: value ± t_ν √V. With all seeds on the same problems

    V = V_S + max(0, V_P − V_U) · S / (S − 1) · P / (P − 1)

V_S is the jackknife variance over seeds: one seed left out at a time. It contains all variation between seeds, whether
shared by all problems or specific to one, and the noise of samples. V_P is the bootstrap variance over problems drawn
for all seeds together, V_U over problems drawn for each seed alone. The variance between problems that seeds share is
in V_P in full and in V_U divided by S; the rest is equal in both. The second term is therefore the variance that seeds
share, and nothing is counted twice. If each seed has problems of its own, V = V_S.

ν lies between S − 1 and P − 1: 1/ν = w/(S − 1) + (1 − w)/(P − 1), w = V_S/V. Satterthwaite's formula squares the
shares instead; a V_S that is small by chance then also makes ν large, and nominal 95 % intervals cover 92 %.

With fewer seeds the interval is the central 95 % of the bootstrap over problems alone. A problem is drawn with all its
samples or responses, so that the variance between problems already includes the noise within them.

Shape suffixes: S seeds, P problems, U = S · P units (a problem of a seed, seed by seed), R replicates, the first of
which counts every unit once and so is the value itself.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy import stats
from scipy.special import expit, stdtrit

FEWEST_SEEDS = 3
TAILS = (0.025, 0.975)
POWER = 0.8

Scale = Literal["plain", "share", "ratio"]
"""Scale on which the interval of three or more seeds is symmetric: logit for a share in [0, 1], log for a ratio."""


@dataclass(frozen=True, eq=False)
class Draws:
    """Resampling weights of each unit in each replicate, and estimates from the replicates of a statistic."""

    count_RU: np.ndarray
    """Rows: all ones; with three or more seeds, each seed left out in turn; the bootstrap draws. Each row sums to U."""
    seeds: int
    problems: int
    """Problems per seed."""
    shared: bool
    """Whether all seeds have the same problems; otherwise each seed has its own."""

    def estimate(self, value_R: np.ndarray, scale: Scale = "plain") -> tuple[float, float, float]:
        """Return a statistic's value and the bounds of its 95 % interval: (value, low, high).

        The bounds are NaN if there is no replicate or one is not finite.
        A share of 0 or 1 gets the Clopper-Pearson interval with one trial per problem, whatever the number of samples,
        as the samples of a problem may all agree.
        """
        value = float(value_R[0])
        if len(value_R) < 2 or not np.isfinite(value_R).all():
            return value, math.nan, math.nan
        if scale == "share" and min(abs(value), abs(1 - value)) < 1e-9:
            trials = self.problems if self.shared else self.seeds * self.problems
            exact = stats.binomtest(round(value) * trials, trials).proportion_ci(method="exact")
            return value, exact.low, exact.high
        if self.seeds < FEWEST_SEEDS:
            low, high = np.quantile(value_R[1:], TAILS)
            return value, float(low), float(high)
        error, freedom = self.error(value_R)
        return value, *ends(value, float(stdtrit(freedom, TAILS[1])) * error, scale)

    def error(self, value_R: np.ndarray) -> tuple[float, float]:
        """Return the standard error of a statistic and its degrees of freedom, by the formulas of this module."""
        if self.seeds < FEWEST_SEEDS:
            units = self.problems if self.shared else self.seeds * self.problems
            return float(value_R[1:].std()), max(units - 1, 1)
        S, P = self.seeds, self.problems
        between = float((S - 1) * value_R[1 : 1 + S].var())
        common = 0.0
        if self.shared:
            together_R, alone_R = np.split(value_R[1 + S :], 2)
            common = max(0.0, float(together_R.var() - alone_R.var())) * S / (S - 1) * P / max(P - 1, 1)
        total = between + common
        share = between / total if total else 1.0
        return math.sqrt(total), 1 / (share / (S - 1) + (1 - share) / max(P - 1, 1))

    def smallest_effect(self, value_R: np.ndarray) -> float:
        """Return the smallest true effect whose interval excludes 0 in 80 % of such experiments; NaN if undefined."""
        if len(value_R) < 2 or not np.isfinite(value_R).all():
            return math.nan
        error, freedom = self.error(value_R)
        return float(stdtrit(freedom, TAILS[1]) + stdtrit(freedom, POWER)) * error


def covers_seeds(seeds: Sequence[int]) -> bool:
    """Check whether there are enough training seeds for intervals that include the variance between seeds."""
    return len(seeds) >= FEWEST_SEEDS


def over(seeds: Sequence[int]) -> str:
    """Describe the resampling of an interval in words: over problems alone, or over problems and seeds."""
    if not covers_seeds(seeds):
        return "problems, not over training seeds: bootstrap"
    return f"problems and {len(seeds)} training seeds: jackknife over seeds, bootstrap over problems, quantiles of t"


def draws(seeds: int, problems: int, resamples: int, seed: int, *, shared: bool) -> Draws:
    """Draw the replicates that all statistics of an experiment share.

    Args:
        seeds: number of training seeds, S.
        problems: number of problems per seed, P.
        resamples: replicates of the bootstrap over problems, and as many of the one over each seed's problems alone.
        seed: random seed of the resampling.
        shared: whether all seeds have the same problems; otherwise each seed has its own.
    """
    rng = np.random.default_rng(seed)
    units = seeds * problems
    parts = [np.ones((1, units))]
    if seeds >= FEWEST_SEEDS:
        parts.append(np.repeat((1 - np.eye(seeds)) * seeds / (seeds - 1), problems, axis=1))
    if shared:
        # Drawn first and without regard to S, so that one seed and several have the same draws of problems.
        together_RP = _counts(rng.integers(problems, size=(resamples, problems)), problems)
        parts.append(np.tile(together_RP, seeds))
    if shared == (seeds >= FEWEST_SEEDS):
        drawn_RSP = rng.integers(problems, size=(resamples, seeds, problems)) + problems * np.arange(seeds)[:, None]
        parts.append(_counts(drawn_RSP.reshape(resamples, units), units))
    return Draws(np.concatenate(parts), seeds, problems, shared)


def ends(value: float, reach: float, scale: Scale) -> tuple[float, float]:
    """Return the bounds of the interval value ± reach, symmetric on the given scale (by the delta method).

    The plain scale is used where the other one is undefined. Both bounds are NaN where the upper one overflows.
    """
    if scale == "share" and 0 < value < 1:
        logit, reach = math.log(value / (1 - value)), reach / (value * (1 - value))
        return float(expit(logit - reach)), float(expit(logit + reach))
    if scale == "ratio" and value > 0:
        low, high = value * _exp(-reach / value), value * _exp(reach / value)
        return (low, high) if math.isfinite(high) else (math.nan, math.nan)
    return value - reach, value + reach


def _counts(drawn_RN: np.ndarray, units: int) -> np.ndarray:
    replicates = len(drawn_RN)
    flat = drawn_RN + units * np.arange(replicates)[:, None]
    return np.bincount(flat.ravel(), minlength=replicates * units).reshape(replicates, units).astype(float)


def _exp(exponent: float) -> float:
    """Return exp(exponent), or infinity instead of an OverflowError."""
    return math.exp(exponent) if exponent < 700 else math.inf
