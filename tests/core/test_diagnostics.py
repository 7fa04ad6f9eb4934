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
    mask=hnp.arrays(np.bool_, (4, 3)).filter(np.any),
)
def test_against_numpy(log_ratio, mask):
    metrics = mismatch_metrics(torch.tensor(log_ratio), torch.tensor(mask))
    tokens, r = log_ratio[mask], np.exp(log_ratio[mask])
    rows = [log_ratio[i][mask[i]] for i in range(len(mask)) if mask[i].any()]
    w = np.array([math.exp(row.sum()) for row in rows])
    expected = {
        "k1": np.mean(-tokens),
        "k3": np.mean(r - tokens - 1),
        "chi2": np.mean(r**2) - 1,
        "ess": w.sum() ** 2 / (w**2).sum() / len(w),
        "max_abs_log_ratio": np.abs(tokens).max(),
        "ratio_outside_0.9_1.1": np.mean((r < 0.9) | (r > 1.1)),
        "ratio_below_1e-4_fraction": np.mean([(np.exp(row) < 1e-4).any() for row in rows]),
    }
    assert metrics == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert 0 < metrics["ess"] <= 1
    assert metrics["k3"] >= -1e-15


@pytest.mark.parametrize("log_ratio", [1e6, -1e6])
def test_extreme_ratios_stay_finite(log_ratio):
    mask = torch.ones(2, 20_000, dtype=torch.bool)
    metrics = mismatch_metrics(torch.full(mask.shape, log_ratio), mask)
    assert all(math.isfinite(value) for value in metrics.values())
    assert metrics["max_abs_log_ratio"] == 1e6
    assert metrics["ess"] == 1.0
    if log_ratio > 0:
        assert metrics["chi2"] == pytest.approx(math.exp(700))


def test_a_sequence_with_a_token_that_the_trainer_never_samples_has_no_weight():
    """Four of eight sequences, all else exact: half of the sample is left; of the means over tokens χ² alone has it."""
    mask, pruned = torch.ones(8, 3, dtype=torch.bool), torch.zeros(8, 3, dtype=torch.bool)
    pruned[:4, 1] = True
    log_ratio = torch.where(pruned, -40.0, 0.0)
    metrics = mismatch_metrics(log_ratio, mask & ~pruned, pruned)
    assert (metrics.pop("ess"), metrics.pop("ratio_below_1e-4_fraction")) == (0.5, 0.5)
    assert metrics.pop("chi2") == pytest.approx(-4 / 24)
    assert set(metrics.values()) == {0.0}
    pruned[4:, 2] = True
    metrics = mismatch_metrics(log_ratio, mask & ~pruned, pruned)
    assert (metrics["ess"], metrics["ratio_below_1e-4_fraction"]) == (0.0, 1.0)


def test_chi2_is_that_of_all_sampled_tokens():
    """Tokens in the proportions of q, two of which the trainer never samples: their ratio is 0."""
    p, q = np.array([0.5, 0.3, 0.15, 0.05, 0, 0]), np.array([0.49, 0.3, 0.15, 0.05, 0.006, 0.004])
    exact = (p**2 / q).sum() - 1
    assert exact == pytest.approx(0.0102, abs=1e-5)
    sample = np.repeat(np.arange(6), np.rint(1000 * q).astype(int)).reshape(10, 100)
    pruned = torch.tensor(p[sample] == 0)
    log_ratio = torch.tensor(np.log(np.where(p > 0, p / q, np.nan))[sample])
    metrics = mismatch_metrics(log_ratio, ~pruned, pruned)
    assert metrics["chi2"] == pytest.approx(exact)
    # The others have no value where p is 0.
    assert metrics["k1"] == pytest.approx(-np.log(0.5 / 0.49) * 490 / 990)


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
