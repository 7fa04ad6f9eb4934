"""Tests over base models, against other ways to compute them: mpmath, scipy's own tests, the closed test, intervals."""

import math
from itertools import combinations

import mpmath
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from dvp.analysis.estimates import over_seeds
from dvp.analysis.hypotheses import equivalence_test, holm, log_odds, t_test

SHARES = st.floats(1e-12, 1 - 1e-12)
SAMPLES = st.lists(st.floats(-1, 1), min_size=2, max_size=16).filter(lambda values: np.ptp(values) > 1e-6)
MARGINS = st.floats(1e-3, 1)


@given(SHARES)
def test_log_odds_are_exact_to_double_precision(share):
    with mpmath.workdps(50):
        exact = mpmath.log(mpmath.mpf(share) / (1 - mpmath.mpf(share)))
        assert log_odds(share) == pytest.approx(float(exact), rel=1e-14, abs=1e-15)


def test_a_score_without_an_error_has_infinite_log_odds():
    assert (log_odds(0.0), log_odds(1.0)) == (-math.inf, math.inf)


@given(SAMPLES)
def test_the_t_test_is_scipys(values):
    assert t_test(values) == pytest.approx(stats.ttest_1samp(values, 0).pvalue, rel=1e-9)


def test_the_t_test_of_a_table_of_quantiles():
    """t = 2.228 is the 97.5 % quantile with ten degrees of freedom."""
    mean, values = 2.228138851986273, np.arange(11.0) - 5
    scaled = values / values.std(ddof=1) * math.sqrt(11)
    assert t_test(scaled + mean) == pytest.approx(0.05, rel=1e-12)


@given(SAMPLES, MARGINS)
def test_equivalence_is_the_larger_of_scipys_one_sided_tests(values, margin):
    above = stats.ttest_1samp(values, -margin, alternative="greater").pvalue
    below = stats.ttest_1samp(values, margin, alternative="less").pvalue
    assert equivalence_test(values, margin) == pytest.approx(max(above, below), rel=1e-9, abs=1e-300)


@given(SAMPLES, MARGINS)
def test_equivalence_is_shown_where_the_90_percent_interval_lies_within(values, margin):
    mean, reach = np.mean(values), stats.t.ppf(0.95, len(values) - 1) * stats.sem(values)
    inside = min(mean - reach + margin, margin - mean - reach)
    if abs(inside) > 1e-9:
        assert (equivalence_test(values, margin) < 0.05) == (inside > 0)


@given(SAMPLES)
def test_the_test_rejects_where_the_interval_excludes_zero(values):
    _, low, high = over_seeds(values)
    if min(abs(low), abs(high)) > 1e-9:
        assert (t_test(values) < 0.05) == (low > 0 or high < 0)


@given(st.lists(st.floats(0, 1), max_size=6))
def test_holm_is_the_closed_test_of_bonferroni(p_values):
    """A hypothesis is rejected if every set of hypotheses that has it is, by Bonferroni's test of that set."""
    places = range(len(p_values))
    sets = [chosen for size in places for chosen in combinations(places, size + 1)]
    of_set = {chosen: min(1.0, len(chosen) * min(p_values[place] for place in chosen)) for chosen in sets}
    expected = [max(of_set[chosen] for chosen in sets if place in chosen) for place in places]
    assert holm(p_values) == pytest.approx(expected, rel=1e-15)


def test_holm_of_a_worked_example():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02], rel=1e-15)


@pytest.mark.parametrize("values", [[], [0.1], [0.1, math.nan], [0.1, math.inf], [0.0, 0.0]])
def test_what_cannot_be_tested_has_no_p_value(values):
    assert math.isnan(t_test(values))
    assert holm([0.01, t_test(values)]) == pytest.approx([0.02, math.nan], nan_ok=True)


def test_values_without_spread_are_equivalent_or_not():
    assert equivalence_test([0.01] * 3, 0.02) == 0
    assert equivalence_test([0.03] * 3, 0.02) == 1
