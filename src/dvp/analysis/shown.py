"""The tables and figures of a report, each with its caption, as declared in shown.yaml (its top explains the keys)."""

from functools import cache
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from dvp.experiment.loading import parse, read_yaml
from dvp.strict import Several, Strict

FILE = Path(__file__).with_name("shown.yaml")


class ColumnEntry(Strict):
    """A column of a table."""

    key: str
    """Its name in a row, in the CSV and in provenance.json."""
    heading: str | None = None
    quantity: str | None = None
    of: dict[str, str] = {}
    cell: str = ""
    interval: str | None = None
    number: str | None = None
    seeds: str | None = None
    text: str | None = None
    scale: float = 1
    ends: list[str] = []
    """Suffixes of the interval's ends in the CSV: KEY_low and KEY_high, or others if it is not a 95 % interval."""
    csv: bool = True
    optional: bool = False
    """Whether the column is left out if no row has a value."""
    of_reference: str | None = None
    """Text in the reference's row instead of a value."""
    own: str = ""
    """Suffix of the score of the policy that the row's model trained."""
    beside: str | None = None
    """Quantity shown behind a single seed's value: the step at which its run collapsed."""
    each: str | None = None
    """Kind of items for each of which the column is repeated (dvp.analysis.rows.columns_of)."""
    only: str | None = Field(None, alias="if")
    """Name of a condition without which the column is left out."""


class Printed(Strict):
    """A table that is printed, and not part of a report."""

    heading: str
    columns: Several[dict[str, Any] | str]
    notes: str = ""


class TableEntry(Printed):
    """A table of a report."""

    title: str
    caption: str
    part: str
    rows: str
    ends: list[str] = []
    sentences: str | None = None


class Panel(Strict):
    """A panel of a figure."""

    quantity: str | list[str]
    label: str
    title: str = ""
    scale: float = 1
    log: str = ""
    floor: float | None = None
    symlog: float | None = None
    limits: list[float] = []
    levels: dict[str, Any] = {}
    seeds: str | None = None


class FigureEntry(Strict):
    """A figure of a report."""

    title: str
    caption: str
    kind: Literal["intervals", "lines"]
    panels: Several[Panel]
    where: dict[str, list[str]] = {}
    unless: dict[str, list[str]] = {}
    needs: list[str] = []
    facet: list[str] = []
    columns: list[str] = []
    colour: str = "method"
    x: str = "x"
    x_label: str | None = None
    levels: dict[str, Any] = {}
    verticals: dict[str, Any] = {}
    smooth: int = 1
    ring: bool = False
    reference: bool = False
    bars: bool = False
    order: str | None = None
    across: int = 3
    width: float = 3.6
    note: str | None = None


KINDS = {"tables": TableEntry, "figures": FigureEntry, "printed": Printed}


@cache
def shown(kind: str) -> dict[str, Any]:
    """Return the declarations of a kind (`tables`, `figures`, …) by name.

    In captions {experiment} stands for the experiment's name. Raises DvpError for a malformed declaration.
    """
    entries = read_yaml(FILE)[kind]
    for name, entry in entries.items() if kind in KINDS else ():
        parse(KINDS[kind], entry, f"{FILE.name}: {kind}.{name}")
        for number, column in enumerate(entry["columns"] if kind != "figures" else ()):
            if isinstance(column, dict):
                parse(ColumnEntry, column, f"{FILE.name}: {kind}.{name}.columns.{number}")
    return entries
