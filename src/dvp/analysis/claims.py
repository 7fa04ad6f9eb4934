"""Published values, each with its source (config/claims.yaml)."""

from pathlib import Path
from typing import Literal

from pydantic import ValidationError, model_validator

from dvp.config import Name, Strict
from dvp.errors import DvpError
from dvp.experiment_files import read_yaml

CLAIMS = Path("config/claims.yaml")


class Claim(Strict):
    """One published statement."""

    id: Name
    text: str
    value: float | None = None
    """None for a claim in words."""
    unit: str | None = None
    relation: Literal["equal", "below", "at_least"] | None = None
    """How the value is meant."""
    source: str
    """In the file a key of its `sources`; once read, the source itself."""
    method: Name | None = None
    """The value stands beside this method's rows of the main table."""
    note: str | None = None

    @model_validator(mode="after")
    def _whole(self) -> "Claim":
        if len({self.value is None, self.unit is None, self.relation is None}) > 1:
            raise ValueError("value, unit and relation go together; give all three or none")
        if self.method is not None and (self.unit, self.relation) != ("%", "equal"):
            raise ValueError("method: only a relative change (unit '%', relation equal) stands in the main table")
        return self


class _File(Strict):
    sources: dict[str, str]
    claims: list[Claim]

    @model_validator(mode="after")
    def _consistent(self) -> "_File":
        for field in ("id", "method"):
            values = [value for claim in self.claims if (value := getattr(claim, field)) is not None]
            for value in values:
                if values.count(value) > 1:
                    raise ValueError(f"claims: {field} '{value}' is given twice")
        for claim in self.claims:
            if claim.source not in self.sources:
                known = ", ".join(self.sources)
                raise ValueError(f"claims: {claim.id}: source '{claim.source}' is not defined; known are {known}")
        return self


def load_claims(path: Path = CLAIMS) -> dict[str, Claim]:
    """The claims by id, in the order of the file, their sources spelled out. Raises DvpError."""
    value = read_yaml(path)
    try:
        file = _File.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        message = first["msg"].removeprefix("Value error, ")
        message = "unknown key" if first["type"] == "extra_forbidden" else message
        raise DvpError(f"{path}: {key}: {message}" if key else f"{path}: {message}") from None
    return {claim.id: claim.model_copy(update={"source": file.sources[claim.source]}) for claim in file.claims}


def claim(claims: dict[str, Claim], name: str, path: Path = CLAIMS) -> Claim:
    """The claim `name`, which has a value. Raises DvpError."""
    if name not in claims or claims[name].value is None:
        raise DvpError(f"{path}: claims: '{name}' with a value is missing; the report quotes it")
    return claims[name]
