"""Measured numbers with intervals, by name: what config/claims.yaml asks for and the tables are made of.

To add one, let the function that makes its part (`training`, `matrix`, `diversity`, `curve`, `mismatch`, `bias`,
`variance`, `bias_length`, `sweep`) return one more `Statistic`: report/PART.json lists it, a claim can ask for it by
its name, and a column of a table can show it.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from matplotlib.figure import Figure

from dvp.analysis.tables import Table


@dataclass(frozen=True)
class Statistic:
    """One number. A cell of a table may be one."""

    name: str
    where: dict[str, str]
    """Of what it is: method, rho, engine, policy, training settings, … as in paths; `none` where there is no ρ."""
    value: float
    low: float
    high: float
    """The 95 % interval, or what `how` says; NaN, both, where it is not defined."""
    unit: str
    how: str
    """A sentence: how the interval was made, over what."""
    sources: tuple[str, ...]
    """The stages' JSON files that it comes from, relative to the experiment's folder."""


def lookup(statistics: Iterable[Statistic]) -> Callable[[str, dict[str, str]], Statistic | None]:
    """known = lookup(statistics): known(name, where) is the statistic of exactly that place, if there is one."""
    known = {(statistic.name, frozenset(statistic.where.items())): statistic for statistic in statistics}
    return lambda name, where: known.get((name, frozenset(where.items())))


@dataclass(frozen=True)
class Part:
    """What a part of an experiment's report consists of."""

    statistics: list[Statistic]
    tables: dict[str, Table] = field(default_factory=dict)
    figures: dict[str, Figure] = field(default_factory=dict)
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Origin of the stages' JSON files behind all of it."""
