"""Draw intervals in rows, and lines with bands in facets, from a tidy table.

matplotlib alone: with seaborn.objects or plotnine the asymmetric intervals, shared symmetric-logarithmic axes and the
controls that are repeated in every facet would have to be drawn by hand as well.
"""

import itertools
import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter

from dvp.analysis.looks import DARK, LINES, MARKERS, Looks
from dvp.analysis.points import BASE
from dvp.analysis.shown import Facet, Panel

STEP = 0.22  # distance between the marks of a row, in row heights
BELOW = 30.0  # factor below the lowest value at which a logarithmic axis ends if an interval reaches zero
ZERO = 1e-300
FEW = 5  # a line of fewer points has markers, so that a single point is seen
MOST_WITH_SEEDS = 8  # lines in a panel; with more, their seeds would hide them
DODGE = 0.04  # share of an axis over which bars of several lines are spread
LEVELS = ((0, (4, 1.5)), (0, (1, 1.5)), "-.")
RING = {"marker": "o", "markersize": 11, "color": "none", "markeredgecolor": DARK, "markeredgewidth": 1}
VERTICAL = {"color": "#707070", "linewidth": 0.9, "linestyle": (0, (2, 2)), "zorder": 1}
REFERENCE = {"color": "black", "linestyle": "-"}
VALUES = ["value", "low", "high"]


@dataclass
class Chart:
    """A figure with its legend."""

    looks: Looks
    title: str
    table: pd.DataFrame
    panels: list[Panel]
    facets: Sequence[str] = ()
    """Columns whose combinations are a panel or a row of panels each."""
    colour: str = "method"
    """Column that gives the colour."""
    handles: dict[str, Line2D] = field(default_factory=dict)
    """The legend by label."""

    @property
    def drawn(self) -> pd.DataFrame:
        """Return the rows of the panels' quantities."""
        return self.table[self.table["quantity"].isin([name for panel in self.panels for name in panel.names])]

    @staticmethod
    def canvas(width: float, height: float) -> Figure:
        """Open a figure of so many inches."""
        figure = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasAgg(figure)
        return figure

    def finish(self, figure: Figure, note: str) -> Figure:
        """Add title and legend."""
        width, height = figure.get_size_inches()
        for label in _outside(figure):
            del self.handles[label]
        title = f"{self.looks.experiment.name}: {self.title}; {note}"
        figure.suptitle(textwrap.fill(title, int(13 * width)), fontsize=9.5, x=0.01, ha="left")
        columns = int((width - 0.3) / (0.075 * max(map(len, self.handles), default=1) + 0.7))
        columns = max(1, min(columns, len(self.handles)))
        figure.set_figheight(height + 0.19 * math.ceil(len(self.handles) / columns))
        figure.legend(self.handles.values(), self.handles.keys(), loc="outside lower center", ncols=columns)
        return figure

    def across(self, draw: Callable, panel: Panel, facet: Facet) -> None:
        """Draw the lines across a panel."""
        for look, (label, at) in zip(itertools.cycle(LEVELS), panel.across.items(), strict=False):
            for value in at(facet) if callable(at) else at:
                if math.isfinite(value):
                    draw(value, zorder=1, label=label, color="black", linestyle=look, linewidth=1)
                    self.handles[label] = handle(color="black", linestyle=look, linewidth=1)


