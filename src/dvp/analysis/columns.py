"""Rows and columns of a report's tables, and the cells that they give.

A cell is a statistic, a list of statistics (of seeds), a `Text` of several, or a plain value that the experiment
itself defines. CSV, text and provenance are read off the same cells.
"""

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import pandas as pd

from dvp.analysis.formats import EMPTY, Formatted, digits, rho_text, tokens_text
from dvp.analysis.points import BASE, role, where_of
from dvp.analysis.statistics import Statistic, lookup
from dvp.experiment.config import Experiment
from dvp.experiment.grid import GridPoint, setting_as_written
from dvp.progress import setting_as_read

MARKS = {"control": " (control)", "reference": " (ref.)"}
FORMATS: dict[str, Callable[[Any], str]] = {"digits": digits(), "+digits": digits("+"), "tokens": tokens_text}

Known = Callable[[str, dict[str, str]], Statistic | None]
Where = dict[str, str] | Callable[["Row"], dict[str, str] | None]
"""Coordinates beside those of the row; None from a function if the row has no such statistic."""


class Text(NamedTuple):
    """A text made from several statistics."""

    value: str
    sources: tuple[str, ...]


@dataclass(frozen=True)
class Row:
    """A row of a table before its statistics are looked up."""

    name: str
    where: dict[str, str]
    """Coordinates that its statistics share."""
    cells: dict[str, Any]
    """Cells that the experiment itself defines."""
    point: GridPoint | None = None


@dataclass(frozen=True)
class Column:
    """A column of a table, made by `cell`, `number`, `interval`, `percent`, `difference`, `seeds` or `counts`."""

    key: str
    """Its name in the CSV and in provenance.json."""
    heading: str | None
    """None if it is in the CSV alone."""
    find: Callable[[Row, Known], Any]
    text: Callable[[Any], str] = str
    ends: tuple[str, ...] = ()
    """Suffixes of the interval's ends in the CSV."""
    whole: bool = False
    """Whether its numbers are whole."""
    csv: bool = True
    optional: bool = False
    """Whether the column is left out if no row has a value."""
    mark: Callable[[Row, Any, str], str] = lambda row, cell, text: text
    """Replace a cell's text, given its row, the cell and the text."""

    def shown(self, row: Row, cell: Any) -> str:
        """Format a cell."""
        return EMPTY if cell is None else self.mark(row, cell, self.text(cell))

    def plain(self, cell: Any) -> dict[str, Any]:
        """Return the cell's columns of the CSV at full precision; the items of a list are joined by spaces."""
        if isinstance(cell, list):
            return {self.key: " ".join(repr(self._value(one)) for one in cell)}
        if self.ends:
            numbers = (math.nan,) * 3 if cell is None else (cell.value, cell.low, cell.high)
            keys = (self.key, *(f"{self.key}_{end}" for end in self.ends))
            return dict(zip(keys, numbers, strict=True))
        return {self.key: self._value(cell)}

    def _value(self, cell: Any) -> Any:
        value = getattr(cell, "value", cell)
        if not self.whole or value is None:
            return value
        return round(value) if math.isfinite(value) else None


def cell(key: str, heading: str | None = None, text: Callable[[Any], str] = str, *, csv: bool = True) -> Column:
    """Show what the row itself says."""
    return Column(key, heading, lambda row, _: row.cells.get(key), text, csv=csv)


def interval(
    key: str,
    heading: str | None,
    spec: str,
    quantity: str = "",
    *,
    scale: float = 1,
    at: Where | None = None,
    ends: tuple[str, ...] = ("low", "high"),
    **more: Any,
) -> Column:
    """Show a statistic's value with its interval.

    spec : a format of `written`. quantity : the statistic's name, if that is not the key. ends : suffixes of the
    interval's ends in the CSV. more : of the Column.
    """

    def text(one: Statistic) -> str:
        value, low, high = (written(end, spec, scale) for end in (one.value, one.low, one.high))
        return f"{value} [{low}, {high}]" if EMPTY not in (value, low) else value

    return Column(key, heading, _finder(quantity or key, at), **{"text": text, "ends": ends} | more)


def reference_or_text(row: Row, _: Any, text: str) -> str:
    """Show a difference from the reference, or in its own row the word."""
    return "reference" if row.cells["role"] == "reference" else text


