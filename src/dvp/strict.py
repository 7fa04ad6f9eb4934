"""What all typed, strict models of the configuration have in common."""

import re
import unicodedata
from difflib import get_close_matches
from typing import Annotated, Any, Self, get_args

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

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False, protected_namespaces=())

    def changed(self, **changes: Any) -> Self:
        """A copy with other values for some of the keys, validated as a whole."""
        return type(self).model_validate(self.model_dump() | changes)


def first_problem(error: ValidationError, value: dict, model: type[Strict]) -> tuple[tuple, str]:
    """The key's path, and one line: the path, what was expected, what was found.

    An unknown key comes before all else, as it may be the missing one, misspelt. `model` has refused `value`.
    """
    problems = sorted(error.errors(), key=lambda problem: problem["type"] != "extra_forbidden")
    first = problems[0]
    location = _without_kinds(first["loc"], value)
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        known = get_close_matches(str(first["loc"][-1]), _keys_beside(first["loc"], model), n=1)
        message = f"unknown key; did you mean {known[0]}?" if known else "unknown key"
    elif first["type"] != "value_error" and not isinstance(first["input"], dict):
        message += f", found {first['input']!r}"
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    key = ".".join(str(part) for part in location)
    line = f"{key}: {message}{more}" if location else f"{message}{more}"
    return location, " ".join(line.split())


def _keys_beside(location: tuple, model: type[Strict]) -> list[str]:
    """What a key of this path could have been called; of a union, in any of its models."""
    models = [model]
    for part in location[:-1]:
        # Else it is an entry of a list or of a table, or the kind that pydantic adds.
        inside = [kind for each in models if part in _types(each) for kind in _mappings(_types(each)[part])]
        models = inside or models
    return list(dict.fromkeys(key for each in models for key in _types(each)))


def _types(mapping: type) -> dict[str, Any]:
    """The types of the keys of a model or of a TypedDict."""
    if issubclass(mapping, BaseModel):
        return {key: field.annotation for key, field in mapping.model_fields.items()}
    return mapping.__annotations__


def _mappings(annotation: Any) -> list[type]:
    """All models and TypedDicts that a type is made of."""
    if isinstance(annotation, type) and (issubclass(annotation, BaseModel) or is_typeddict(annotation)):
        return [annotation]
    return [mapping for argument in get_args(annotation) for mapping in _mappings(argument)]


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
