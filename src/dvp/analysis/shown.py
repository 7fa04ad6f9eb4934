"""What a report shows (shown.yaml, whose top explains the keys): its tables and figures, each with its caption."""

from functools import cache
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from dvp.experiment.loading import parse, read_yaml
from dvp.strict import Several, Strict

FILE = Path(__file__).with_name("shown.yaml")


class ColumnEntry(Strict):
    """Of a table."""

    key: str
    """In a row, in the CSV and in provenance.json."""
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
    """In the CSV, of a statistic: KEY_low and KEY_high, or other names for what its interval is."""
    csv: bool = True
    optional: bool = False
    """It is left out where no row has it."""
    of_reference: str | None = None
    """What the reference's row says instead."""
    own: str = ""
    """Set behind the score of the policy that the row's model trained."""
    beside: str | None = None
    """Of single seeds: a quantity, a step, at which it happened to some."""
    each: str | None = None
    """A column for each of these."""
    only: str | None = Field(None, alias="if")
    """Without which it is left out."""


class Printed(Strict):
    """A table without a place in a report."""

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
    """Of a figure."""

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
    """By name, the declarations of `tables` or `figures`; in their captions {experiment} is the experiment's name.

    Raises DvpError for a mistake in one.
    """
    entries = read_yaml(FILE)[kind]
    for name, entry in entries.items() if kind in KINDS else ():
        parse(KINDS[kind], entry, f"{FILE.name}: {kind}.{name}")
        for number, column in enumerate(entry["columns"] if kind != "figures" else ()):
            if isinstance(column, dict):
                parse(ColumnEntry, column, f"{FILE.name}: {kind}.{name}.columns.{number}")
    return entries
