"""Bias, cosine, variance and mse of gradient estimates, against float64 loops and simulated gradients."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dvp.errors import DvpError
from dvp.measurement import estimator_bias as module
from dvp.measurement.estimator_bias import gradient_statistics, inner_products


def measured(x_nD, y_mD):
    x_nD, y_mD = torch.as_tensor(x_nD), torch.as_tensor(y_mD)
    return gradient_statistics(inner_products(x_nD, x_nD), inner_products(y_mD, y_mD), inner_products(x_nD, y_mD))


def by_loops(x, y):
    """The definitions: averages over pairs of different batches, one product after the other."""

    def over_pairs(z):
        pairs = [(i, j) for i in range(len(z)) for j in range(len(z)) if i != j]
        return math.fsum(float(z[i] @ z[j]) for i, j in pairs) / len(pairs)

    mean, norm = over_pairs(x), over_pairs(y)
    cross = math.fsum(float(a @ b) for a in x for b in y) / (len(x) * len(y))
    power = math.fsum(float(a @ a) for a in x) / len(x)
    bias, variance = (mean - 2 * cross + norm) / norm, (power - mean) / norm
    cosine = cross / math.sqrt(mean * norm) if mean > 0 else math.nan
    return {
        **{"squared_bias": bias, "cosine": cosine, "variance": variance, "mse": bias + variance},
        **{"signal": mean / norm, "variance_over_signal": (power - mean) / mean},
    }


def gaussian(rng, mean_D, variance, count):
    """Batches whose covariance has the trace `variance`."""
    return mean_D + rng.normal(size=(count, len(mean_D))) * math.sqrt(variance / len(mean_D))


@settings(max_examples=30)
@given(
    seed=st.integers(0, 10**6),
    n=st.integers(4, 7),
    m=st.integers(4, 7),
    columns=st.integers(1, 9),
    bias=st.floats(0, 2),
)
def test_values_and_jackknife_are_those_of_the_definitions(seed, n, m, columns, bias):
    rng = np.random.default_rng(seed)
    g_D = rng.normal(size=6)
    x, y = gaussian(rng, g_D * (1 + bias), 2.0, n), gaussian(rng, g_D, 0.1 * g_D @ g_D, m)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "COLUMNS", columns)
        found = measured(x, y)
    expected = by_loops(x, y)
    assert found.keys() == expected.keys()
    without_x = [by_loops(np.delete(x, i, axis=0), y) for i in range(n)]
    without_y = [by_loops(x, np.delete(y, k, axis=0)) for k in range(m)]
    for name, one in found.items():
        if name == "variance_over_signal" and math.isnan(one.value):
            continue  # its signal may be 0
        close = {"rtol": 1e-7, "atol": 1e-9}
        np.testing.assert_allclose(one.value, expected[name], **close)
        np.testing.assert_allclose(one.over_batches_n, [each[name] for each in without_x], **close)
        np.testing.assert_allclose(one.over_reference_m, [each[name] for each in without_y], **close)
        variance = sum((len(part) - 1) * np.var([each[name] for each in part]) for part in (without_x, without_y))
        np.testing.assert_allclose(one.se, math.sqrt(variance), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("direction", "variance"), [("none", 3.0), ("along", 3.0), ("across", 12.0)])
def test_simulated_gradients_give_back_their_bias_and_variance(direction, variance):
    """Known truth: |g|² = 1, a bias of 0 or of 0.3 along or across g, noise several times the signal."""
    rng = np.random.default_rng(1)
    g_D, across_D = np.eye(40)[0], np.eye(40)[1]
    shift = {"none": 0.0, "along": 0.3, "across": 0.3}[direction]
    mean_D = g_D + shift * (across_D if direction == "across" else g_D)
    truth = {
        "squared_bias": shift**2,
        "cosine": mean_D @ g_D / np.linalg.norm(mean_D),
        "variance": variance,
        "mse": shift**2 + variance,
        "signal": mean_D @ mean_D,
        "variance_over_signal": variance / (mean_D @ mean_D),
    }
    runs = [measured(gaussian(rng, mean_D, variance, 40), gaussian(rng, g_D, 2.0, 160)) for _ in range(300)]
    for name, expected in truth.items():
        values = np.array([run[name].value for run in runs])
        noise = values.std(ddof=1)
        # A ratio of unbiased estimates: what is left of a bias is of second order, (s.e. of |g|²)² ≈ .003.
        tolerance = 4 * noise / math.sqrt(len(values)) + 0.01 * abs(expected)
        assert values.mean() == pytest.approx(expected, abs=tolerance), name
        # Where the bias is small the jackknife is too large by up to √2, never much too small.
        assert 0.85 <= np.mean([run[name].se for run in runs]) / noise <= 1.5, name
        covered = np.mean([run[name].interval[0] <= expected <= run[name].interval[1] for run in runs])
        assert covered >= 0.9, name


def test_what_is_relative_to_a_mean_that_may_be_zero_is_undefined():
    rng = np.random.default_rng(0)
    y = gaussian(rng, np.ones(30), 0.1, 6)
    for x in (np.concatenate([y[:3], -y[:3]]), np.zeros((6, 30))):  # the second: no response is that long
        undefined = {name for name, one in measured(x, y).items() if math.isnan(one.value)}
        assert undefined == {"cosine", "variance_over_signal"}


def test_inner_products_of_float32_gradients_keep_the_digits_that_differences_need():
    rng = np.random.default_rng(4)
    x = (rng.normal(size=(5, 200_000)) * 10).astype(np.float32)
    expected = x.astype(np.float64) @ x.astype(np.float64).T
    np.testing.assert_allclose(inner_products(torch.tensor(x), torch.tensor(x)), expected, rtol=1e-12, atol=1e-6)


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (np.ones((6, 2)), np.array([[1.0, 0], [-1, 0], [0, 1], [0, -1]]), "not distinguishable from 0"),
        (np.ones((3, 2)), np.ones((6, 2)), "batches: expected at least 4, got 3"),
        (np.ones((6, 2)), np.ones((3, 2)), "reference batches: expected at least 4, got 3"),
    ],
)
def test_what_cannot_be_measured_is_one_line(x, y, message):
    with pytest.raises(DvpError, match=message):
        measured(x, y)
