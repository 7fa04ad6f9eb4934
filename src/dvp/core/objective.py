"""Policy-gradient losses with stop-gradient importance weights (docs/method.md, Theory 4 [P Thm 5.3], and "Losses").

There are two separate ratios: the weights correct the engine for the trainer, π_old/π_infer, and are constants
(`dvp.core.importance`); the losses clip what the optimiser changed since the rollout, π_θ/π_old. On the first
optimiser step on a batch the latter is 1.

Rejected tokens are cut out of the graph instead of being multiplied by zero: 0 · NaN is NaN, in the value and in the
gradient.

Shape suffixes: B responses, T tokens, N flattened tokens, V vocabulary, H hidden, G group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, get_args

from pydantic import Field

from dvp.core.lazy import torch
from dvp.core.limits import LOG_RATIO_CLAMP
from dvp.strict import Fraction, Tagged


@dataclass(frozen=True, eq=False)
class Tokens:
    """The inputs of a loss, each (B, T)."""

    log_prob_BT: torch.Tensor
    """log π_θ (nats), with gradient; 0 where not active."""
    log_ratio_BT: torch.Tensor
    """log π_θ − log π_old, with gradient; 0 where not active."""
    coefficient_BT: torch.Tensor
    """w · A, a constant; 0 where not active."""
    active_BT: torch.Tensor
    """bool: a token of the response that is not rejected."""


class LossRule(Tagged):
    """Settings of a loss: its kind, and how far π_θ/π_old may move from 1."""

    has_ratio: ClassVar[bool] = True
    """Whether it has the ratio to the policy that the rollout was made with."""
    by_token: ClassVar[bool] = True
    """Whether the tokens of a response may have different weights and advantages."""

    def terms(self, tokens: Tokens) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the terms that are summed and maximised, with gradient, and where the ratio was cut.

        The latter is bool and broadcasts over the tokens.
        """
        raise NotImplementedError


class Reinforce(LossRule):
    """A log π_θ, by token."""

    has_ratio = False
    kind: Literal["reinforce"] = "reinforce"

    def terms(self, tokens: Tokens) -> tuple[torch.Tensor, torch.Tensor]:
        return tokens.coefficient_BT * tokens.log_prob_BT, torch.zeros_like(tokens.active_BT)


Low = Annotated[Fraction, Field(description="The ratio's lower bound is 1 − clip_low; 1 sets none.")]
High = Annotated[float, Field(ge=0, description="The ratio's upper bound is 1 + clip_high.")]


class _Clipped(LossRule):
    kind: str
    clip_low: Low
    clip_high: High


class Ppo(_Clipped):
    """The clipped ratio, by token, arXiv 1707.06347."""

    kind: Literal["ppo"] = "ppo"
    clip_low: Low = 0.2
    clip_high: High = 0.2

    def terms(self, tokens: Tokens) -> tuple[torch.Tensor, torch.Tensor]:
        return _clipped_term(self, tokens.log_ratio_BT, tokens.coefficient_BT)


class Gspo(_Clipped):
    """The clipped geometric mean of a sequence's token ratios, arXiv 2507.18071."""

    by_token = False
    kind: Literal["gspo"] = "gspo"
    clip_low: Low = 3e-4
    clip_high: High = 4e-4

    def terms(self, tokens: Tokens) -> tuple[torch.Tensor, torch.Tensor]:
        active_BT = tokens.active_BT
        # All active tokens of a sequence have the same weight and advantage: take the first one's.
        first_B1 = active_BT.float().argmax(dim=1, keepdim=True)
        coefficient_B1 = tokens.coefficient_BT.gather(1, first_B1)
        log_ratio_B1 = tokens.log_ratio_BT.sum(dim=1, keepdim=True) / active_BT.sum(dim=1, keepdim=True).clamp(min=1)
        return _clipped_term(self, log_ratio_B1, coefficient_B1)


class Cispo(_Clipped):
    """log π_θ, by token, times the truncated ratio as a constant.

    arXiv 2506.13585 sets no lower bound and prints no upper one; ScaleRL (arXiv 2510.13786) caps the ratio at 5.
    """

    kind: Literal["cispo"] = "cispo"
    clip_low: Low = 1.0
    clip_high: High = 4.0

    def terms(self, tokens: Tokens) -> tuple[torch.Tensor, torch.Tensor]:
        ratio_BT = tokens.log_ratio_BT.detach().clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP).exp()
        truncated_BT = ratio_BT.clamp(1.0 - self.clip_low, 1.0 + self.clip_high)
        clipped_BT = (truncated_BT != ratio_BT) | (tokens.log_ratio_BT.abs() > LOG_RATIO_CLAMP)
        return tokens.coefficient_BT * truncated_BT * tokens.log_prob_BT, clipped_BT


Loss = Annotated[Reinforce | Ppo | Gspo | Cispo, Field(discriminator="kind")]
"""Every kind of loss that an experiment can ask for."""

