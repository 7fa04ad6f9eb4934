"""The two kinds of figure that nearly all are of: intervals in rows, and lines with their intervals in facets."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import matplotlib as mpl
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dvp.analysis.figures import DARK, STYLE, new_figure, plain_log, set_title
from dvp.analysis.statistics import Statistic

STEP = 0.22  # of a row's height, between its marks
BELOW = 30.0  # times below its value ends a bar on a logarithmic axis that would go on to 0 and beyond
MARGIN = 1.25  # beside the first and the last tick of a logarithmic axis, times
FEW = 5  # points that are marked, so that a single one is seen
RING = {"marker": "o", "markersize": 11, "color": "none", "markeredgecolor": DARK, "markeredgewidth": 1}


@dataclass(frozen=True)
class Mark:
    """A value with its interval."""

    statistic: Statistic
    color: str
    hollow: bool = False
    ringed: bool = False
    marker: str = "o"
    seeds: Sequence[float] = ()
    """Small marks below it."""


@dataclass(frozen=True)
class Rows:
    """A panel of intervals in rows."""

    rows: Sequence[Sequence[Mark | None]]
    """From the top; of each row the marks one below another, None where a place stays free."""
    label: str
    """Of the axis."""
    title: str = ""
    scale: float = 1
    log: bool = False
    levels: Sequence[tuple[float, dict]] = ()
    """Lines across all rows, and how they look."""


@dataclass(frozen=True)
class Line:
    """With a marker its intervals are bars at the points, without one a band. It has a gap where there is no value."""

    points: Mapping[float, Statistic | None]
    """By their place on the x axis."""
    color: str
    marker: str | None = None
    style: str | tuple = "-"


@dataclass(frozen=True)
class Facet:
    """A panel of lines."""

    lines: Sequence[Line]
    title: str = ""
    x: str = ""
    y: str = ""
    """Labels of the axes."""
    log: str = "xy"
    """Which axes are logarithmic."""
    ticks: Mapping[float, str] | None = None
    """Of the x axis; None: matplotlib's."""
    y_limits: tuple[float, float] | None = None
    zero: bool = False
    """With a line at y = 0."""
    empty: str = ""
    """What stands there instead if no line has a value."""


def intervals_in_rows(
    title: str, labels: Sequence[str], panels: Sequence[Sequence[Rows]], handles: Sequence[Artist], panel: float
) -> Figure:
    """A grid of panels whose rows are called `labels`; `panel` is the width of one in inches."""
    most = max(len(row) for line in panels for each in line for row in each.rows)
    lines = max(label.count("\n") + 1 for label in labels)
    width = panel * len(panels[0]) + 2.4
    height = max(0.11 * most + 0.1, 0.16 * lines + 0.06) * len(labels) + 0.6
    with mpl.rc_context(STYLE):
        figure = new_figure(width, height * len(panels) + 1.1)
        grid = figure.subplots(len(panels), len(panels[0]), squeeze=False, sharex="col", sharey=True)
        for place in np.ndindex(grid.shape):
            _rows(grid[place], panels[place[0]][place[1]])
        for axes in grid[:-1].ravel():
            axes.set_xlabel("")
        grid[0, 0].set_yticks(range(len(labels)), labels)
        grid[0, 0].set_ylim(len(labels) - 0.5, -0.5)
        _finish(figure, title, handles)
    return figure


def _rows(axes: Axes, panel: Rows) -> None:
    for height, row in enumerate(panel.rows):
        for place, mark in enumerate(row):
            if mark is None:
                continue
            y, looks = height + STEP * (place - (len(row) - 1) / 2), {"color": mark.color}
            value, low, high = (panel.scale * getattr(mark.statistic, key) for key in ("value", "low", "high"))
            axes.hlines(y, low, high, linewidth=1.6, alpha=0.7, zorder=2, **looks)
            if mark.ringed:
                axes.plot(value, y, zorder=2, **RING)
            axes.plot(
                value, y, mark.marker, markersize=5, mfc="white" if mark.hollow else mark.color, zorder=3, **looks
            )
            for seed in mark.seeds:
                axes.plot(panel.scale * seed, y + 1.2 * STEP, "o", markersize=3.5, mfc="white", zorder=3, **looks)
        if height:
            axes.axhline(height - 0.5, color="#E4E4E4", linewidth=0.6, zorder=0)
    for level, looks in panel.levels:
        axes.axvline(panel.scale * level, linewidth=1.2, zorder=1, **looks)
    axes.set(xlabel=panel.label, title=panel.title)
    axes.grid(visible=False, axis="y")
    if panel.log:
        axes.set_xscale("log")
        plain_log(axes.xaxis)


