"""The one bootstrap behind every interval over problems: training seeds are resampled, then problems.

A problem is resampled with all that belongs to it (its samples, its responses), so that the spread between problems
holds the noise within them once. Two seeds resampled say nothing, so seeds are drawn from three on. Every statistic is
a ratio of sums over problems, and a replicate is how often each problem counts; the same draws for all models make
differences paired, and give the same number the same interval wherever it is quoted.

Shape suffixes: S seeds, P problems, U = S · P units (a problem of a seed, seed by seed), R replicates, the first of
which counts every unit once and so is the value itself.
"""

from collections.abc import Sequence

import numpy as np

FEWEST_SEEDS = 3
TAILS = (0.025, 0.975)


def resamples_seeds(seeds: Sequence[int]) -> bool:
    return len(seeds) >= FEWEST_SEEDS


def over(seeds: Sequence[int]) -> str:
    """What an interval is over, in words."""
    if not resamples_seeds(seeds):
        return "problems, not over training seeds"
    share = (len(seeds) - 1) / len(seeds)
    return f"problems and {len(seeds)} training seeds (of so few it sees {share:.0%} of their variance)"


def draws(seeds: int, problems: int, resamples: int, seed: int, *, shared: bool) -> np.ndarray:
    """How often each unit counts in each replicate, (1 + resamples, seeds · problems).

    Args:
        seed: of the resampling.
        shared: whether all seeds have the same problems, which are then drawn for all of them together, or problems of
            their own.
    """
    rng = np.random.default_rng(seed)
    if shared:
        # Problems first: one seed's draws of problems are those of several.
        problem_RP = _counts(rng.integers(problems, size=(resamples, problems)), problems)
        seed_RS = np.ones((resamples, seeds))
        if resamples_seeds(range(seeds)):
            seed_RS = _counts(np.random.default_rng([seed, seeds]).integers(seeds, size=(resamples, seeds)), seeds)
        count_RU = (seed_RS[:, :, None] * problem_RP[:, None, :]).reshape(resamples, -1)
    else:
        drawn_RS = np.tile(np.arange(seeds), (resamples, 1))
        if resamples_seeds(range(seeds)):
            drawn_RS = rng.integers(seeds, size=(resamples, seeds))
        drawn_RSP = drawn_RS[..., None] * problems + rng.integers(problems, size=(resamples, seeds, problems))
        count_RU = _counts(drawn_RSP.reshape(resamples, -1), seeds * problems)
    return np.concatenate([np.ones((1, seeds * problems)), count_RU])


def estimate(value_R: np.ndarray) -> tuple[float, float, float]:
    """The value, and the central 95 % of the other replicates; these two NaN where a replicate is not finite."""
    value, replicate_R = float(value_R[0]), value_R[1:]
    if not len(replicate_R) or not np.isfinite(replicate_R).all():
        return value, float("nan"), float("nan")
    low, high = np.quantile(replicate_R, TAILS)
    return value, float(low), float(high)


def _counts(drawn_RN: np.ndarray, units: int) -> np.ndarray:
    replicates = len(drawn_RN)
    flat = drawn_RN + units * np.arange(replicates)[:, None]
    return np.bincount(flat.ravel(), minlength=replicates * units).reshape(replicates, units).astype(float)
