"""Forecast what corrections keep of long responses, from the log-ratios of single tokens."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from dvp.core.importance import ImportanceRule, importance_weights

SIMULATED = 400
"""Number of responses of the longest length that are drawn."""


def forecast(
    values_N: np.ndarray, probability_N: np.ndarray, rules: Mapping[str, ImportanceRule], lengths: Sequence[int]
) -> dict[str, dict[int, float]]:
    """Simulate responses whose tokens' log-ratios are independent draws, and apply corrections to them.

    values_N, probability_N: the distribution of a token's log-ratio.
    rules: corrections by name.
    Returns, by name and length (tokens), the share of responses that are kept; for a rule that truncates by token, the
    share of tokens that stay uncut.
    """
    drawn_BT = np.random.default_rng(0).choice(values_N, (SIMULATED, max(lengths)), p=probability_N)
    log_ratio_BT = torch.from_numpy(drawn_BT)
    kept: dict[str, dict[int, float]] = {name: {} for name in rules}
    for length in lengths:
        part_BT = log_ratio_BT[:, :length]
        for name, rule in rules.items():
            weights = importance_weights(part_BT, torch.ones_like(part_BT, dtype=torch.bool), rule)
            untouched = part_BT <= math.log(rule.upper) if rule.action == "truncate" and rule.by_token else None
            kept[name][length] = (weights.kept_B if untouched is None else untouched).double().mean().item()
    return kept
