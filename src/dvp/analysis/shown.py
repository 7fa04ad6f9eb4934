"""Register what a report shows: a table or a figure is one function in a module of dvp.analysis.pages.

Its id, by which files are named, is the function's name, its caption the function's docstring. Snakemake reads titles
and captions whenever it starts, so neither this module nor the pages import matplotlib.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Shown:
    """A table or a figure of the reports."""

    title: str
    make: Callable[[Any], Any]
    """Makes it from a dvp.analysis.columns.Report or a dvp.analysis.charts.Charts; None if it has nothing to show."""
    part: str = ""
    """The part of the report (dvp.analysis.parts) that a table belongs to."""

    @property
    def caption(self) -> str:
        """Return the docstring, in which {experiment} stands for the experiment's name."""
        return " ".join(inspect.getdoc(self.make).split())


TABLES: dict[str, Shown] = {}
FIGURES: dict[str, Shown] = {}


Facet = dict[str, str]
Levels = Mapping[str, Sequence[float] | Callable[[Facet], Sequence[float]]]
"""Lines across a panel by label; a function is of the facet's coordinates."""


@dataclass(frozen=True)
class Panel:
    """A panel of a figure: its quantities, and its axis of values."""

    quantities: str | tuple[str, ...]
    label: str
    title: str = ""
    scale: float = 1
    log: str = ""
    """Logarithmic axes: x, y or xy."""
    symlog: float | None = None
    """The axis of values is linear within ± this value, and logarithmic beyond."""
    floor: float | None = None
    """Values up to here are not drawn."""
    limits: tuple[float, float] | None = None
    across: Levels = field(default_factory=dict)
    seeds: str = ""
    """Quantity of the small marks below a row's own."""

    @property
    def names(self) -> list[str]:
        """List the quantities."""
        return [self.quantities] if isinstance(self.quantities, str) else list(self.quantities)


def table(title: str, part: str) -> Callable[[Callable], Callable]:
    """Register a table, whose function makes a Layout from a Report."""
    return lambda make: _register(TABLES, make.__name__, Shown(title, make, part))


def figure(title: str, name: str = "") -> Callable[[Callable], Callable]:
    """Register a figure, whose function draws from a Charts, or returns None if its quantities were not measured.

    name : its id, if a table has that as the name of its function.
    """
    return lambda make: _register(FIGURES, name or make.__name__, Shown(title, make))


def _register(entries: dict[str, Shown], name: str, entry: Shown) -> Callable:
    assert name not in entries, f"{name}: registered twice"
    entries[name] = entry
    return entry.make
