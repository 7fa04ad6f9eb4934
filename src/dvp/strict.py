"""What all typed, strict models of the configuration have in common."""

import re
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field

NAME = re.compile(r"[a-z0-9][a-z0-9_.-]*")
Name = Annotated[str, Field(pattern=rf"^{NAME.pattern}$")]
Positive = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(ge=0, le=1)]
PositiveFloat = Annotated[float, Field(gt=0)]


class Strict(BaseModel):
    """Unknown keys are errors, values are not coerced, numbers are finite, instances do not change."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False, protected_namespaces=())

    def changed(self, **changes: Any) -> Self:
        """A copy with other values for some of the keys, validated as a whole."""
        return type(self).model_validate(self.model_dump() | changes)
