"""Compute `dvp.core.rows` by Triton kernels.

The sums take one program per row, which reads it once or twice; the gradient reads each row once.

Whether a token is safe depends on the row's maximum, so a running maximum could not take back what it counted as safe.
The first pass therefore guesses the maximum, mostly right, and a row with a wrong guess is read again.

Block sizes are fixed, not tuned by timing: that would change the order of summation from process to process, and a run
that resumes would not be bit-identical. Compiled for an H100 (sm_90) the sums take 48 registers per thread, and
five programs of 8 warps share a multiprocessor; blocks of 4,096 would take 172, and one program would fit. On an H200
other blocks changed the head's time by 6 % or less (results/reference/bench/h200_profile.txt).

Shape suffixes: N flattened tokens, V vocabulary.
"""

import torch
import triton
import triton.language as tl

from dvp.core.rows import RowCoefficients, RowSums

SUMS_BLOCK, SUMS_WARPS = 1024, 8
GRADIENT_BLOCK, GRADIENT_WARPS = 4096, 8


def row_sums(logits_NV: torch.Tensor, log_rho_N: torch.Tensor, guess_N: torch.Tensor) -> RowSums:
    """Compute dvp.core.rows.row_sums on a GPU."""
    rows, vocabulary = logits_NV.shape
    sums_8N = torch.empty(len(RowSums._fields), rows, dtype=torch.float32, device=logits_NV.device)
    if rows:
        _sums_kernel[(rows,)](
            logits_NV,
            guess_N.contiguous(),
            log_rho_N,
            sums_8N,
            rows,
            vocabulary,
            logits_NV.stride(0),
            BLOCK=SUMS_BLOCK,
            num_warps=SUMS_WARPS,
        )
    return RowSums(*sums_8N)


def row_gradient_(
    logits_NV: torch.Tensor, maximum_N: torch.Tensor, log_rho_N: torch.Tensor, coefficients: RowCoefficients
) -> None:
    """Compute dvp.core.rows.row_gradient_ on a GPU."""
    rows, vocabulary = logits_NV.shape
    if rows:
        _gradient_kernel[(rows, triton.cdiv(vocabulary, GRADIENT_BLOCK))](
            logits_NV,
            maximum_N,
            log_rho_N,
            *coefficients,
            vocabulary,
            logits_NV.stride(0),
            BLOCK=GRADIENT_BLOCK,
            num_warps=GRADIENT_WARPS,
        )


@triton.jit
def _sums_kernel(logits, guess, log_rho, sums, rows, vocabulary, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    row_logits = logits + row.to(tl.int64) * stride
    threshold = tl.load(log_rho + row)
    maximum = tl.load(guess + row)
    highest, size, safe_sum, pruned_sum, safe_dot, pruned_dot, safe_squares, pruned_squares = _reading(
        row_logits, vocabulary, maximum, threshold, BLOCK
    )
    if highest > maximum:
        maximum = highest
        highest, size, safe_sum, pruned_sum, safe_dot, pruned_dot, safe_squares, pruned_squares = _reading(
            row_logits, vocabulary, maximum, threshold, BLOCK
        )

    tl.store(sums + row, maximum)
    tl.store(sums + rows + row, size)
    tl.store(sums + 2 * rows + row, safe_sum)
    tl.store(sums + 3 * rows + row, pruned_sum)
    tl.store(sums + 4 * rows + row, safe_dot)
    tl.store(sums + 5 * rows + row, pruned_dot)
    tl.store(sums + 6 * rows + row, safe_squares)
    tl.store(sums + 7 * rows + row, pruned_squares)


@triton.jit
def _reading(row_logits, vocabulary, maximum, threshold, BLOCK: tl.constexpr):
    """Read a row once: return its true maximum, and its sums, valid only if that equals `maximum`."""
    # Lanes are added up at the end: fewer roundings than one running sum.
    maxima = tl.full([BLOCK], -float("inf"), tl.float32)
    safe_size = tl.zeros([BLOCK], tl.float32)
    safe_sum = tl.zeros([BLOCK], tl.float32)
    pruned_sum = tl.zeros([BLOCK], tl.float32)
    safe_dot = tl.zeros([BLOCK], tl.float32)
    pruned_dot = tl.zeros([BLOCK], tl.float32)
    safe_squares = tl.zeros([BLOCK], tl.float32)
    pruned_squares = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocabulary, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < vocabulary
        z = tl.load(row_logits + columns, mask=inside, other=-float("inf")).to(tl.float32)
        maxima = tl.maximum(maxima, z)
        shift = tl.where(inside, z - maximum, 0.0)
        weight = tl.where(inside, tl.exp(shift), 0.0)
        safe = shift >= threshold
        safe_weight = tl.where(safe, weight, 0.0)
        pruned_weight = tl.where(safe, 0.0, weight)
        safe_size += tl.where(safe & inside, 1.0, 0.0)
        safe_sum += safe_weight
        pruned_sum += pruned_weight
        safe_dot += safe_weight * shift
        pruned_dot += pruned_weight * shift
        safe_squares += safe_weight * safe_weight
        pruned_squares += pruned_weight * pruned_weight
    return (
        tl.max(maxima, axis=0),
        tl.sum(safe_size, axis=0),
        tl.sum(safe_sum, axis=0),
        tl.sum(pruned_sum, axis=0),
        tl.sum(safe_dot, axis=0),
        tl.sum(pruned_dot, axis=0),
        tl.sum(safe_squares, axis=0),
        tl.sum(pruned_squares, axis=0),
    )


@triton.jit
def _gradient_kernel(
    logits,
    maximum,
    log_rho,
    constant,
    slope,
    safe_constant,
    safe_slope,
    vocabulary,
    stride,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < vocabulary
    at = logits + row.to(tl.int64) * stride + columns
    shift = tl.load(at, mask=inside, other=0.0).to(tl.float32) - tl.load(maximum + row)
    of_all = tl.load(constant + row) + tl.load(slope + row) * shift
    of_safe = tl.load(safe_constant + row) + tl.load(safe_slope + row) * shift
    safe = shift >= tl.load(log_rho + row)
    gradient = tl.exp(shift) * (of_all + tl.where(safe, of_safe, 0.0))
    tl.store(at, gradient.to(logits.dtype.element_ty), mask=inside)
