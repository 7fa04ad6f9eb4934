"""The policy-gradient loss: REINFORCE with stop-gradient importance weights (METHOD.md item 4 [P Thm 5.3]).

Its negative gradient is the batch mean of ĝ = w · A · ∇log p^mp(y). Rejected tokens are cut out of the graph
and not merely multiplied by zero: 0 · NaN is NaN, in the value and in the gradient.

Shape suffixes: B responses, T tokens, N flattened tokens, V vocabulary, H hidden, G group.
"""

import torch

from dvp.errors import DvpError


def reinforce_loss(
    log_prob_BT: torch.Tensor,
    weight_BT: torch.Tensor,
    advantage_B: torch.Tensor,
    mask_BT: torch.Tensor,
    denominator: float,
) -> torch.Tensor:
    """−(1/denominator) Σ_i Σ_t stopgrad(w_it) · A_i · log p_it, over the tokens of the mask.

    The sum over a sequence is not divided by its length: that is ∇log p of the sequence, and any other
    division would favour short or long answers.

    Args:
        log_prob_BT: log-probs of the sampled tokens (nats), with gradient; non-finite values are harmless
            wherever the weight is 0 or the mask is False.
        weight_BT: importance weights; no gradient flows through them.
        advantage_B: one advantage a response.
        mask_BT: bool, True at the response's tokens.
        denominator: how many responses the sum is averaged over (all, or kept), > 0; the caller decides,
            since micro-batches and ranks share one.

    Returns:
        A scalar, exactly 0 with zero gradients when every token is rejected.

    Raises:
        DvpError: denominator not above 0. Where it counts kept responses, skip the step when none is kept.
    """
    if not denominator > 0.0:
        raise DvpError(f"denominator: expected a number above 0, got {denominator}")
    active_BT = mask_BT & (weight_BT != 0)
    coefficient_BT = torch.where(active_BT, weight_BT * advantage_B[:, None], 0.0).detach()
    return -(coefficient_BT * torch.where(active_BT, log_prob_BT, 0.0)).sum() / denominator


def zero_outside_safe(weight_BT: torch.Tensor, target_in_safe_BT: torch.Tensor) -> torch.Tensor:
    """Set the weight of sampled tokens outside V_S to zero.

    V'_S ≠ V_S, so the engine can sample what the trainer prunes. Such a token's p^mp is a constant over the
    sum of the safe ones, and its gradient pushes ALL safe logits; with no importance weight to bring it to
    nothing it must be zeroed here (METHOD.md, "Dynamic vocabulary pruning"). The caller counts these tokens:
    (mask_BT & ~target_in_safe_BT).sum().

    Args:
        weight_BT: importance weights.
        target_in_safe_BT: bool, `TokenStatistics.target_in_safe`; its value at padding is immaterial.
    """
    return torch.where(target_in_safe_BT, weight_BT, 0.0)
