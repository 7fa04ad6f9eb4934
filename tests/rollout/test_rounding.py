"""Rounding through low-precision formats, against the formats' own definitions."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dvp.rollout.rounding import round_cached, round_weight
from rounding import rounding


@given(st.integers(0, 2**31), st.sampled_from(["int8", "int4", "int3"]))
def test_integers_have_few_levels_and_err_by_half_a_level(seed, form):
    weight = torch.randn(3, 17, generator=torch.Generator().manual_seed(seed))
    rounded = round_weight(weight, form)
    levels = 2 ** (int(form[3:]) - 1) - 1
    step = weight.abs().amax(dim=1, keepdim=True) / levels
    assert ((rounded - weight).abs() <= 0.5001 * step).all()
    assert torch.allclose(rounded / step, (rounded / step).round(), rtol=0, atol=rounding(3, levels))
    assert torch.allclose(round_weight(rounded, form), rounded, rtol=0, atol=rounding(4, weight.abs().max().item()))


def test_groups_of_128_have_a_scale_each():
    """The last group of a row may be smaller."""
    weight = torch.randn(3, 300, generator=torch.Generator().manual_seed(0)) * torch.arange(1.0, 301.0)
    expected = torch.empty_like(weight)
    for row in range(3):
        for start in (0, 128, 256):
            group = weight[row, start : start + 128]
            step = group.abs().max() / 7
            expected[row, start : start + 128] = (group / step).round() * step
    assert torch.allclose(
        round_weight(weight, "int4_g128"), expected, rtol=0, atol=rounding(2, weight.abs().max().item())
    )


@pytest.mark.parametrize(("form", "bits"), [("fp8_e4m3", 3), ("fp8_e5m2", 2)])
def test_floats_keep_their_mantissa(form, bits):
    weight = torch.randn(5, 101, generator=torch.Generator().manual_seed(0))
    large = weight.abs() > 0.02 * weight.abs().amax(dim=1, keepdim=True)
    relative = (round_weight(weight, form) / weight - 1).abs()[large]
    assert relative.max() <= 2.0 ** -(bits + 1) * 1.001
    assert relative.max() > 2.0 ** -(bits + 3)


def test_a_row_of_zeros_stays_zero():
    assert (round_weight(torch.zeros(2, 4), "int4") == 0).all()


def every(dtype: torch.dtype) -> torch.Tensor:
    """All finite numbers of a format of 8 or 16 bits, in float32, in their order."""
    bits, whole = (8, torch.uint8) if dtype.itemsize == 1 else (16, torch.int32)
    numbers = torch.arange(2**bits, dtype=whole)
    numbers = numbers.view(dtype) if bits == 8 else numbers.to(torch.int16).view(dtype)
    numbers = numbers.float()
    return numbers[numbers.isfinite()].sort().values


@pytest.mark.parametrize(("form", "dtype"), [("fp8", torch.float8_e4m3fn), ("fp8_e5m2", torch.float8_e5m2)])
def test_cached_keys_and_values_are_cut_toward_zero(form, dtype):
    values, held = every(torch.bfloat16), every(dtype)
    smaller = held[torch.searchsorted(held, values, right=True).sub(1).clamp_min(0)]  # the last one below
    larger = held[torch.searchsorted(held, values).clamp_max(len(held) - 1)]  # the first one above
    assert torch.equal(round_cached(values.bfloat16(), form).float(), torch.where(values > 0, smaller, larger))
    assert round_cached(values.bfloat16(), form).dtype == torch.bfloat16
