"""`dvp.core.rows` as Triton kernels: one program a row, the row read twice for the sums and once for the gradient.

A row of 151,936 logits is 0.3 to 0.6 MB; its second reading comes from the L2 cache.

Shape suffixes: N flattened tokens, V vocabulary.
"""

import torch
import triton
import triton.language as tl

from dvp.core.rows import RowCoefficients, RowSums

BLOCK = 4096
WARPS = 8


def row_sums(logits_NV: torch.Tensor, log_rho_N: torch.Tensor) -> RowSums:
    """See dvp.core.rows.row_sums."""
    rows, vocabulary = logits_NV.shape
    sums_8N = torch.empty(len(RowSums._fields), rows, dtype=torch.float32, device=logits_NV.device)
    if rows:
        _sums_kernel[(rows,)](
            logits_NV, log_rho_N, sums_8N, rows, vocabulary, logits_NV.stride(0), BLOCK=BLOCK, num_warps=WARPS
        )
    return RowSums(*sums_8N)


def row_gradient_(
    logits_NV: torch.Tensor, maximum_N: torch.Tensor, log_rho_N: torch.Tensor, coefficients: RowCoefficients
) -> None:
    """See dvp.core.rows.row_gradient_."""
    rows, vocabulary = logits_NV.shape
    if rows:
        _gradient_kernel[(rows, triton.cdiv(vocabulary, BLOCK))](
            logits_NV,
            maximum_N,
            log_rho_N,
            *coefficients,
            vocabulary,
            logits_NV.stride(0),
            BLOCK=BLOCK,
            num_warps=WARPS,
        )


@triton.jit
def _sums_kernel(logits, log_rho, sums, rows, vocabulary, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    row_logits = logits + row.to(tl.int64) * stride
    threshold = tl.load(log_rho + row)

    maxima = tl.full([BLOCK], -float("inf"), tl.float32)
    for start in range(0, vocabulary, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        z = tl.load(row_logits + columns, mask=columns < vocabulary, other=-float("inf")).to(tl.float32)
        maxima = tl.maximum(maxima, z)
    maximum = tl.max(maxima, axis=0)

    # Lanes are added up at the end: fewer roundings than one running sum.
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
        z = tl.load(row_logits + columns, mask=inside, other=0.0).to(tl.float32)
        shift = z - maximum
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

    tl.store(sums + row, maximum)
    tl.store(sums + rows + row, tl.sum(safe_size, axis=0))
    tl.store(sums + 2 * rows + row, tl.sum(safe_sum, axis=0))
    tl.store(sums + 3 * rows + row, tl.sum(pruned_sum, axis=0))
    tl.store(sums + 4 * rows + row, tl.sum(safe_dot, axis=0))
    tl.store(sums + 5 * rows + row, tl.sum(pruned_dot, axis=0))
    tl.store(sums + 6 * rows + row, tl.sum(safe_squares, axis=0))
    tl.store(sums + 7 * rows + row, tl.sum(pruned_squares, axis=0))


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
