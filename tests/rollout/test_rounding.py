"""Rounding through low-precision formats, against the formats' own definitions."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dvp.rollout.rounding import is_rounded, round_weight


@given(st.integers(0, 2**31), st.sampled_from(["int8", "int4", "int3"]))
def test_integers_have_few_levels_and_err_by_half_a_level(seed, form):
    weight = torch.randn(3, 17, generator=torch.Generator().manual_seed(seed))
    rounded = round_weight(weight, form)
    levels = 2 ** (int(form[3:]) - 1) - 1
    step = weight.abs().amax(dim=1, keepdim=True) / levels
    assert ((rounded - weight).abs() <= 0.5001 * step).all()
    assert torch.allclose(rounded / step, (rounded / step).round(), atol=1e-4)
    assert torch.allclose(round_weight(rounded, form), rounded, atol=1e-6)


@pytest.mark.parametrize(("form", "bits"), [("fp8_e4m3", 3), ("fp8_e5m2", 2)])
def test_floats_keep_their_mantissa(form, bits):
    weight = torch.randn(5, 101, generator=torch.Generator().manual_seed(0))
    large = weight.abs() > 0.02 * weight.abs().amax(dim=1, keepdim=True)
    relative = (round_weight(weight, form) / weight - 1).abs()[large]
    assert relative.max() <= 2.0 ** -(bits + 1) * 1.001
    assert relative.max() > 2.0 ** -(bits + 3)


def test_a_row_of_zeros_stays_zero():
    assert (round_weight(torch.zeros(2, 4), "int4") == 0).all()


def test_only_the_matrices_of_the_blocks_are_rounded():
    assert is_rounded("model.layers.0.mlp.up_proj.weight", torch.ones(2, 2))
    assert not is_rounded("model.embed_tokens.weight", torch.ones(2, 2))
    assert not is_rounded("lm_head.weight", torch.ones(2, 2))
    assert not is_rounded("model.layers.0.input_layernorm.weight", torch.ones(2))
