"""New parts of a method, and a tool's settings: each is put into the file of src/dvp that its comment names."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from dvp.core.advantages import Responses, _centred, _constant, by_response, compares
from dvp.core.batch import Rollout
from dvp.core.importance import CorrectionRule, ImportanceWeights
from dvp.core.lazy import no_grad, torch
from dvp.core.masks import MaskRule
from dvp.core.objective import LossRule, Tokens
from dvp.core.safe_vocabulary import RhoRule, SafeVocabulary
from dvp.experiment.tools import _Tool
from dvp.strict import Positive, PositiveFloat

# core/advantages.py. In an experiment: `advantage: half`.


@compares
@by_response
def half(responses: Responses) -> torch.Tensor:
    """A_i = (R_i − R̄) / 2."""
    return _constant(responses, _centred(responses) / 2)


# core/safe_vocabulary.py, with `ConfidentRule |` first among the alternatives of `Rule`: `safe_vocabulary: confident`.


@dataclass(frozen=True)
class Confident(SafeVocabulary):
    """ρ(s) = ρ · p_max(s): a state that is sure of its token keeps fewer others."""

    rho: float

    def log_rho(self, logits_NV: torch.Tensor) -> torch.Tensor:
        return math.log(self.rho) + logits_NV.float().log_softmax(dim=-1).amax(dim=-1)


class ConfidentRule(RhoRule):
    """ρ(s) = ρ · p_max(s) on both sides."""

    rule: Literal["confident"]

    def safe(self, rho: float | None, max_response_tokens: int) -> Confident:
        return Confident(rho)


# core/importance.py, before `Correction`, which becomes
# `Annotated[ImportanceRule | Smooth, Field(discriminator="kind")]`: `importance: {kind: smooth}`.


class Smooth(CorrectionRule):
    """Weights 2r / (1 + r) of each token's ratio r: bounded by 2, and smooth."""

    kind: Literal["smooth"] = "smooth"

    @property
    def by_token(self) -> bool:
        return True

    def weights(self, rollout: Rollout, statistics: dict[str, torch.Tensor]) -> ImportanceWeights:
        mask_BT = rollout.batch.response_BT
        log_ratio_BT = statistics["pruned_log_prob"] - rollout.infer_log_prob_BT
        weight_BT = torch.where(mask_BT & statistics["target_in_safe"], 2 * log_ratio_BT.sigmoid(), 0.0).detach()
        return ImportanceWeights(weight_BT, (weight_BT > 0).any(dim=1), {}, len(weight_BT))


# core/masks.py, with `TailMask |` first among the alternatives of `Mask`: `mask: {kind: tail, probability: 1e-4}`.


class TailMask(MaskRule):
    """Leaves out every token that the trainer gives less than `probability`."""

    kind: Literal["tail"] = "tail"
    probability: PositiveFloat
    """Below it a token is left out."""

    @no_grad
    def keeps(self, rollout: Rollout, statistics: dict[str, torch.Tensor], advantage_BT: torch.Tensor) -> torch.Tensor:
        return statistics["pruned_log_prob"].exp() >= self.probability


# core/objective.py, with `Squared |` first among the alternatives of `Loss`: `loss: squared`.


class Squared(LossRule):
    """Of each token A (r − (r − 1)² / 2): the ratio r is pulled back to 1."""

    kind: Literal["squared"] = "squared"

    def terms(self, tokens: Tokens) -> tuple[torch.Tensor, torch.Tensor]:
        ratio_BT = tokens.log_ratio_BT.exp()
        pulled_BT = ratio_BT - (ratio_BT - 1.0).square() / 2
        return tokens.coefficient_BT * pulled_BT, torch.zeros_like(tokens.active_BT)


# experiment/tools.py, with `Dictionary |` first among the alternatives of `Tools`: `tools: {kind: dictionary}`.


class Dictionary(_Tool):
    """Spells a word backwards."""

    program = "dvp.tools.dictionary:DictionaryTool"
    kind: Literal["dictionary"]
    longest: Positive = 20
    """Characters of a word that is taken."""
