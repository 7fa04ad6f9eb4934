"""Spearman's rank correlation: known answers, SciPy's, and the jackknife over clusters by its definition."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import spearmanr

from dvp.core.rank_correlation import clustered_rank_correlation, rank_correlation
from dvp.errors import DvpError


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        ([1, 2, 3, 4], [10, 20, 30, 1000], 1.0),
        ([1, 2, 3, 4], [4, 3, 2, 1], -1.0),
        ([1, 2, 3, 4, 5], [2, 1, 4, 3, 5], 1 - 6 * 4 / (5 * 24)),  # 1 − 6 Σd² / (n(n² − 1)) without ties
        ([1, 1, 2], [1, 2, 3], math.sqrt(3) / 2),  # ranks 1.5, 1.5, 3
        ([1, 1, 1], [1, 2, 3], math.nan),
        ([], [], math.nan),
    ],
)
def test_known_answers(left, right, expected):
    found = rank_correlation(torch.tensor(left, dtype=torch.float64), torch.tensor(right, dtype=torch.float64))
    assert found == pytest.approx(expected, nan_ok=True)


@settings(max_examples=40)
@given(seed=st.integers(0, 10**6), count=st.integers(6, 40), ties=st.booleans())
def test_it_is_scipys_and_its_error_the_jackknifes(seed, count, ties):
    rng = np.random.default_rng(seed)
    left = rng.integers(0, 5, count) * 1.0 if ties else rng.normal(size=count)
    right = left + rng.normal(size=count)
    cluster = rng.permutation(np.arange(count) % 3)
    value, error = clustered_rank_correlation(*map(torch.tensor, (left, right, cluster)))
    assert value == pytest.approx(spearmanr(left, right).statistic, nan_ok=True)
    without = [spearmanr(left[cluster != c], right[cluster != c]).statistic for c in range(3)]
    assert error == pytest.approx(math.sqrt(2 * np.var(without)), nan_ok=True, abs=1e-12)


def test_it_depends_on_the_order_alone():
    left = torch.tensor([0.1, 3.0, 2.0, 0.7, 9.0])
    right = torch.tensor([1.0, 2.0, 5.0, 3.0, 4.0])
    assert rank_correlation(left.exp(), right**3) == pytest.approx(rank_correlation(left, right))


def test_a_single_cluster_has_no_error_and_lengths_must_agree():
    values = torch.tensor([1.0, 2.0, 3.0])
    value, error = clustered_rank_correlation(values, values, torch.zeros(3))
    assert value == pytest.approx(1.0)
    assert math.isnan(error)
    with pytest.raises(DvpError, match="three vectors of one length"):
        clustered_rank_correlation(values, values[:2], torch.zeros(3))
