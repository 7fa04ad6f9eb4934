"""Importance weights between the trainer's and the engine's policy (METHOD.md, "Importance corrections").

log_ratio = log p_train(y_t) − log q_infer(y_t) of the sampled token throughout, with p and q both pruned or
both full. The named methods are settings of one rule:

    token TIS       token, truncate, upper 2
    sequence TIS    sequence, truncate, upper 2
    MIS             sequence, mask, [0.5, 2]
    IcePop          token, mask, [0.5, 5]

Shape suffixes: B responses, T tokens, N flattened tokens, V vocabulary, H hidden, G group.
"""

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from dvp.errors import DvpError

Level = Literal["none", "token", "sequence"]
Action = Literal["truncate", "mask"]

# e^±20 is far outside any useful bound, and keeps a weight finite in fp32 and in bf16.
LOG_RATIO_CLAMP = 20.0


@dataclass(frozen=True)
class ImportanceRule:
    """How a ratio becomes a weight.

    Raises:
        DvpError: an unknown level or action, or bounds or veto out of range.
    """

    level: Level
    """The ratio of each token, the product over the sequence, or none (weight 1)."""
    action: Action
    """Outside the bounds: cut the ratio to `upper` (truncate), or reject it with weight 0 (mask)."""
    lower: float
    """Smallest ratio that `mask` keeps, ≥ 0; `truncate` has no lower bound."""
    upper: float
    """Largest ratio, > 0 and ≥ lower; infinity means unbounded."""
    veto: float | None
    """Drop a sequence with any token ratio below this, in (0, 1); None never does. Applies at every level."""

    def __post_init__(self) -> None:
        if self.level not in get_args(Level):
            raise DvpError(f"importance.level: expected one of {get_args(Level)}, got {self.level!r}")
        if self.action not in get_args(Action):
            raise DvpError(f"importance.action: expected one of {get_args(Action)}, got {self.action!r}")
        if not (0.0 <= self.lower <= self.upper and self.upper > 0.0):
            raise DvpError(
                f"importance bounds: expected 0 ≤ lower ≤ upper, 0 < upper, got [{self.lower}, {self.upper}]"
            )
        if self.veto is not None and not 0.0 < self.veto < 1.0:
            raise DvpError(f"importance.veto: expected a ratio strictly between 0 and 1, got {self.veto}")


@dataclass(frozen=True, eq=False)
class ImportanceWeights:
    """The weights of B responses; none carries a gradient."""

    weight_BT: torch.Tensor
    """In the log-ratio's type, ≥ 0; 0 at padding and wherever the token or its sequence was rejected."""
    kept_B: torch.Tensor
    """bool: the sequence has a token with weight > 0."""
    vetoed_B: torch.Tensor
    """bool: the veto dropped the sequence."""


@torch.no_grad()
def importance_weights(log_ratio_BT: torch.Tensor, mask_BT: torch.Tensor, rule: ImportanceRule) -> ImportanceWeights:
    """Turn log-ratios into stop-gradient weights.

    Log-ratios (a token's, or their sum over the sequence) are clamped to ±20 before exp; the veto looks at
    the unclamped ones. A batch in which everything is rejected is a legal result: all weights 0.

    Args:
        log_ratio_BT: log p − log q of the sampled tokens (nats); any value, NaN too, where mask_BT is False.
        mask_BT: bool, True at the response's tokens.
        rule: the correction.
    """
    log_ratio_BT = torch.where(mask_BT, log_ratio_BT, 0.0)
    log_veto = -math.inf if rule.veto is None else math.log(rule.veto)
    vetoed_B = (log_ratio_BT < log_veto).any(dim=1)

    if rule.level == "none":
        weight_BT = torch.ones_like(log_ratio_BT)
    else:
        if rule.level == "sequence":
            log_ratio_BT = log_ratio_BT.sum(dim=1, keepdim=True).expand_as(log_ratio_BT)
        ratio_BT = log_ratio_BT.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP).exp()
        if rule.action == "truncate":
            weight_BT = ratio_BT.clamp(max=rule.upper)
        else:
            within_BT = (ratio_BT >= rule.lower) & (ratio_BT <= rule.upper)
            weight_BT = torch.where(within_BT, ratio_BT, 0.0)
    weight_BT = torch.where(mask_BT & ~vetoed_B[:, None], weight_BT, 0.0)
    return ImportanceWeights(weight_BT=weight_BT, kept_B=(weight_BT > 0).any(dim=1), vetoed_B=vetoed_B)
