"""How far an estimator of the policy gradient is from the exact one, and how noisy it is (docs/method.md, Theory 1).

Two samples are given: n batch estimates x_i = ĝ of an estimator, and m batch estimates y_k of the exact gradient
g = E y. All that is wanted follows from inner products, so a gradient of any length is three small matrices here.
With A = |E x|², B = ⟨E x, g⟩, C = |g|² and P = E|x|²:

    squared_bias  (A − 2B + C) / C    |E ĝ − g|² / |g|²
    cosine        B / √(A C)          between E ĝ and g
    variance      (P − A) / C         E|ĝ − E ĝ|² / |g|² of one batch: the trace of the covariance
    mse           (P − 2B + C) / C    their sum, E|ĝ − g|² / |g|²

What part of the gradient comes from some of the tokens alone has statistics of its own (`gradient_variance`). With A
and P of that part, and C of the whole gradient:

    variance              (P − A) / C
    signal                A / C
    variance_over_signal  (P − A) / A    which a baseline does not change by scaling the estimate

A, B and C are U-statistics (products of different batches only), hence unbiased, numerators with them: where the bias
is 0 the estimate of its square is negative half of the time. A plain |x̄ − ȳ|² would have the noise of both means in it.
Where the bias is near 0 the jackknife's standard error of its square is too large, by up to √2 (the U-statistic is then
degenerate): such intervals are too wide rather than too narrow.

Shape suffixes: n batches of the estimator, m of the reference, D coordinates, N and M rows.
"""

import math
from dataclasses import dataclass

import torch

from dvp.errors import DvpError
from dvp.measurement.files import NORMAL_95

STATISTICS = ("squared_bias", "cosine", "variance", "mse")
VARIANCE_STATISTICS = ("variance", "signal", "variance_over_signal")
FEWEST = 4  # batches: deleting one leaves enough for products of different ones and a spread
COLUMNS = 2**16  # coordinates that are widened to float64 at once


@dataclass(frozen=True, eq=False)
class Jackknifed:
    """A statistic with its delete-one jackknife over both samples."""

    value: float
    """NaN where it is not defined: the cosine of an estimator whose |E x|² is not estimated above 0."""
    over_batches_n: torch.Tensor
    """The statistic without the i-th batch of the estimator, float64."""
    over_reference_m: torch.Tensor
    """The statistic without the k-th batch of the reference."""

    @property
    def se(self) -> float:
        """Standard error; the two samples are independent, so their variances add."""
        return math.sqrt(_variance(self.over_batches_n) + _variance(self.over_reference_m))

    @property
    def interval(self) -> tuple[float, float]:
        """95 %, by the normal distribution."""
        return self.value - NORMAL_95 * self.se, self.value + NORMAL_95 * self.se


def inner_products(left_ND: torch.Tensor, right_MD: torch.Tensor) -> torch.Tensor:
    """⟨row of left, row of right⟩ as (N, M) float64, summed in float64: U-statistics are differences of large sums."""
    total_NM = torch.zeros(len(left_ND), len(right_MD), dtype=torch.float64)
    for left_Nd, right_Md in zip(left_ND.split(COLUMNS, dim=1), right_MD.split(COLUMNS, dim=1), strict=True):
        total_NM.addmm_(left_Nd.double(), right_Md.double().T)
    return total_NM


def squared_norm(reference_mm: torch.Tensor) -> Jackknifed:
    """|g|² from the inner products of the reference's batches.

    Raises:
        DvpError: fewer than 4 batches, or an interval that holds 0: nothing can be given relative to it.
    """
    check_batches("reference batches", len(reference_mm))
    value, without_m = squared_mean(reference_mm)
    norm = Jackknifed(value.item(), torch.empty(0, dtype=torch.float64), without_m)
    if not norm.interval[0] > 0.0:
        raise DvpError(
            f"the exact gradient is not distinguishable from 0: |g|² = {value:.3g} ± {norm.se:.2g} from "
            f"{len(reference_mm)} batches; take more reference_batches, or problems that are solved now and then"
        )
    return norm


