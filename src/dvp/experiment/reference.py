"""Document every key of an experiment from the models: as Markdown, and as JSON Schema for editors.

`python -m dvp.experiment.reference` writes docs/keys.md and config/schema.json, and a test fails when they are stale.
"""

import inspect
import json
import re
from pathlib import Path
from typing import Any

from dvp.core.advantages import ADVANTAGES
from dvp.core.importance import PRESETS
from dvp.core.objective import LOSSES
from dvp.experiment.config import Experiment

HEADING = (
    "# All keys\n\nOf a file in config/experiments, generated from the models. "
    "[The guide](../config/README.md) says how to write one.\n\n"
)
WORDS = {"string": "text", "boolean": "true or false"}
BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}


def reference() -> str:
    """Return docs/keys.md: a section for the file and for each group of keys, and the names that a method may use."""
    schema = Experiment.model_json_schema()
    del schema["properties"]["deepspeed"]  # filled in
    groups = schema.pop("$defs") | {"The file": schema}
    titles = ["The file"]
    for title in titles:  # grows as sections refer to others
        titles += dict.fromkeys(name for name in re.findall(r"defs/(\w+)", str(groups[title])) if name not in titles)
    return HEADING + "\n\n".join([*(_section(title, groups[title]) for title in titles), _names()]) + "\n"


def editor_schema() -> dict[str, Any]:
    """Return the JSON Schema of a file of config/experiments.

    Any key may be left to `extends`, and null removes one.
    """
    schema = Experiment.model_json_schema()
    del schema["properties"]["deepspeed"]  # filled in
    extends = "The experiment that has every key which this file leaves out."
    schema["properties"]["extends"] = {"type": "string", "description": extends}
    _or(schema["properties"]["base"], {"type": "string"})  # by name
    groups = schema["$defs"]
    for group in ("GridEntry", "Estimators"):  # one or many
        for value in groups[group]["properties"].values():
            _or(value, *[each["items"] for each in (value, *value.get("anyOf", ())) if "items" in each])
    for key in ("safe_vocabulary", "importance", "loss"):  # by name
        _or(groups["Method"]["properties"][key], {"type": "string"})
    for group in (schema, *groups.values()):
        group.pop("required", None)
        for value in group.get("properties", {}).values():
            named = [value.get("additionalProperties"), *value.get("patternProperties", {}).values()]
            for each in (value, *(one for one in named if isinstance(one, dict))):
                _or(each, {"type": "null"})
    text = json.dumps({"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}, ensure_ascii=False)
    return json.loads(text.replace('{"type": "value"}', "{}"))


def _or(value: dict[str, Any], *more: dict[str, Any]) -> None:
    """Allow more values, in place."""
    told = {key: value.pop(key) for key in ("description", "default", "title") if key in value}
    own = dict(value)
    value.clear()
    value.update({"anyOf": [own, *more]} | told)


def _section(title: str, group: dict) -> str:
    rows = [
        [
            f"`{key}`",
            _value(value),
            "required" if key in group.get("required", ()) or "const" in value else _default(value),
            _text(value),
        ]
        for key, value in group["properties"].items()
    ]
    return f"## {title}\n\n{_text(group)}\n\n{_table(['key', 'value', 'default', 'meaning'], rows)}"


def _names() -> str:
    rows = [[f"`advantage: {name}`", (inspect.getdoc(made) or "").splitlines()[0]] for name, made in ADVANTAGES.items()]
    for key, presets in (("importance", PRESETS), ("loss", LOSSES)):
        for name, preset in presets.items():
            settings = preset.model_dump(exclude_none=True)
            rows.append([f"`{key}: {name}`", ", ".join(f"{option} {value}" for option, value in settings.items())])
    return f"## Names that a method may use\n\n{_table(['name', 'what it is'], rows)}"


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *lines))


def _text(value: dict) -> str:
    """Return the docstring of a class, or that below a field, in one line."""
    return " ".join(value.get("description", "").split())


def _value(value: dict) -> str:
    """Describe in words what may be written."""
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


if __name__ == "__main__":
    Path("docs/keys.md").write_text(reference(), "utf-8")
    Path("config/schema.json").write_text(json.dumps(editor_schema(), indent=1, ensure_ascii=False) + "\n", "utf-8")
