"""DVP and its corrections inside verl's V1 trainer; docs/other_trainers.md has the recipe and the limitations.

Loss and agent loop are added to verl's registries. There is no registry for the trainer's logits: one private function
of verl's FSDP engine is replaced. verl passes a registered loss the engine's log-probs only in bypass mode, and one
micro-batch at a time. Its registered advantages do not get Σp², so that OTB is verl's own or none.

Shape suffixes: B responses of a micro-batch, T tokens, N flattened tokens, V vocabulary.
"""

from collections.abc import Callable
from functools import reduce
from typing import Any, ClassVar

import torch
import verl

from dvp.core.head import MASK_LOGIT
from dvp.core.importance import ImportanceRule, importance_weights
from dvp.core.objective import Reinforce, policy_loss
from dvp.core.safe_vocabulary import FixedRho, safe_mask
from dvp.errors import DvpError

VERSION = "0.9.1"
if verl.__version__ != VERSION:
    raise DvpError(f"verl is {verl.__version__}; expected {VERSION}: others differ within")

from verl.experimental.agent_loop.agent_loop import register  # noqa: E402
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop  # noqa: E402
from verl.trainer.ppo.core_algos import register_policy_loss  # noqa: E402
from verl.workers.engine.fsdp import transformer_impl  # noqa: E402

# With a smaller ρ a safe token's log-prob could come near MASK_LOGIT, by which tokens outside V_S are recognised.
SMALLEST_RHO = 1e-12
_scale_logits = transformer_impl._scale_logits_by_temperature
# Settings of verl's actor that the loss requires.
NEEDED = {"actor.loss_agg_mode": ("seq-mean-token-sum",), "actor.policy_loss.rollout_correction.bypass_mode": (True,)}
# Other engines and kernels do not prune the vocabulary, and a token outside V_S has no log-prob for a KL penalty.
NEEDED_TO_PRUNE = NEEDED | {"actor.strategy": ("fsdp", "fsdp2")}
NEEDED_TO_PRUNE |= {f"actor.{name}": (False,) for name in ("use_fused_kernels", "use_prefix_grouper", "use_kl_loss")}
# Required settings outside the actor, which only agent loops see. The trainer's V_S has no top_p or top_k.
NEEDED_TO_SAMPLE = {
    "algorithm.use_kl_in_reward": (False,),
    "actor_rollout_ref.rollout.top_p": (1.0,),
    "actor_rollout_ref.rollout.top_k": (-1, 0),
}


class DvpAgentLoop(SingleTurnAgentLoop):
    """verl's single-turn loop, sampling responses from V_S by vLLM's min_p; in validation too, unless it is greedy."""

    rho: ClassVar[float]

    def __init__(self, *arguments: Any, **options: Any):
        """Take the arguments of verl's loop.

        Raises:
            DvpError: the sampler uses top_p or top_k, or there is a KL penalty in the reward.
        """
        super().__init__(*arguments, **options)
        _check(self.config, NEEDED_TO_SAMPLE, "agent loop")

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
        """Run verl's loop with min_p = ρ among the sampling parameters."""
        return await super().run(sampling_params | {"min_p": self.rho}, **kwargs)


def install(importance: ImportanceRule, rho: float | None = None) -> None:
    """Register the loss `dvp`: −(1/B) Σ_i Σ_t stopgrad(w_it) A_it log π_θ over all B responses of verl's mini-batch.

    The weights w are computed from π_θ/π_infer with π_θ at each optimiser step, as in verl's own bypass mode; this
    project's trainer computes them before the first one. With one optimiser step per batch the two are the same.

    With `rho`, also register the agent loop `dvp`, and restrict the trainer's logits to V_S = {p ≥ ρ · p_max}:
    log-probs, entropy and Σp² are then those over V_S. Tokens that the engine sampled outside V_S get weight 0. A
    forward pass holds up to three more copies of its logits.

    Args:
        importance: the correction; denominator `kept` and self_normalise are refused, as they need the whole batch.
        rho: in [1e-12, 1); None leaves the vocabulary whole.

    Raises:
        DvpError: the correction or rho is not supported. The loss raises it for settings of verl with which it would
            be a different loss, and for log-ratios that are not finite.
    """
    if importance.denominator == "kept" or importance.self_normalise:
        raise DvpError(f"importance: {importance}; expected denominator all and no self_normalise in verl")
    if rho is not None:
        if not SMALLEST_RHO <= rho < 1:
            raise DvpError(f"rho: {rho}; expected a number in [{SMALLEST_RHO}, 1)")
        DvpAgentLoop.rho = rho
        register("dvp")(DvpAgentLoop)
        transformer_impl._scale_logits_by_temperature = _pruning(FixedRho(rho))

    def loss(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights=None):
        _check({"actor": config}, NEEDED if rho is None else NEEDED_TO_PRUNE, "loss_mode")
        mask_BT, log_prob_BT, whole = response_mask.bool(), log_prob.detach(), config.global_batch_info
        outside_BT = mask_BT & (log_prob_BT < (-torch.inf if rho is None else MASK_LOGIT + 1))
        weights = importance_weights(log_prob_BT - old_log_prob, mask_BT, importance, outside_BT)
        weight_BT = weights.weight_BT.masked_fill(outside_BT, 0.0)
        rest = (weight_BT, advantages, mask_BT, whole["global_batch_size"])
        kept, outside = weights.kept_B.float().mean(), outside_BT.sum() / mask_BT.sum().clamp(min=1)
        # Gradients are averaged over the data-parallel ranks, each of which has only its part of the sum.
        return policy_loss(Reinforce(), log_prob, log_prob_BT, *rest).loss * whole["dp_size"], {
            "actor/dvp_kept": kept.item(),
            "actor/dvp_outside_safe": outside.item(),
        }

    register_policy_loss("dvp")(loss)


def _check(config: Any, needed: dict[str, tuple], of: str) -> None:
    for name, accepted in needed.items():
        found = reduce(lambda settings, key: settings.get(key), name.split("."), config)
        if found not in accepted:
            raise DvpError(f"{name}: {found}; expected {' or '.join(map(str, accepted))} with {of} dvp")


def _pruning(rule: FixedRho) -> Callable:
    def scale_and_prune(logits: torch.Tensor, temperature: torch.Tensor, *, is_unit_temperature: bool) -> torch.Tensor:
        scaled = _scale_logits(logits, temperature, is_unit_temperature=is_unit_temperature)
        safe = safe_mask(scaled.flatten(0, -2), rule).view(scaled.shape)
        return torch.where(safe, scaled, scaled.detach().amax(dim=-1, keepdim=True) + MASK_LOGIT)

    return scale_and_prune
