"""Every key of an experiment as Markdown, read from the models.

config/README.md ends with it: `python -m dvp.experiment.reference` writes it there, and a test fails when it is stale.
"""

import inspect
from collections.abc import Callable
from pathlib import Path

from dvp.core.advantages import ADVANTAGES
from dvp.core.importance import PRESETS
from dvp.core.objective import LOSSES
from dvp.experiment.config import Experiment
from dvp.experiment.loading import TABLES
from dvp.strict import Strict

HEADING = "## All keys\n\n"
FILLED_IN = {"deepspeed"}  # top-level keys that no file may have
NUMBERS = {"integer": "integer", "number": "number", "string": "text", "boolean": "true or false", "null": "null"}
BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}


def reference() -> str:
    """A section for each group of keys, in the order in which an experiment comes to them."""
    schema = Experiment.model_json_schema()
    models = {model.__name__: model for model in _subclasses(Strict)}
    sections, queue, seen = [], [("", "Experiment")], {"Experiment"}
    while queue:
        where, name = queue.pop(0)
        properties = schema["properties"] if name == "Experiment" else schema["$defs"][name]["properties"]
        required = schema["required"] if name == "Experiment" else schema["$defs"][name].get("required", [])
        rows, groups = [], []
        for key, value in properties.items():
            if not where and key in FILLED_IN:
                continue
            default = "required" if key in required else _default(value.get("default"))
            if not where and key in TABLES:
                default = "none of its own"
            rows.append(f"| `{key}` | {_value(value)} | {default} | {_meaning(value)} |")
            groups += _groups(value, f"{where}.{key}" if where else key)
        new = [(path, inner) for path, inner in groups if inner not in seen]
        seen |= {inner for _, inner in new}
        queue = new + queue
        title = f"`{where}`" if where else "The file"
        text = " ".join(inspect.cleandoc(models[name].__doc__ or "").split())
        sections.append(
            "\n".join([f"### {title}", "", text, "", "| key | value | default | meaning |", "|---|---|---|---|", *rows])
        )
    return "\n\n".join([*sections, _names()]) + "\n"


def _names() -> str:
    """What a method may name."""
    rows = [f"| `advantage: {name}` | {_first_line(advantage)} |" for name, advantage in ADVANTAGES.items()]
    for key, presets in (("importance", PRESETS), ("loss", LOSSES)):
        for name, preset in presets.items():
            settings = preset.model_dump(exclude_none=True)
            kind = settings.pop("kind")
            says = ", ".join(f"{option} {value}" for option, value in settings.items())
            rows.append(f"| `{key}: {name}` | {f'{kind}: ' if key == 'loss' and kind != name else ''}{says} |")
    return "\n".join(["### Names that a method may use", "", "| name | what it is |", "|---|---|", *rows])


def _first_line(function: Callable) -> str:
    return inspect.cleandoc(function.__doc__ or "").splitlines()[0].replace("|", "\\|")


def _meaning(value: dict) -> str:
    """The docstring below a field."""
    return " ".join(value.get("description", "").split()).replace("|", "\\|")


def _subclasses(model: type) -> list[type]:
    return [inner for child in model.__subclasses__() for inner in (child, *_subclasses(child))]


def _groups(value: dict, where: str) -> list[tuple[str, str]]:
    """The groups of keys that a value may be, each with the path under which a file has it."""
    if "$ref" in value:
        return [(where, value["$ref"].rpartition("/")[2])]
    if "discriminator" in value:
        tag, mapping = value["discriminator"]["propertyName"], value["discriminator"]["mapping"]
        return [(f"{where} ({tag}: {kind})", ref.rpartition("/")[2]) for kind, ref in mapping.items()]
    inner = [*value.get("anyOf", []), *value.get("oneOf", []), *value.get("allOf", [])]
    groups = [group for option in inner for group in _groups(option, where)]
    if isinstance(value.get("items"), dict):
        groups += _groups(value["items"], f"{where}[]")
    for entry in (value.get("additionalProperties"), *value.get("patternProperties", {}).values()):
        if isinstance(entry, dict):
            groups += _groups(entry, f"{where}.NAME")
    return groups


def _value(value: dict) -> str:
    """What may be written, in words."""
    if "$ref" in value:
        return "keys, below"
    if "const" in value:
        return f"`{value['const']}`"
    if "enum" in value:
        return ", ".join(f"`{choice}`" for choice in value["enum"])
    options = [*value.get("anyOf", []), *value.get("oneOf", []), *value.get("allOf", [])]
    if options:
        return " or ".join(dict.fromkeys(_value(option) for option in options if option.get("type") != "null"))
    if value.get("type") == "array":
        return f"list of {_value(value.get('items', {}))}"
    if value.get("type") == "object":
        entries = [value.get("additionalProperties"), *value.get("patternProperties", {}).values()]
        return "names, each with " + next((_value(entry) for entry in entries if isinstance(entry, dict)), "keys")
    bounds = ", ".join(f"{sign} {value[bound]:.12g}" for bound, sign in BOUNDS.items() if bound in value)
    if value.get("pattern") == r"^[0-9a-f]{40}$":
        return "40 hexadecimal digits"
    word = "name" if "pattern" in value else NUMBERS.get(value.get("type", ""), "value")
    return f"{word} {bounds}".strip()


def _default(value: object) -> str:
    if value is None or value == {}:
        return "none"
    if isinstance(value, dict):
        return "as below"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{value}`"


def write_reference(document: Path) -> None:
    """Put the keys under the document's heading for them."""
    text = document.read_text(encoding="utf-8")
    document.write_text(text.partition(HEADING)[0] + HEADING + reference(), encoding="utf-8")


if __name__ == "__main__":
    write_reference(Path("config/README.md"))
