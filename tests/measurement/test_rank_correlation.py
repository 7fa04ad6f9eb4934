"""Spearman's rank correlation: known answers, SciPy's, and the jackknife over clusters by its definition."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import spearmanr

from dvp.measurement.rank_correlation import clustered_rank_correlation


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
    cluster = torch.arange(len(left))
    found, _ = clustered_rank_correlation(torch.tensor(left), torch.tensor(right), cluster)
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


def test_a_single_cluster_has_no_error():
    values = torch.tensor([1.0, 2.0, 3.0])
    value, error = clustered_rank_correlation(values, values, torch.zeros(3))
    assert value == 1.0
    assert math.isnan(error)
