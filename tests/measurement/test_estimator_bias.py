"""Bias, cosine, variance and mse of gradient estimates, against float64 loops and simulated gradients."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dvp.errors import DvpError
from dvp.measurement import estimator_bias as module
from dvp.measurement.estimator_bias import (
    STATISTICS,
    VARIANCE_STATISTICS,
    estimator_bias,
    gradient_variance,
    inner_products,
    squared_norm,
)


def measured(x_nD, y_mD):
    x_nD, y_mD = torch.as_tensor(x_nD), torch.as_tensor(y_mD)
    return estimator_bias(inner_products(x_nD, x_nD), inner_products(x_nD, y_mD), inner_products(y_mD, y_mD))


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
    return {"squared_bias": bias, "cosine": cosine, "variance": variance, "mse": bias + variance}


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
    without_x = [by_loops(np.delete(x, i, axis=0), y) for i in range(n)]
    without_y = [by_loops(x, np.delete(y, k, axis=0)) for k in range(m)]
    for name in STATISTICS:
        close = {"rtol": 1e-7, "atol": 1e-9}
        np.testing.assert_allclose(found[name].value, expected[name], **close)
        np.testing.assert_allclose(found[name].over_batches_n, [one[name] for one in without_x], **close)
        np.testing.assert_allclose(found[name].over_reference_m, [one[name] for one in without_y], **close)
        variance = sum(
            (len(part) - 1)
            / len(part)
            * sum((one[name] - np.mean([other[name] for other in part])) ** 2 for one in part)
            for part in (without_x, without_y)
        )
        np.testing.assert_allclose(found[name].se, math.sqrt(variance), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(("direction", "variance"), [("none", 3.0), ("along", 3.0), ("across", 12.0)])
def test_simulated_gradients_give_back_their_bias_and_variance_with_intervals_that_cover_them(direction, variance):
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
    }
    runs = [measured(gaussian(rng, mean_D, variance, 40), gaussian(rng, g_D, 2.0, 160)) for _ in range(300)]
    for name in STATISTICS:
        values = np.array([run[name].value for run in runs])
        noise = values.std(ddof=1)
        # A ratio of unbiased estimates: what is left of a bias is of second order, (s.e. of |g|²)² ≈ .003.
        tolerance = 4 * noise / math.sqrt(len(values)) + 0.01 * abs(truth[name])
        assert values.mean() == pytest.approx(truth[name], abs=tolerance), name
        # Where the bias is small the jackknife is too large by up to √2, never much too small.
        assert 0.85 <= np.mean([run[name].se for run in runs]) / noise <= 1.5, name
        covered = np.mean([run[name].interval[0] <= truth[name] <= run[name].interval[1] for run in runs])
        assert covered >= 0.9, name


def test_cosine_is_undefined_where_the_mean_of_the_estimates_is_not_told_from_zero():
    rng = np.random.default_rng(0)
    y = gaussian(rng, np.ones(30), 0.1, 6)
    found = measured(np.concatenate([y[:3], -y[:3]]), y)
    assert math.isnan(found["cosine"].value)
    assert all(math.isfinite(found[name].value) for name in STATISTICS if name != "cosine")


def test_inner_products_of_float32_gradients_keep_the_digits_that_differences_need():
    rng = np.random.default_rng(4)
    x = (rng.normal(size=(5, 200_000)) * 10).astype(np.float32)
    expected = x.astype(np.float64) @ x.astype(np.float64).T
    np.testing.assert_allclose(inner_products(torch.tensor(x), torch.tensor(x)), expected, rtol=1e-12, atol=1e-6)


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (np.ones((6, 2)), np.array([[1.0, 0], [-1, 0], [0, 1], [0, -1]]), "not distinguishable from 0"),
        (np.ones((6, 2)), np.zeros((6, 2)), "not distinguishable from 0"),
        (np.ones((3, 2)), np.ones((6, 2)), "batches: expected at least 4, got 3"),
        (np.ones((6, 2)), np.ones((3, 2)), "reference batches: expected at least 4, got 3"),
    ],
)
def test_what_cannot_be_measured_is_one_line(x, y, message):
    with pytest.raises(DvpError, match=message):
        measured(x, y)


def variance_of(part_nD, y_mD):
    part_nD, y_mD = torch.as_tensor(part_nD), torch.as_tensor(y_mD)
    return gradient_variance(inner_products(part_nD, part_nD), inner_products(y_mD, y_mD))


@settings(max_examples=30)
@given(seed=st.integers(0, 10**6), n=st.integers(4, 7), m=st.integers(4, 7))
def test_the_variance_of_a_part_and_its_jackknife_are_those_of_the_definitions(seed, n, m):
    """(P − A)/C, A/C and (P − A)/A, one product after the other; numpy's own variance says the first again."""
    rng = np.random.default_rng(seed)
    g_D = rng.normal(size=6)
    x, y = gaussian(rng, 3 * g_D, 0.5, n), gaussian(rng, g_D, 0.1 * g_D @ g_D, m)

    def by_definition(x, y):
        found = by_loops(x, y)
        norm = math.fsum(float(a @ b) for i, a in enumerate(y) for j, b in enumerate(y) if i != j)
        signal = math.fsum(float(a @ b) for i, a in enumerate(x) for j, b in enumerate(x) if i != j)
        signal *= len(y) * (len(y) - 1) / (len(x) * (len(x) - 1) * norm)
        return {
            "variance": found["variance"],
            "signal": signal,
            "variance_over_signal": found["variance"] / signal,
        }

    found, expected = variance_of(x, y), by_definition(x, y)
    assert set(found) == set(VARIANCE_STATISTICS)
    norm = float(squared_norm(inner_products(torch.tensor(y), torch.tensor(y))).value)
    assert found["variance"].value == pytest.approx(x.var(axis=0, ddof=1).sum() / norm)
    without_x = [by_definition(np.delete(x, i, axis=0), y) for i in range(n)]
    without_y = [by_definition(x, np.delete(y, k, axis=0)) for k in range(m)]
    for name in VARIANCE_STATISTICS:
        close = {"rtol": 1e-7, "atol": 1e-9}
        np.testing.assert_allclose(found[name].value, expected[name], **close)
        np.testing.assert_allclose(found[name].over_batches_n, [one[name] for one in without_x], **close)
        spread = sum(
            (len(part) - 1) * np.var([one[name] for one in part])
            for part in ([without_x, without_y] if name != "variance_over_signal" else [without_x])
        )
        np.testing.assert_allclose(found[name].se, math.sqrt(spread), rtol=1e-6, atol=1e-9)


