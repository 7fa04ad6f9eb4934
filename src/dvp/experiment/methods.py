"""A method: an advantage, a safe vocabulary, an importance correction, a mask, a loss and a decay of the learning rate.

Each part is a strict model, or for an advantage a name, that stands in dvp.core beside its mathematics.
"""

from collections.abc import Iterable
from typing import Any, Literal

from pydantic import ValidationInfo, field_validator, model_validator

from dvp.core.advantages import ADVANTAGES, BY_TOKEN
from dvp.core.importance import PRESETS, Correction, ImportanceRule
from dvp.core.length_decay import LengthDecay
from dvp.core.masks import Mask
from dvp.core.objective import LOSSES, Loss, Reinforce
from dvp.core.safe_vocabulary import Rule, SafeVocabularies
from dvp.strict import Line, Strict, optional


class Method(Strict):
    """A name for {advantage, safe vocabulary, importance correction, mask, loss, decay of the learning rate}."""

    label: Line
    """How figures and tables call it."""
    advantage: Literal[tuple(ADVANTAGES)]
    """A name in dvp.core.advantages."""
    safe_vocabulary: Rule | None = None
    """To what trainer and engine are restricted (dvp.core.safe_vocabulary); None restricts neither."""
    importance: Correction = ImportanceRule()
    """dvp.core.importance: a correction by its settings or by the name of a preset, which `preset` changes."""
    mask: Mask | None = optional()
    """dvp.core.masks: tokens that are left out by the sign of their advantage; None leaves none out."""
    loss: Loss = Reinforce()
    """dvp.core.objective: a loss by its settings or by its name."""
    learning_rate_decay: LengthDecay | None = optional()
    """dvp.core.length_decay: a learning rate that falls once responses grow longer; None keeps it."""
    true_norms: bool = optional(False)
    """Whether OTB weighs tokens by the true squared norms of their gradients instead of its proxy: an oracle, which
    `bias` can measure and nothing can train with."""

    @field_validator("safe_vocabulary", "importance", "loss", mode="before")
    @classmethod
    def _spelled_out(cls, value: Any, info: ValidationInfo) -> Any:
        """Expand a name (`mis`, `clip_higher`, `fixed`) into its settings; keys beside a name change these."""
        key, named = {"importance": ("preset", PRESETS), "loss": ("kind", LOSSES)}.get(info.field_name, ("rule", None))
        value = {key: value} if isinstance(value, str) else value
        if key == "preset" and isinstance(value, dict) and key not in value:
            return {"kind": "ratio"} | value
        if named is None or not isinstance(value, dict) or key not in value:
            return value
        name = value[key]
        if not isinstance(name, str) or name not in named:
            raise ValueError(f"no {info.field_name} is called {name!r}; known are {', '.join(sorted(named))}")
        return named[name].model_dump() | {other: given for other, given in value.items() if other != key}

    @model_validator(mode="after")
    def _fits_together(self) -> "Method":
        if self.true_norms and self.advantage not in BY_TOKEN:
            raise ValueError(f"true_norms: expected an advantage that weighs tokens: {', '.join(sorted(BY_TOKEN))}")
        if not self.loss.by_token and self.importance.by_token:
            raise ValueError(f"loss {self.loss.kind} takes a correction of level none, sequence or geometric")
        if not self.loss.by_token and self.advantage in BY_TOKEN:
            raise ValueError(f"loss {self.loss.kind} takes one advantage a sequence; {self.advantage} has one a token")
        return self

    def like(self, other: "Method", *, but: Iterable[str]) -> bool:
        """Return whether it differs from another one in its label and in these parts at most."""
        apart = {"label", *but}
        return self.model_dump(exclude=apart) == other.model_dump(exclude=apart)

    @property
    def takes_rho(self) -> bool:
        """Return whether ρ comes from the grid."""
        return self.safe_vocabulary is not None and self.safe_vocabulary.takes_rho

    @property
    def policies(self) -> str:
        """Return between which policies of trainer and engine its ratios are: full, pruned, or one of each."""
        if self.safe_vocabulary is None:
            return "full"
        return {"engine_only": "full, pruned", "trainer_only": "pruned, full"}.get(self.safe_vocabulary.rule, "pruned")

    @property
    def at_fixed_policy(self) -> bool:
        """Return whether it estimates the gradient at a fixed policy, where nothing is clipped or fed back."""
        needs_training = self.safe_vocabulary is not None and self.safe_vocabulary.needs_training
        return not self.loss.has_ratio and not needs_training and self.learning_rate_decay is None

    def sides(self, rho: float | None, max_response_tokens: int) -> SafeVocabularies:
        """Return the safe vocabularies of trainer and engine; `rho` is the grid's, None if the method takes none.

        Raises DvpError for values that do not fit together.
        """
        if self.safe_vocabulary is None:
            return SafeVocabularies(None, None)
        return self.safe_vocabulary.sides(rho, max_response_tokens)
