"""Test hypotheses about a mean over base models: that it is 0, several at once, and that it is nearly 0."""

import math
from collections.abc import Sequence

import numpy as np
from scipy import stats


def log_odds(share: float) -> float:
    """Return ln(share / (1 − share)): −∞ at 0, ∞ at 1."""
    with np.errstate(divide="ignore"):
        return float(np.log(share) - np.log1p(-share))


def t_test(values: Sequence[float]) -> float:
    """Return the two-sided p-value of Student's t test that the mean is 0; NaN as `_t`."""
    t, freedom = _t(values, 0.0)
    return float(2 * stats.t.sf(abs(t), freedom))


def equivalence_test(values: Sequence[float], margin: float) -> float:
    """Return the p-value of two one-sided t tests that the mean lies within ± margin; NaN as `_t`.

    It is the larger of the two, that the mean is above −margin and that it is below margin. It is at most 0.05 exactly
    where the 90 % t interval lies within ± margin (Schuirmann 1987).
    """
    (above, freedom), (below, _) = _t(values, -margin), _t(values, margin)
    return float(max(stats.t.sf(above, freedom), stats.t.cdf(below, freedom)))


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values adjusted by Holm's step-down procedure (1979), in the order given.

    Rejecting those that are at most α errs in any of them with probability α at most, however they depend on another.
    A NaN stays one, and counts.
    """
    p = np.asarray(p_values, dtype=float)
    order = np.argsort(p)
    p[order] = np.minimum(1, np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1)))
    return p.tolist()


def _t(values: Sequence[float], mean: float) -> tuple[float, int]:
    """Return Student's t of the hypothesis that the mean is `mean`, and its degrees of freedom.

    t is NaN with fewer than two values, where one is not finite, and where all are `mean`.
    """
    numbers = np.asarray(values, dtype=float)
    if len(numbers) < 2 or not np.isfinite(numbers).all():
        return math.nan, 1
    with np.errstate(divide="ignore", invalid="ignore"):
        t = (numbers.mean() - mean) / (numbers.std(ddof=1) / math.sqrt(len(numbers)))
    return float(t), len(numbers) - 1