def test_intervals_of_the_variance_over_signal_cover_the_truth():
    rng = np.random.default_rng(2)
    covered, values = [], []
    for _ in range(300):
        part = variance_of(gaussian(rng, 0.7 * np.eye(30)[1], 1.5, 40), gaussian(rng, np.eye(30)[0], 1.0, 80))
        values.append(part["variance_over_signal"].value)
        low, high = part["variance_over_signal"].interval
        covered.append(low < 1.5 / 0.49 < high)
    assert 0.88 < np.mean(covered) <= 1.0
    assert np.median(values) == pytest.approx(1.5 / 0.49, rel=0.05)


def test_a_part_whose_signal_may_be_zero_has_no_variance_over_it():
    rng = np.random.default_rng(0)
    y = gaussian(rng, np.eye(9)[0], 1.0, 80)
    noise = variance_of(gaussian(rng, np.zeros(9), 3.0, 12), y)
    assert math.isnan(noise["variance_over_signal"].value)
    assert math.isnan(noise["variance_over_signal"].se)
    assert noise["variance"].value == pytest.approx(3.0, rel=0.5)
    nothing = variance_of(np.zeros((6, 9)), y)  # no response is that long
    assert nothing["variance"].value == nothing["signal"].value == 0.0
    assert math.isnan(nothing["variance_over_signal"].value)
