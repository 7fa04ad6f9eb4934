"""Every key of an experiment as Markdown, from the JSON Schema of the models.

config/README.md ends with it: `python -m dvp.experiment.reference` writes it there, and a test fails when it is stale.
"""

import inspect
import re
from pathlib import Path

from dvp.core.advantages import ADVANTAGES
from dvp.core.importance import PRESETS
from dvp.core.objective import LOSSES
from dvp.experiment.config import Experiment

HEADING = "## All keys\n\n"
WORDS = {"string": "text", "boolean": "true or false"}
BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}


def reference() -> str:
    """A section for the file and for each group of keys, and the names that a method may use."""
    schema = Experiment.model_json_schema()
    del schema["properties"]["deepspeed"]  # filled in
    groups = schema.pop("$defs") | {"The file": schema}
    titles = ["The file"]
    for title in titles:  # and those that it comes to
        titles += dict.fromkeys(name for name in re.findall(r"defs/(\w+)", str(groups[title])) if name not in titles)
    return "\n\n".join([*(_section(title, groups[title]) for title in titles), _names()]) + "\n"


def _section(title: str, group: dict) -> str:
    rows = [
        [
            f"`{key}`",
            _value(value),
            _default(value) if key not in group.get("required", ()) else "required",
            _text(value),
        ]
        for key, value in group["properties"].items()
    ]
    return f"### {title}\n\n{_text(group)}\n\n{_table(['key', 'value', 'default', 'meaning'], rows)}"


def _names() -> str:
    rows = [[f"`advantage: {name}`", (inspect.getdoc(made) or "").splitlines()[0]] for name, made in ADVANTAGES.items()]
    for key, presets in (("importance", PRESETS), ("loss", LOSSES)):
        for name, preset in presets.items():
            settings = preset.model_dump(exclude_none=True)
            rows.append([f"`{key}: {name}`", ", ".join(f"{option} {value}" for option, value in settings.items())])
    return f"### Names that a method may use\n\n{_table(['name', 'what it is'], rows)}"


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *lines))


def _text(value: dict) -> str:
    """The docstring of a class, or that below a field."""
    return " ".join(value.get("description", "").split())


def _value(value: dict) -> str:
    """What may be written, in words."""
    options = [*value.get("anyOf", []), *value.get("oneOf", []), *value.get("allOf", [])]
    if options:
        return " or ".join(dict.fromkeys(_value(option) for option in options if option.get("type") != "null"))
    if "$ref" in value:
        name = value["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "const" in value or "enum" in value:
        return ", ".join(f"`{choice}`" for choice in value.get("enum", [value.get("const")]))
    if value.get("type") == "array":
        return f"list of {_value(value.get('items', {}))}"
    if value.get("type") == "object":
        inner = [value.get("additionalProperties"), *value.get("patternProperties", {}).values()]
        return f"names, each with {next((_value(each) for each in inner if isinstance(each, dict)), 'keys')}"
    bounds = ", ".join(f"{sign} {value[bound]:.12g}" for bound, sign in BOUNDS.items() if bound in value)
    return f"{WORDS.get(value.get('type'), value.get('type', 'value'))} {bounds}".strip()


def _default(value: dict) -> str:
    default = value.get("default")
    if default in (None, {}):
        return "none"
    return (
        "as there"
        if isinstance(default, dict)
        else f"`{str(default).lower() if default in (True, False) else default}`"
    )


def write_reference(document: Path) -> None:
    """Put the keys under the document's heading for them."""
    text = document.read_text(encoding="utf-8")
    document.write_text(text.partition(HEADING)[0] + HEADING + reference(), encoding="utf-8")


if __name__ == "__main__":
    write_reference(Path("config/README.md"))
