"""Sums over the vocabulary, row by row of the logits: the part of the head that is not a matrix product.

Everything that the head reports follows from eight sums over a row, and every gradient from one formula per entry:

    shift_a = z_a − max z       e_a = exp(shift_a)       a is safe iff shift_a ≥ log ρ
    gradient_a = e_a · (A + B · shift_a + [a is safe] · (C + D · shift_a))

Both are memory-bound: a row should be read only once or twice, and nothing of its size written but the gradient. There
are three implementations, chosen by device and size: a Triton kernel on a GPU (rows_triton.py), the functions below
compiled by torch if the vocabulary is large, and the functions below on tiles that fit a core's cache. All sums are
fp32, whatever the logits' type.

Shape suffixes: N flattened tokens, V vocabulary.
"""

import sys
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch

# A tile of fp32 logits and its few temporaries stay in a core's L2 cache.
TILE = 2**16
# Below this size of the vocabulary compiling (seconds, once per process) costs more than it saves.
COMPILED_VOCABULARY = 32_768


class RowSums(NamedTuple):
    """The sums over each row, (N,) float32; e is relative to the row's maximum, so 1 ≤ safe_sum ≤ V."""

    maximum: torch.Tensor
    """max_a z_a."""
    safe_size: torch.Tensor
    """|V_S|."""
    safe_sum: torch.Tensor
    """Σ_{a∈V_S} e_a."""
    pruned_sum: torch.Tensor
    """Σ_{a∉V_S} e_a, summed separately: as a difference it would lose all digits of a small 1 − Z."""
    safe_dot: torch.Tensor
    """Σ_{a∈V_S} e_a · shift_a."""
    pruned_dot: torch.Tensor
    """Σ_{a∉V_S} e_a · shift_a."""
    safe_squares: torch.Tensor
    """Σ_{a∈V_S} e_a²."""
    pruned_squares: torch.Tensor
    """Σ_{a∉V_S} e_a²."""


class RowCoefficients(NamedTuple):
    """The coefficients A, B, C and D of the gradient's formula, each (N,) float32."""

    constant: torch.Tensor
    slope: torch.Tensor
    safe_constant: torch.Tensor
    safe_slope: torch.Tensor


@torch.no_grad()
def row_sums(logits_NV: torch.Tensor, log_rho_N: torch.Tensor, guess_N: torch.Tensor) -> RowSums:
    """Compute the sums of each row.

    Args:
        logits_NV: fp32 or bf16, after temperature, finite.
        log_rho_N: float32, ≤ 0; −inf where nothing is pruned.
        guess_N: float32, an entry of each row, best the largest: a GPU reads a row once if its guess is the largest
            entry, otherwise twice.
    """
    if logits_NV.is_cuda:
        from dvp.core import rows_triton

        return rows_triton.row_sums(logits_NV, log_rho_N, guess_N)
    if (compiled := _compiled_for(logits_NV, _row_sums)) is not None:
        return compiled(logits_NV, log_rho_N)
    tiles = [_row_sums(*tile) for tile in _tiles(logits_NV, log_rho_N)]
    return RowSums(*(torch.cat(parts) for parts in zip(*tiles, strict=True)))


@torch.no_grad()
def row_gradient_(
    logits_NV: torch.Tensor, maximum_N: torch.Tensor, log_rho_N: torch.Tensor, coefficients: RowCoefficients
) -> None:
    """Overwrite the logits by the gradient of the module's formula, in the logits' type.

    Args:
        logits_NV, log_rho_N: as in `row_sums`.
        maximum_N: `RowSums.maximum` of the same logits.
        coefficients: A, B, C and D.
    """
    if logits_NV.is_cuda:
        from dvp.core import rows_triton

        rows_triton.row_gradient_(logits_NV, maximum_N, log_rho_N, coefficients)
    elif (compiled := _compiled_for(logits_NV, _row_gradient_)) is not None:
        compiled(logits_NV, maximum_N, log_rho_N, *coefficients)
    else:
        for tile in _tiles(logits_NV, maximum_N, log_rho_N, *coefficients):
            _row_gradient_(*tile)


def _row_sums(logits_NV: torch.Tensor, log_rho_N: torch.Tensor) -> RowSums:
    logits_NV = logits_NV.float()
    maximum_N = logits_NV.amax(dim=1)
    shift_NV = logits_NV - maximum_N[:, None]
    exp_NV = shift_NV.exp()
    safe_NV = shift_NV >= log_rho_N[:, None]
    safe_exp_NV = torch.where(safe_NV, exp_NV, 0.0)
    pruned_exp_NV = torch.where(safe_NV, 0.0, exp_NV)
    return RowSums(
        maximum=maximum_N,
        safe_size=safe_NV.float().sum(dim=1),
        safe_sum=safe_exp_NV.sum(dim=1),
        pruned_sum=pruned_exp_NV.sum(dim=1),
        safe_dot=(safe_exp_NV * shift_NV).sum(dim=1),
        pruned_dot=(pruned_exp_NV * shift_NV).sum(dim=1),
        safe_squares=(safe_exp_NV * safe_exp_NV).sum(dim=1),
        pruned_squares=(pruned_exp_NV * pruned_exp_NV).sum(dim=1),
    )


def _row_gradient_(
    logits_NV: torch.Tensor,
    maximum_N: torch.Tensor,
    log_rho_N: torch.Tensor,
    constant_N: torch.Tensor,
    slope_N: torch.Tensor,
    safe_constant_N: torch.Tensor,
    safe_slope_N: torch.Tensor,
) -> None:
    shift_NV = logits_NV.float() - maximum_N[:, None]
    of_all_NV = constant_N[:, None] + slope_N[:, None] * shift_NV
    of_safe_NV = safe_constant_N[:, None] + safe_slope_N[:, None] * shift_NV
    safe_NV = shift_NV >= log_rho_N[:, None]
    logits_NV.copy_(shift_NV.exp() * (of_all_NV + torch.where(safe_NV, of_safe_NV, 0.0)))


def _tiles(logits_NV: torch.Tensor, *columns_N: torch.Tensor):
    """Split rows into tiles of a few rows each; one empty tile if there are no rows."""
    rows = max(1, TILE // logits_NV.shape[1])
    return zip(logits_NV.split(rows), *(column_N.split(rows) for column_N in columns_N), strict=True)


def _compiled_for(logits_NV: torch.Tensor, function: Callable) -> Callable | None:
    return _compiled(function) if logits_NV.shape[1] >= COMPILED_VOCABULARY and len(logits_NV) else None


@cache
def _compiled(function: Callable) -> Callable | None:
    """Return the function compiled by torch, or None if compiling is switched off or fails here."""
    if torch._dynamo.config.disable:
        return None
    compiled = torch.compile(function, dynamic=True)
    try:
        # The compiler is called at the first use. Two rows: a dimension of 1 would be taken for a constant.
        columns = [torch.zeros(2) for _ in range(function.__code__.co_argcount - 1)]
        compiled(torch.zeros(2, COMPILED_VOCABULARY), *columns)
    except Exception as error:  # torch names no common class for what a missing or broken compiler raises
        reason = " ".join(str(error).split())[:150]
        print(f"warning: torch cannot compile here ({reason}); the head runs uncompiled, slower", file=sys.stderr)
        return None
    return compiled