def estimator_bias(
    batches_nn: torch.Tensor, cross_nm: torch.Tensor, reference_mm: torch.Tensor
) -> dict[str, Jackknifed]:
    """Each of STATISTICS.

    Args:
        batches_nn: ⟨x_i, x_j⟩, float64.
        cross_nm: ⟨x_i, y_k⟩.
        reference_mm: ⟨y_k, y_l⟩.

    Raises:
        DvpError: fewer than 4 batches of either, shapes that differ, or as `squared_norm`.
    """
    count, others = cross_nm.shape
    if batches_nn.shape != (count, count) or reference_mm.shape != (others, others):
        raise DvpError(
            f"inner products: expected (n, n), (n, m) and (m, m), got {tuple(batches_nn.shape)}, "
            f"{tuple(cross_nm.shape)} and {tuple(reference_mm.shape)}"
        )
    check_batches("batches", count)
    squared_norm(reference_mm)
    mean, mean_n = squared_mean(batches_nn)
    norm, norm_m = squared_mean(reference_mm)
    total = cross_nm.sum()
    cross = total / cross_nm.numel()
    cross_n = (total - cross_nm.sum(dim=1)) / ((count - 1) * others)
    cross_m = (total - cross_nm.sum(dim=0)) / (count * (others - 1))
    power, power_n = _power(batches_nn)
    values = _statistics(mean, cross, norm, power)
    over_batches = _statistics(mean_n, cross_n, norm, power_n)
    over_reference = _statistics(mean, cross_m, norm_m, power)
    return {
        name: Jackknifed(values[name].item(), over_batches[name].expand(count), over_reference[name].expand(others))
        for name in STATISTICS
    }


def gradient_variance(batches_nn: torch.Tensor, reference_mm: torch.Tensor) -> dict[str, Jackknifed]:
    """Each of VARIANCE_STATISTICS, of estimates of the gradient or of a part of it.

    variance_over_signal is NaN where the 95 % interval of the squared signal holds 0: nothing can be given relative to
    it.

    Args:
        batches_nn: ⟨x_i, x_j⟩ of the part, float64.
        reference_mm: ⟨y_k, y_l⟩ of the whole gradient.

    Raises:
        DvpError: as `estimator_bias`.
    """
    count, others = len(batches_nn), len(reference_mm)
    if batches_nn.shape != (count, count) or reference_mm.shape != (others, others):
        raise DvpError(
            f"inner products: expected (n, n) and (m, m), got {tuple(batches_nn.shape)} and {tuple(reference_mm.shape)}"
        )
    check_batches("batches", count)
    squared_norm(reference_mm)
    mean, mean_n = squared_mean(batches_nn)
    norm, norm_m = squared_mean(reference_mm)
    power, power_n = _power(batches_nn)
    measured = {
        "variance": Jackknifed(((power - mean) / norm).item(), (power_n - mean_n) / norm, (power - mean) / norm_m),
        "signal": Jackknifed((mean / norm).item(), mean_n / norm, mean / norm_m),
    }
    own = Jackknifed(mean.item(), mean_n, norm_m[:0])
    over = (power - mean) / mean if own.interval[0] > 0.0 else torch.tensor(math.nan, dtype=torch.float64)
    over_n = (power_n - mean_n) / mean_n if own.interval[0] > 0.0 else torch.full_like(mean_n, math.nan)
    # Nothing of the reference is in it.
    ratio = Jackknifed(over.item(), over_n, over.expand(others))
    return measured | {"variance_over_signal": ratio}


def _statistics(
    mean: torch.Tensor, cross: torch.Tensor, norm: torch.Tensor, power: torch.Tensor
) -> dict[str, torch.Tensor]:
    # The root of a negative estimate of |E x|² is NaN, which is what the cosine then is.
    return {
        "squared_bias": (mean - 2 * cross + norm) / norm,
        "cosine": cross / (mean * norm).sqrt(),
        "variance": (power - mean) / norm,
        "mse": (power - 2 * cross + norm) / norm,
    }


def squared_mean(products_nn: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """|E x|² over all pairs of different batches, and without each batch in turn."""
    count = len(products_nn)
    own_n = products_nn.diagonal()
    total = products_nn.sum() - own_n.sum()
    without_n = total - 2 * (products_nn.sum(dim=1) - own_n)
    return total / (count * (count - 1)), without_n / ((count - 1) * (count - 2))


def _power(products_nn: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """E|x|², and without each batch in turn."""
    own_n = products_nn.diagonal()
    return own_n.mean(), (own_n.sum() - own_n) / (len(own_n) - 1)


def _variance(without_n: torch.Tensor) -> float:
    """The jackknife's variance, (n − 1)/n · Σ (θ_(i) − mean)²; 0 for no batches."""
    if not len(without_n):
        return 0.0
    return (len(without_n) - 1) * (without_n - without_n.mean()).square().mean().item()


def check_batches(what: str, count: int) -> None:
    """Raise DvpError, naming `what`, for fewer than FEWEST."""
    if count < FEWEST:
        raise DvpError(f"{what}: expected at least {FEWEST}, got {count}")
