"""Spearman's rank correlation, with a standard error where values come in clusters.

Shape suffixes: N values.
"""

import math

import torch

from dvp.errors import DvpError


def rank_correlation(left_N: torch.Tensor, right_N: torch.Tensor) -> float:
    """Spearman's ρ, the correlation of ranks; equal values share the mean of theirs. NaN if a side is constant."""
    left_N, right_N = _centred_ranks(left_N), _centred_ranks(right_N)
    size = (left_N.square().sum() * right_N.square().sum()).sqrt().item()
    return (left_N @ right_N).item() / size if size > 0.0 else math.nan


def clustered_rank_correlation(
    left_N: torch.Tensor, right_N: torch.Tensor, cluster_N: torch.Tensor
) -> tuple[float, float]:
    """Spearman's ρ and its standard error by the jackknife that leaves out a cluster (tokens of a problem) at a time.

    Args:
        cluster_N: the number of each value's cluster.

    Returns:
        ρ and its standard error; NaN where one of them is not defined, as for fewer than two clusters.

    Raises:
        DvpError: lengths that differ.
    """
    if not left_N.shape == right_N.shape == cluster_N.shape or left_N.dim() != 1:
        shapes = ", ".join(str(tuple(values.shape)) for values in (left_N, right_N, cluster_N))
        raise DvpError(f"rank correlation: expected three vectors of one length, got {shapes}")
    without = [
        rank_correlation(left_N[cluster_N != cluster], right_N[cluster_N != cluster]) for cluster in cluster_N.unique()
    ]
    value, count = rank_correlation(left_N, right_N), len(without)
    if count < 2:
        return value, math.nan
    mean = sum(without) / count
    return value, math.sqrt((count - 1) / count * sum((each - mean) ** 2 for each in without))


def _centred_ranks(values_N: torch.Tensor) -> torch.Tensor:
    _, place_N, count_U = values_N.unique(return_inverse=True, return_counts=True)
    rank_U = count_U.cumsum(dim=0) - (count_U - 1) / 2
    return rank_U.double()[place_N] - (len(values_N) + 1) / 2