def number(key: str, heading: str | None, spec: str, quantity: str = "", *, scale: float = 1, **more: Any) -> Column:
    """Show a statistic's value alone."""
    more |= {"text": lambda one: written(one.value, spec, scale), "whole": spec == "d"}
    return interval(key, heading, spec, quantity, ends=(), **more)


def percent(key: str, heading: str, quantity: str = "", **more: Any) -> Column:
    """Show a fraction in percent, with its interval."""
    return interval(key, heading, ".1f", quantity, scale=100, **more)


def difference(key: str, heading: str, quantity: str = "", **more: Any) -> Column:
    """Show a difference of fractions in percentage points, with its interval."""
    return interval(key, heading, "+.1f", quantity, scale=100, **more)


def seeds(
    key: str,
    heading: str | None,
    spec: str,
    quantity: str = "",
    *,
    scale: float = 1,
    csv: bool = True,
    after: Callable[[Statistic], str] = lambda one: "",
) -> Column:
    """Show the value of every seed, and what `after` says of each. The base model has one value, in the CSV alone."""

    def find(row: Row, known: Known) -> list[Statistic] | None:
        every = [str(seed) for seed in row.cells["seeds"]] or ["none"] * csv
        found = [known(quantity or key, row.where | {"seed": seed}) for seed in every]
        return [one for one in found if one is not None] or ([] if heading is None else None)

    def text(found: list[Statistic]) -> str:
        return " ".join(written(one.value, spec, scale) + after(one) for one in found)

    return Column(key, heading, find, text, whole=spec == "d", csv=csv)


def counts(key: str, heading: str, quantities: Sequence[str], text: Callable[..., str], *, csv: bool = True) -> Column:
    """Show a text of several statistics that are whole numbers."""

    def find(row: Row, known: Known) -> Text | None:
        found = [known(name, row.where) for name in quantities]
        if None in found:
            return None
        files = tuple(file for one in found for file in one.sources)
        return Text(text(*(round(one.value) for one in found)), files)

    return Column(key, heading, find, lambda one: one.value, csv=csv)


def _finder(quantity: str, at: Where | None) -> Callable[[Row, Known], Statistic | None]:
    def find(row: Row, known: Known) -> Statistic | None:
        where = at(row) if callable(at) else at or {}
        return None if where is None else known(quantity, row.where | where)

    return find


def written(value: float, spec: str, scale: float = 1) -> str:
    """Format a number: Python's format specification, `digits` or `+digits`, or `tokens`."""
    if not math.isfinite(value):
        return EMPTY
    value = round(value) if spec == "d" else scale * value
    text = FORMATS[spec](value) if spec in FORMATS else f"{value:{spec}}"
    if re.fullmatch(r"-0(\.0*)?", text):  # a value rounded to 0 has no sign
        text = text.replace("-", "+" if "+" in spec else "")
    # 1.0e-03 becomes 1.0e-3, and an exact 0 is written as 0.
    return "0" if re.fullmatch(r"\+?0(\.0*e\+00)?", text) else re.sub(r"e([-+])0(?=\d)", r"e\1", text)


class Layout(NamedTuple):
    """The result of a table's function: a heading, rows, columns, and what stands below."""

    heading: str
    rows: list[Row]
    columns: list[Column]
    sentences: list[str] = []
    """Findings, above the notes."""
    notes: list[str] | None = None
    """How to read the table; if None, the template templates/notes/NAME.md.j2."""
    names: dict[str, Any] = {}
    """Names that the template uses besides those of dvp.analysis.tables."""


