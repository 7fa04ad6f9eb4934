"""Importance weights between the trainer's and the engine's policy (docs/method.md, "Importance corrections").

log_ratio = log p_train(y_t) − log q_infer(y_t) of the sampled token throughout, with p and q both pruned or
both full. Every named method of the field is a setting of one rule: see `PRESETS`.

Shape suffixes: B responses, T tokens, N flattened tokens, V vocabulary, H hidden, G group.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, model_serializer, model_validator

from dvp.core.lazy import no_grad, torch
from dvp.core.limits import LOG_RATIO_CLAMP, MAX_EXPONENT
from dvp.errors import DvpError
from dvp.strict import PositiveFloat, Strict

if TYPE_CHECKING:
    from dvp.core.batch import Rollout


class CorrectionRule(Strict):
    """The interface of a correction: what the rest of the program asks of it."""

    @property
    def by_token(self) -> bool:
        """Return whether the tokens of a response may have different weights, apart from those that are 0."""
        raise NotImplementedError

    @property
    def corrects(self) -> bool:
        """Return whether updates are for the trainer's policy: weights are its probability over the engine's."""
        return True

    @property
    def family(self) -> str:
        """Return the family whose colour it has in figures: a name in dvp.analysis.looks.FAMILIES, or any other."""
        return "other correction"

    def weights(self, rollout: Rollout, statistics: dict[str, torch.Tensor]) -> ImportanceWeights:
        """Return the weights of a rollout's responses, given the trainer's statistics of their tokens, (B, T)."""
        raise NotImplementedError


class ImportanceRule(CorrectionRule):
    """How a ratio becomes a weight, and which responses are dropped. `ImportanceRule()` corrects nothing.

    Refused are a number out of range and a setting that could have no effect.
    """

    kind: Literal["ratio"] = "ratio"
    level: Literal["none", "token", "sequence", "geometric"] = "none"
    """The ratio: each token's, the product over the sequence, its geometric mean over the sequence's tokens, or none
    (weight 1). It is both what is bounded and the weight."""
    action: Literal["truncate", "mask"] = "truncate"
    """Outside the bounds: cut the ratio to `upper` (truncate), or reject it with weight 0 (mask)."""
    lower: Annotated[float, Field(ge=0)] = 0.0
    """Smallest ratio that `mask` keeps; `truncate` has no lower bound."""
    upper: Annotated[float, Field(gt=0, allow_inf_nan=True)] = math.inf
    """Largest ratio, ≥ lower; infinity means unbounded."""
    veto: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Drop a sequence with any token ratio below this; None never does. One-sided, and at every level."""
    trust_region: Annotated[float, Field(gt=1)] | None = None
    """Drop a sequence with any token ratio above this or below its inverse; None never does. Every level."""
    k3_max: PositiveFloat | None = None
    """Drop a sequence whose mean of r − log r − 1 over its tokens exceeds this; None never does. Every level."""
    denominator: Literal["all", "kept"] = "all"
    """The loss is a mean over all responses, or over those that keep a token."""
    self_normalise: bool = False
    """Divide the weights by their mean, so that they average to 1. The mean is over tokens at token level, else over
    sequences that have a token; of all responses (rejected ones count as 0) or of the kept ones, as `denominator`
    says. Past token level, and with no response empty, the loss is then Σ w ℓ / Σ w with either denominator."""

    @model_validator(mode="after")
    def _has_effect(self) -> ImportanceRule:
        if self.lower > self.upper:
            raise ValueError(f"lower ({self.lower}) must not exceed upper ({self.upper})")
        if self.action == "truncate" and self.lower != 0.0:
            raise ValueError(f"lower: truncate has no lower bound, found {self.lower}; mask has one")
        if self.level == "none" and (self.action != "truncate" or self.upper != math.inf):
            raise ValueError("level: none has no ratio for an action and its bounds; choose another level")
        if self.level == "none" and self.self_normalise:
            raise ValueError("self_normalise: level none has no weights; denominator: kept does what is meant")
        return self

    @model_serializer(mode="wrap")
    def _without_defaults(self, handler: Any) -> dict[str, Any]:
        fields = type(self).model_fields
        return {name: value for name, value in handler(self).items() if name == "kind" or value != fields[name].default}

    @property
    def by_token(self) -> bool:
        return self.level == "token"

    @property
    def corrects(self) -> bool:
        return self.level != "none"

    @property
    def family(self) -> str:
        return f"{self.level}, {self.action}"

    def weights(self, rollout: Rollout, statistics: dict[str, torch.Tensor]) -> ImportanceWeights:
        """Return the weights of a rollout's responses, given the trainer's statistics of their tokens, (B, T).

        Raises:
            DvpError: as `importance_weights`.
        """
        log_ratio_BT = statistics["pruned_log_prob"] - rollout.infer_log_prob_BT
        return importance_weights(log_ratio_BT, rollout.batch.response_BT, self, ~statistics["target_in_safe"])


Correction = ImportanceRule
"""Every kind of correction that an experiment can ask for."""

PRESETS: dict[str, Correction] = {
    "tis": ImportanceRule(level="token", upper=2.0),
    "seq_tis": ImportanceRule(level="sequence", upper=2.0),
    "mis": ImportanceRule(level="sequence", action="mask", lower=0.5, upper=2.0),
    "icepop": ImportanceRule(level="token", action="mask", lower=0.5, upper=5.0),
    "geo_rs": ImportanceRule(level="geometric", action="mask", lower=0.999, upper=1.001),
    "k3": ImportanceRule(k3_max=0.01),
    "veto": ImportanceRule(veto=1e-4),
    "trm": ImportanceRule(trust_region=2.0),
}
"""The named corrections with verl's default bounds; an experiment can change them."""


