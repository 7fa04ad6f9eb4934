"""Claims by source, published ones and questions of our own, and how each is decided (config/claims.yaml)."""

import math
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from dvp.errors import DvpError
from dvp.experiment.grid import Rho, setting_as_written
from dvp.experiment.loading import parse, read_yaml
from dvp.strict import NAME, Name, Strict

CLAIMS = Path("config/claims.yaml")


GAIN_ABOVE, GAIN, NO_GAIN, HARM = "gain above δ", "gain", "no gain above δ", "harm"
HOLDS, FAILS = "holds", "does not hold"
CANNOT_TELL, NOT_COMPARABLE, MISSING = "cannot tell", "not comparable", "not measured"
WORDS = (GAIN_ABOVE, GAIN, NO_GAIN, HARM, HOLDS, FAILS, CANNOT_TELL, NOT_COMPARABLE, MISSING)
"""Possible outcomes of a condition: an effect is a gain or not, a bound holds or does not."""


def effect_word(low: float, high: float, delta: float) -> str:
    """Classify the 95 % interval of a gain against δ > 0, the smallest gain that matters."""
    if low > delta:
        return GAIN_ABOVE
    if low > 0:
        return GAIN
    if high < 0:
        return HARM
    return NO_GAIN if high < delta else CANNOT_TELL


class Condition(Strict):
    """One measured number and what is asked of it: how large a gain it is, or whether a bound holds for it."""

    says: str
    """An effect: what is compared with what. A bound: the statement that holds or does not."""
    control: bool = False
    """Whether it is a control, which shows whose effect it is, rather than part of the claim."""
    experiment: Name
    """Name of the experiment under `evidence` in config/config.yaml."""
    statistic: Name
    where: dict[Name, str] = {}
    """Coordinates of the estimate, such as method, rho, engine or policy."""
    negate: bool = False
    """Whether the gain is the negative of the statistic, a difference."""
    delta: Annotated[float, Field(gt=0)] | None = None
    """δ of an effect, in the statistic's unit."""
    above: float | None = None
    """A bound: the whole interval has to lie above it (`above`), below it (`below`), or between two (`within`)."""
    below: float | None = None
    within: Annotated[list[float], Field(min_length=2, max_length=2)] | None = None
    not_comparable: str | None = None
    """Why the number says nothing about the claim: the premise that is not met."""

    @field_validator("where", mode="before")
    @classmethod
    def _as_written(cls, value: Any) -> Any:
        """Turn numbers into texts, and a ρ into the way experiments write it; `none` stays for a method without."""
        if not isinstance(value, dict):
            return value
        plain = (bool, int, float)
        texts = {key: setting_as_written(item) if isinstance(item, plain) else item for key, item in value.items()}
        rho = texts.get("rho", "none")
        return texts if rho == "none" or not isinstance(rho, str) else texts | {"rho": Rho(rho)}

    @model_validator(mode="after")
    def _one_question(self) -> "Condition":
        asked = [name for name in ("delta", "above", "below", "within") if getattr(self, name) is not None]
        if len(asked) != 1:
            raise ValueError(f"expected one of delta, above, below, within; found {len(asked)}")
        if self.within and self.within[0] >= self.within[1]:
            raise ValueError(f"within: expected [low, high], found {self.within}")
        return self

    def word(self, low: float | None, high: float | None) -> str:
        """Return the outcome for an interval, one of WORDS; its ends are None if it is not defined."""
        if self.not_comparable:
            return NOT_COMPARABLE
        if low is None or high is None:
            return CANNOT_TELL
        if self.delta is not None:
            return effect_word(low, high, self.delta)
        above = -math.inf if self.above is None else self.above
        first, last = self.within or (above, math.inf if self.below is None else self.below)
        if first < low and high < last:
            return HOLDS
        return FAILS if high <= first or low >= last else CANNOT_TELL


class Source(Strict):
    """The source of some claims."""

    name: str
    """A paper's title, or another name."""
    published: str | None = None
    """Place of publication, and how much of it we know; None if it is unpublished."""


class Published(Strict):
    """A published value."""

    relation: Literal["equal", "below", "at_least"]
    """Whether the value is exact, an upper bound or a lower bound."""
    value: float
    unit: str


class Claim(Strict):
    """One statement, and how it is answered."""

    id: Name
    text: str
    source: Name
    published: Published | None = None
    """None for a claim in words."""
    note: str | None = None
    figure: Annotated[str, Field(pattern=rf"^{NAME.pattern}/{NAME.pattern}$")] | None = None
    """EXPERIMENT/FIGURE that shows the measurement."""
    conditions: Annotated[list[Condition], Field(min_length=1)]

    @model_validator(mode="after")
    def _answered(self) -> "Claim":
        if all(condition.control for condition in self.conditions):
            raise ValueError("conditions: expected one that is not a control")
        return self


class Claims(Strict):
    """The contents of config/claims.yaml, with every condition written out."""

    sources: dict[Name, Source]
    claims: list[Claim]
    overview: Name | None = None
    """The experiment whose `overview_table` opens the page."""

    @model_validator(mode="after")
    def _consistent(self) -> "Claims":
        ids = [claim.id for claim in self.claims]
        for claim in self.claims:
            if ids.count(claim.id) > 1:
                raise ValueError(f"claims: id '{claim.id}' is a duplicate")
            if claim.source not in self.sources:
                raise ValueError(f"claims: {claim.source}: no such source; known are {', '.join(self.sources)}")
        return self

    @property
    def wanted(self) -> set[str]:
        """Return the keys of the experiments that the claims, their figures and the page's overview ask for."""
        wanted = {condition.experiment for claim in self.claims for condition in claim.conditions}
        wanted |= {claim.figure.split("/")[0] for claim in self.claims if claim.figure}
        return wanted | ({self.overview} - {None})

    def check_keys(self, keys: Iterable[str]) -> None:
        """Raise DvpError for a key that no claim asks for and that looks like a misspelt missing one."""
        given = set(keys)
        for key in sorted(given - self.wanted):
            meant = get_close_matches(key, self.wanted - given, n=1, cutoff=0.9)
            if meant:
                raise DvpError(f"evidence: '{key}' is asked for by no claim; did you mean {meant[0]}?")


def load_file(path: Path = CLAIMS) -> Claims:
    """Read all claims of a file. Raises DvpError if it is malformed."""
    value = read_yaml(path)
    try:
        return parse(Claims, _written_out(value), path)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise DvpError(f"{path}: claims: expected lists of claims by source; {type(error).__name__}: {error}") from None


def _written_out(file: dict[str, Any]) -> dict[str, Any]:
    """Return the file with its claims in one list, and templates and shared keys filled into each condition."""
    templates = file.get("templates", {})

    def condition(own: Any, shared: dict[str, Any]) -> dict[str, Any]:
        own = {"as": own} if isinstance(own, str) else own
        keys = shared | (templates[own["as"]] if "as" in own else {}) | own
        filled = {key: item.format_map(keys) if isinstance(item, str) else item for key, item in keys.items()}
        known = {key: filled.pop(key) for key in Condition.model_fields if key in filled}
        where = {key: item for key, item in filled.items() if key not in ("as", "this", "that")}
        return known | {"where": where | known.get("where", {})}

    claims = []
    for source, of_source in file["claims"].items():
        for claim in of_source:
            shared = claim.pop("all", {})
            claim["conditions"] = [condition(own, shared) for own in claim["conditions"]]
            claims.append(claim | {"source": source})
    return {key: value for key, value in file.items() if key != "templates"} | {"claims": claims}
