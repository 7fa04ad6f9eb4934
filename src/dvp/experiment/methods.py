"""A method as typed, strict models: an advantage, a safe vocabulary, an importance correction and a loss.

These are the settings; the mathematics is in dvp.core, and dvp.training.method turns one into the other. (They are
apart because reading an experiment must not take the seconds that importing torch takes.)
"""

from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from dvp.strict import Positive, PositiveFloat, Strict

ImportancePreset = Literal["tis", "seq_tis", "mis", "icepop", "geo_rs", "k3", "veto"]
LossKind = Literal["reinforce", "ppo", "clip_higher", "gspo", "cispo"]
Advantage = Literal["rloo", "grpo", "dr_grpo", "opo", "reinforce_pp", "otb", "otb_leave_one_out"]
Rho = Annotated[float, Field(gt=0, lt=1)]
# The loss of a sequence has one weight and one advantage: see GSPO in dvp.core.objective.
TOKEN_LEVEL_ADVANTAGES = ("otb", "otb_leave_one_out")


class Importance(Strict):
    """Importance correction by its mathematics (dvp.core.importance.ImportanceRule, whose defaults fill the gaps)."""

    preset: ImportancePreset | None = None
    """A named correction; what stands beside it changes it."""
    level: Literal["none", "token", "sequence", "geometric"] | None = None
    action: Literal["truncate", "mask"] | None = None
    lower: Annotated[float, Field(ge=0)] | None = None
    upper: Annotated[float, Field(gt=0, allow_inf_nan=True)] | None = None
    veto: Annotated[float, Field(gt=0, lt=1)] | None = None
    """A sequence with any token ratio below this is dropped."""
    k3_max: PositiveFloat | None = None
    """A sequence whose mean of r − log r − 1 exceeds this is dropped."""
    denominator: Literal["all", "kept"] | None = None
    """The loss is a mean over all responses, or over those that were kept."""
    self_normalise: bool | None = None
    """Weights are divided by their mean."""

    @model_validator(mode="after")
    def _bounds(self) -> "Importance":
        if self.lower is not None and self.upper is not None and self.lower > self.upper:
            raise ValueError(f"lower ({self.lower}) must not exceed upper ({self.upper})")
        return self


class Loss(Strict):
    """The policy loss (dvp.core.objective.LOSSES): the ratio π_θ/π_old is held in [1 − clip_low, 1 + clip_high]."""

    kind: LossKind
    clip_low: PositiveFloat | None = None
    clip_high: PositiveFloat | None = None

    @model_validator(mode="after")
    def _clips(self) -> "Loss":
        if self.kind == "reinforce" and (self.clip_low, self.clip_high) != (None, None):
            raise ValueError("reinforce takes no clip_low and no clip_high")
        return self


class FixedSafe(Strict):
    """The paper's rule: min-p with the grid's ρ on both sides."""

    rule: Literal["fixed"]


class MarginSafe(Strict):
    """One side prunes at ρ, the other at ρ·e^(−2ε̂): it has all that the first has if no logit is off by more than ε̂."""

    rule: Literal["margin"]
    epsilon: Annotated[float, Field(ge=0)]
    """ε̂, nats."""
    side: Literal["trainer", "engine"] = "trainer"
    """Which side has the margin: the trainer's leaves no sampled token outside V_S, the engine's no bias."""


class MassBudgetSafe(Strict):
    """Each state loses at most δ/T of its probability, T being training.max_response_tokens. Takes no ρ."""

    rule: Literal["mass_budget"]
    delta: Annotated[float, Field(gt=0)]
    """δ, probability a response may lose; the bias of J is at most R_max times it."""


class EntropySafe(Strict):
    """log ρ(s) = log ρ + alpha · (target_entropy − H(s)), held within [lowest, highest]."""

    rule: Literal["entropy"]
    alpha: float
    target_entropy: Annotated[float, Field(ge=0)]
    """H̄, nats."""
    lowest: Rho
    highest: Rho


class FeedbackSafe(Strict):
    """Starts at ρ; `patience` steps with the signal above `high` multiply it by `factor`, below `low` divide it."""

    rule: Literal["feedback"]
    signal: Literal["k3", "vetoed_fraction", "tail_mismatch"]
    low: Annotated[float, Field(ge=0)]
    high: PositiveFloat
    factor: Annotated[float, Field(gt=1)]
    lowest: Rho
    highest: Rho
    patience: Positive


SafeVocabulary = Annotated[
    FixedSafe | MarginSafe | MassBudgetSafe | EntropySafe | FeedbackSafe, Field(discriminator="rule")
]


class Method(Strict):
    """A name for {advantage, safe vocabulary, importance correction, loss}."""

    label: str
    """How figures and tables call it."""
    advantage: Advantage
    safe_vocabulary: SafeVocabulary | None = None
    """To what trainer and engine are restricted; None restricts neither."""
    importance: Importance = Importance()
    loss: Loss = Loss(kind="reinforce")

    @field_validator("safe_vocabulary", "importance", "loss", mode="before")
    @classmethod
    def _named(cls, value: Any, info: ValidationInfo) -> Any:
        """A bare name says it all: `loss: ppo`."""
        key = {"safe_vocabulary": "rule", "importance": "preset", "loss": "kind"}[info.field_name]
        return {key: value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _one_value_a_sequence(self) -> "Method":
        by_token = self.importance.preset in ("tis", "icepop") if self.importance.level is None else None
        if self.loss.kind == "gspo" and (by_token or self.importance.level == "token"):
            raise ValueError("loss gspo takes an importance correction of level none, sequence or geometric")
        if self.loss.kind == "gspo" and self.advantage in TOKEN_LEVEL_ADVANTAGES:
            raise ValueError(f"loss gspo takes one advantage a sequence; {self.advantage} gives one a token")
        return self

    @property
    def takes_rho(self) -> bool:
        """Whether ρ comes from the grid."""
        return self.safe_vocabulary is not None and not isinstance(self.safe_vocabulary, MassBudgetSafe)