def lines_in_facets(
    title: str, facets: Sequence[Sequence[Facet]], handles: Sequence[Artist], facet: float, *, share_y: bool = True
) -> Figure:
    """A grid of facets with one x axis, each row with one y axis or each facet with its own.

    facet : the width of one in inches; its height is three quarters of that.
    """
    shape = len(facets), len(facets[0])
    width = max(facet * shape[1], 6.0)
    with mpl.rc_context(STYLE):
        figure = new_figure(width, 0.75 * facet * len(facets) + 1.1 + 0.2 * math.ceil(len(handles) / 3))
        grid = figure.subplots(*shape, squeeze=False, sharex=True, sharey="row" if share_y else False)
        for place in np.ndindex(grid.shape):
            _facet(grid[place], facets[place[0]][place[1]])
        for axes in grid[:, 1:].ravel() if share_y else ():
            axes.set_ylabel("")
        for axes in grid[:-1].ravel():
            axes.set_xlabel("")
        _finish(figure, title, handles)
    return figure


def _facet(axes: Axes, facet: Facet) -> None:
    axes.set(title=facet.title, xlabel=facet.x, ylabel=facet.y)
    for axis in facet.log:
        axes.set(**{f"{axis}scale": "log"})
    if facet.zero:
        axes.axhline(0, color="#808080", linewidth=0.8, zorder=1)
    for line in facet.lines:
        _line(axes, line, positive="y" in facet.log)
    if facet.ticks is not None:
        axes.set_xticks(list(facet.ticks), list(facet.ticks.values()))
        axes.set_xticks([], minor=True)
        # Also where a facet has no mark.
        first, last = min(facet.ticks), max(facet.ticks)
        axes.set_xlim(*((first / MARGIN, last * MARGIN) if "x" in facet.log else (first - 0.6, last + 0.6)))
    if facet.y_limits:
        axes.set_ylim(*facet.y_limits)
    if facet.empty and not any(np.isfinite(line.get_ydata()).any() for line in axes.lines):
        axes.text(0.5, 0.5, facet.empty, transform=axes.transAxes, ha="center", va="center")
    if "y" in facet.log and axes.get_ylim()[1] < 100 * axes.get_ylim()[0]:
        plain_log(axes.yaxis)


def _line(axes: Axes, line: Line, *, positive: bool) -> None:
    """positive : whether the axis has no place for what is not."""
    x, points = np.array(list(line.points)), list(line.points.values())
    numbers = [(math.nan,) * 3 if one is None else (one.value, one.low, one.high) for one in points]
    value, low, high = np.array(numbers, dtype=float).reshape(-1, 3).T
    if positive:
        value = np.where(value > 0, value, math.nan)
        low = np.where(low > 0, low, value / BELOW)
    marker = line.marker or ("o" if len(points) < FEW else None)
    axes.plot(x, value, color=line.color, linestyle=line.style, linewidth=1.2, marker=marker, markersize=4, zorder=3)
    if line.marker is None:
        axes.fill_between(x, low, high, color=line.color, alpha=0.18, linewidth=0)
    else:
        known = np.isfinite(value) & np.isfinite(high)
        axes.vlines(x[known], low[known], high[known], color=line.color, linewidth=0.9, alpha=0.6, zorder=2)


def _finish(figure: Figure, title: str, handles: Sequence[Artist]) -> None:
    width = figure.get_figwidth()
    set_title(figure, title, 0.96 * width)
    longest = max(len(part) for handle in handles for part in handle.get_label().split("\n"))
    columns = int((width - 0.3) / (0.075 * longest + 0.7))
    figure.legend(handles=handles, loc="outside lower center", ncols=max(1, min(columns, len(handles))))
