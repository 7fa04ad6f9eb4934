"""A table of the report: what its columns show of its cells, at full precision and as text.

A cell is a plain value that the experiment itself defines (a label, a ρ), a `Cell`, or a statistic; the last two name
the files that they come from. CSV, text and provenance are read off the same cells.
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pandas as pd

from dvp.analysis.formats import EMPTY, Formatted

Text = Callable[[Any], str]
Spec = str | Callable[[float], str]


class Cell(NamedTuple):
    """What was measured and is no statistic."""

    value: Any
    sources: tuple[str, ...]


@dataclass(frozen=True)
class Column:
    key: str
    """In a row, in the CSV and in provenance.json."""
    heading: str | None
    """None: in the CSV only."""
    text: Text = str
    ends: tuple[str, ...] = ()
    """In the CSV, of a statistic: KEY_low and KEY_high, or other names for what its interval is."""
    shown_only: bool = False
    """Not in the CSV, which has its parts."""


INTERVAL = ("low", "high")


@dataclass(frozen=True)
class Table:
    title: str
    columns: Sequence[Column]
    rows: dict[str, dict[str, Any]]
    """By name; what a row lacks is undefined there."""
    notes: Sequence[str]

    def formatted(self) -> Formatted:
        """As text, with the notes that stand below."""
        shown = [column for column in self.columns if column.heading is not None]
        return Formatted(
            self.title,
            [column.heading for column in shown],
            [
                [EMPTY if (cell := row.get(column.key)) is None else column.text(_value(cell)) for column in shown]
                for row in self.rows.values()
            ],
            list(self.notes),
        )

    def frame(self) -> pd.DataFrame:
        """At full precision; a list's items are parted by spaces."""
        return pd.DataFrame([self._plain(row) for row in self.rows.values()])

    def provenance(self) -> dict[str, dict[str, list[str]]]:
        """Of each row, of each column, the stages' JSON files that the cell comes from."""
        return {
            name: {
                column.key: list(dict.fromkeys(getattr(row.get(column.key), "sources", ()))) for column in self.columns
            }
            for name, row in self.rows.items()
        }

    def _plain(self, row: dict[str, Any]) -> dict[str, Any]:
        plain: dict[str, Any] = {}
        for column in self.columns:
            if column.shown_only:
                continue
            cell = row.get(column.key)
            if column.ends:
                numbers = (cell.value, cell.low, cell.high) if cell is not None else (math.nan,) * 3
                names = (column.key, *(f"{column.key}_{end}" for end in column.ends))
                plain |= dict(zip(names, numbers, strict=True))
            else:
                value = getattr(cell, "value", cell)
                plain[column.key] = " ".join(map(repr, value)) if isinstance(value, list) else value
        return plain


def number(spec: Spec, scale: float = 1) -> Text:
    """A plain number or a statistic's value; a dash where it is not defined."""

    def text(value: Any) -> str:
        return _number(getattr(value, "value", value), spec, scale)

    return text


def interval(spec: Spec, scale: float = 1) -> Text:
    """A statistic as `value [low, high]`, without the interval where that is not defined."""

    def text(statistic: Any) -> str:
        value, low, high = (_number(end, spec, scale) for end in (statistic.value, statistic.low, statistic.high))
        return f"{value} [{low}, {high}]" if EMPTY not in (value, low) else value

    return text


def _number(value: float, spec: Spec, scale: float) -> str:
    if not math.isfinite(value):
        return EMPTY
    text = spec(scale * value) if callable(spec) else f"{scale * value:{spec}}"
    # 1.0e-3, and a 0 that is exact.
    return "0" if re.fullmatch(r"\+?0(\.0*e\+00)?", text) else re.sub(r"e([-+])0(?=\d)", r"e\1", text)


def _value(cell: Any) -> Any:
    return cell.value if isinstance(cell, Cell) else cell
