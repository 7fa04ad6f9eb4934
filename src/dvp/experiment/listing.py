"""List the experiments and explain the keys of their files: `dvp list` and `dvp keys`."""

import re
from difflib import get_close_matches
from itertools import groupby
from pathlib import Path

from dvp.errors import DvpError
from dvp.experiment.loading import config_folder, experiment_files, load_experiment
from dvp.experiment.reference import reference

CELLS, LINK = re.compile(r"(?<!\\)\|"), re.compile(r"\[([^\]]+)\]\([^)]*\)")  # in a Markdown table; in a Markdown text
REPORT = "report/manifest.json"
KEPT = Path("results/reference")


def experiments(results: Path) -> str:
    """List the experiments by folder, one per line.

    A line has the number of training runs, whether a report is there or kept, and what the experiment asks.
    """
    lines, config = ["runs  report  experiment"], config_folder()
    for folder, files in groupby(experiment_files(config).values(), key=lambda file: file.parent):
        lines += ["", f"{config.name}/{folder.relative_to(config)}/"]
        lines += [_line(file.stem, results, config) for file in files]
    return "\n".join(lines)


def _line(name: str, results: Path, config: Path) -> str:
    experiment = load_experiment(name, config)
    found = "here" if (results / name / REPORT).is_file() else "-"
    found = "kept" if found == "-" and (KEPT / name / REPORT).is_file() else found
    runs = len(experiment.runs) * (len(experiment.bases) or 1)
    return f"{runs:4}  {found:6}  {name}: {' '.join(experiment.description.split())}"


def keys(name: str | None) -> str:
    """Return the groups of keys, or the explanation of a key, a group or a named part of a method, in any case.

    Raises DvpError for a name that does not exist.
    """
    sections = dict(section.split("\n\n", 1) for section in reference().split("\n## ")[1:])
    if name is None:
        return "\n".join(f"{title}: {_about(text)}".removesuffix(": ") for title, text in sections.items())
    rows = [
        (title, [cell.strip().replace("\\|", "|") for cell in CELLS.split(line)[1:-1]])
        for title, text in sections.items()
        for line in text.splitlines()
        if line.startswith("| `")
    ]
    # For training.gpus: find the rows of `training`, then those of `gpus` in the groups that they link to.
    *above, key = name.lower().split(".")
    asked = rows
    for part in above:
        links = "".join(cells[1] for _, cells in asked if _key(cells) == part).lower()
        asked = [(title, cells) for title, cells in rows if f"](#{title.lower()})" in links]
    found = [(title, cells) for title, cells in asked if _key(cells) == key]
    groups = [] if above else [title for title in sections if title.lower() == key]
    found += [(title, cells) for title, cells in rows if title in groups]
    if not found:
        meant = get_close_matches(name, [*sections, *(_key(cells) for _, cells in rows)], n=1)
        raise DvpError(f"keys: no key '{name}'" + (f"; did you mean {meant[0]}?" if meant else ""))
    return "\n".join([*(_about(sections[title]) for title in groups), *(_told(*row) for row in found)])


def _about(section: str) -> str:
    """Return the text above a section's table."""
    return _plain(section.partition("| ")[0].strip())


def _key(cells: list[str]) -> str:
    """Return the name that a row explains: `rho`, or `otb` from the row for `advantage: otb`."""
    return cells[0].strip("`").rpartition(": ")[2].lower()


def _told(title: str, cells: list[str]) -> str:
    """Format a row of the reference as text: the key, its meaning, and what may be written."""
    key, *values, meaning = cells
    if not values:  # the row is that of a name that a method may use
        return _plain(f"{key}: {meaning}")
    value, default = values
    return _plain(
        f"{title}.{key}: {meaning}\n    {value}; {default if default == 'required' else f'default {default}'}"
    )


def _plain(text: str) -> str:
    """Strip Markdown's links and code from a text."""
    return LINK.sub(r"\1", text).replace("`", "")
