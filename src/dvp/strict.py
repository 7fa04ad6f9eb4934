"""What all typed, strict models of the configuration have in common."""

import re
import unicodedata
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

NAME = re.compile(r"[a-z0-9][a-z0-9_.-]*")
Name = Annotated[str, Field(pattern=rf"^{NAME.pattern}$")]
Positive = Annotated[int, Field(ge=1)]
Seed = Annotated[int, Field(ge=0, le=2**32 - 1)]
Fraction = Annotated[float, Field(ge=0, le=1)]
PositiveFloat = Annotated[float, Field(gt=0)]
LearningRate = Annotated[float, Field(gt=0, le=1)]


def _one_line(text: str) -> str:
    if any(unicodedata.category(character) in ("Cc", "Zl", "Zp") for character in text):
        raise ValueError(f"expected one line without control characters, found {text!r}")
    return text


Line = Annotated[str, AfterValidator(_one_line)]


class Strict(BaseModel):
    """Unknown keys are errors, values are not coerced, numbers are finite, instances do not change."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False, protected_namespaces=())

    def changed(self, **changes: Any) -> Self:
        """A copy with other values for some of the keys, validated as a whole."""
        return type(self).model_validate(self.model_dump() | changes)
