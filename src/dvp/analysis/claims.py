"""What others have published and what we ask ourselves, each with its source (config/claims.yaml)."""

from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from dvp.errors import DvpError
from dvp.experiment.grid import rho_as_written, setting_as_written
from dvp.experiment.loading import read_yaml
from dvp.strict import NAME, Name, Strict, first_problem

CLAIMS = Path("config/claims.yaml")


class Condition(Strict):
    """One measured number, and where its whole interval has to lie."""

    says: str
    """The condition in words."""
    control: bool = False
    """Whether it says whose effect it is: where it is not met, nothing of the claim is reproduced."""
    experiment: Name
    """Under which name of `evidence` in config/config.yaml the experiment stands."""
    statistic: Name
    where: dict[Name, str] = {}
    """Which row of the statistic: values of its columns, such as method, rho, engine or policy."""
    turned: bool = False
    """Whether it is asked the other way round: of a ratio the reciprocal, of a difference the negative; of no other."""
    above: float | None = None
    below: float | None = None
    within: Annotated[list[float], Field(min_length=2, max_length=2)] | None = None
    contains: float | None = None
    """Here the interval has to hold this value."""

    @field_validator("where", mode="before")
    @classmethod
    def _as_written(cls, value: Any) -> Any:
        """Numbers as texts; a ρ as experiments write it, `none` for a method without."""
        if not isinstance(value, dict):
            return value
        plain = (bool, int, float)
        texts = {key: setting_as_written(item) if isinstance(item, plain) else item for key, item in value.items()}
        rho = texts.get("rho", "none")
        return texts if rho == "none" or not isinstance(rho, str) else texts | {"rho": rho_as_written(rho)}

    @model_validator(mode="after")
    def _one_test(self) -> "Condition":
        tests = [name for name in ("above", "below", "within", "contains") if getattr(self, name) is not None]
        if len(tests) != 1:
            raise ValueError(f"expected one of above, below, within, contains; found {len(tests)}")
        if self.within and self.within[0] >= self.within[1]:
            raise ValueError(f"within: expected [low, high], found {self.within}")
        return self


class Source(Strict):
    """Who says something."""

    name: str
    """A paper's title, or who else."""
    published: str | None = None
    """Where, and how far we know it; None for what nobody has published."""


class Claim(Strict):
    """One statement, and how it is answered."""

    id: Name
    text: str
    value: float | None = None
    """None for a claim in words."""
    unit: str | None = None
    relation: Literal["equal", "below", "at_least"] | None = None
    """How the value is meant."""
    source: Name
    """A key of the file's `sources`."""
    method: Name | None = None
    """The value stands beside this method's rows of the main table."""
    note: str | None = None
    figure: Annotated[str, Field(pattern=rf"^{NAME.pattern}/{NAME.pattern}$")] | None = None
    """EXPERIMENT/FIGURE that shows the measurement."""
    conditions: list[Condition] = []
    needs_all: bool = False
    """Whether the conditions mean something together only: some of them are then no part of the claim."""
    not_testable: str | None = None
    """Why it cannot be tested at this scale."""
    not_tested: str | None = None
    """Why it has not been tested, though it could be."""

    @model_validator(mode="after")
    def _answered(self) -> "Claim":
        given = [name for name in ("conditions", "not_testable", "not_tested") if getattr(self, name)]
        if len(given) != 1:
            raise ValueError("expected one of conditions, not_testable and not_tested")
        if self.conditions and all(condition.control for condition in self.conditions):
            raise ValueError("conditions: expected one that is not a control")
        if (self.figure is None) != (not self.conditions):
            raise ValueError("figure: belongs to a claim with conditions, and to no other")
        return self

    @model_validator(mode="after")
    def _whole(self) -> "Claim":
        if len({self.value is None, self.unit is None, self.relation is None}) > 1:
            raise ValueError("value, unit and relation go together; give all three or none")
        if self.method is not None and (self.unit, self.relation) != ("%", "equal"):
            raise ValueError("method: only a relative change (unit '%', relation equal) stands in the main table")
        return self


class Change(Strict):
    """What was changed after it had been written down."""

    claim: Name
    """A claim's id, or `all`."""
    commit: str
    known: str
    """What was known of the results then."""
    what: str


class Claims(Strict):
    """config/claims.yaml."""

    sources: dict[Name, Source]
    claims: list[Claim]
    overview: Name | None = None
    """The experiment whose `overview_table` opens the page."""
    changes: list[Change] = []

    @model_validator(mode="after")
    def _consistent(self) -> "Claims":
        for field in ("id", "method"):
            values = [value for claim in self.claims if (value := getattr(claim, field)) is not None]
            for value in values:
                if values.count(value) > 1:
                    raise ValueError(f"claims: {field} '{value}' is given twice")
        for claim in self.claims:
            if claim.source not in self.sources:
                known = ", ".join(self.sources)
                raise ValueError(f"claims: {claim.id}: source '{claim.source}' is not defined; known are {known}")
        for change in self.changes:
            if change.claim not in {"all", *(claim.id for claim in self.claims)}:
                raise ValueError(f"changes: '{change.claim}' is neither a claim's id nor 'all'")
        return self

    @property
    def by_id(self) -> dict[str, Claim]:
        """The claims in the order of the file."""
        return {claim.id: claim for claim in self.claims}

    @property
    def wanted(self) -> set[str]:
        """What the claims, their figures and the page's overview ask for, by the keys under which they do."""
        wanted = {condition.experiment for claim in self.claims for condition in claim.conditions}
        wanted |= {claim.figure.split("/")[0] for claim in self.claims if claim.figure}
        return wanted | ({self.overview} - {None})

    def check_keys(self, keys: Iterable[str]) -> None:
        """Raise DvpError for a key that no claim asks for and that is nearly one which is not given."""
        given = set(keys)
        for key in sorted(given - self.wanted):
            meant = get_close_matches(key, self.wanted - given, n=1, cutoff=0.9)
            if meant:
                raise DvpError(f"evidence: '{key}' is asked for by no claim; did you mean {meant[0]}?")


def load_claims(path: Path = CLAIMS) -> dict[str, Claim]:
    """`Claims.by_id` of the file. Raises DvpError."""
    return load_file(path).by_id


def load_file(path: Path = CLAIMS) -> Claims:
    """All of the file. Raises DvpError."""
    value = read_yaml(path)
    try:
        return Claims.model_validate(value)
    except ValidationError as error:
        raise DvpError(f"{path}: {first_problem(error, value, Claims)[1]}") from None


def claim(claims: dict[str, Claim], name: str, path: Path = CLAIMS) -> Claim:
    """The claim `name`, which has a value. Raises DvpError."""
    if name not in claims or claims[name].value is None:
        raise DvpError(f"{path}: claims: '{name}' with a value is missing; the report quotes it")
    return claims[name]
