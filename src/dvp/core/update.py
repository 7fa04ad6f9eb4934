"""Compute what multiplies each token's ∇log p: ratio → weight → advantage → mask → coefficient.

Training's optimiser steps and the study of the estimators' bias both call `make_update`, so that what is measured is
what is trained.

Shape suffixes: B responses, T token positions.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from dvp.core.advantages import Responses, optimal_token_proxy
from dvp.core.batch import Rollout
from dvp.core.importance import Correction, ImportanceWeights
from dvp.core.masks import Mask


@dataclass(frozen=True, eq=False)
class Update:
    """The weight and the advantage of each token of some responses, from which an optimiser step is made."""

    weights: ImportanceWeights
    """Result of the importance correction."""
    weight_BT: torch.Tensor
    """Those weights, but 0 at tokens outside V_S and at those that the mask leaves out."""
    responses: Responses
    """Input of the advantage, with the weights before the mask."""
    advantage_BT: torch.Tensor

    def coefficients(self) -> torch.Tensor:
        """Return the factor of each token's ∇log p^mp in the policy gradient, (B, T); 0 if nothing was kept."""
        return self.weight_BT * self.advantage_BT / max(self.weights.denominator, 1)


def make_update(
    rollout: Rollout,
    statistics: dict[str, torch.Tensor],
    *,
    importance: Correction,
    advantage: Callable[[Responses], torch.Tensor],
    group_size: int,
    mask: Mask | None = None,
    squared_norm_BT: torch.Tensor | None = None,
) -> Update:
    """Compute weights and advantages of some responses: whole groups, as advantages compare their members.

    Args:
        statistics: the trainer's (fields of dvp.core.head.TokenStatistics) of each response token, (B, T).
        group_size: responses to a prompt.
        squared_norm_BT: measured ‖∇ log p^mp(y_t)‖² over the policy's parameters, which the advantage then uses instead
            of OTB's proxy; None uses the proxy.

    Raises DvpError for a log-ratio that is not finite.
    """
    mask_BT, log_prob_BT = rollout.batch.response_BT, statistics["pruned_log_prob"]
    weights = importance.weights(rollout, statistics)
    # The engine can sample what the trainer prunes. Such a token's p^mp is a constant divided by the sum over the safe
    # ones, so its gradient pushes ALL safe logits. Not every importance weight removes it, so remove it here
    # (docs/method.md, "Dynamic vocabulary pruning").
    weight_BT = torch.where(statistics["target_in_safe"], weights.weight_BT, 0.0) * mask_BT
    proxy_BT = squared_norm_BT
    if proxy_BT is None:
        proxy_BT = optimal_token_proxy(log_prob_BT, statistics["pruned_sum_p_squared"])
    responses = Responses(rollout.rewards_B, mask_BT, group_size, proxy_BT, weight_BT)
    advantage_BT = advantage(responses)
    if mask is not None:
        weight_BT = torch.where(mask.keeps(rollout, statistics, advantage_BT), weight_BT, 0.0)
    return Update(weights, weight_BT, responses, advantage_BT)
