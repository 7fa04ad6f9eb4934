"""Measured numbers with intervals, by name: what config/claims.yaml asks for, and what tables and figures show.

To add one, let the function that makes its part (`training`, `matrix`, `diversity`, `curve`, `mismatch`, `bias`,
`bias_length`) yield one more `Statistic`: report/estimates.parquet lists it, a claim can ask for it by its
name, and a function in dvp.analysis.pages shows it in a table or a figure.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import pandas as pd


@dataclass(frozen=True)
class Statistic:
    """One measured number with its interval. A cell of a table may be one."""

    name: str
    where: dict[str, str]
    """Its coordinates: method, rho, engine, policy, training settings, … as in paths; rho is `none` without one."""
    value: float
    low: float
    high: float
    """The ends of the 95 % interval, or of what `how` says; both NaN where it is not defined."""
    unit: str
    how: str
    """A sentence: how the interval was made, and over what."""
    sources: tuple[str, ...]
    """The stages' JSON files that it comes from, relative to the experiment's folder."""


def without_interval(
    name: str, where: dict[str, str], value: float, unit: str, how: str, sources: tuple[str, ...]
) -> Statistic:
    """Return a statistic without an interval: both of its ends are NaN."""
    return Statistic(name, where, float(value), math.nan, math.nan, unit, how, sources)


def lookup(statistics: Iterable[Statistic]) -> Callable[[str, dict[str, str]], Statistic | None]:
    """Index statistics: lookup(statistics)(name, where) is the one with exactly these coordinates, or None."""
    known = {(statistic.name, frozenset(statistic.where.items())): statistic for statistic in statistics}
    return lambda name, where: known.get((name, frozenset(where.items())))


ESTIMATES = "report/estimates.parquet"  # in an experiment's folder
_NUMBERS = ("quantity", "value", "low", "high", "unit", "how", "sources")


def to_frame(statistics: Iterable[Statistic]) -> pd.DataFrame:
    """Return the long table: one row per statistic, one column per coordinate (None where it does not apply)."""
    rows = [{"quantity": one.name} | one.where | {key: getattr(one, key) for key in _NUMBERS[1:]} for one in statistics]
    coordinates = dict.fromkeys(key for row in rows for key in row if key not in _NUMBERS)
    table = pd.DataFrame(rows, columns=["quantity", *coordinates, *_NUMBERS[1:]])
    return table.astype(dict.fromkeys(coordinates, object)).astype(dict.fromkeys(("value", "low", "high"), float))


def read_statistics(path: Path) -> list[Statistic]:
    """Read statistics from a parquet file of `to_frame`'s table."""
    table = pd.read_parquet(path)
    coordinates = [column for column in table if column not in _NUMBERS]
    return [
        Statistic(
            row["quantity"],
            {key: row[key] for key in coordinates if pd.notna(row[key])},
            *(row[key] for key in ("value", "low", "high", "unit", "how")),
            tuple(row["sources"]),
        )
        for row in table.to_dict("records")
    ]
