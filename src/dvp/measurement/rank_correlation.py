"""Spearman's rank correlation, with a standard error where values come in clusters.

Shape suffixes: N values.
"""

import math

import numpy as np
import torch
from scipy.stats import rankdata


def clustered_rank_correlation(
    left_N: torch.Tensor, right_N: torch.Tensor, cluster_N: torch.Tensor
) -> tuple[float, float]:
    """Spearman's ρ and its standard error by the jackknife that leaves out a cluster (tokens of a problem) at a time.

    Args:
        cluster_N: the number of each value's cluster.

    Returns:
        ρ and its standard error; NaN where one of them is not defined, as for fewer than two clusters.
    """
    left_N, right_N, cluster_N = (values_N.cpu().numpy() for values_N in (left_N, right_N, cluster_N))
    without = [
        _rank_correlation(left_N[cluster_N != cluster], right_N[cluster_N != cluster])
        for cluster in np.unique(cluster_N)
    ]
    error = math.sqrt((len(without) - 1) * np.var(without)) if len(without) > 1 else math.nan
    return _rank_correlation(left_N, right_N), error


def _rank_correlation(left_N: np.ndarray, right_N: np.ndarray) -> float:
    """NaN if a side is constant; sums of ranks are exact."""
    left_N, right_N = (rankdata(values_N) - (len(values_N) + 1) / 2 for values_N in (left_N, right_N))
    size = math.sqrt((left_N @ left_N) * (right_N @ right_N))
    return float(left_N @ right_N) / size if size > 0.0 else math.nan
