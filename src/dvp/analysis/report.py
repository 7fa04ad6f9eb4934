"""A report: of each of its parts, load, make statistics of the frames, then tables and figures of the statistics."""

from pathlib import Path
from typing import Any

from dvp.analysis import (
    bias,
    bias_length,
    curve,
    diversity,
    figures,
    matrix,
    mismatch,
    overview,
    series,
    sweep,
    training,
    variance,
)
from dvp.analysis.estimates import scores
from dvp.analysis.formats import Formatted, to_html, to_markdown, to_tex, to_text
from dvp.analysis.load import (
    load_bias,
    load_curve,
    load_matrix,
    load_mismatch,
    load_tokenizer,
    load_training,
    load_variance,
)
from dvp.analysis.parts import parts
from dvp.analysis.statistics import ESTIMATES, Part, to_frame
from dvp.errors import DvpError
from dvp.experiment.config import Experiment
from dvp.files import atomic_path, expect, expect_keys, read_json, write_text


def make(experiment: Experiment, results: Path) -> Part:
    """All of an experiment's report, read, checked and drawn.

    Args:
        results: the experiment's own folder (results/E).

    Raises:
        DvpError: an input is missing, malformed, or written by another version of the experiment.
    """
    whole = Part([])
    for name in parts(experiment):
        part = make_part(experiment, results, name)
        whole = Part(
            whole.statistics + part.statistics,
            whole.tables | part.tables,
            whole.files | part.files,
            [*whole.series, *part.series],
        )
    return whole


def make_part(experiment: Experiment, results: Path, part: str) -> Part:
    """A part of it (see `parts`)."""
    makers = {
        "training": _training,
        "matrix": _matrix,
        "diversity": _diversity,
        "curve": _curve,
        "mismatch": _mismatch,
        "bias": _bias,
        "variance": _variance,
        "bias_length": _bias_length,
        "sweep": _sweep,
    }
    return makers[part](experiment, results)


def _training(experiment: Experiment, results: Path) -> Part:
    loaded = load_training(experiment, results)
    statistics, tables = training.part(experiment, loaded)
    return Part(statistics, tables, loaded.files, [*series.training(experiment, loaded)])


def _matrix(experiment: Experiment, results: Path) -> Part:
    loaded = load_matrix(experiment, results)
    statistics = matrix.statistics(experiment, loaded)
    table = matrix.table(experiment, statistics)
    tables = {"matrix_table": table, "overview_table": overview.table(experiment, loaded, statistics)}
    return Part(statistics, tables, loaded.files)


def _diversity(experiment: Experiment, results: Path) -> Part:
    loaded = load_matrix(experiment, results, answers=True)
    tokenizer, files = load_tokenizer(experiment, results)
    statistics = diversity.statistics(experiment, loaded, tokenizer)
    table = diversity.table(experiment, loaded, statistics)
    return Part(statistics, {"diversity_table": table}, loaded.files | files)


def _curve(experiment: Experiment, results: Path) -> Part:
    loaded = load_curve(experiment, results)
    groups = curve.groups(experiment, loaded)
    statistics = curve.statistics(experiment, groups)
    tables = curve.tables(experiment, groups, statistics)
    return Part(statistics, tables, loaded.files, [*series.curve(experiment, groups)])


def _mismatch(experiment: Experiment, results: Path) -> Part:
    loaded = load_mismatch(experiment, results)
    groups = mismatch.groups(experiment, loaded)
    statistics = [statistic for group in groups for statistic in mismatch.statistics(experiment, group)]
    tables = mismatch.tables(experiment, groups, statistics)
    return Part(statistics, tables, loaded.files, [*series.mismatch(groups)])


def _bias(experiment: Experiment, results: Path) -> Part:
    loaded = load_bias(experiment, results)
    statistics = bias.statistics(experiment, loaded)
    tables = {"bias_table": bias.bias_table(experiment, loaded, statistics)}
    return Part(statistics, tables, loaded.files)


def _variance(experiment: Experiment, results: Path) -> Part:
    loaded = load_variance(experiment, results)
    statistics = variance.statistics(experiment, loaded)
    return Part(statistics, variance.tables(experiment, loaded, statistics), loaded.files)


def _bias_length(experiment: Experiment, results: Path) -> Part:
    loaded = load_bias(experiment, results)
    statistics = bias_length.statistics(experiment, loaded)
    return Part(statistics, {"bias_length_table": bias_length.table(experiment, statistics)}, loaded.files)


def _sweep(experiment: Experiment, results: Path) -> Part:
    loaded = load_training(experiment, results)
    return Part(sweep.statistics(experiment, scores(experiment, loaded)), {}, loaded.files)


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
