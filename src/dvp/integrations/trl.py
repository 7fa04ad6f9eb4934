"""TRL's GRPOTrainer with a safe vocabulary, importance corrections and baselines by token (docs/trl.md).

Private parts of TRL, listed on that page, are used only here and only in the version VERSION. Importance weights are
multiplied into TRL's advantages, which may have shape (B, T): each of its losses is linear in a factor ≥ 0 of the
advantage.

Shape suffixes: B responses of this process, T completion positions, L positions, N scored tokens, R rewards, H hidden.
"""

import json
import math
from functools import wraps

import torch
import trl
from accelerate.utils import gather_object, is_peft_model
from torch.distributed.tensor import DTensor
from transformers import GenerationConfig
from trl.trainer import utils

from dvp.core.advantages import ADVANTAGES
from dvp.core.batch import Batch, Rollout, unflatten
from dvp.core.head import MASK_LOGIT, token_statistics
from dvp.core.importance import PRESETS, ImportanceRule
from dvp.core.safe_vocabulary import FixedRho
from dvp.core.update import make_update
from dvp.errors import DvpError

VERSION = "1.16."
if not trl.__version__.startswith(VERSION):  # here, as others lack parts of `utils` that are used below
    raise DvpError(f"TRL is {trl.__version__}; expected {VERSION}x: others differ within")

