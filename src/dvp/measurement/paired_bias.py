"""Estimate the bias of a gradient estimator from the engine's own samples (docs/method.md, "Paired bias").

With y ~ q (the engine's policy, whole vocabulary) and r = p(y)/q(y), h = (1/B) Σ_i r_i A_i ∇log p(y_i) with RLOO's
leave-one-out advantage is an unbiased estimate of the exact gradient ∇J: the baseline of response i comes from other
responses, which are independent of it, and E_q[r ∇log p] = 0. So E[x − h] is the bias of an estimate x, whatever x's
own weights and baseline are, and most of the noise of x and h is the same. The U-statistic over batches of x − h is an
unbiased estimate of its square.

h stays RLOO's for every x. A baseline that includes the response itself (GRPO, Dr. GRPO, OPO, OTB) would bias it.

With samples of the pruned engine q^mp, r = p^mp/q^mp and h over the safe vocabulary estimates ∇J_mp instead, without
bias if q^mp reaches all that p^mp does. The mean of r is then 1; below 1 it tells how much q^mp misses.

Shape suffixes: B responses, T tokens.
"""

import torch

from dvp.core.advantages import Responses, rloo
from dvp.core.batch import Rollout
from dvp.core.limits import LOG_RATIO_CLAMP


def sequence_log_ratio(rollout: Rollout, statistics: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return log r = Σ_t log p^mp(y_t) − log q(y_t) over the model's own tokens (nats), (B,) float64, unclamped.

    −inf for a response with a token outside V_S: p^mp(y) is 0.

    Args:
        statistics: the trainer's (fields of dvp.core.head.TokenStatistics) of each response token, (B, T).
    """
    mask_BT = rollout.batch.response_BT
    token_BT = statistics["pruned_log_prob"].double() - rollout.infer_log_prob_BT.double()
    log_ratio_B = torch.where(mask_BT, token_BT, 0.0).sum(dim=1)
    outside_B = (mask_BT & ~statistics["target_in_safe"]).any(dim=1)
    return log_ratio_B.masked_fill(outside_B, -torch.inf)


def rloo_advantage(rollout: Rollout, group_size: int) -> torch.Tensor:
    """Return RLOO's leave-one-out advantage of each token, (B, T)."""
    ones_BT = torch.ones(rollout.batch.response_BT.shape)
    return rloo(Responses(rollout.rewards_B, rollout.batch.response_BT, group_size, ones_BT, ones_BT))


def exact_coefficients(rollout: Rollout, log_ratio_B: torch.Tensor, group_size: int) -> torch.Tensor:
    """Return the coefficients of ∇log p of each response's tokens in h: r_i A_i / B, (B, T) float32, 0 elsewhere.

    r is clamped at e^20 so that it stays finite; where that matters, the weights' ESS is below SMALLEST_ESS anyway.
    """
    ratio_B = log_ratio_B.clamp(max=LOG_RATIO_CLAMP).exp()
    return (ratio_B[:, None] * rloo_advantage(rollout, group_size) / len(ratio_B)).float()


def weight_diagnostics(log_ratio_B: torch.Tensor) -> dict[str, float]:
    """Diagnose whether the sequence weights r of some responses can be used.

    Returns:
        weight_ess: (Σ r)² / (N Σ r²), in (0, 1]; 0 if every r is 0.
        weight_largest_share: the largest r over Σ r; 1 if every r is 0.
        weight_mean: the mean of r; 1 in expectation.
    """
    largest = log_ratio_B.max()
    if largest == -torch.inf:
        return {"weight_ess": 0.0, "weight_largest_share": 1.0, "weight_mean": 0.0}
    scaled_B = (log_ratio_B - largest).exp()  # relative to the largest, so that none overflows
    total = scaled_B.sum()
    return {
        "weight_ess": (total.square() / (len(scaled_B) * scaled_B.square().sum())).item(),
        "weight_largest_share": (1 / total).item(),
        "weight_mean": (scaled_B.mean() * largest.exp()).item(),
    }
