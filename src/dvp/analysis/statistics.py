"""Measured numbers with intervals, by name: what config/claims.yaml asks for and tables/statistics.csv lists."""

from dataclasses import dataclass, field

import pandas as pd
from matplotlib.figure import Figure

from dvp.analysis.formats import Formatted


@dataclass(frozen=True)
class Statistic:
    """One number."""

    name: str
    where: dict[str, str]
    """Of what it is: method, rho, engine, policy, weighting, … as in paths; `none` where there is no ρ."""
    value: float
    low: float
    high: float
    """The 95 % interval; NaN, both, where it is not defined."""
    unit: str
    how: str
    """A sentence: how the interval was made, over what."""
    sources: tuple[str, ...]
    """The stages' JSON files that it comes from, relative to the experiment's folder."""


@dataclass(frozen=True)
class Measured:
    """What a part of an experiment's report consists of."""

    statistics: list[Statistic] = field(default_factory=list)
    tables: dict[str, tuple[pd.DataFrame, Formatted]] = field(default_factory=dict)
    figures: dict[str, Figure] = field(default_factory=dict)
    sources: tuple[str, ...] = ()
    """The stages' JSON files behind all of it, relative to the experiment's folder."""
