"""The intervals of everything that is measured on problems, for several training seeds.

Every statistic is a function of sums over problems, and a replicate is how often each problem counts. The same
replicates for all models make differences paired, and give the same number the same interval wherever it is quoted.

From three seeds on the interval is over problems and seeds: value ± t_ν √V. With all seeds on the same problems

    V = V_S + max(0, V_P − V_U) · S / (S − 1) · P / (P − 1)

V_S is the jackknife's variance over seeds: one seed left out at a time. It holds what differs from seed to seed, in
all problems alike or in each of them, the noise of samples too. V_P is the bootstrap's variance over problems that are
drawn for all seeds together, V_U over problems that are drawn for each seed alone. What seeds have in common in a
problem is in V_P in full and in V_U by 1/S; the rest is in both alike. So the second term is the variance of what seeds
have in common, and nothing is counted twice. Where each seed has problems of its own, V = V_S holds all.

ν lies between S − 1 and P − 1 by the shares of V: 1/ν = w/(S − 1) + (1 − w)/(P − 1), w = V_S/V. Satterthwaite's formula
squares the shares; but a V_S that is small by chance then makes ν large as well, and of 95 % it covers 92 %.

With fewer seeds the interval is the bootstrap's central 95 %, over problems alone. A problem is drawn with all that
belongs to it (its samples, its responses), so that the spread between problems holds the noise within them once.

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
"""From three seeds on a share, in [0, 1], has its interval made on the logit scale, a ratio on the log scale."""


@dataclass(frozen=True, eq=False)
class Draws:
    """How often each unit counts in each replicate, and what replicates of a statistic come to."""

    count_RU: np.ndarray
    """1, then from three seeds on each seed left out in turn, then what is drawn; each row adds up to U."""
    seeds: int
    problems: int
    """Of a seed."""
    shared: bool
    """Whether all seeds have the same problems, or problems of their own."""

    def estimate(self, value_R: np.ndarray, scale: Scale = "plain") -> tuple[float, float, float]:
        """The value and its 95 % interval, whose ends are NaN where a replicate is not finite.

        A share of 0 or 1 has the Clopper-Pearson interval of as many trials as there are problems, whatever the number
        of samples: they may all agree.
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
        """Standard error and its degrees of freedom."""
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
        """The true difference whose interval would leave out 0 in 80 % of such experiments; NaN where undefined."""
        if len(value_R) < 2 or not np.isfinite(value_R).all():
            return math.nan
        error, freedom = self.error(value_R)
        return float(stdtrit(freedom, TAILS[1]) + stdtrit(freedom, POWER)) * error


def covers_seeds(seeds: Sequence[int]) -> bool:
    return len(seeds) >= FEWEST_SEEDS


def over(seeds: Sequence[int]) -> str:
    """What an interval is over, and how it is made, in words."""
    if not covers_seeds(seeds):
        return "problems, not over training seeds: bootstrap"
    return f"problems and {len(seeds)} training seeds: jackknife over seeds, bootstrap over problems, quantiles of t"


def draws(seeds: int, problems: int, resamples: int, seed: int, *, shared: bool) -> Draws:
    """The replicates of an experiment.

    Args:
        problems: of a seed.
        resamples: of the bootstrap over problems; that over problems of each seed alone has as many.
        seed: of the resampling.
        shared: whether all seeds have the same problems, or problems of their own.
    """
    rng = np.random.default_rng(seed)
    units = seeds * problems
    parts = [np.ones((1, units))]
    if seeds >= FEWEST_SEEDS:
        parts.append(np.repeat((1 - np.eye(seeds)) * seeds / (seeds - 1), problems, axis=1))
    if shared:
        # One seed's draws of problems are those of several.
        together_RP = _counts(rng.integers(problems, size=(resamples, problems)), problems)
        parts.append(np.tile(together_RP, seeds))
    if shared == (seeds >= FEWEST_SEEDS):
        drawn_RSP = rng.integers(problems, size=(resamples, seeds, problems)) + problems * np.arange(seeds)[:, None]
        parts.append(_counts(drawn_RSP.reshape(resamples, units), units))
    return Draws(np.concatenate(parts), seeds, problems, shared)


def ends(value: float, reach: float, scale: Scale) -> tuple[float, float]:
    """Those of the interval value ± reach, made on its scale by the derivative; plain where that is not defined.

    NaN, both, where one would not be a number that a machine holds: nothing is known then.
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
    """Infinite instead of an overflow."""
    return math.exp(exponent) if exponent < 700 else math.inf