@dataclass(frozen=True)
class Table:
    """A table of a report: its columns, cells and notes."""

    title: str
    columns: Sequence[Column]
    rows: dict[str, dict[str, Any]]
    """Cells by the row's name and the column's key."""
    texts: list[list[str]]
    """Formatted cells, row by row, without the columns that have no heading."""
    notes: Sequence[str]

    @classmethod
    def laid_out(cls, layout: Layout, known: Known) -> "Table":
        """Look up the cells of a layout. A row that is there twice is shown once."""
        rows = list({row.name: row for row in layout.rows}.values())
        found = [[column.find(row, known) for column in layout.columns] for row in rows]
        columns = [
            (place, column)
            for place, column in enumerate(layout.columns)
            if not column.optional or any(cells[place] is not None for cells in found)
        ]
        texts = [
            [column.shown(row, cells[place]) for place, column in columns if column.heading is not None]
            for row, cells in zip(rows, found, strict=True)
        ]
        cells = {
            row.name: {column.key: cells[place] for place, column in columns}
            for row, cells in zip(rows, found, strict=True)
        }
        notes = [*layout.sentences, *layout.notes]
        return cls(layout.heading, [column for _, column in columns], cells, texts, notes)

    def formatted(self) -> Formatted:
        """Return the table as text, with its notes."""
        headings = [column.heading for column in self.columns if column.heading is not None]
        return Formatted(self.title, headings, self.texts, list(self.notes))

    def frame(self) -> pd.DataFrame:
        """Return the table of the CSV, at full precision."""
        columns = [column for column in self.columns if column.csv]
        plain = [[column.plain(row[column.key]) for column in columns] for row in self.rows.values()]
        return pd.DataFrame([{key: value for cell in row for key, value in cell.items()} for row in plain])

    @property
    def measured(self) -> bool:
        """Return whether any cell is a statistic."""
        return any(isinstance(cell, Statistic) for row in self.rows.values() for cell in row.values())

    def provenance(self) -> dict[str, dict[str, list[str]]]:
        """Return, by row and column, the stages' JSON files that a cell comes from."""

        def files(cell: Any) -> list[str]:
            every = cell if isinstance(cell, list) else [cell]
            return list(dict.fromkeys(file for one in every for file in getattr(one, "sources", ())))

        return {name: {key: files(cell) for key, cell in row.items()} for name, row in self.rows.items()}


@dataclass(frozen=True)
class Report:
    """Source of a report's tables: an experiment and its statistics."""

    experiment: Experiment
    statistics: list[Statistic] = field(repr=False)

    @cached_property
    def known(self) -> Known:
        """Look up a statistic by name and coordinates."""
        return lookup(self.statistics)

    @property
    def count(self) -> int:
        """Return the number of seeds, or of base models if there are several."""
        return len(self.experiment.repetitions)

    @property
    def k(self) -> int:
        """Return the number of samples per problem."""
        return self.experiment.evaluation.samples_per_problem[self.experiment.report.task]

    def named(self, name: str) -> list[Statistic]:
        """List the statistics of a name."""
        return [one for one in self.statistics if one.name == name]

    def values(self, name: str) -> list[float]:
        """List the values of a name that are defined."""
        return [one.value for one in self.named(name) if not math.isnan(one.value)]

    def points(self, *, base: bool = False) -> list[Row]:
        """Return a row per grid point, after the base model's with `base`."""
        return [point_row(self.experiment, point) for point in [*([None] if base else []), *self.experiment.points]]

    def point_columns(self) -> list[Column]:
        """Return the columns with which a table of grid points begins."""
        axes = [cell(f"training.{key}", setting_as_read(key)) for key in self.experiment.axes]
        return [
            *(cell("point"), cell("label"), cell("method", "method", csv=False), cell("engine", "engine")),
            *(cell("rho", "ρ", rho_text), *axes, cell("role"), cell("seeds")),
        ]


def point_row(experiment: Experiment, point: GridPoint | None) -> Row:
    """Return the row of a grid point, or of the base model."""
    settings, own_role = experiment.settings_of(point) if point else {}, role(experiment, point)
    label = experiment.methods[point.method].label if point else "base model"
    cells = {
        "point": point.path if point else BASE,
        "label": label,
        "method": label + MARKS.get(own_role, ""),
        "engine": point.engine if point else None,
        "rho": point.rho if point else None,
        **{f"training.{key}": setting_as_written(value) for key, value in settings.items()},
        "role": own_role,
        "seeds": list(experiment.repetitions) if point else [],
    }
    return Row(cells["point"], where_of(experiment, point), cells, point)


def at_each(rows: Iterable[Row], key: str, values: Sequence[Any] | Callable[[Row], Sequence[Any]]) -> list[Row]:
    """Return every row once per value of a further coordinate."""
    return [
        Row(f"{row.name} {value}", row.where | {key: str(value)}, row.cells | {key: value}, row.point)
        for row in rows
        for value in (values(row) if callable(values) else values)
    ]
