"""What all typed, strict models of the configuration have in common."""

import re
import unicodedata
from difflib import get_close_matches
from types import UnionType
from typing import Annotated, Any, Literal, Self, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, GetCoreSchemaHandler, ValidationError
from pydantic_core import CoreSchema, core_schema
from typing_extensions import is_typeddict

NAME = re.compile(r"[a-z0-9][a-z0-9_.-]*")
Name = Annotated[str, Field(pattern=rf"^{NAME.pattern}$")]
Positive = Annotated[int, Field(ge=1)]
Seed = Annotated[int, Field(ge=0, le=2**32 - 1)]
Fraction = Annotated[float, Field(ge=0, le=1)]
PositiveFloat = Annotated[float, Field(gt=0)]
LOWEST_TEMPERATURE = 0.01
"""Of sampling; vLLM takes a lower one for this one."""
LearningRate = Annotated[float, Field(gt=0, le=1)]


# What no text holds, and what is left of a LaTeX command whose one backslash was read as an escape: a tab and `imes`.
# A line may begin with `u`, and `an` may follow a tab: `\nu` is not recognised, and `\tan` only by what comes after it.
_CONTROL = re.compile(
    r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]"
    r"|\n(?=(?:eq|abla|ot|otin|geq|leq|onumber|ewline|subseteq)(?![A-Za-z]))|(?<= )\n(?=e -?[\d\\])"
    r"|\r(?=(?:ight|ightarrow|angle|floor|ceil|ho|brace|vert)(?![A-Za-z]))"
    r"|\t(?=(?:ext(?:bf|it|rm|sf|tt)?|imes|heta|anh|frac|binom|ilde|herefore|riangle(?:q|left|right)?)(?![A-Za-z]))"
    r"|(?<=[^\n\t])\t(?=(?:o|an|op|au) ?(?:[\\{^_($\d]|(?<= )[A-Za-z](?![A-Za-z])))"
)
_ESCAPES = dict(zip("\a\b\f\n\r\t\v", "abfnrtv", strict=True))


def control_character(text: str) -> str | None:
    """What is wrong with a text that has one, and which command of LaTeX it most likely was."""
    found = _CONTROL.search(text)
    if found is None:
        return None
    character, after = found[0], text[found.end() :][:20]
    command = re.match("[a-z]*", after)[0]
    cause = "which no text needs; remove it"
    if command and character in _ESCAPES:
        cause = f"most likely \\{_ESCAPES[character]}{command} with one backslash where two are needed"
    return f"a control character, {character!r}, before {after!r}: {cause}"


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


class Told:
    """Beside Field(discriminator=key): says which key is missing and what it may be, which pydantic does not."""

    def __init__(self, key: str):
        self.key = key

    def __get_pydantic_core_schema__(self, union: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """The union's own schema, behind the check."""
        known = [kind for model in get_args(union) for kind in get_args(model.model_fields[self.key].annotation)]

        def has_key(value: Any) -> Any:
            if isinstance(value, dict) and self.key not in value:
                raise ValueError(f"{self.key} is missing; expected one of {', '.join(known)}")
            return value

        return core_schema.no_info_before_validator_function(has_key, handler(union))


class Strict(BaseModel):
    """Unknown keys are errors, values are not coerced, numbers are finite, instances do not change."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        allow_inf_nan=False,
        protected_namespaces=(),
        use_attribute_docstrings=True,
    )

    def changed(self, **changes: Any) -> Self:
        """A copy with other values for some of the keys, validated as a whole."""
        return type(self).model_validate(self.model_dump() | changes)


# What pydantic says in the words of its own code.
_PLAIN = {
    "union_tag_invalid": "{discriminator}: expected one of {expected_tags}, found {tag}",
    "too_short": "expected at least {min_length} of them, found {actual_length}",
    "missing": "is missing",
}


def first_problem(
    error: ValidationError, value: dict, model: type[Strict], more: tuple[str, ...] = ()
) -> tuple[tuple, str]:
    """The key's path, and one line: the path, what was expected, what was found.

    An unknown key comes before all else, as it may be the missing one, misspelt. `model` has refused `value`;
    `more` are keys that a file may have at its top beside the model's.
    """
    problems = sorted(error.errors(), key=lambda problem: problem["type"] != "extra_forbidden")
    first = problems[0]
    location = _without_kinds(first["loc"], value)
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        known = _known_keys(first["loc"], model, more)
        meant = get_close_matches(str(first["loc"][-1]), known, n=1, cutoff=0.65)
        message = f"unknown key; did you mean {meant[0]}?" if meant else f"unknown key; known are {', '.join(known)}"
    elif first["type"] in _PLAIN:
        message = _PLAIN[first["type"]].format(**first.get("ctx", {})).replace("'", "")
    elif first["type"] != "value_error" and not isinstance(first["input"], dict):
        message += f", found {first['input']!r}"
    others = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    key = ".".join(str(part) for part in location)
    line = f"{key}: {message}{others}" if location else f"{message}{others}"
    return location, " ".join(line.split())


def _known_keys(location: tuple, model: type[Strict], more: tuple[str, ...]) -> list[str]:
    """The keys that can stand where an unknown one of this path does."""
    kinds: list[Any] = [model]
    for part in location[:-1]:
        kinds = [inner for kind in kinds for inner in _inside(kind, part)]
    keys = [key for kind in kinds for member in _members(kind) if _is_mapping(member) for key in _types(member)]
    keys += more if len(location) == 1 else ()
    return list(dict.fromkeys(keys))


def _inside(kind: Any, part: Any) -> list[Any]:
    """The types that a path comes to by its next part; those that it is at for a part that pydantic adds to it."""
    members = _members(kind)
    if members != [kind]:
        tagged = [member for member in members if _is_mapping(member) and _has_tag(member, part)]
        return tagged or [inner for member in members for inner in _inside(member, part)]
    if get_origin(kind) in (dict, list):
        return [get_args(kind)[-1]]  # whatever the entry is called
    if not _is_mapping(kind):
        return []
    return [_types(kind)[part]] if part in _types(kind) else [kind]


def _members(kind: Any) -> list[Any]:
    """The types that a union is of; a type that is none by itself."""
    if get_origin(kind) is Annotated:
        return _members(get_args(kind)[0])
    if get_origin(kind) in (Union, UnionType):
        return [member for argument in get_args(kind) for member in _members(argument)]
    return [kind]


def _is_mapping(kind: Any) -> bool:
    return is_typeddict(kind) or (isinstance(kind, type) and issubclass(kind, BaseModel))


def _has_tag(mapping: type, part: Any) -> bool:
    """Whether it is the model of a union that a `kind` or a `rule` of this value stands for."""
    return any(get_origin(kind) is Literal and part in get_args(kind) for kind in _types(mapping).values())


def _types(mapping: type) -> dict[str, Any]:
    """The types of the keys of a model or of a TypedDict."""
    if issubclass(mapping, BaseModel):
        return {key: field.annotation for key, field in mapping.model_fields.items()}
    return mapping.__annotations__


def _without_kinds(location: tuple, value: Any) -> tuple:
    """The path as it is written in the file: pydantic adds a source's `kind`, or a `rule`, as a step of its own."""
    kept = []
    for index, part in enumerate(location):
        if isinstance(value, dict):
            # The last key may be one that the file lacks.
            last = index == len(location) - 1
            kind = part not in value and (not last or part in (value.get("kind"), value.get("rule")))
        else:
            kind = part == value
        if isinstance(part, str) and kind:
            continue
        kept.append(part)
        try:
            value = value[part]
        except (KeyError, IndexError, TypeError):
            value = None
    return tuple(kept)
