import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from dvp.core.safe_vocabulary import safe_mask
from dvp.errors import DvpError

# Quarters are exact in fp32, and so is adding a power of two to them.
LOGITS = hnp.arrays(np.float32, (3, 37), elements=st.integers(-80, 40).map(lambda k: k / 4))
RHO = math.exp(-13)


@settings(deadline=None, max_examples=50)
@given(LOGITS, st.sampled_from([0.5, 1e-2, 2e-6]))
def test_it_is_the_min_p_rule(logits, rho):
    # No log ρ here is a multiple of 1/4: at a tie the ratio of probabilities rounds either way.
    logits = logits.astype(np.float64)
    p = np.exp(logits - logits.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    expected = p >= rho * p.max(axis=1, keepdims=True)
    assert (safe_mask(torch.tensor(logits), rho).numpy() == expected).all()


@settings(deadline=None, max_examples=50)
@given(LOGITS, st.sampled_from([-64.0, 32.0, 128.0]))
def test_it_does_not_see_a_shift(logits, shift):
    logits = torch.tensor(logits)
    assert torch.equal(safe_mask(logits, RHO), safe_mask(logits + shift, RHO))


@settings(deadline=None, max_examples=25)
@given(LOGITS)
def test_a_smaller_rho_keeps_more(logits):
    logits = torch.tensor(logits)
    assert not (safe_mask(logits, 1e-2) & ~safe_mask(logits, 1e-3)).any()


def test_ties_at_the_threshold_are_kept():
    threshold = torch.tensor(math.log(0.1))
    below = torch.nextafter(threshold, torch.tensor(-math.inf))
    logits = torch.stack([torch.tensor(0.0), threshold, threshold, below])[None]
    assert safe_mask(logits, 0.1).tolist() == [[True, True, True, False]]


def test_the_default_rho_keeps_a_tie_at_13():
    """bf16 logits are multiples of 1/16 or coarser above 8, so differences of exactly 13 do occur."""
    assert safe_mask(torch.tensor([[9.75, -3.25, -3.5]]), RHO).tolist() == [[True, True, False]]


def test_equal_logits_are_all_safe():
    assert safe_mask(torch.full((2, 37), -7.5), 0.999).all()


@pytest.mark.parametrize("scale", [1e30, 1e-30])
def test_extreme_logits(scale):
    logits = torch.tensor([[1.0, -1.0, 0.0]]) * scale
    expected = [True, False, False] if scale > 1 else [True, True, True]
    assert safe_mask(logits, RHO).tolist() == [expected]


def test_the_comparison_is_in_fp32_and_outside_the_graph():
    # In bf16 the threshold 100 + log(0.9) would round up to 100.
    logits = torch.tensor([[100.0, 99.5]], dtype=torch.bfloat16, requires_grad=True)
    mask = safe_mask(logits, 0.6)
    assert mask.all()
    assert not mask.requires_grad


@pytest.mark.parametrize("rho", [0.0, 1.0, -0.1, 2.0, math.nan])
def test_rho_outside_its_range(rho):
    with pytest.raises(DvpError, match="rho"):
        safe_mask(torch.zeros(1, 3), rho)
