"""Spearman's rank correlation is SciPy's, and its error the jackknife over clusters by its definition."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import spearmanr

from dvp.measurement.rank_correlation import clustered_rank_correlation


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


@pytest.mark.parametrize(("left", "expected"), [([1.0, 2.0, 3.0], 1.0), ([1.0, 1.0, 1.0], math.nan), ([], math.nan)])
def test_what_is_not_defined_is_nan(left, expected):
    right = torch.arange(len(left))
    value, error = clustered_rank_correlation(torch.tensor(left), right, torch.zeros(len(left)))
    assert value == pytest.approx(expected, nan_ok=True)
    assert math.isnan(error)  # of a single cluster
