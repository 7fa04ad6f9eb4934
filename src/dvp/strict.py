"""Define the base classes and field types that all typed, strict models of the configuration share."""

import re
import unicodedata
from difflib import get_close_matches
from functools import reduce
from operator import getitem
from typing import Annotated, Any, Self, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_serializer

NAME = re.compile(r"[a-z0-9][a-z0-9_.-]*")
Name = Annotated[str, Field(pattern=rf"^{NAME.pattern}$")]
EXPERIMENT = re.compile(rf"{NAME.pattern}(~{NAME.pattern})?")
"""The name of an experiment, `bases`, or of one of its base models, `bases~5`."""
Positive = Annotated[int, Field(ge=1)]
Seed = Annotated[int, Field(ge=0, le=2**32 - 1)]
Fraction = Annotated[float, Field(ge=0, le=1)]
PositiveFloat = Annotated[float, Field(gt=0)]
LOWEST_TEMPERATURE = 0.01
"""The lowest sampling temperature: vLLM raises a lower one to this."""
LearningRate = Annotated[float, Field(gt=0, le=1)]


# Control characters, and the remains of a LaTeX command whose single backslash was read as an escape: a tab and `imes`.
# A line may begin with `u`, and `an` may follow a tab: `\nu` is not recognised, and `\tan` only by what comes after it.
_CONTROL = re.compile(
    r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]"
    r"|\n(?=(?:eq|abla|ot|otin|geq|leq|onumber|ewline|subseteq)(?![A-Za-z]))|(?<= )\n(?=e -?[\d\\])"
    r"|\r(?=(?:ight|ightarrow|angle|floor|ceil|ho|brace|vert)(?![A-Za-z]))"
    r"|\t(?=(?:ext(?:bf|it|rm|sf|tt)?|imes|heta|anh|frac|binom|ilde|herefore|riangle(?:q|left|right)?)(?![A-Za-z]))"
    r"|(?<=[^\n\t])\t(?=(?:o|an|op|au) ?(?:[\\{^_($\d]|(?<= )[A-Za-z](?![A-Za-z])))"
)


def control_character(text: str) -> str | None:
    """Describe the first control character in a text, and what was expected instead; None if there is none."""
    if (found := _CONTROL.search(text)) is None:
        return None
    after = text[found.end() :][:20]
    return f"a control character, {found[0]!r}, before {after!r}; expected none: two backslashes, if LaTeX was meant"


def _without_control_characters(text: str) -> str:
    if wrong := control_character(text):
        raise ValueError(wrong)
    return text


Text = Annotated[str, AfterValidator(_without_control_characters)]


def _one_line(text: str) -> str:
    if any(unicodedata.category(character) in ("Cc", "Zl", "Zp") for character in text):
        raise ValueError(f"expected one line without control characters, found {text!r}")
    return text


Line = Annotated[str, AfterValidator(_one_line)]


def distinct(values: list) -> list:
    """Return the list. Raises ValueError if it has a value twice, even as a number in two spellings."""
    meant = [getattr(value, "value", value) for value in values]
    for place, value in enumerate(values):
        if meant[place] in meant[:place]:
            raise ValueError(f"{value} is listed twice")
    return values


T = TypeVar("T")
Distinct = Annotated[list[T], AfterValidator(distinct)]
Several = Annotated[Distinct[T], Field(min_length=1)]
OneOrMany = Annotated[Several[T], BeforeValidator(lambda value: value if isinstance(value, list) else [value])]


def optional(default: Any = None) -> Any:
    """Declare a key that is written out only if it differs from its default."""
    return Field(default, exclude_if=lambda value: value == default)


class Strict(BaseModel):
    """A model that refuses unknown keys, does not coerce values, allows only finite numbers, and cannot be changed."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        allow_inf_nan=False,
        protected_namespaces=(),
        use_attribute_docstrings=True,
    )

    def changed(self, **changes: Any) -> Self:
        """Return a copy with other values for some of the keys, validated as a whole."""
        return type(self).model_validate(self.model_dump() | changes)


class Tagged(Strict):
    """One of several models distinguished by `kind` or `rule`, which is written out even if defaults are left out."""

    @model_serializer(mode="wrap")
    def _with_tag(self, handler: Any) -> dict[str, Any]:
        tags = {key: getattr(self, key) for key in ("kind", "rule") if key in type(self).model_fields}
        return tags | handler(self)


def first_problem(
    error: ValidationError, value: dict, model: type[Strict], more: tuple[str, ...] = ()
) -> tuple[tuple, str]:
    """Return the path of the first invalid key, and one line: the path, what was expected, what was found.

    An unknown key comes before all else, as it may be the missing one, misspelt.
    value : what `model` refused.
    more : keys that a file may have beside the model's.
    """
    problems = sorted(error.errors(), key=lambda problem: problem["type"] != "extra_forbidden")
    first = problems[0]
    location = _as_written(first, value)
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        schema = model.model_json_schema()
        groups = [{*group.get("properties", ())} for group in (schema, *schema.get("$defs", {}).values())]
        beside = {*reduce(getitem, location[:-1], value)} - {problem["loc"][-1] for problem in problems}
        known = {*more}.union(*([group for group in groups if beside <= group] or groups)) - {location[-1]}
        meant = get_close_matches(str(location[-1]), sorted(known), n=1, cutoff=0.65)
        message = f"unknown key; did you mean {meant[0]}?" if meant else "unknown key"
    elif first["type"] == "union_tag_not_found":
        key = first["ctx"]["discriminator"].strip("'")
        message = f"{key} is missing; docs/keys.md has what it may be"
    elif first["type"] not in ("value_error", "missing") and not isinstance(first["input"], dict):
        message += f", found {first['input']!r}"
    others = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return location, " ".join(f"{'.'.join(map(str, location))}: {message}{others}".removeprefix(": ").split())


def _as_written(problem: Any, value: Any) -> tuple:
    """Return a problem's path as it is in the file, without the `kind` or `rule` that pydantic adds as a step."""
    kept = []
    for part in problem["loc"]:
        if (isinstance(value, list) and isinstance(part, int)) or (isinstance(value, dict) and part in value):
            value = value[part]
        elif problem["type"] != "missing" or part != problem["loc"][-1]:
            continue
        kept.append(part)
    return tuple(kept)