@dataclass
class Intervals(Chart):
    """Marks with their intervals, a row per model or estimator in the order of the table."""

    columns: Sequence[str] = ()
    """Columns of the table whose combinations are columns of panels."""
    rings: Sequence[Mapping[str, str]] = ()
    """Coordinates of marks with a ring: the policy that the updates are for."""

    def draw(self) -> Figure:
        """Draw the figure."""
        drawn, looks = self.drawn, self.looks
        facets, columns = combinations(drawn, self.facets), combinations(drawn, self.columns)
        cells = [(panel, of) for of in columns for panel in self.panels]
        keys = [key for key in [*looks.identity, "only_rho"] if key not in {**facets[0], **columns[0]}]
        rows = drawn.drop_duplicates(keys)
        named = [key for key in keys if key == "method" or rows[rows["method"] != BASE][key].nunique() > 1]
        labels = [textwrap.fill(looks.name(row, named), 46) for row in rows.to_dict("records")]
        lines = max(label.count("\n") + 1 for label in labels)
        marks = drawn.groupby(["quantity", *keys, *facets[0], *columns[0]]).size().max()
        marks *= max(len(panel.names) for panel in self.panels)
        height = max(0.12 * marks + 0.12, 0.16 * lines + 0.08) * len(rows) + 0.7
        width = 6.0 if len(cells) == 1 else 3.0
        figure = self.canvas(width * len(cells) + 2.4, height * len(facets) + 0.7)
        grid = figure.subplots(len(facets), len(cells), squeeze=False, sharey=True)
        for (row, facet), (column, (panel, of)) in itertools.product(enumerate(facets), enumerate(cells)):
            axes, own = grid[row, column], matching(self.table, facet | of)
            # Panels of a quantity share the axis, so that facets can be compared.
            if axes is not (first := grid[0, self.panels.index(panel)]):
                axes.sharex(first)
            for place, one in enumerate(rows[keys].to_dict("records")):
                self._row(axes, place, panel, matching(own, one))
            self.across(axes.axvline, panel, facet | of)
            of_panel = looks.name(pd.Series(facet | of, dtype=object), [*facet, *of])
            title = ": ".join(filter(None, [of_panel, panel.title]))
            axes.set(title=textwrap.fill(title, int(11 * width)), xlabel=panel.label if facet is facets[-1] else "")
            axes.grid(visible=False, axis="y")
            _scale(axes, "x", panel)
            for boundary in range(1, len(rows)):
                axes.axhline(boundary - 0.5, color="#E4E4E4", linewidth=0.6, zorder=0)
        grid[0, 0].set_yticks(range(len(labels)), labels)
        grid[0, 0].set_ylim(len(labels) - 0.5, -0.5)
        return self.finish(figure, "bars: 95 % intervals")

    def _row(self, axes: Axes, height: int, panel: Panel, own: pd.DataFrame) -> None:
        """Draw a row's marks below one another: the marker shows the quantity, and is hollow if sampled at ρ."""
        seeds, own = own[own["quantity"] == panel.seeds], own[own["quantity"].isin(panel.names)]
        for place, row in enumerate(own.to_dict("records")):
            y, color = height + STEP * (place - (len(own) - 1) / 2), self.looks.color(row, self.colour)
            value, low, high = (panel.scale * row[key] for key in VALUES)
            low = max(low, ZERO) if panel.log else low
            marker = MARKERS[panel.names.index(row["quantity"])]
            face = color if row["at"] == "none" else "white"
            axes.hlines(y, low, high, linewidth=1.6, alpha=0.7, zorder=2, color=color)
            axes.plot(value, y, marker, markersize=5, mfc=face, color=color, zorder=3)
            if any(all(row[key] == of for key, of in place.items()) for place in self.rings):
                axes.plot(value, y, zorder=2, **RING)
                self.handles["policy that the updates are for"] = handle(**RING)
            if self.colour != "method":
                label = self.looks.name(row, [self.colour, "at"])
                self.handles[label] = handle(marker=marker, color=color, mfc=face)
            if len(panel.names) > 1:
                self.handles[self.looks.name(row, ["quantity"])] = handle(marker=marker, color=DARK)
        for value in seeds["value"]:
            color, look = self.looks.color(seeds.iloc[0], self.colour), {"markersize": 3.5, "mfc": "white"}
            axes.plot(panel.scale * value, height + 1.2 * STEP, "o", color=color, zorder=3, **look)
            one = "one base model" if self.looks.experiment.bases else "one seed"
            self.handles[one] = handle(marker="o", color=DARK, **look)


