"""Make a report: load each part's frames, compute statistics, then draw tables and figures from the statistics."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pandas as pd

from dvp.analysis import bias, bias_length, curve, diversity, figures, matrix, mismatch, series, training
from dvp.analysis.bases import BaseModels, folders
from dvp.analysis.formats import to_html, to_markdown, to_tex
from dvp.analysis.load import PROBLEMS, Reader, check_fresh
from dvp.analysis.parts import parts
from dvp.analysis.statistics import ESTIMATES, Statistic, read_statistics, to_frame
from dvp.analysis.tables import Table, make_tables
from dvp.experiment.config import Experiment
from dvp.experiment.loading import read_resolved
from dvp.files import atomic_path, read_json, verify_checksums, write_text


@dataclass(frozen=True)
class Part:
    """A report's statistics, tables and series, and the files that they come from."""

    statistics: list[Statistic]
    tables: dict[str, Table]
    files: dict[str, dict[str, Any]]
    """Origin of the stages' JSON files, by path."""
    series: pd.DataFrame = field(default_factory=lambda: series.joined([]))
    """Curves, as dvp.analysis.series makes them."""
    problems: pd.DataFrame = field(default_factory=pd.DataFrame)
    """Correct responses by model and problem (dvp.analysis.load.Reader.problems); empty for a report that was read."""
    manifest: dict[str, Any] = field(default_factory=dict)
    """report/manifest.json of a report that was read; empty for one that was just made."""


MEASURES = {
    "training": training.statistics,
    "matrix": matrix.statistics,
    "diversity": diversity.statistics,
    "curve": curve.statistics,
    "mismatch": mismatch.statistics,
    "bias": bias.statistics,
    "variance": bias.variances,
    "bias_length": bias_length.statistics,
}


def make(experiment: Experiment, results: Path) -> Part:
    """Make the report of an experiment from its folder, results/E.

    Raises DvpError if an input is missing, malformed, or written by another version of the experiment.
    """
    if experiment.bases:
        of_bases = folders(experiment, results)
        each = [kept(read_resolved(folder / "config.yaml"), folder) for folder in of_bases]
        models = BaseModels(experiment, [part.statistics for part in each])
        statistics = [*models.means(), *models.tests()]
        named = zip(experiment.of_bases, each, strict=True)
        files = {f"../{name}/{file}": origin for name, part in named for file, origin in part.files.items()}
        counts = zip(map(str, experiment.bases), of_bases, strict=True)
        problems = pd.concat([pd.read_parquet(folder / PROBLEMS).assign(base=base) for base, folder in counts])
        return Part(statistics, make_tables(experiment, statistics), files, problems=problems)
    reader = Reader(experiment, results)
    wanted = set(parts(experiment))
    # Diversity is compared with the scores by policy.
    wanted |= {"matrix"} if "diversity" in wanted else set()
    statistics = [one for part, of in MEASURES.items() if part in wanted for one in of(experiment, reader)]
    curves = list(series.training(experiment, reader))
    curves += series.mismatch(mismatch.groups(experiment, reader)) if experiment.mismatch else []
    tables = make_tables(experiment, statistics)
    return Part(statistics, tables, reader.files, series.joined(curves), reader.problems)


def write(experiment: Experiment, part: Part, folder: Path) -> list[str]:
    """Write the parquet files of report/ below `folder`, then `draw`; return the figures' names."""
    frames = {ESTIMATES: to_frame(part.statistics), series.SERIES: part.series, PROBLEMS: part.problems}
    for name, frame in frames.items():
        with atomic_path(folder / name) as temporary:
            frame.to_parquet(temporary, index=False)
    return draw(experiment, part, folder)


def draw(experiment: Experiment, part: Part, folder: Path) -> list[str]:
    """Write figures/*.svg and *.png, tables/*.csv, *.md, *.tex and *.html below `folder`; return the figures' names."""
    drawn = figures.draw(experiment, part.statistics, part.series)
    for name, figure in drawn.items():
        figures.save(figure, folder / "figures", name)
    for name, table in part.tables.items():
        write_text(folder / "tables" / f"{name}.csv", table.frame().to_csv(index=False))
        for suffix, form in (("md", to_markdown), ("tex", to_tex), ("html", to_html)):
            write_text(folder / "tables" / f"{name}.{suffix}", form(table.formatted()))
    return sorted(drawn)


def estimates_of(experiment: Experiment, folder: Path) -> tuple[list[Statistic], dict[str, Any]]:
    """Read the estimates in an experiment's folder, results/E, and report/manifest.json.

    Raises DvpError if one is missing, altered or stale.
    """
    path = folder / "report" / "manifest.json"
    manifest = read_json(path, "config_hash", "tracking_key", "figures", "files", "origins")
    check_fresh(path, manifest, experiment.config_hash("report"))
    verify_checksums(path.parent, manifest["files"])
    return read_statistics(folder / ESTIMATES), manifest


def kept(experiment: Experiment, folder: Path) -> Part:
    """Read the report in an experiment's folder, results/E, and rebuild its tables.

    Raises DvpError as `estimates_of`.
    """
    statistics, manifest = estimates_of(experiment, folder)
    # Numbers taken over from an older table keep its notes, which say how they were made.
    notes = manifest.get("notes", {})
    tables = {
        name: replace(table, notes=notes.get(name, table.notes))
        for name, table in make_tables(experiment, statistics).items()
    }
    return Part(statistics, tables, manifest["origins"], pd.read_parquet(folder / series.SERIES), manifest)


def provenance(experiment: Experiment, part: Part) -> dict[str, Any]:
    """Return the files behind each cell of the tables, and the origin of each file.

    tables.TABLE.POINT.COLUMN is a list of keys of `files`, paths relative to the experiment's folder; it is empty for a
    cell that the experiment itself defines, or that is undefined.
    """
    return {
        "experiment": experiment.name,
        "config_hash": experiment.config_hash("report"),
        "reference": experiment.reference_point.path,
        "tables": {name: table.provenance() for name, table in part.tables.items()},
        "files": part.files,
    }
