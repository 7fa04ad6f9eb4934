"""What there is to run, and what can be set: `dvp list` and `dvp keys`."""

from difflib import get_close_matches
from itertools import groupby
from pathlib import Path

from dvp.errors import DvpError
from dvp.experiment.loading import experiment_files, load_experiment
from dvp.experiment.reference import reference

REPORT = "report/manifest.json"
KEPT = Path("results/reference")


def experiments(results: Path, config: Path = Path("config")) -> str:
    """A line for each experiment, by folder: training runs, whether a report is there or kept, and what it asks."""
    lines = ["runs  report  experiment"]
    for folder, files in groupby(experiment_files(config).values(), key=lambda file: file.parent):
        lines += ["", f"{folder}/"]
        lines += [_line(file.stem, results, config) for file in files]
    return "\n".join(lines)


def _line(name: str, results: Path, config: Path) -> str:
    experiment = load_experiment(name, config)
    found = "here" if (results / name / REPORT).is_file() else "-"
    found = "kept" if found == "-" and (KEPT / name / REPORT).is_file() else found
    return f"{len(experiment.runs):4}  {found:6}  {name}: {' '.join(experiment.description.split())}"


def keys(name: str | None) -> str:
    """The groups of keys, or what is told of a key or a group. Raises DvpError for one that is not there."""
    sections = dict(section.split("\n\n", 1) for section in reference().split("\n## ")[1:])
    if name is None:
        return "\n".join(f"{title}: {text.splitlines()[0]}" for title, text in sections.items())
    found = [sections[name].strip()] if name in sections else []
    rows = [f"{title}: {row}" for title, text in sections.items() for row in text.splitlines() if row.startswith("| `")]
    # Of training.gpus: the rows of `training`, then those of `gpus` in the groups that they link.
    *above, key = name.split(".")
    asked = rows
    for part in above:
        links = "".join(row for row in asked if f": | `{part}` " in row).lower()
        asked = [row for row in rows if f"](#{row.split(':')[0].lower()})" in links]
    found += [row for row in asked if f": | `{key}` " in row]
    if not found:
        known = [*sections, *(row.split("`")[1] for row in rows)]
        meant = get_close_matches(name, known, n=1)
        raise DvpError(f"keys: no key '{name}'" + (f"; did you mean {meant[0]}?" if meant else ""))
    return "\n".join(found)