@dataclass
class Lines(Chart):
    """Lines with bands, a facet per combination of coordinates and a panel per quantity.

    What has no ρ, and the control, stand in every facet of a ρ.
    """

    x_label: str = ""
    along: str = "x"
    """Coordinate of x, which does not tell lines apart."""
    tick: Callable[[float], str] | None = None
    """Labels of the x that the data have, if only these are marked."""
    per_row: int = 3
    """Panels side by side."""
    width: float = 3.6
    """Inches of a panel."""
    bars: bool = False
    """Draw intervals as bars instead of bands."""
    smooth: int = 0
    """Steps of the trailing mean; its lines are means of the table's seeds and have no interval."""
    reference: bool = False
    """Draw the reference's line in black in every facet."""
    verticals: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Vertical lines by label."""
    note: str = ""
    """Explains what is drawn, if not the intervals."""
    alike: dict[str, list[tuple]] = field(default_factory=dict)
    """The lines of the figure by colour; those of one colour differ in style."""

    def draw(self) -> Figure:
        """Draw the figure."""
        # Facets of a single quantity are wrapped; with several quantities each facet starts a row.
        rows = [[(facet, panel) for panel in self.panels] for facet in self.places]
        rows = [list(itertools.chain(*rows))] if len(self.panels) == 1 else rows
        starts = [(row, start) for row in rows for start in range(0, len(row), self.per_row)]
        layout = [row[start : start + self.per_row] for row, start in starts]
        number, first = max(map(len, layout)), {}
        width, height = self.width * number + 0.4, max(0.78 * self.width, 2.3) * len(layout) + 0.9
        figure = self.canvas(max(width, 6.0), height)
        grid = figure.subplots(len(layout), number, squeeze=False)
        for row, cells in zip(grid, layout, strict=True):
            for axes, (facet, panel) in zip(row, cells, strict=False):
                if (other := first.setdefault(id(panel), axes)) is not axes:
                    axes.sharey(other)
                self._panel(axes, panel, facet)
                of_facet = self.looks.name(facet, facet) if len(self.places) > 1 or len(self.panels) == 1 else ""
                title = ": ".join(filter(None, [of_facet, panel.title]))
                axes.set(title=textwrap.fill(title, int(11 * self.width)), xlabel=self.x_label)
                label = textwrap.fill(panel.label, 32)  # longer ones end beyond the panel
                axes.set_ylabel(label if axes is row[0] or len(self.panels) > 1 else "")
            for axes in row[len(cells) :]:
                axes.remove()
        note = f"{'bars' if self.bars else 'bands'}: 95 % intervals"
        note = f"bold: means over seeds, trailing mean of {self.smooth} steps" if self.smooth else note
        return self.finish(figure, self.note or note)

    @cached_property
    def named(self) -> list[str]:
        """List the columns that tell grid points apart."""
        drawn = self.drawn[self.drawn["method"] != BASE]
        return [key for key in self.looks.identity if key == "method" or drawn[key].nunique() > 1]

    @cached_property
    def places(self) -> list[Facet]:
        """Return the coordinates of the facets, which follow from the lines other than controls.

        A facet without ρ is left out if there are some with ρ: its lines are repeated beside each ρ.
        """
        own = self.drawn[self.drawn["method"] != BASE]
        own = own[own["role"] != "control"] if (own["role"] != "control").any() else own
        every = combinations(own, self.facets)
        with_rho = [{**facet, "rho": "none"} for facet in every if facet.get("rho", "none") != "none"]
        return [facet for facet in every if facet not in with_rho]

    def _panel(self, axes: Axes, panel: Panel, facet: Facet) -> None:
        axes.set(**{f"{axis}scale": "log" for axis in panel.log})
        own = self._in_facet(self.table[self.table["quantity"].isin(panel.names)], facet)
        if panel.floor is not None:
            own = own.assign(value=own["value"].where(own["value"] > panel.floor))
        keys = [*self.looks.identity, "control", "margin", "weighting", "role"]
        keys = [key for key in keys if key not in facet and key != self.along]
        named = [self.colour, *(key for key in keys[:-1] if key in self.named or key not in self.looks.identity)]
        groups = list(own.groupby(["quantity", *keys], sort=False))
        for number, (key, line) in enumerate(groups):
            columns = [*named, "engine"] if line["role"].iloc[0] == "control" else named
            label = self.looks.name(line.iloc[0], [*dict.fromkeys(columns)])
            shift = DODGE * (number / len(groups) - 0.5) if self.bars else 0
            self._line(axes, panel, line, key[1:-1], label, shift, with_seeds=len(groups) <= MOST_WITH_SEEDS)
        self.across(axes.axhline, panel, facet)
        for label, places in self.verticals.items():
            for x in places:
                axes.axvline(x, label=label, **VERTICAL)
                self.handles[label] = handle(**VERTICAL)
        if panel.limits:
            axes.set_ylim(*panel.limits)
        _scale(axes, "x", panel, values=False)
        _scale(axes, "y", panel)
        if self.tick:
            ticks = sorted(own["x"].dropna().unique())
            axes.set_xticks(ticks, list(map(self.tick, ticks)))
            axes.set_xticks([], minor=True)
        elif "x" not in panel.log:
            axes.xaxis.get_major_locator().set_params(integer=True)
            if axes.get_xlim()[1] > 1e4:
                axes.xaxis.set_major_formatter(EngFormatter())

    def _line(
        self, axes: Axes, panel: Panel, line: pd.DataFrame, key: tuple, label: str, shift: float, *, with_seeds: bool
    ) -> None:
        first = line.iloc[0]
        color, look, marker = self._look(panel, first, key)
        label = f"{label} (control)" if first["role"] == "control" else label
        if self.reference and first["role"] == "reference":
            look, label, color = look | REFERENCE, f"reference: {label}", "black"
        seeds, mean = line[line["seed"] != "none"], line[line["seed"] == "none"]
        for _, one in seeds.groupby("seed") if with_seeds else ():
            axes.plot(one["x"], panel.scale * one["value"], color=color, linewidth=0.6, alpha=0.35)
            self.handles["one seed"] = handle(color=DARK, linewidth=0.6, alpha=0.5)
        mean = self._smoothed(seeds) if mean.empty else mean
        if mean["x"].isna().all():  # x is ρ, and the line has none
            if np.isfinite(value := mean["value"].iloc[0]):
                axes.axhline(panel.scale * value, **look | {"linewidth": 1.3})
                self.handles.setdefault(label, handle(**look))
            return
        mean = mean.dropna(subset="x").sort_values("x")
        x, value, low, high = (mean[key].to_numpy(dtype=float) for key in ("x", *VALUES))
        value, low, high = (panel.scale * each for each in (value, low, high))
        if axes.get_yscale() == "log":
            value = np.where(value > 0, value, math.nan)
            low = np.maximum(low, ZERO)
        if self.bars:
            logarithmic = axes.get_xscale() == "log"
            x = x * (x.max() / x.min()) ** shift if logarithmic else x + 8 * shift
            axes.vlines(x, low, high, color=color, linewidth=0.9, alpha=0.6, zorder=2)
        else:
            axes.fill_between(x, low, high, color=color, alpha=0.18, linewidth=0)
        look |= marker if self.bars or len(x) < FEW else {}
        axes.plot(x, value, zorder=3, **look)
        if np.isfinite(value).any():  # else it lies below the panel's floor
            self.handles.setdefault(label, handle(**look))

    def _look(self, panel: Panel, row: pd.Series, key: tuple) -> tuple[str, dict, dict]:
        """Return the colour of a line, its look, and its marker; lines of one colour differ in both."""
        color = self.looks.color(row, self.colour)  # a control has another colour
        alike = self.alike.setdefault(color, [])
        if key not in alike:
            alike.append(key)
        number = alike.index(key) + panel.names.index(row["quantity"])
        style = LINES[(number + 3 * (row["role"] == "control")) % len(LINES)]
        look = {"color": color, "linestyle": style, "linewidth": 1 if self.bars else 1.8}
        return color, look, {"marker": MARKERS[number % len(MARKERS)], "markersize": 4}

    def _smoothed(self, seeds: pd.DataFrame) -> pd.DataFrame:
        """Return the trailing mean over steps of the mean over seeds."""
        by_seed = seeds.pivot_table(index="x", columns="seed", values="value", dropna=False)
        smooth = by_seed.mean(axis=1).rolling(self.smooth, min_periods=1).mean()
        # A gap of every seed stays a gap in the mean, which the trailing mean would close.
        mean = smooth.where(by_seed.notna().any(axis=1)).rename("value").reset_index()
        return mean.assign(low=math.nan, high=math.nan)

    def _in_facet(self, own: pd.DataFrame, facet: Facet) -> pd.DataFrame:
        """Return the rows of a facet, with the lines that are repeated in it: without ρ, controls, the reference."""
        control, settings = own["role"] == "control", self.looks.experiment.axes
        inside = pd.Series(data=True, index=own.index)
        for key, value in facet.items():
            same = own[key] == value
            if self.reference and key != "task":
                same |= own["role"] == "reference"
            if key == "rho":
                same |= own[key] == "none"
            elif key == "engine" or (
                key in settings and not {of[key] for of in self.places} & set(own.loc[control, key])
            ):
                same |= control
            inside &= same
        return own[inside & (own["method"] != BASE)]


def _scale(axes: Axes, axis: str, panel: Panel, *, values: bool = True) -> None:
    """Set an axis to log, labelled 1, 2, 5, 10, … over few decades, or symlog, grey where it is linear.

    values : whether it is the axis of the panel's values, which alone can be symlog.
    """
    of = getattr(axes, f"{axis}axis")
    if values and panel.symlog:
        getattr(axes, f"set_{axis}scale")("symlog", linthresh=panel.symlog, linscale=0.7)
        span = axes.axvspan if axis == "x" else axes.axhspan
        span(-panel.symlog, panel.symlog, color="#F0F0F0", zorder=0)
        of.set_major_formatter("{x:g}")
    elif axis in panel.log:
        getattr(axes, f"set_{axis}scale")("log")
        getattr(axes, f"set_{axis}lim")(*_limits(axes, axis))
        low, high = getattr(axes, f"get_{axis}lim")()
        if high < 100 * low:
            of.set_major_locator(LogLocator(subs=(1, 2, 5)))
            of.set_major_formatter("{x:g}")
            of.set_minor_formatter(NullFormatter())


def _limits(axes: Axes, axis: str) -> tuple[float | None, float | None]:
    """Return limits of a logarithmic axis that show all intervals; if one reaches zero, by BELOW the lowest value.

    (None, None) without a positive value.
    """
    place, shared = "xy".index(axis), getattr(axes, f"get_shared_{axis}_axes")().get_siblings(axes)
    drawn = [line.get_xydata()[:, place] for of in shared for line in of.lines if line.get_zorder() == 3]
    paths = [path for of in shared for collection in of.collections for path in collection.get_paths()]
    values, ends = np.concatenate([[], *drawn]), np.concatenate([[], *(path.vertices[:, place] for path in paths)])
    values, every = values[values > 0], np.concatenate([values, ends])
    if not len(values):
        return None, None
    lowest = values.min() / BELOW if (ends <= ZERO).any() else every[every > ZERO].min()
    highest = np.nanmax(every)
    beside = max(1.2, (highest / lowest) ** 0.04)
    return lowest / beside, highest * beside


def _outside(figure: Figure) -> set[str]:
    """Find the labels of levels and verticals that lie outside every panel."""
    labels, seen = set(), set()
    for axes in figure.axes:
        for line in axes.lines:
            if not line.get_label().startswith("_"):
                labels.add(line.get_label())
                # In coordinates of the panel, as its limits need not be those of the data.
                ends = axes.transAxes.inverted().transform(line.get_transform().transform(line.get_xydata()))
                seen |= {line.get_label()} if ((ends >= -0.001) & (ends <= 1.001)).all() else set()
    return labels - seen


def handle(**looks: Any) -> Line2D:
    """Make an entry of a legend: a line, or a marker alone if one is given without `linestyle` and `linewidth`."""
    if "marker" in looks and "linestyle" not in looks:
        looks.setdefault("linewidth", 0)
    return Line2D([], [], **looks)


def combinations(table: pd.DataFrame, columns: Sequence[str]) -> list[Facet]:
    """List the distinct combinations of values in some columns; without columns a single empty one."""
    return table[[*columns]].drop_duplicates().to_dict("records") if columns else [{}]


def matching(table: pd.DataFrame, where: Mapping[str, str]) -> pd.DataFrame:
    """Return the rows with these values of their columns."""
    for key, value in where.items():
        table = table[table[key] == value]
    return table