ASKED = ("min_p", "temperature", "top_p", "top_k", "repetition_penalty")
# Sampling parameters of transformers and vLLM that change no token's distribution, and the values that turn others off.
HARMLESS = {"max_new_tokens", "max_tokens", "max_length", "max_time", "stop", "stop_strings", "stop_token_ids"}
HARMLESS |= {"pad_token_id", "bos_token_id", "eos_token_id", "transformers_version", "_from_model_config"}
HARMLESS |= {"seed", "skip_special_tokens", "detokenize"}
HARMLESS |= {"use_cache", "cache_implementation", "cache_config", "compile_config", "disable_compile"}
OFF = {"do_sample": True, "num_beams": 1, "top_p": 1.0, "top_k": 0, "typical_p": 1.0, "epsilon_cutoff": 0.0}
OFF |= {"eta_cutoff": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
OFF |= {"no_repeat_ngram_size": 0, "length_penalty": 1.0, "num_return_sequences": 1}
DUMPED = ("completion_ids", "sampling_per_token_logps", "old_per_token_logps", "tool_mask")
LOGITS = ("final_logit_softcapping", "logit_scale", "output_multiplier", "lm_head_multiplier", "logits_scaling")


class MismatchTrainer(trl.GRPOTrainer):
    """GRPOTrainer whose log-probs are over V_S of its own logits, with tokens outside V_S masked; ρ is `min_p`."""

    def __init__(
        self, *args, correction: str | ImportanceRule | None, advantage: str | None = None, rollouts: str = "", **kwargs
    ):
        """Take the arguments of GRPOTrainer and these.

        correction : replaces vllm_importance_sampling_correction: a name in PRESETS, an ImportanceRule, or None.
        advantage : a name in ADVANTAGES, such as otb, applied to the weighted sum of the rewards; None: TRL's own.
        rollouts : a file to which each response's log-probs are appended as a line of JSON for dvp diagnose-rollouts;
            its `tool_mask` is 1 for tokens in V_S, its `outside_safe` counts the others.
        Raises DvpError for an unknown name, or settings that cannot be combined.
        """
        for name, given, known in (("correction", correction, PRESETS), ("advantage", advantage, ADVANTAGES)):
            if isinstance(given, str) and given not in known:
                raise DvpError(f"{name}: expected one of {', '.join(known)}, got {given}")
        super().__init__(*args, **kwargs)
        self.correction = PRESETS[correction] if isinstance(correction, str) else correction or ImportanceRule()
        self.advantage, self.rollouts = advantage, rollouts
        self.vllm_importance_sampling_correction, self._scored, self._now = False, [], None
        model, config = self.model.get_base_model() if is_peft_model(self.model) else self.model, self.args
        head, text = model.get_output_embeddings(), model.config.get_text_config()
        changed = [name for name in LOGITS if getattr(text, name, None) not in (None, 1.0)]
        more = self._sampler(model)
        for problem, there in {
            f"generation: {more}; expected no more than min_p and temperature that changes a distribution": more,
            "beta: expected 0 with min_p, as a reference has a V_S of its own": config.min_p and config.beta,
            "the model's logits: expected its head's product alone": changed or head.bias is not None,
            "expected a model of text without router loss": self._is_vlm or self.aux_loss_enabled,
        }.items():
            if there:
                raise DvpError(problem)
        theirs, safe = model.forward, FixedRho(config.min_p) if config.min_p else None
        dtype = torch.bfloat16 if config.bf16 and not config.cast_lm_head_to_fp32 else torch.float32
        options = {"safe": safe, "temperature": config.temperature, "product_dtype": dtype}

        @wraps(theirs)  # `generate` inspects its signature
        def forward(*inputs, fused_lm_head=False, **kwargs):
            if not fused_lm_head:
                return theirs(*inputs, **kwargs)
            scored_BL = (target_BL := kwargs.pop("labels")[:, 1:]) != -100
            hidden_BLH = model.base_model(*inputs, **kwargs, use_cache=False).last_hidden_state[:, :-1]
            with utils.maybe_gather_lm_head_ctx(weight := model.get_output_embeddings().weight):
                # The weight must stay whole until the backward pass: FSDP holds a shard of it, and ZeRO-3 (which sets
                # ds_id) empties it again.
                whole_VH = weight.full_tensor() if isinstance(weight, DTensor) else weight
                whole_VH = weight.clone() if hasattr(weight, "ds_id") else whole_VH
                found = token_statistics(hidden_BLH[scored_BL], whole_VH, target_BL[scored_BL], **options)
            # A constant outside V_S, where the gradient would change the probabilities of all tokens inside.
            log_prob_N = found.pruned_log_prob.where(found.target_in_safe, MASK_LOGIT)
            of_tokens = (log_prob_N, found.pruned_entropy, found.target_in_safe, found.pruned_sum_p_squared)
            log_prob_BL, entropy_BL, *others = (unflatten(values_N, scored_BL) for values_N in of_tokens)
            self._scored.append(others)
            return utils.FusedCausalLMOutput(log_probs=log_prob_BL, entropy=entropy_BL)

        model.forward = forward

    def _sampler(self, model):
        """Return the sampling settings besides min_p and temperature that change the distribution of responses."""
        config = self.args
        asked = {name: getattr(config, name) for name in ASKED}
        asked |= {"structured_outputs": config.vllm_structured_outputs_regex} | (config.generation_kwargs or {})
        if not self.use_vllm and self.rollout_func is None:
            # Settings that TRL leaves open, transformers takes from the model's generation config or sets itself.
            own = {name: vars(model.generation_config).get(name) for name in vars(GenerationConfig())}
            own = {name: value for name, value in own.items() if value is not False}
            given = ({"top_k": 50}, own, {"do_sample": True}, asked)
            asked = {name: value for part in given for name, value in part.items() if value is not None}
        known = OFF | {"min_p": config.min_p, "temperature": config.temperature or None}
        return {
            name: value
            for name, value in asked.items()
            if name not in HARMLESS and value is not None and value != known.get(name)
        }

    def _calculate_rewards(self, *args, **kwargs):
        self._rewards = super()._calculate_rewards(*args, **kwargs)
        return self._rewards

    def _score(self, model, inputs, **options):
        """Return TRL's scores of the completions' tokens, whether they are in V_S, and Σp² over V_S, each (B, T)."""
        both = [torch.cat([inputs[f"prompt_{of}"], inputs[f"completion_{of}"]], dim=1) for of in ("ids", "mask")]
        length = inputs["completion_ids"].shape[1]
        self._scored.clear()
        scores = super()._get_per_token_logps_and_entropies(model, *both, length, **options)
        return scores, *(torch.cat(parts)[:, -length:] for parts in zip(*self._scored, strict=True))

    def _get_per_token_logps_and_entropies(self, *args, **kwargs):
        now, self._now = self._now, None
        return now or super()._get_per_token_logps_and_entropies(*args, **kwargs)

    def _compute_loss(self, model, inputs):
        # The log-prob of a token that has left V_S since the rollout is a constant and must not enter any mean.
        self._now, safe_BT, _ = self._score(model, inputs, compute_entropy=True)
        return super()._compute_loss(model, inputs | {"tool_mask": inputs["tool_mask"] * safe_BT})

    def _generate_and_score_completions(self, inputs):
        made = super()._generate_and_score_completions(inputs)
        mode = "train" if self.model.training else "eval"
        group = self.num_generations if mode == "train" else self.num_generations_eval
        count = len(made["completion_ids"])
        if self.advantage and count % group:
            raise DvpError(f"advantage: expected groups of {group} in each process, got {count} responses")
        mask_BT = (made["completion_mask"] * made.get("tool_mask", 1)).bool()
        size = getattr(self.args, f"per_device_{mode}_batch_size")
        with torch.no_grad():
            (old_BT, *_), safe_BT, squares_BT = self._score(self.model, made, batch_size=size)
        sampled_BT = made.get("sampling_per_token_logps")
        if sampled_BT is None and (self.correction != ImportanceRule() or self.rollouts):
            raise DvpError("correction, rollouts: expected the sampler's log-probs, from use_vllm or a rollout_func")
        if self.rollouts:
            self._dump(mode, inputs, made | {"old_per_token_logps": old_BT, "tool_mask": safe_BT.long()}, mask_BT)
        known_BT = None if sampled_BT is None else mask_BT & safe_BT & ~sampled_BT.isnan()
        # As in TRL, the ratio is 1 where vLLM reports no log-prob.
        sampled_BT = old_BT if sampled_BT is None else old_BT.where(sampled_BT.isnan(), sampled_BT)
        made |= {"sampling_per_token_logps": sampled_BT, "old_per_token_logps": old_BT}
        rewards_BR = self._rewards[self.accelerator.process_index * count :][:count]
        graded_B = ~rewards_BR.isnan().all(dim=1)
        rewards_B = (rewards_BR * self.reward_weights.to(rewards_BR)).nansum(dim=1).where(graded_B, torch.nan)
        batch = Batch(made["completion_ids"], mask_BT & graded_B[:, None])
        rollout = Rollout(batch, sampled_BT, rewards_B, truncated_B=torch.zeros_like(graded_B))
        statistics = {"pruned_log_prob": old_BT, "target_in_safe": safe_BT, "pruned_sum_p_squared": squares_BT}
        advantage = ADVANTAGES.get(self.advantage, lambda _: made["advantages"][:, None])
        update = make_update(rollout, statistics, importance=self.correction, advantage=advantage, group_size=group)
        self._record(mode, update.weights.kept_B[graded_B], mean="mismatch/kept")
        self._record(mode, ~safe_BT[mask_BT], mean="mismatch/outside_safe")
        if known_BT is not None:
            apart, ratio = "sampling/sampling_logp_difference", "sampling/importance_sampling_ratio"
            self._record(mode, (old_BT - sampled_BT)[known_BT].abs(), mean=f"{apart}/mean", max=f"{apart}/max")
            weight_BT = update.weights.weight_BT
            weight_N = weight_BT[batch.response_BT] if self.correction.by_token else weight_BT.amax(dim=1)[graded_B]
            self._record(mode, weight_N, min=f"{ratio}/min", mean=f"{ratio}/mean", max=f"{ratio}/max")
        if self.advantage:
            # In its table of completions, replace TRL's advantages by each response's mean.
            mean_B, shown = update.advantage_BT.sum(dim=1) / mask_BT.sum(dim=1).clamp(min=1), self._logs["advantages"]
            mean_B = self.accelerator.gather(mean_B).tolist()
            for _ in range(min(len(mean_B), len(shown))):
                shown.pop()
            shown.extend(mean_B)
        # The mask also excludes tokens outside V_S from ratios of whole sequences and from entropies.
        return made | {"advantages": update.coefficients() * count, "tool_mask": (mask_BT & safe_BT).long()}

    def _record(self, mode, values_N, **names):
        """Log the mean, min and max over all processes' values, each under the name given for it."""
        values_N = values_N.float()
        least, largest = values_N.aminmax() if len(values_N) else (values_N.new_tensor(math.nan),) * 2
        of_process = torch.stack([values_N.sum(), values_N.new_tensor(len(values_N)), least, largest])
        total_P, count_P, least_P, largest_P = self.accelerator.gather(of_process[None]).T
        found = {"mean": total_P.sum() / count_P.sum(), "min": utils.nanmin(least_P), "max": utils.nanmax(largest_P)}
        for statistic, name in names.items():
            self._metrics[mode][name].append(found[statistic].item())

    def _dump(self, mode, inputs, made, mask_BT):
        """Append all processes' responses to the file of rollouts, without padding and the output of tools."""
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
