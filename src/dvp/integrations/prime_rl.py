"""dvp's corrections as prime-rl's custom loss, one response at a time; docs/other_trainers.md has the recipe.

The hook gets log-probs, so that V_S is out of its reach: the trainer's are over the full vocabulary.

Shape suffixes: T tokens of a response with its prompt; 1T the same as a batch of one response.
"""

from typing import Any

from prime_rl.trainer.rl.loss import LossInputs, LossOutputs

from dvp.core.importance import PRESETS, ImportanceRule, importance_weights
from dvp.core.objective import Reinforce, policy_loss
from dvp.errors import DvpError


def corrected_loss(inputs: LossInputs, correction: str | dict[str, Any]) -> LossOutputs:
    """Return −Σ_t stopgrad(w_t) A_t log π_θ over a response's tokens; prime-rl divides by the step's tokens.

    The weights w are computed from π_θ/π_infer with π_θ at each optimiser step, so that they correct for stale weights
    too. A rejected response counts in prime-rl's divisor.

    Args:
        inputs: of one response. `loss_weights`, where there are any, multiply the terms.
        correction: a name in dvp.core.importance.PRESETS, or the keys of an ImportanceRule.

    Raises:
        DvpError: an unknown name, a correction that needs the whole batch, or a log-ratio that is not finite.
    """
    if isinstance(correction, str) and correction not in PRESETS:
        raise DvpError(f"correction: {correction}; expected one of {', '.join(PRESETS)}, or a rule's keys")
    rule = PRESETS[correction] if isinstance(correction, str) else ImportanceRule(**correction)
    if rule.denominator == "kept" or rule.self_normalise:
        raise DvpError("correction: expected denominator all and no self_normalise in prime-rl, one response at a time")
    mask_1T, log_prob_1T = inputs.loss_mask[None], inputs.trainer_logprobs[None]
    log_ratio_1T = log_prob_1T.detach() - inputs.inference_logprobs[None]
    weights = importance_weights(log_ratio_1T, mask_1T, rule)
    factor_T = inputs.advantages if inputs.loss_weights is None else inputs.advantages * inputs.loss_weights
    loss = policy_loss(Reinforce(), log_prob_1T, log_prob_1T, weights.weight_BT, factor_T[None], mask_1T, 1).loss
    mean_weight = weights.weight_BT.sum() / mask_1T.sum().clamp(min=1)
    return LossOutputs(loss=loss, metrics={"dvp_kept": weights.kept_B.float().mean(), "dvp_weight": mean_weight})
