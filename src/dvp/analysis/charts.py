"""Give the figures of a report a tidy table of estimates and series, and two ways to draw it."""

import math
from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from dvp.analysis.drawing import VALUES, Intervals, Lines, matching
from dvp.analysis.looks import STYLE, Looks
from dvp.analysis.points import BASE, role, where_of
from dvp.analysis.shown import Panel
from dvp.analysis.statistics import Statistic, to_frame
from dvp.experiment.config import Experiment
from dvp.experiment.grid import parse_rho

COORDINATES = (
    *("method", "engine", "rho", "policy", "task", "step", "seed", "position", "length", "control", "weighting"),
    *("part", "margin", "side", "evaluated_on", "evaluated_rho"),
)


class Charts:
    """Source of a report's figures: a tidy table of estimates and series, and two ways to draw it."""

    def __init__(self, experiment: Experiment, statistics: list[Statistic], series: pd.DataFrame):
        self.experiment = experiment
        self.table = tidy(experiment, statistics, series)
        """A row per estimate or point of a curve, with all coordinates (`none` where one does not apply)."""

    @property
    def task(self) -> str:
        """Return the name of the task that is reported."""
        task = self.experiment.report.task
        return "held-out problems" if task == "held_out" else task

    @property
    def k(self) -> int:
        """Return the number of samples per problem."""
        return self.experiment.evaluation.samples_per_problem[self.experiment.report.task]

    def has(self, quantity: str) -> bool:
        """Return whether a quantity was measured."""
        return bool((self.table["quantity"] == quantity).any())

    def values(self, **where: str) -> np.ndarray:
        """List the distinct values of the rows with these values of their columns."""
        return matching(self.table, where)["value"].unique()

    @staticmethod
    def over_rho(table: pd.DataFrame) -> pd.DataFrame:
        """Let lines run along ρ; x is NaN without one."""
        rho = table["rho"].map(lambda rho: math.nan if rho == "none" else parse_rho(rho))
        return table.assign(x=rho.astype(float))

    def over_quantity(self, quantity: str) -> pd.DataFrame:
        """Let lines run along another quantity of the same coordinates."""
        if not self.has(quantity):
            return self.table
        own = matching(self.table, {"quantity": quantity})
        shared = [key for key in (*COORDINATES, *self.experiment.axes) if (own[key] != "none").any()]
        known = own[[*shared, "value"]].drop_duplicates(shared)
        x = self.table[shared].merge(known, "left", shared)["value"]
        return self.table.assign(x=x.set_axis(self.table.index))

    def by_family(self, *quantities: str, position: str = "none") -> pd.DataFrame:
        """Return estimators: one without a safe vocabulary, then the same with each, the largest fixed ρ first."""
        own = self.table[self.table["quantity"].isin(quantities) & (self.table["position"] == position)]
        return Looks(self.experiment).by_family(own)

    @staticmethod
    def finding(title: str, says: str, table: pd.DataFrame, quantity: str) -> str:
        """Add to a title how many intervals of a quantity, which `says` names, lie above zero and below it."""
        rows = table[table["quantity"] == quantity].dropna(subset=VALUES)
        above, below = int((rows["low"] > 0).sum()), int((rows["high"] < 0).sum())
        counts = f"{above} above zero, {below} below, {len(rows) - above - below} inconclusive"
        return f"{title}; {says}: {counts}" if len(rows) else title

    def intervals(self, title: str, table: pd.DataFrame, panels: Sequence[Panel], **options: Any) -> Figure | None:
        """Draw a row per model or estimator and a column per panel; see `Intervals`. None without a value."""
        return _drawn(Intervals, self.experiment, title, table, panels, options)

    def lines(self, title: str, table: pd.DataFrame, panels: Sequence[Panel], **options: Any) -> Figure | None:
        """Draw lines over the column `x` of the table; see `Lines`. None without a value."""
        return _drawn(Lines, self.experiment, title, table, panels, options)


def tidy(experiment: Experiment, statistics: list[Statistic], series: pd.DataFrame) -> pd.DataFrame:
    """Join estimates and series into one table with every coordinate, `none` where it does not apply.

    Adds role, of a grid point or the base model (dvp.analysis.points.role); at, `at ρ` for evaluations sampled at a ρ;
    and only_rho, that ρ if training had none.
    """
    table = pd.concat([to_frame(statistics), series], ignore_index=True)
    coordinates = [*COORDINATES, *experiment.axes]
    table = table.reindex(columns=[*dict.fromkeys([*table, *coordinates, "x"])])
    table[coordinates] = table[coordinates].astype(object).fillna("none")
    roles = {
        tuple(where_of(experiment, point).values()): role(experiment, point) for point in (None, *experiment.points)
    }
    places = zip(*(table[key] for key in ["method", "engine", "rho", *experiment.axes]), strict=True)
    only = (table["evaluated_rho"] != table["rho"]) & (table["evaluated_rho"] != "own")
    return table.assign(
        role=[roles.get(place if place[0] != BASE else place[:3], "") for place in places],
        only_rho=table["evaluated_rho"].where(only, "none"),
        at=np.where(table["evaluated_rho"] == "none", "none", "at ρ"),
    )


def _drawn(
    kind: type, experiment: Experiment, title: str, table: pd.DataFrame, panels: Sequence[Panel], options: dict
) -> Figure | None:
    known = set(table.loc[table["value"].notna(), "quantity"])
    panels = [panel for panel in panels if known & set(panel.names)]
    with mpl.rc_context(STYLE):  # touches no global state
        return kind(Looks(experiment), title, table, panels, **options).draw() if panels else None
