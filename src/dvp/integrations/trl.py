"""TRL's GRPOTrainer with a safe vocabulary, importance corrections and baselines by token (docs/trl.md).

What is private in TRL is used here alone, in the version that it is known of. Weights go into TRL's advantages, which
may be of shape (B, T): each of its losses is linear in a factor ≥ 0 of the advantage.

Shape suffixes: B responses of this process, T completion positions, L positions, N scored tokens, R rewards, H hidden.
"""

import json
import math
from functools import wraps

import torch
import trl
from accelerate.utils import gather_object, is_peft_model
from torch.distributed.tensor import DTensor
from trl.trainer.utils import FusedCausalLMOutput, maybe_gather_lm_head_ctx

from dvp.core.advantages import ADVANTAGES
from dvp.core.batch import Batch, Rollout, unflatten
from dvp.core.head import MASK_LOGIT, token_statistics
from dvp.core.importance import PRESETS, ImportanceRule
from dvp.core.safe_vocabulary import FixedRho
from dvp.core.update import make_update
from dvp.errors import DvpError

VERSION = "1.16."
SAMPLER = {"top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0}
DUMPED = ("completion_ids", "sampling_per_token_logps", "old_per_token_logps", "tool_mask")
LOGITS = ("final_logit_softcapping", "logit_scale", "output_multiplier", "lm_head_multiplier", "logits_scaling")


class MismatchTrainer(trl.GRPOTrainer):
    """A GRPOTrainer whose log-probs are over V_S of its own logits, outside which no token counts; ρ is `min_p`."""

    def __init__(
        self, *args, correction: str | ImportanceRule | None, advantage: str | None = None, rollouts: str = "", **kwargs
    ):
        """Takes what GRPOTrainer takes; raises DvpError for another TRL, an unknown name, what cannot be combined.

        correction : in the place of vllm_importance_sampling_correction: a name in PRESETS, an ImportanceRule, or none.
        advantage : a name in ADVANTAGES, such as otb, of the weighted sum of the rewards; None leaves TRL's.
        rollouts : a file to which each response's log-probs are appended, a line of JSON, for dvp diagnose-rollouts;
            its `tool_mask` is 1 for tokens in V_S, its `outside_safe` counts the others.
        """
        if not trl.__version__.startswith(VERSION):
            raise DvpError(f"TRL is {trl.__version__}; expected {VERSION}x: others differ within")
        for name, given, known in (("correction", correction, PRESETS), ("advantage", advantage, ADVANTAGES)):
            if isinstance(given, str) and given not in known:
                raise DvpError(f"{name}: expected one of {', '.join(known)}, got {given}")
        super().__init__(*args, **kwargs)
        self.correction = PRESETS[correction] if isinstance(correction, str) else correction or ImportanceRule()
        self.advantage, self.rollouts = advantage, rollouts
        self.vllm_importance_sampling_correction, self._scored = False, []
        model, config = self.model.get_base_model() if is_peft_model(self.model) else self.model, self.args
        head, text = model.get_output_embeddings(), model.config.get_text_config()
        changed = [name for name in LOGITS if getattr(text, name, None) not in (None, 1.0)]
        sampler = {"min_p": config.min_p, "temperature": config.temperature, **SAMPLER}
        found = vars(config) | (config.generation_kwargs or {})
        for problem, there in {
            f"generation: expected {sampler}": sampler != {name: found[name] for name in sampler},
            "beta: expected 0 with min_p, as a reference has a V_S of its own": config.min_p and config.beta,
            "the model's logits: expected its head's product alone": changed or head.bias is not None,
            "expected a model of text without router loss": self._is_vlm or self.aux_loss_enabled,
        }.items():
            if there:
                raise DvpError(problem)
        theirs, safe = model.forward, FixedRho(config.min_p) if config.min_p else None
        dtype = torch.bfloat16 if config.bf16 and not config.cast_lm_head_to_fp32 else torch.float32
        options = {"safe": safe, "temperature": config.temperature, "product_dtype": dtype}

        @wraps(theirs)  # whose signature `generate` looks at
        def forward(*inputs, fused_lm_head=False, **kwargs):
            if not fused_lm_head:
                return theirs(*inputs, **kwargs)
            scored_BL = (target_BL := kwargs.pop("labels")[:, 1:]) != -100
            hidden_BLH = model.base_model(*inputs, **kwargs, use_cache=False).last_hidden_state[:, :-1]
            with maybe_gather_lm_head_ctx(weight := model.get_output_embeddings().weight):
                # Whole until the backward pass. FSDP has a shard of it; ZeRO-3, whose mark it is, empties it again.
                whole_VH = weight.full_tensor() if isinstance(weight, DTensor) else weight
                whole_VH = weight.clone() if hasattr(weight, "ds_id") else whole_VH
                found = token_statistics(hidden_BLH[scored_BL], whole_VH, target_BL[scored_BL], **options)
            # A constant: outside V_S the gradient would push all that is inside.
            log_prob_N = found.pruned_log_prob.where(found.target_in_safe, MASK_LOGIT)
            of_tokens = (log_prob_N, found.pruned_entropy, found.target_in_safe, found.pruned_sum_p_squared)
            log_prob_BL, entropy_BL, *others = (unflatten(values_N, scored_BL) for values_N in of_tokens)
            self._scored.append(others)
            return FusedCausalLMOutput(log_probs=log_prob_BL, entropy=entropy_BL)

        model.forward = forward

    def _calculate_rewards(self, *args, **kwargs):
        self._rewards = super()._calculate_rewards(*args, **kwargs)
        return self._rewards

    def _generate_and_score_completions(self, inputs):
        made = super()._generate_and_score_completions(inputs)
        mode = "train" if self.model.training else "eval"
        group = self.num_generations if mode == "train" else self.num_generations_eval
        count, length = made["completion_ids"].shape
        if self.advantage and count % group:
            raise DvpError(f"advantage: expected groups of {group} in each process, got {count} responses")
        mask_BT = (made["completion_mask"] * made.get("tool_mask", 1)).bool()
        both = [torch.cat([made[f"prompt_{of}"], made[f"completion_{of}"]], dim=1) for of in ("ids", "mask")]
        size = getattr(self.args, f"per_device_{mode}_batch_size")
        self._scored.clear()
        with torch.no_grad():
            old_BT = self._get_per_token_logps_and_entropies(self.model, *both, length, batch_size=size)[0]
        safe_BT, squares_BT = (torch.cat(parts)[:, -length:] for parts in zip(*self._scored, strict=True))
        sampled_BT = made.get("sampling_per_token_logps")
        if sampled_BT is None and (self.correction != ImportanceRule() or self.rollouts):
            raise DvpError("correction, rollouts: expected the sampler's log-probs, from use_vllm or a rollout_func")
        if self.rollouts:
            self._dump(mode, inputs, made | {"old_per_token_logps": old_BT, "tool_mask": safe_BT.long()}, mask_BT)
        # As in TRL: a ratio of 1 where vLLM has no number.
        sampled_BT = old_BT if sampled_BT is None else old_BT.where(sampled_BT.isnan(), sampled_BT)
        made |= {"sampling_per_token_logps": sampled_BT, "old_per_token_logps": old_BT}
        rewards_BR = self._rewards[self.accelerator.process_index * count :][:count]
        graded_B1 = ~rewards_BR.isnan().all(dim=1, keepdim=True)
        rewards_B = (rewards_BR * self.reward_weights.to(rewards_BR)).nansum(dim=1)
        batch = Batch(made["completion_ids"], mask_BT & graded_B1)
        rollout = Rollout(batch, sampled_BT, rewards_B, truncated_B=torch.zeros_like(graded_B1[:, 0]))
        statistics = {"pruned_log_prob": old_BT, "target_in_safe": safe_BT, "pruned_sum_p_squared": squares_BT}
        advantage = ADVANTAGES.get(self.advantage, lambda _: made["advantages"][:, None])
        update = make_update(rollout, statistics, importance=self.correction, advantage=advantage, group_size=group)
        self._metrics[mode]["mismatch/kept"].append(update.weights.kept_B.float().mean().item())
        self._metrics[mode]["mismatch/outside_safe"].append((~safe_BT)[mask_BT].float().mean().item())
        # The mask keeps them out of ratios of whole sequences and of entropies, too.
        return made | {"advantages": update.coefficients() * count, "tool_mask": (mask_BT & safe_BT).long()}

    def _dump(self, mode, inputs, made, mask_BT):
        """Append all processes' responses to the file of rollouts, without what padding and tools added to them."""
        rows = []
        for given, mask_T, *values in zip(inputs, mask_BT, *(made[name] for name in DUMPED), strict=True):
            lists = zip(DUMPED, (value_T[mask_T].tolist() for value_T in values), strict=True)
            row = {name: [None if math.isnan(value) else value for value in list_] for name, list_ in lists}
            outside = len(row["tool_mask"]) - sum(row["tool_mask"])
            about = {"step": self.state.global_step, "mode": mode, "prompt": given.get("prompt")}
            rows.append(about | row | {"outside_safe": outside})
        rows = gather_object(rows)
        if self.accelerator.is_main_process:
            with open(self.rollouts, "a", encoding="utf-8") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows)
