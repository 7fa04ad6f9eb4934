"""Tokens that take no part in the update because of the sign of their advantage (docs/method.md, "Masks").

An importance correction (dvp.core.importance) rejects before advantages are computed, so that OTB's baseline can leave
rejected responses out. A mask uses the advantage and so comes after it: it changes no baseline and no denominator.

Shape suffixes: B responses, T tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from dvp.core.lazy import no_grad, torch
from dvp.strict import PositiveFloat, Tagged

if TYPE_CHECKING:
    from dvp.core.batch import Rollout


class MaskRule(Tagged):
    """Settings of a mask."""

    by_token: ClassVar[bool] = True
    """Whether it may leave out some tokens of a response and keep others."""

    def keeps(self, rollout: Rollout, statistics: dict[str, torch.Tensor], advantage_BT: torch.Tensor) -> torch.Tensor:
        """Return which tokens stay, bool (B, T); any value outside the response. `statistics` as in `make_update`."""
        raise NotImplementedError


class OffPolicyMask(MaskRule):
    """Leaves out a bad response that the engine made more likely than the trainer has it.

    "Off-policy sequence masking", DeepSeek-V3.2 (arXiv 2512.02556), section 3.1: M = 0 where the advantage is negative
    and the mean of log q − log p over the response's tokens exceeds δ. Where tokens have advantages of their own, their
    mean decides.
    """

    by_token = False
    kind: Literal["off_policy"] = "off_policy"
    delta: PositiveFloat
    """δ, nats per token."""

    @no_grad
    def keeps(self, rollout: Rollout, statistics: dict[str, torch.Tensor], advantage_BT: torch.Tensor) -> torch.Tensor:
        mask_BT = rollout.batch.response_BT
        length_B = mask_BT.sum(dim=1).clamp(min=1)
        k1_BT = torch.where(mask_BT, rollout.infer_log_prob_BT - statistics["pruned_log_prob"], 0.0)
        k1_B = k1_BT.double().sum(dim=1) / length_B
        advantage_B = torch.where(mask_BT, advantage_BT, 0.0).double().sum(dim=1)
        return ~((advantage_B < 0) & (k1_B > self.delta))[:, None].expand_as(mask_BT)


class DivergenceMask(MaskRule):
    """Leaves out a token at which the policies are far apart already and which would drive them further apart.

    DPPO with the binary total variation (arXiv 2602.04879): far apart is |p(y) − q(y)| > δ; further apart means A > 0
    with p > q, or A < 0 with p < q. With `importance: {level: token, upper: 20}` it is the method as published, where
    δ = 0.15.
    """

    kind: Literal["divergence"] = "divergence"
    delta: Annotated[float, Field(gt=0, lt=1)]
    """δ, a probability."""

    @no_grad
    def keeps(self, rollout: Rollout, statistics: dict[str, torch.Tensor], advantage_BT: torch.Tensor) -> torch.Tensor:
        ahead_BT = statistics["pruned_log_prob"].double().exp() - rollout.infer_log_prob_BT.double().exp()
        return ~((ahead_BT.abs() > self.delta) & (ahead_BT.sign() * advantage_BT.sign() > 0))


class SpuriousMask(MaskRule):
    """Leaves out an unlikely token of a good response where the policy was nearly certain of another one.

    "Silencing spurious tokens", STAPO (arXiv 2602.15620): A > 0, p(y) < τ_p, and an entropy among the lowest of the
    batch. A summary of it names 0.01 and the lowest 5 % as examples.
    """

    kind: Literal["spurious"] = "spurious"
    probability: Annotated[float, Field(gt=0, lt=1)]
    """τ_p."""
    entropy_quantile: Annotated[float, Field(gt=0, le=1)]
    """The share of the batch's tokens, those of lowest entropy, among which a token counts as spurious."""

    @no_grad
    def keeps(self, rollout: Rollout, statistics: dict[str, torch.Tensor], advantage_BT: torch.Tensor) -> torch.Tensor:
        mask_BT, entropy_BT = rollout.batch.response_BT, statistics["pruned_entropy"]
        entropy_N = entropy_BT[mask_BT]
        # Not torch.quantile, which takes 16 million values at most.
        rank = max(1, round(self.entropy_quantile * len(entropy_N)))
        certain_BT = entropy_BT <= entropy_N.kthvalue(rank).values
        unlikely_BT = statistics["pruned_log_prob"].double().exp() < self.probability
        return ~((advantage_BT > 0) & unlikely_BT & certain_BT)


Mask = Annotated[OffPolicyMask | DivergenceMask | SpuriousMask, Field(discriminator="kind")]
"""Every mask that an experiment can ask for."""
