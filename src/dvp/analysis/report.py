"""A report: of each of its parts, load, make statistics of the frames, then tables and figures of the statistics."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from dvp.analysis import bias, bias_length, curve, diversity, figures, matrix, mismatch, series, training, variance
from dvp.analysis.formats import Formatted, to_html, to_markdown, to_tex, to_text
from dvp.analysis.load import Reader
from dvp.analysis.parts import parts
from dvp.analysis.statistics import ESTIMATES, Statistic, to_frame
from dvp.analysis.tables import Table, make_tables
from dvp.errors import DvpError
from dvp.experiment.config import Experiment
from dvp.files import atomic_path, expect, expect_keys, read_json, write_text


@dataclass(frozen=True)
class Part:
    """A report, or some parts of one (see `parts`)."""

    statistics: list[Statistic]
    tables: dict[str, Table]
    files: dict[str, dict[str, Any]]
    """Origin of the stages' JSON files behind all of it."""
    series: list[pd.DataFrame] = field(default_factory=list)
    """Curves, as dvp.analysis.series makes them."""


MEASURES = {
    "training": training.statistics,
    "matrix": matrix.statistics,
    "diversity": diversity.statistics,
    "curve": curve.statistics,
    "mismatch": mismatch.statistics,
    "bias": bias.statistics,
    "variance": variance.statistics,
    "bias_length": bias_length.statistics,
}


SERIES_OF = {
    "training": series.training,
    "curve": lambda experiment, reader: series.curve(experiment, curve.groups(reader)),
    "mismatch": lambda experiment, reader: series.mismatch(mismatch.groups(experiment, reader)),
}


def make(experiment: Experiment, results: Path, *of_parts: str) -> Part:
    """All of an experiment's report, or some parts of it: read, checked and drawn.

    Args:
        results: the experiment's own folder (results/E).

    Raises:
        DvpError: an input is missing, malformed, or written by another version of the experiment.
    """
    reader = Reader(experiment, results)
    statistics = measure(experiment, reader, *of_parts)
    curves = [
        frame
        for part in of_parts or parts(experiment)
        if part in SERIES_OF
        for frame in SERIES_OF[part](experiment, reader)
    ]
    return Part(statistics, make_tables(experiment, statistics, *of_parts), reader.files, curves)


def measure(experiment: Experiment, reader: Reader, *of_parts: str) -> list[Statistic]:
    """All that a report says, or some parts of it (see `parts`)."""
    wanted = set(of_parts or parts(experiment))
    # What several solutions are held against.
    wanted |= {"matrix"} if "diversity" in wanted else set()
    return [one for part, statistics in MEASURES.items() if part in wanted for one in statistics(experiment, reader)]


def write(experiment: Experiment, part: Part, folder: Path) -> list[str]:
    """report/estimates.parquet and series.parquet, figures/*.svg and *.png, tables/*.csv, *.md, *.tex and *.html.

    All are below `folder`. Returns the figures' names.
    """
    curves = series.joined(part.series)
    for name, frame in ((ESTIMATES, to_frame(part.statistics)), (series.SERIES, curves)):
        with atomic_path(folder / name) as temporary:
            frame.to_parquet(temporary, index=False)
    drawn = figures.draw(experiment, part.statistics, curves)
    for name, figure in drawn.items():
        figures.save(figure, folder / "figures", name)
    for name, table in part.tables.items():
        write_text(folder / "tables" / f"{name}.csv", table.frame().to_csv(index=False))
        for suffix, form in (("md", to_markdown), ("tex", to_tex), ("html", to_html)):
            write_text(folder / "tables" / f"{name}.{suffix}", form(table.formatted()))
    return sorted(drawn)


def provenance(experiment: Experiment, part: Part) -> dict[str, Any]:
    """Of each cell of the tables the keys of `files` that it comes from; of each file its origin.

    tables.TABLE.POINT.COLUMN is a list of files, paths relative to the experiment's folder; an empty one is of a cell
    that the experiment itself defines, or that is undefined.
    """
    return {
        "experiment": experiment.name,
        "config_hash": experiment.config_hash("report"),
        "reference": experiment.reference_point.path,
        "tables": {name: table.provenance() for name, table in part.tables.items()},
        "files": part.files,
    }


def print_table(folder: Path) -> str:
    """The main table in `folder` as text for a terminal of 110 columns. Raises DvpError."""
    path = folder / "report" / "manifest.json"
    tables = read_json(path, "tables")["tables"]
    expect_keys(tables, {"main_table": "an object"}, f"{path}: tables.")
    table, where = tables["main_table"], f"{path}: tables.main_table"
    expect_keys(table, {"title": "a text", "headings": "a list", "rows": "a list", "notes": "a list"}, f"{where}.")
    for key in ("headings", "notes"):
        for number, text in enumerate(table[key]):
            expect("a text", text, f"{where}.{key}.{number}")
    if not table["headings"]:
        raise DvpError(f"{where}.headings: expected one at least, found []")
    for number, row in enumerate(table["rows"]):
        expect("a list", row, f"{where}.rows.{number}")
        if len(row) != len(table["headings"]):
            raise DvpError(f"{where}.rows.{number}: expected {len(table['headings'])} cells, found {len(row)}")
        for place, cell in enumerate(row):
            expect("a text", cell, f"{where}.rows.{number}.{place}")
    return to_text(Formatted(*(table[key] for key in Formatted._fields)))
