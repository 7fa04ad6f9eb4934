"""dvp's corrections as slime's custom TIS function; docs/other_trainers.md has the recipe.

The hook gets log-probs, so that V_S is out of its reach: the trainer's are over the full vocabulary.

Shape suffixes: B responses of a micro-batch, T tokens, N the tokens of all responses, one after the other.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from dvp.core.importance import ImportanceRule, importance_weights
from dvp.errors import DvpError


def tis_function(rule: ImportanceRule) -> Callable:
    """Make the function that slime calls by --custom-tis-function-path.

    It multiplies slime's loss of each token by the token's weight, from the trainer's log-probs before the first
    optimiser step over the engine's, and takes rejected tokens out of slime's masks. They count in slime's divisors.

    Raises:
        DvpError: the rule needs the whole batch. The function raises it for log-ratios that are not finite, and for
            responses that are split over processes (context parallelism).
    """
    if rule.denominator == "kept" or rule.self_normalise:
        raise DvpError(f"importance: {rule}; expected denominator all and no self_normalise in slime")

    def function(
        args: Any,
        *,
        pg_loss: torch.Tensor,
        train_log_probs: list[torch.Tensor],
        rollout_log_probs: list[torch.Tensor],
        loss_masks: list[torch.Tensor],
        response_lengths: list[int],
        **_: Any,
    ) -> tuple[torch.Tensor, list[torch.Tensor], dict[str, torch.Tensor]]:
        if (found := [len(values) for values in train_log_probs]) != list(response_lengths):
            raise DvpError(f"log-probs: lengths {found}; expected {response_lengths}, no context parallelism")
        log_ratios = [train - rollout for train, rollout in zip(train_log_probs, rollout_log_probs, strict=True)]
        mask_BT = pad_sequence(loss_masks, batch_first=True) != 0
        weights = importance_weights(pad_sequence(log_ratios, batch_first=True).detach(), mask_BT, rule)
        per_response = zip(weights.weight_BT, weights.kept_B, response_lengths, strict=True)
        found = [(weight_T[:length], kept.expand(length)) for weight_T, kept, length in per_response]
        weight_N, kept_N = (torch.cat(values) for values in zip(*found, strict=True))
        masks = [mask_T * (weight_T != 0) for mask_T, (weight_T, _) in zip(loss_masks, found, strict=True)]
        # Multiplied by 0, a loss that is not finite would still be NaN.
        loss_N = torch.where(weight_N != 0, pg_loss * weight_N, 0.0)
        return loss_N, masks, {"dvp_weight": weight_N, "dvp_kept": kept_N.to(weight_N)}

    return function
