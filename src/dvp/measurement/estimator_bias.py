"""Estimate bias and variance of a policy-gradient estimator from batch gradients (docs/method.md, Theory 1).

Two samples are given: n batch estimates x_i = ĝ of an estimator, and m batch estimates y_k of the exact gradient
g = E y. Every statistic follows from inner products, so that gradients of any length become three small matrices.
With A = |E x|², B = ⟨E x, g⟩, C = |g|² and P = E|x|²:

    squared_bias  (A − 2B + C) / C    |E ĝ − g|² / |g|²
    cosine        B / √(A C)          between E ĝ and g
    variance      (P − A) / C         E|ĝ − E ĝ|² / |g|² of one batch: the trace of the covariance
    mse           (P − 2B + C) / C    their sum, E|ĝ − g|² / |g|²

The part of the gradient that some of the tokens contribute has statistics of its own, with A and P of that part and C
of the whole gradient:

    variance              (P − A) / C
    signal                A / C
    variance_over_signal  (P − A) / A    which a baseline does not change by scaling the estimate

A, B and C are U-statistics (products of different batches only), hence unbiased, and so are the numerators: where the
bias is 0 the estimate of its square is negative half of the time. A plain |x̄ − ȳ|² would contain the noise of both
means.
Where the bias is near 0 the jackknife's standard error of its square is too large, by up to √2 (the U-statistic is then
degenerate): such intervals are too wide rather than too narrow.

Shape suffixes: n batches of the estimator, m of the reference, D coordinates, N and M rows, R the whole sample and then
without each batch in turn: 1 + n + m.
"""

import math
from dataclasses import dataclass

import torch

from dvp.errors import DvpError
from dvp.measurement.files import NORMAL_95

STATISTICS = ("squared_bias", "cosine", "variance", "mse")
VARIANCE_STATISTICS = ("variance", "signal", "variance_over_signal")
FEWEST = 4  # batches: with one left out, products of different batches and their spread are still defined
COLUMNS = 2**16  # coordinates converted to float64 at once


@dataclass(frozen=True, eq=False)
class Jackknifed:
    """A statistic with its delete-one jackknife over both samples."""

    value: float
    """NaN where it is not defined."""
    over_batches_n: torch.Tensor
    """The statistic without the i-th batch of the estimator, float64."""
    over_reference_m: torch.Tensor
    """The statistic without the k-th batch of the reference."""

    @property
    def se(self) -> float:
        """Return the standard error; the two samples are independent, so their variances add."""
        return math.sqrt(_variance(self.over_batches_n) + _variance(self.over_reference_m))

    @property
    def interval(self) -> tuple[float, float]:
        """Return the 95 % interval of the normal distribution, (low, high)."""
        return self.value - NORMAL_95 * self.se, self.value + NORMAL_95 * self.se


def inner_products(left_ND: torch.Tensor, right_MD: torch.Tensor) -> torch.Tensor:
    """Return ⟨row of left, row of right⟩, (N, M) float64; summed in float64, as U-statistics cancel large sums."""
    total_NM = torch.zeros(len(left_ND), len(right_MD), dtype=torch.float64)
    for left_Nd, right_Md in zip(left_ND.split(COLUMNS, dim=1), right_MD.split(COLUMNS, dim=1), strict=True):
        total_NM.addmm_(left_Nd.double(), right_Md.double().T)
    return total_NM


def squared_norm(reference_mm: torch.Tensor) -> Jackknifed:
    """Estimate |g|² from the inner products of the reference's batches.

    Raises:
        DvpError: fewer than 4 batches, or an interval that includes zero: no statistic relative to |g|² is defined.
    """
    value, without_m = _squared_mean(reference_mm, "reference batches")
    norm = Jackknifed(value.item(), without_m[:0], without_m)
    if not norm.interval[0] > 0.0:
        raise DvpError(
            f"the exact gradient is not distinguishable from 0: |g|² = {norm.value:.3g} ± {norm.se:.2g} from "
            f"{len(reference_mm)} batches; take more reference_batches, or problems that are solved now and then"
        )
    return norm


def gradient_statistics(
    batches_nn: torch.Tensor, reference_mm: torch.Tensor, cross_nm: torch.Tensor | None = None
) -> dict[str, Jackknifed]:
    """Return VARIANCE_STATISTICS of estimates of the gradient, or of a part of it; with `cross_nm` STATISTICS too.

    The cosine is NaN where |E x|² is not estimated above 0, variance_over_signal where the 95 % interval of |E x|²
    includes zero. The signal of differences x − h is the squared bias of x paired with h (dvp.measurement.paired_bias).

    Args:
        batches_nn: ⟨x_i, x_j⟩, float64.
        reference_mm: ⟨y_k, y_l⟩ of the whole gradient.
        cross_nm: ⟨x_i, y_k⟩.

    Raises:
        DvpError: fewer than 4 batches of either, or an |g|² that is not distinguishable from 0.
    """
    norm = squared_norm(reference_mm)
    mean, mean_n = _squared_mean(batches_nn, "batches")
    own_n = batches_nn.diagonal()
    count, others = len(own_n), len(reference_mm)
    mean_R = torch.cat([mean[None], mean_n, mean.expand(others)])
    power_R = torch.cat([own_n.mean()[None], (own_n.sum() - own_n) / (count - 1), own_n.mean().expand(others)])
    norm_R = torch.cat([torch.full((1 + count,), norm.value, dtype=torch.float64), norm.over_reference_m])

    def jackknifed(value_R: torch.Tensor) -> Jackknifed:
        return Jackknifed(value_R[0].item(), value_R[1 : 1 + count], value_R[1 + count :])

    values = {"variance": (power_R - mean_R) / norm_R, "signal": mean_R / norm_R}
    defined = jackknifed(mean_R).interval[0] > 0.0
    values["variance_over_signal"] = (power_R - mean_R) / (mean_R if defined else torch.full_like(mean_R, math.nan))
    if cross_nm is not None:
        total = cross_nm.sum()
        cross_R = torch.cat(
            [
                (total / cross_nm.numel())[None],
                (total - cross_nm.sum(dim=1)) / ((count - 1) * others),
                (total - cross_nm.sum(dim=0)) / (count * (others - 1)),
            ]
        )
        values["squared_bias"] = (mean_R - 2 * cross_R + norm_R) / norm_R
        # A negative estimate of |E x|² makes the root, and the cosine, NaN.
        values["cosine"] = cross_R / (mean_R * norm_R).sqrt()
        values["mse"] = (power_R - 2 * cross_R + norm_R) / norm_R
    return {name: jackknifed(value_R) for name, value_R in values.items()}


def _squared_mean(products_nn: torch.Tensor, what: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Estimate |E x|² from all pairs of different batches, and with each batch left out in turn.

    Raises DvpError, which names `what`, for fewer than 4 batches.
    """
    count = len(products_nn)
    if count < FEWEST:
        raise DvpError(f"{what}: expected at least {FEWEST}, got {count}")
    own_n = products_nn.diagonal()
    total = products_nn.sum() - own_n.sum()
    without_n = total - 2 * (products_nn.sum(dim=1) - own_n)
    return total / (count * (count - 1)), without_n / ((count - 1) * (count - 2))


def _variance(without_n: torch.Tensor) -> float:
    """Return the jackknife's variance, (n − 1)/n · Σ (θ_(i) − mean)²; 0 for no batches."""
    if not len(without_n):
        return 0.0
    return (len(without_n) - 1) * (without_n - without_n.mean()).square().mean().item()
