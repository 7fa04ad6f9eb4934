"""Read-outs of the train/inference mismatch (docs/method.md, "Diagnostics").

Every statistic uses the unclamped, untruncated ratios r = exp(log_ratio), in float64, where log_ratio is log p − log q
of tokens sampled from q, and d = −log_ratio: these read-outs watch exactly what the corrections cut off.

Shape suffixes: B responses, T tokens, N flattened tokens, V vocabulary, H hidden, G group.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from dvp.core.kept_sets import KeptSets
from dvp.core.limits import MAX_EXPONENT

if TYPE_CHECKING:
    from dvp.core.batch import Rollout
    from dvp.core.update import Update

LOW_RATIO = 1e-4
# A sampled token with p below this counts as tail: there the factor 1 − p of the bounds is practically 1.
TAIL_PROBABILITY = 1e-2


@torch.no_grad()
def mismatch_metrics(
    log_ratio_BT: torch.Tensor, mask_BT: torch.Tensor, pruned_BT: torch.Tensor | None = None
) -> dict[str, float]:
    """Measure how far the trainer's policy p is from the engine's q on one batch.

    Args:
        log_ratio_BT: log p − log q of the sampled tokens (nats); any value, NaN too, where mask_BT is False.
        mask_BT: bool, True at the response's tokens that have a ratio.
        pruned_BT: bool, True at the response's tokens with p = 0, whose log-ratio is ignored; None: there are none.
            At least one token must be in one of the two masks.

    Returns:
        Token level, over the masked tokens:
            k1: mean(log q − log p) = mean(d), an unbiased estimate of KL(q‖p), of either sign.
            k3: mean(r − log r − 1), an estimate of it that is never negative but for rounding; too low by the mass
                that p has where q has none, if both are pruned and V_S is not within V'_S.
            chi2: mean(r²) − 1, over the pruned tokens too, whose r is 0.
            max_abs_log_ratio, ratio_outside_0.9_1.1 (a fraction of the tokens).
        Sequence level, over the sequences that have a token of either kind:
            ess: (Σw)² / Σw² / count with w = ∏r, 0 with a pruned token: the effective fraction of the sample.
            ratio_below_1e-4_fraction: sequences with any r < 1e-4, whatever veto the run's own rule has.
        Exponents are cut at 700, so the values are finite for finite log-ratios; ess = 0 says that every sequence has
        a pruned token.
    """
    pruned_BT = torch.zeros_like(mask_BT) if pruned_BT is None else pruned_BT
    sequence_B = (mask_BT | pruned_BT).any(dim=1)
    impossible_B = pruned_BT.any(dim=1)[sequence_B]
    log_ratio_BT = torch.where(mask_BT, log_ratio_BT, 0.0).double()[sequence_B]
    log_ratio_N = log_ratio_BT[mask_BT[sequence_B]]

    # Without tokens the sums below are 0, so the divisor does not matter.
    count, every = max(log_ratio_N.numel(), 1), log_ratio_N.numel() + pruned_BT.sum().item()
    # expm1 keeps the digits of ratios near 1; dividing before the sum, e^700s cannot add up to infinity.
    k3_N = log_ratio_N.clamp(max=MAX_EXPONENT).expm1() - log_ratio_N
    chi2_N = (2.0 * log_ratio_N).clamp(max=MAX_EXPONENT).expm1()
    outside_N = (log_ratio_N < math.log(0.9)) | (log_ratio_N > math.log(1.1))
    # The effective sample size does not depend on the weights' scale, so no exponent needs cutting.
    log_weight_B = torch.where(impossible_B, -torch.inf, log_ratio_BT.sum(dim=1))
    weight_B = (log_weight_B - log_weight_B.max()).exp()
    ess = 0.0 if impossible_B.all() else (weight_B.sum().square() / weight_B.square().sum() / len(weight_B)).item()
    low_B = impossible_B | (log_ratio_BT < math.log(LOW_RATIO)).any(dim=1)
    return {
        "k1": -(log_ratio_N.sum() / count).item(),
        "k3": (k3_N / count).sum().item(),
        "chi2": (chi2_N / every).sum().item() - pruned_BT.sum().item() / every,
        "ess": min(ess, 1.0),
        "max_abs_log_ratio": log_ratio_BT.abs().max().item(),
        "ratio_outside_0.9_1.1": outside_N.sum().item() / count,
        "ratio_below_1e-4_fraction": low_B.double().mean().item(),
    }


def rollout_metrics(rollout: Rollout, statistics: dict[str, torch.Tensor], update: Update) -> dict[str, float]:
    """Compute all read-outs of a rollout before the trainer moves; arguments as in `make_update`, and its result."""
    batch = rollout.batch
    mask_BT, safe_BT = batch.response_BT, statistics["target_in_safe"]
    log_ratio_BT = statistics["pruned_log_prob"] - rollout.infer_log_prob_BT
    tokens, dropped_B = mask_BT.sum().item(), update.weights.dropped_B

    rewards_PG = rollout.rewards_B.view(-1, update.responses.group_size)
    first_P1 = rewards_PG.gather(1, (~rewards_PG.isnan()).long().argmax(dim=1, keepdim=True))

    def mean(name: str) -> float:
        return statistics[name][mask_BT].float().mean().item()

    none_B = torch.zeros_like(update.weights.kept_B)  # other kinds of correction may have other rules
    return {
        # Prompts whose responses differ in reward: the policy learns nothing from the others.
        "mixed_groups_fraction": ((rewards_PG != first_P1) & ~rewards_PG.isnan()).any(dim=1).float().mean().item(),
        # Between the policies that were sampled: pruned ones if the run has a safe vocabulary, else full ones. The
        # log-prob of a token outside V_S is a convention; such tokens are counted below, not averaged here.
        **mismatch_metrics(log_ratio_BT, mask_BT & safe_BT, mask_BT & ~safe_BT),
        "tail_mismatch": tail_mismatch(log_ratio_BT, statistics["log_prob"], mask_BT & safe_BT),
        "entropy": mean("entropy"),
        "pruned_entropy": mean("pruned_entropy"),
        "sum_p_squared": mean("sum_p_squared"),
        **pruned_mass_metrics(statistics["pruned_mass"], mask_BT),
        "safe_size": mean("safe_size"),
        "outside_safe_fraction": (mask_BT & ~safe_BT).sum().item() / tokens,
        "kept_fraction": update.weights.kept_B.float().mean().item(),
        # Rejected because of a single ratio, below the veto or outside the trust region.
        "vetoed_fraction": (dropped_B.get("veto", none_B) | dropped_B.get("trust_region", none_B))
        .float()
        .mean()
        .item(),
        "filtered_fraction": dropped_B.get("k3", none_B).float().mean().item(),
        "masked_fraction": (mask_BT & (update.weight_BT == 0)).sum().item() / tokens,
        **({} if batch.kept is None else set_metrics(rollout, statistics)),
    }


@torch.no_grad()
def set_metrics(rollout: Rollout, statistics: dict[str, torch.Tensor]) -> dict[str, float]:
    """Compute the read-outs that need the engine's sets (docs/method.md, "log Z' of the engine").

    Returns:
        unpruned_k3, unpruned_ess: as in `mismatch_metrics`, for the unpruned p/q, where log q = log q^mp + log Z'. The
            tokens are sampled from q^mp and say nothing about q outside its sets.
        engine_pruned_mass_mean: 1 − Z'.
        set_overlap_mean: |V_S ∩ V'_S| / |V_S ∪ V'_S| of the rule's sets on the trainer's and on the engine's logits.
        sets_bytes: bytes of the ids that are kept for a step.
    """
    mask_BT, sets = rollout.batch.response_BT, KeptSets.cat(rollout.batch.kept)
    log_q_BT = rollout.infer_log_prob_BT.clone()
    log_q_BT[mask_BT] += sets.log_mass_N
    unpruned = mismatch_metrics(statistics["log_prob"] - log_q_BT, mask_BT)
    return {
        "unpruned_k3": unpruned["k3"],
        "unpruned_ess": unpruned["ess"],
        "engine_pruned_mass_mean": -sets.log_mass_N.double().expm1().mean().item(),
        "set_overlap_mean": statistics["set_overlap"][mask_BT].mean().item(),
        "sets_bytes": sets.ids_M.itemsize * sets.sizes_N.sum().item(),
    }


@torch.no_grad()
def tail_mismatch(log_ratio_BT: torch.Tensor, log_prob_BT: torch.Tensor, mask_BT: torch.Tensor) -> float:
    """Return the mean |d| (nats) of sampled tokens that the trainer finds unlikely, p < 0.01; 0 if there are none.

    Arguments as in `mismatch_metrics`; log_prob_BT is log p over the full vocabulary.
    """
    d_N = log_ratio_BT[mask_BT & (log_prob_BT < math.log(TAIL_PROBABILITY))].double().abs()
    return d_N.mean().item() if len(d_N) else 0.0


@torch.no_grad()
def pruned_mass_metrics(pruned_mass_BT: torch.Tensor, mask_BT: torch.Tensor) -> dict[str, float]:
    """Estimate what pruning removes: |J_mp − J| ≤ R_max · E[Σ_t (1 − Z_t)] for R in [0, R_max], twice that for ±R_max.

    (docs/method.md, Theory 5.) The bound's expectation is over the trainer's responses, full or pruned; measured is the
    mean over the engine's responses. It is therefore an estimate, as good as the two agree, and not a bound.

    pruned_mass_BT is 1 − Z, with any value where mask_BT is False. Returns its mean and maximum over tokens, and as
    ..._per_response_... those of Σ_t (1 − Z_t) over the sequences that have a token.
    """
    mass_BT = torch.where(mask_BT, pruned_mass_BT, 0.0).double()[mask_BT.any(dim=1)]
    mass_B = mass_BT.sum(dim=1)
    return {
        "pruned_mass_mean": (mass_B.sum() / mask_BT.sum()).item(),
        "pruned_mass_max": mass_BT.max().item(),
        "pruned_mass_per_response_mean": mass_B.mean().item(),
        "pruned_mass_per_response_max": mass_B.max().item(),
    }
