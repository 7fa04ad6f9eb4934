import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from dvp.core.diagnostics import mismatch_metrics, pruned_mass_metrics, tail_mismatch


@settings(max_examples=60)
@given(
    log_ratio=hnp.arrays(np.float64, (4, 3), elements=st.one_of(st.floats(-0.3, 0.3), st.floats(-12, 12))),
    kinds=hnp.arrays(np.int8, (4, 3), elements=st.integers(0, 2)).filter(np.any),
)
def test_against_numpy(log_ratio, kinds):
    """Of kind 0 is padding; tokens of kind 2 the trainer never samples: their ratio is 0, and has no logarithm."""
    mask, pruned = kinds == 1, kinds == 2
    spoiled = np.where(mask, log_ratio, np.nan)
    metrics = mismatch_metrics(torch.tensor(spoiled), torch.tensor(mask), torch.tensor(pruned))
    tokens, r = log_ratio[mask], np.exp(log_ratio[mask])
    rows = [np.where(pruned, -np.inf, log_ratio)[i][kinds[i] > 0] for i in range(4) if kinds[i].any()]
    w = np.array([math.exp(row.sum()) for row in rows])
    count = max(len(tokens), 1)
    expected = {
        "k1": np.sum(-tokens) / count,
        "k3": np.sum(r - tokens - 1) / count,
        "chi2": np.sum(r**2) / np.sum(kinds > 0) - 1,
        "ess": w.sum() ** 2 / (w**2).sum() / len(w) if w.any() else 0.0,
        "max_abs_log_ratio": np.abs(tokens).max(initial=0.0),
        "ratio_outside_0.9_1.1": np.sum((r < 0.9) | (r > 1.1)) / count,
        "ratio_below_1e-4_fraction": np.mean([(np.exp(row) < 1e-4).any() for row in rows]),
    }
    assert metrics == pytest.approx(expected, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("log_ratio", [1e6, -1e6])
def test_extreme_ratios_stay_finite(log_ratio):
    mask = torch.ones(2, 20_000, dtype=torch.bool)
    metrics = mismatch_metrics(torch.full(mask.shape, log_ratio), mask)
    assert all(math.isfinite(value) for value in metrics.values())
    assert metrics["max_abs_log_ratio"] == 1e6
    assert metrics["ess"] == 1.0
    if log_ratio > 0:
        assert metrics["chi2"] == pytest.approx(math.exp(700))


def test_tail_mismatch_looks_at_unlikely_tokens_only():
    probability = torch.tensor([[0.5, 0.009, 0.011, 1e-6], [1e-3, 1e-9, 0.9, 0.9]])
    log_ratio = torch.tensor([[3.0, -0.5, 4.0, 1.0], [0.25, math.nan, 5.0, 5.0]])
    mask = torch.tensor([[True, True, True, True], [True, False, True, False]])
    assert tail_mismatch(log_ratio, probability.log(), mask) == pytest.approx((0.5 + 1.0 + 0.25) / 3)
    assert tail_mismatch(log_ratio, torch.zeros(2, 4), mask) == 0.0


@settings(max_examples=50)
@given(
    mass=hnp.arrays(np.float64, (4, 3), elements=st.floats(0, 1)),
    mask=hnp.arrays(np.bool_, (4, 3)).filter(np.any),
)
def test_pruned_mass_against_loops(mass, mask):
    tokens = [mass[b, t] for b in range(4) for t in range(3) if mask[b, t]]
    responses = [sum(mass[b, t] for t in range(3) if mask[b, t]) for b in range(4) if mask[b].any()]
    expected = {
        "pruned_mass_mean": sum(tokens) / len(tokens),
        "pruned_mass_max": max(tokens),
        "pruned_mass_per_response_mean": sum(responses) / len(responses),
        "pruned_mass_per_response_max": max(responses),
    }
    padded = np.where(mask, mass, np.nan)
    assert pruned_mass_metrics(torch.tensor(padded), torch.tensor(mask)) == pytest.approx(expected)