@dataclass(frozen=True, eq=False)
class ImportanceWeights:
    """The weights of B responses; none carries a gradient."""

    weight_BT: torch.Tensor
    """In the log-ratio's type, ≥ 0; 0 at padding and wherever the token or its sequence was rejected."""
    kept_B: torch.Tensor
    """bool: the sequence has a token that was not rejected, by a ratio of 0 or otherwise. False without tokens."""
    dropped_B: dict[str, torch.Tensor]
    """bool, by rule ("veto", "trust_region", "k3") in the order of application: the rule dropped the sequence."""
    denominator: int
    """Number of responses that the loss is averaged over: B, or that of the kept ones. If it is 0, skip the step."""


@no_grad
def importance_weights(
    log_ratio_BT: torch.Tensor, mask_BT: torch.Tensor, rule: ImportanceRule, impossible_BT: torch.Tensor | None = None
) -> ImportanceWeights:
    """Turn log-ratios into stop-gradient weights.

    Rejection (bounds of `mask`, veto, trust region, K3 filter) uses the unclamped ratios. For the values of weights,
    log-ratios (a token's, or their sum or mean over the sequence) are clamped to ±20 before exp. Bounds are inclusive.
    A batch in which everything is rejected is legal: all weights are 0.

    Args:
        log_ratio_BT: log p − log q of the sampled tokens (nats); any value, NaN too, where mask_BT is False.
        mask_BT: bool, True at the response's tokens.
        rule: the correction. With self_normalise the mean is over this call's responses: pass the whole batch.
        impossible_BT: bool, True at tokens that p cannot give, those outside V_S. Their ratio is 0, whatever
            log_ratio_BT says, and so are their response's product and geometric mean; its K3 is infinite.

    Raises:
        DvpError: a log-ratio inside the mask is NaN or infinite. Neither policy can give a sampled token such a
            log-prob, so one side has an error, which is no mismatch to be corrected.
    """
    bad_BT = mask_BT & ~log_ratio_BT.isfinite()
    if bad_BT.any():
        row, position = bad_BT.nonzero()[0].tolist()
        value = log_ratio_BT[row, position].item()
        raise DvpError(f"log-ratio of response {row}, position {position}: expected a finite number, got {value}")

    # float64: bounds 1e-3 from 1 must not depend on the rounding of a sum over thousands of tokens.
    token_BT = torch.where(mask_BT, log_ratio_BT, 0.0).double()
    if impossible_BT is not None:
        token_BT = token_BT.masked_fill(mask_BT & impossible_BT, -math.inf)
    length_B = mask_BT.sum(dim=1).clamp(min=1)
    # expm1 keeps the digits of ratios near 1.
    k3_B = (token_BT.clamp(max=MAX_EXPONENT).expm1() - token_BT).sum(dim=1) / length_B
    dropped_B = {
        "veto": (token_BT < _log(rule.veto or 0.0)).any(dim=1),
        "trust_region": (token_BT.abs() > _log(rule.trust_region or math.inf)).any(dim=1),
        "k3": k3_B > (math.inf if rule.k3_max is None else rule.k3_max),
    }

    if rule.level == "sequence":
        log_weight_BT = token_BT.sum(dim=1, keepdim=True).expand_as(token_BT)
    elif rule.level == "geometric":
        log_weight_BT = (token_BT.sum(dim=1) / length_B)[:, None].expand_as(token_BT)
    elif rule.level == "token":
        log_weight_BT = token_BT
    else:
        log_weight_BT = torch.zeros_like(token_BT)
    accepted_BT = mask_BT & ~torch.stack([*dropped_B.values()]).any(dim=0)[:, None]
    # A ratio of 0 rejects. Clamped to e^−20, it would keep its response in its group (dvp.core.advantages). A batch
    # without other ratios must not be self-normalised: the mean of its weights is 0.
    accepted_BT &= log_weight_BT > -math.inf
    weight_BT = log_weight_BT.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP).exp()
    if rule.action == "truncate":
        weight_BT = weight_BT.clamp(max=rule.upper)
    else:
        accepted_BT &= (log_weight_BT >= _log(rule.lower)) & (log_weight_BT <= _log(rule.upper))
    weight_BT = torch.where(accepted_BT, weight_BT, 0.0)
    kept_B = accepted_BT.any(dim=1)

    if rule.self_normalise and kept_B.any():
        counted_B = kept_B if rule.denominator == "kept" else mask_BT.any(dim=1)
        if rule.level == "token":
            weight_BT = weight_BT / weight_BT[mask_BT & counted_B[:, None]].mean()
        else:
            weight_BT = weight_BT / weight_BT[counted_B].amax(dim=1).mean()
    return ImportanceWeights(
        weight_BT=weight_BT.to(log_ratio_BT.dtype),
        kept_B=kept_B,
        dropped_B=dropped_B,
        denominator=int(kept_B.sum()) if rule.denominator == "kept" else len(kept_B),
    )


def _log(bound: float) -> float:
    return math.log(bound) if bound > 0.0 else -math.inf