LOSSES: dict[str, LossRule] = {kind().kind: kind() for kind in get_args(get_args(Loss)[0])}
LOSSES["clip_higher"] = Ppo(clip_high=0.28)  # DAPO, arXiv 2503.14476
"""The losses by name, each kind under its own, with their published clips; an experiment can change them."""


@dataclass(frozen=True, eq=False)
class PolicyLoss:
    """The loss of some responses, to be minimised."""

    loss: torch.Tensor
    """Scalar with gradient; exactly 0 with zero gradients when every token is rejected."""
    clipped_BT: torch.Tensor
    """bool: the ratio was cut, so that no gradient flows (ppo, gspo) or a smaller one (cispo). A ratio past a bound on
    the side on which ppo and gspo do not clip (above for a negative advantage, below for a positive one) does not
    count; one held at e^±20 does. False at rejected tokens; for gspo the same at all tokens of a sequence."""


def policy_loss(
    rule: LossRule,
    log_prob_BT: torch.Tensor,
    old_log_prob_BT: torch.Tensor,
    weight_BT: torch.Tensor,
    advantage_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    denominator: int,
) -> PolicyLoss:
    """Return the loss −(1/denominator) Σ_i Σ_t stopgrad(w_it) · ℓ_it over the tokens that are not rejected.

    With r = π_θ/π_old:

        reinforce  ℓ_it = A_it log π_θ
        ppo        ℓ_it = min(r A, clip(r, 1 − clip_low, 1 + clip_high) A)
        cispo      ℓ_it = stopgrad(clip(r, 1 − clip_low, 1 + clip_high)) · A log π_θ
        gspo       one term per sequence, as ppo's with s = exp(mean_t log r) for r

    At r = 1 the gradients of reinforce, ppo and cispo are the same. The sum over a sequence is not divided by its
    length: that is ∇log p of the sequence, and any other division would favour short or long answers. Log-ratios are
    clamped to ±20 before exp.

    Args:
        log_prob_BT: log π_θ of the sampled tokens (nats), with gradient; non-finite values are harmless
            wherever the weight is 0 or the mask is False, here and in the other tensors.
        old_log_prob_BT: log π_old of these tokens, under the trainer's weights at the rollout; not used by reinforce.
        weight_BT: importance weights ≥ 0, 0 meaning rejected; no gradient flows through them.
        advantage_BT: one advantage per token; no gradient flows through them.
        mask_BT: bool, True at the response's tokens.
        denominator: `ImportanceWeights.denominator` of the whole batch, since micro-batches and ranks share it; > 0,
            as a step that keeps no response is skipped.

    For gspo a sequence has one weight (level none, sequence or geometric) and one advantage. Tokens of weight 0 are
    left out of s, so that those outside V_S can be zeroed here too.
    """
    active_BT = mask_BT & (weight_BT != 0)
    log_prob_BT = torch.where(active_BT, log_prob_BT, 0.0)
    coefficient_BT = torch.where(active_BT, weight_BT * advantage_BT, 0.0).detach()
    if not active_BT.any():
        return PolicyLoss(-(coefficient_BT * log_prob_BT).sum() / denominator, active_BT)
    log_ratio_BT = log_prob_BT - torch.where(active_BT, old_log_prob_BT, 0.0).detach()
    term, clipped = rule.terms(Tokens(log_prob_BT, log_ratio_BT, coefficient_BT, active_BT))
    return PolicyLoss(-term.sum() / denominator, clipped & active_BT)


def gradient_at_rollout(
    rule: LossRule, weight_BT: torch.Tensor, advantage_BT: torch.Tensor, mask_BT: torch.Tensor, denominator: int
) -> torch.Tensor:
    """Return ∂ loss / ∂ log π_θ of each token at π_θ = π_old, (B, T). For reinforce it is the same at any π_θ.

    Arguments as in `policy_loss`.
    """
    log_prob_BT = torch.zeros_like(weight_BT, requires_grad=True)
    loss = policy_loss(rule, log_prob_BT, log_prob_BT, weight_BT, advantage_BT, mask_BT, denominator).loss
    return torch.autograd.grad(loss, log_prob_BT)[0]


def _clipped_term(
    rule: _Clipped, log_ratio: torch.Tensor, coefficient: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return min(r c, clip(r) c) with its gradient in r, and where that is cut off; c = w · A is a constant."""
    ratio = log_ratio.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP).exp()
    # The minimum is the clipped term exactly where r has moved past its bound in the advantage's direction.
    stopped = torch.where(
        coefficient > 0, ratio > 1.0 + rule.clip_high, (coefficient < 0) & (ratio < 1.0 - rule.clip_low)
    )
    bounded = torch.where(stopped, ratio.clamp(1.0 - rule.clip_low, 1.0 + rule.clip_high), ratio)
    return coefficient * bounded, stopped | (log_ratio.abs() > LOG_RATIO_CLAMP)
