"""Advantages of outcome rewards (METHOD.md, "Advantages").

Shape suffixes: B responses, T tokens, N flattened tokens, V vocabulary, H hidden, G group.
"""

import torch

from dvp.errors import DvpError


def rloo(rewards_B: torch.Tensor, group_size: int) -> torch.Tensor:
    """Leave-one-out advantage A_i = R_i − mean_{j≠i} R_j = G/(G−1) · (R_i − R̄); for G = 1, A = R.

    Args:
        rewards_B: one float reward a response; the G responses to a prompt are consecutive rows.
        group_size: G ≥ 1.

    Returns:
        (B,), in the rewards' units and type; sums to zero over each group when G > 1.

    Raises:
        DvpError: G below 1, or B not a multiple of G.
    """
    if group_size < 1:
        raise DvpError(f"group_size: expected at least 1, got {group_size}")
    if len(rewards_B) % group_size:
        raise DvpError(f"group_size: {len(rewards_B)} responses do not divide into groups of {group_size}")
    if group_size == 1:
        return rewards_B
    rewards_PG = rewards_B.reshape(-1, group_size)  # P prompts
    centred_PG = rewards_PG - rewards_PG.mean(dim=1, keepdim=True)
    return (group_size / (group_size - 1) * centred_PG).flatten()
