import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from dvp.core.diagnostics import mismatch_metrics


@settings(deadline=None, max_examples=60)
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
        "veto_fraction": np.mean([(np.exp(row) < 1e-4).any() for row in rows]),
    }
    assert metrics == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert 0 < metrics["ess"] <= 1
    assert metrics["k3"] >= -1e-15


def test_sampled_tokens_the_engine_overrates_have_positive_k1():
    """d = log q − log p > 0 is the signature of failure; k1 is its mean."""
    assert mismatch_metrics(torch.tensor([[-0.5]]), torch.tensor([[True]]))["k1"] == 0.5


def test_estimates_enumerate_to_kl_and_chi2():
    log_p, log_q = torch.tensor([[0.1, 0.2, 0.7], [0.25, 0.25, 0.5]], dtype=torch.float64).log()
    # Tokens in the proportions of q: 1, 1 and 2 of them.
    sample = torch.tensor([0, 1, 2, 2])
    metrics = mismatch_metrics((log_p - log_q)[sample][None], torch.ones(1, 4, dtype=torch.bool))
    kl = (log_q.exp() * (log_q - log_p)).sum().item()
    chi2 = ((log_p.exp() - log_q.exp()) ** 2 / log_q.exp()).sum().item()
    assert metrics["k1"] == pytest.approx(kl)
    assert metrics["k3"] == pytest.approx(kl)
    assert metrics["chi2"] == pytest.approx(chi2)


def test_equal_policies():
    metrics = mismatch_metrics(torch.zeros(3, 2), torch.ones(3, 2, dtype=torch.bool))
    assert metrics.pop("ess") == 1.0
    assert set(metrics.values()) == {0.0}


@pytest.mark.parametrize("log_ratio", [1e6, -1e6])
def test_extreme_ratios_stay_finite(log_ratio):
    mask = torch.ones(2, 20_000, dtype=torch.bool)
    metrics = mismatch_metrics(torch.full(mask.shape, log_ratio), mask)
    assert all(math.isfinite(value) for value in metrics.values())
    assert metrics["max_abs_log_ratio"] == 1e6
    assert metrics["ess"] == 1.0
    if log_ratio > 0:
        assert metrics["chi2"] == pytest.approx(math.exp(700))


def test_statistics_are_not_clamped():
    metrics = mismatch_metrics(torch.tensor([[30.0]]), torch.tensor([[True]]))
    assert metrics["k3"] == pytest.approx(math.exp(30) - 31)


@pytest.mark.parametrize("shape", [(2, 3), (0, 3), (2, 0)])
def test_no_tokens_give_zeros(shape):
    values, mask = torch.full(shape, math.nan), torch.zeros(shape, dtype=torch.bool)
    metrics = mismatch_metrics(values, mask)
    assert set(metrics.values()) == {0.0}
    assert metrics.keys() == mismatch_metrics(torch.zeros(1, 1), torch.tensor([[True]])).keys()


def test_padding_and_empty_sequences_do_not_count():
    log_ratio = torch.tensor([[0.0, math.nan], [0.0, math.inf], [math.nan, math.nan]])
    mask = torch.tensor([[True, False], [True, False], [False, False]])
    metrics = mismatch_metrics(log_ratio, mask)
    assert metrics.pop("ess") == 1.0
    assert set(metrics.values()) == {0.0}
