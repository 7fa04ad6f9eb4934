"""Draw the two kinds of figure: intervals in rows, and lines with their intervals in facets.

Both draw a table of estimates and series (dvp.analysis.figures.as_drawn) as shown.yaml declares, which lists the keys.
"""

import itertools
import math
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter

from dvp.analysis.looks import DARK, LINES, MARKERS, STYLE, Looks
from dvp.analysis.matrix import own_policies
from dvp.analysis.points import BASE
from dvp.experiment.config import Experiment
from dvp.experiment.grid import parse_rho

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
COORDINATES = (
    *("method", "engine", "rho", "policy", "task", "step", "seed", "position", "length", "control", "weighting"),
    *("part", "margin", "side", "evaluated_on", "evaluated_rho"),
)

Handles = dict[str, Line2D]


def intervals(looks: Looks, shown: dict[str, Any], table: pd.DataFrame) -> Figure:
    """Draw one row per model or estimator, and one column of panels per quantity."""
    panels = present(shown, table)
    drawn = table[table["quantity"].isin(quantities(panels))]
    facets, columns = combinations(drawn, shown.get("facet", [])), combinations(drawn, shown.get("columns", []))
    cells = [(panel, of) for of in columns for panel in panels]
    keys = [key for key in [*looks.identity, "only_rho"] if key not in {**facets[0], **columns[0]}]
    rows = drawn.drop_duplicates(keys)
    rows = looks.by_family(rows) if shown.get("order") == "family" else rows
    named = [key for key in keys if key == "method" or rows[rows["method"] != BASE][key].nunique() > 1]
    labels = [textwrap.fill(looks.name(row, named), 46) for row in rows.to_dict("records")]
    lines = max(label.count("\n") + 1 for label in labels)
    most = drawn.groupby(["quantity", *keys, *facets[0], *columns[0]]).size().max() * max(
        len(panel["quantity"]) for panel in panels
    )
    height = max(0.12 * most + 0.12, 0.16 * lines + 0.08) * len(rows) + 0.7
    width = 6.0 if len(cells) == 1 else 3.0
    size = width * len(cells) + 2.4, height * len(facets) + 0.7
    with drawing(looks, shown, *size, "bars: 95 % intervals") as (figure, handles):
        grid = figure.subplots(len(facets), len(cells), squeeze=False, sharey=True)
        for (row, facet), (column, (panel, of)) in itertools.product(enumerate(facets), enumerate(cells)):
            axes, own = grid[row, column], matching(table, facet | of)
            # Panels of a quantity share the axis, so that facets can be compared.
            if axes is not (first := grid[0, panels.index(panel)]):
                axes.sharex(first)
            for place, one in enumerate(rows[keys].to_dict("records")):
                _row(axes, place, looks, shown | panel, matching(own, one), handles)
            _levels(axes.axvline, looks, shown | panel, own, handles)
            of_panel = looks.name(pd.Series(facet | of, dtype=object), [*facet, *of])
            title = ": ".join(filter(None, [of_panel, panel.get("title")]))
            axes.set(title=textwrap.fill(title, int(11 * width)), xlabel=panel["label"] if facet is facets[-1] else "")
            axes.grid(visible=False, axis="y")
            if "log" in panel:
                _scale(axes, "x", panel["log"])
        for boundary in range(1, len(rows)):
            for axes in grid.ravel():
                axes.axhline(boundary - 0.5, color="#E4E4E4", linewidth=0.6, zorder=0)
        grid[0, 0].set_yticks(range(len(labels)), labels)
        grid[0, 0].set_ylim(len(labels) - 0.5, -0.5)
    return figure


def _row(axes: Axes, height: int, looks: Looks, panel: dict[str, Any], own: pd.DataFrame, handles: Handles) -> None:
    """Draw a row's marks below one another: the marker shows the quantity, and is hollow if sampled at ρ."""
    by, seeds = panel.get("colour", "method"), own[own["quantity"] == panel.get("seeds")]
    own = own[own["quantity"].isin(panel["quantity"])]
    policies = own_policies(looks.experiment) if panel.get("ring") else []
    for place, row in enumerate(own.to_dict("records")):
        y, color = height + STEP * (place - (len(own) - 1) / 2), looks.color(row, by)
        value, low, high = (panel.get("scale", 1) * row[key] for key in VALUES)
        low = max(low, ZERO) if panel.get("log") == "log" else low
        marker = MARKERS[panel["quantity"].index(row["quantity"])]
        face = color if row["at"] == "none" else "white"
        axes.hlines(y, low, high, linewidth=1.6, alpha=0.7, zorder=2, color=color)
        axes.plot(value, y, marker, markersize=5, mfc=face, color=color, zorder=3)
        if any(all(row[key] == of for key, of in place.items()) for place in policies):
            axes.plot(value, y, zorder=2, **RING)
            handles["policy that the updates are for"] = handle(**RING)
        if by != "method":
            label = looks.name(row, [by, "at"])
            handles[label] = handle(marker=marker, color=color, mfc=face)
        if len(panel["quantity"]) > 1:
            handles[looks.name(row, ["quantity"])] = handle(marker=marker, color=DARK)
    for value in seeds["value"]:
        color = looks.color(seeds.iloc[0], by)
        axes.plot(panel["scale"] * value, height + 1.2 * STEP, "o", markersize=3.5, mfc="white", color=color, zorder=3)
        one = "one base model" if looks.experiment.bases else "one seed"
        handles[one] = handle(marker="o", markersize=3.5, color=DARK, mfc="white")


def lines(looks: Looks, shown: dict[str, Any], table: pd.DataFrame) -> Figure:
    """Draw one facet per combination of coordinates, with one panel per quantity."""
    panels = present(shown, table)
    facets = _facets(looks, shown, table)
    # Facets of a single quantity are wrapped; with several quantities each facet starts a row.
    rows = [[(facet, panel) for panel in panels] for facet in facets]
    rows = [list(itertools.chain(*rows))] if len(panels) == 1 else rows
    across = shown.get("across", 3)
    grid_of = [row[start : start + across] for row in rows for start in range(0, len(row), across)]
    width, number = shown.get("width", 3.6), max(map(len, grid_of))
    note = f"{'bars' if shown.get('bars') else 'bands'}: 95 % intervals"
    note = f"bold: means over seeds, trailing mean of {shown['smooth']} steps" if "smooth" in shown else note
    size = max(width * number + 0.4, 6.0), max(0.78 * width, 2.3) * len(grid_of) + 0.9
    with drawing(looks, shown, *size, shown.get("note", note)) as (figure, handles):
        grid = figure.subplots(len(grid_of), number, squeeze=False)
        draw, first = _Lines(looks, facets, table[table["quantity"].isin(quantities(panels))], handles), {}
        for row, cells in zip(grid, grid_of, strict=True):
            for axes, cell in itertools.zip_longest(row, cells):
                if cell is None:
                    axes.remove()
                    continue
                facet, panel = cell
                if (other := first.setdefault(id(panel), axes)) is not axes:
                    axes.sharey(other)
                draw(axes, shown | panel, facet, table[table["quantity"].isin(panel["quantity"])], table)
                of_facet = looks.name(facet, facet) if len(facets) > 1 or len(panels) == 1 else ""
                title = ": ".join(filter(None, [of_facet, panel.get("title")]))
                axes.set(title=textwrap.fill(title, int(11 * width)), xlabel=shown.get("x_label"))
                label = textwrap.fill(panel["label"], 32)  # longer ones end beyond the panel
                axes.set_ylabel(label if axes is row[0] or len(panels) > 1 else "")
    return figure


def _facets(looks: Looks, shown: dict[str, Any], table: pd.DataFrame) -> list[dict[str, str]]:
    """Return the coordinates of the facets, which follow from the lines other than controls.

    A facet without ρ is left out if there are some with ρ: its lines are repeated beside each ρ.
    """
    own = table[table["quantity"].isin(quantities(shown["panels"])) & (table["method"] != BASE)]
    own = own[own["role"] != "control"] if (own["role"] != "control").any() else own
    by = [key for name in shown.get("facet", []) for key in (looks.experiment.axes if name == "settings" else [name])]
    every = combinations(own, by)
    with_rho = [{**facet, "rho": "none"} for facet in every if facet.get("rho", "none") != "none"]
    return [facet for facet in every if facet not in with_rho]


class _Lines:
    def __init__(self, looks: Looks, facets: list[dict[str, str]], drawn: pd.DataFrame, handles: Handles):
        self.looks, self.facets, self.handles = looks, facets, handles
        drawn = drawn[drawn["method"] != BASE]
        self.named = [key for key in looks.identity if key == "method" or drawn[key].nunique() > 1]
        # The lines of the whole figure by colour; those of one colour differ in style.
        self.alike: dict[str, list[tuple]] = {}

    def __call__(
        self, axes: Axes, panel: dict[str, Any], facet: dict[str, str], own: pd.DataFrame, table: pd.DataFrame
    ) -> None:
        looks, x_name = self.looks, panel.get("x", "x")
        log = panel.get("log", "")
        axes.set(**{f"{axis}scale": "log" for axis in log})
        own = self._in_facet(own, facet, reference=panel.get("reference", False)).assign(
            x_shown=lambda rows: _x(rows, x_name, table, looks.experiment)
        )
        keys = [*looks.identity, "control", "margin", "weighting", "role"]
        keys = [key for key in keys if key not in facet and key != x_name]
        if "floor" in panel:
            own = own.assign(value=own["value"].where(own["value"] > panel["floor"]))
        by = panel.get("colour", "method")
        named = [*dict.fromkeys([by, *(key for key in keys[:-1] if key in self.named or key not in looks.identity)])]
        groups = list(own.groupby(["quantity", *keys], sort=False))
        for number, (key, line) in enumerate(groups):
            columns = [*named, "engine"] if line["role"].iloc[0] == "control" else named
            label = looks.name(line.iloc[0], [*dict.fromkeys(columns)])
            panel["seeds"] = len(groups) <= MOST_WITH_SEEDS
            self._line(axes, panel, line, key[1:-1], label, number / len(groups) - 0.5)
        of_task = matching(table, {"task": facet["task"]}) if "task" in facet else table
        _levels(axes.axhline, looks, panel, of_task, self.handles)
        for label, at in panel.get("verticals", {}).items():
            for x in map(parse_rho, looks.experiment.mismatch.rhos) if at == "rho" else [at]:
                axes.axvline(x, label=label, **VERTICAL)
                self.handles[label] = handle(**VERTICAL)
        if "limits" in panel:
            axes.set_ylim(*panel["limits"])
        for axis in log:
            _scale(axes, axis, "log")
        if "symlog" in panel:
            _scale(axes, "y", f"symlog:{panel['symlog']}")
        if x_name in ("position", "length", "response_tokens"):
            ticks = own.dropna(subset="x_shown").drop_duplicates("x_shown").sort_values("x_shown")
            names = ticks[x_name] if x_name in own else ticks["x_shown"].map("{:.0f}".format)
            axes.set_xticks(ticks["x_shown"], [name.replace("-", "–") for name in names])
            axes.set_xticks([], minor=True)
        if x_name == "tokens_at_step":
            axes.xaxis.set_major_formatter(EngFormatter())
        elif x_name == "x" and "x" not in log:
            axes.xaxis.get_major_locator().set_params(integer=True)

    def _line(
        self, axes: Axes, panel: dict[str, Any], line: pd.DataFrame, key: tuple, label: str, place: float
    ) -> None:
        color, scale = self.looks.color(line.iloc[0], panel.get("colour", "method")), panel.get("scale", 1)
        alike = self.alike.setdefault(color, [])  # a control has another colour
        if key not in alike:
            alike.append(key)
        number = alike.index(key) + panel["quantity"].index(line["quantity"].iloc[0])
        style, marker = LINES[number % len(LINES)], MARKERS[number % len(MARKERS)]
        if line["role"].iloc[0] == "control":
            style, label = LINES[(number + 3) % len(LINES)], f"{label} (control)"
        looks = {"color": color, "linestyle": style, "linewidth": 1.8}
        if panel.get("reference") and line["role"].iloc[0] == "reference":
            looks, label, color = looks | REFERENCE, f"reference: {label}", "black"
        seeds, mean = line[line["seed"] != "none"], line[line["seed"] == "none"]
        if len(seeds):
            if mean.empty:
                by_seed = seeds.pivot_table(index="x_shown", columns="seed", values="value", dropna=False)
                smooth = by_seed.mean(axis=1).rolling(panel["smooth"], min_periods=1).mean()
                # A gap of every seed stays a gap in the mean, which the trailing mean would close.
                mean = smooth.where(by_seed.notna().any(axis=1)).rename("value").reset_index()
                mean = mean.assign(low=math.nan, high=math.nan)
            for _, one in seeds.groupby("seed") if panel["seeds"] else ():
                axes.plot(one["x_shown"], scale * one["value"], color=color, linewidth=0.6, alpha=0.35)
                self.handles["one seed"] = handle(color=DARK, linewidth=0.6, alpha=0.5)
        if mean["x_shown"].isna().all():  # x is ρ, and the line has none
            if np.isfinite(value := mean["value"].iloc[0]):
                axes.axhline(scale * value, **looks | {"linewidth": 1.3})
                self.handles.setdefault(label, handle(**looks))
            return
        mean = mean.dropna(subset="x_shown").sort_values("x_shown")
        value, low, high = (scale * mean[key].to_numpy(dtype=float) for key in VALUES)
        if axes.get_yscale() == "log":
            value = np.where(value > 0, value, math.nan)
            low = np.maximum(low, ZERO)
        x = mean["x_shown"].to_numpy(dtype=float)
        if panel.get("bars"):
            span = x.max() / x.min() if axes.get_xscale() == "log" else max(np.ptp(x), 1)
            x = x * span ** (DODGE * place) if axes.get_xscale() == "log" else x + 8 * DODGE * place
            looks |= {"marker": marker, "markersize": 4, "linewidth": 1}
            axes.vlines(x, low, high, color=color, linewidth=0.9, alpha=0.6, zorder=2)
        else:
            axes.fill_between(x, low, high, color=color, alpha=0.18, linewidth=0)
            looks |= {"marker": marker, "markersize": 4} if len(x) < FEW else {}
        axes.plot(x, value, zorder=3, **looks)
        self.handles.setdefault(label, handle(**looks))

    def _in_facet(self, own: pd.DataFrame, facet: dict[str, str], *, reference: bool) -> pd.DataFrame:
        """Return the rows of a facet, with the lines that are repeated in it: without ρ, controls, the reference."""
        control, settings = own["role"] == "control", self.looks.experiment.axes
        inside = pd.Series(data=True, index=own.index)
        for key, value in facet.items():
            same = own[key] == value
            if reference and key != "task":
                same |= own["role"] == "reference"
            if key == "rho":
                same |= own[key] == "none"
            elif key == "engine" or (
                key in settings and not {of[key] for of in self.facets} & set(own.loc[control, key])
            ):
                same |= control
            inside &= same
        return own[inside & (own["method"] != BASE)]


def _x(rows: pd.DataFrame, name: str, table: pd.DataFrame, experiment: Experiment) -> pd.Series:
    """Return a coordinate as numbers, NaN where it does not apply, or another quantity at the same coordinates."""
    if name == "rho":
        return rows[name].map(lambda rho: math.nan if rho == "none" else parse_rho(rho)).astype(float)
    if name == "position":
        places = {position: float(place) for place, position in enumerate(experiment.positions)}
        return rows[name].map(places).astype(float)
    if name not in rows:
        of = table[table["quantity"] == name]
        shared = [key for key in (*COORDINATES, *experiment.axes) if (of[key] != "none").any()]
        known = of[[*shared, "value"]].drop_duplicates(shared)
        return rows[shared].merge(known, "left", shared)["value"].set_axis(rows.index)
    return rows[name].astype(float)


def _levels(draw: Any, looks: Looks, panel: dict[str, Any], table: pd.DataFrame, handles: Handles) -> None:
    """Draw lines across a panel: numbers, a training setting, a quantity, or the panel's quantity of a given role."""
    experiment, places = looks.experiment, iter(itertools.cycle(LEVELS))
    for label, level in panel.get("levels", {}).items():
        of_panel = table[table["quantity"].isin(panel["quantity"])]
        look = {"color": "black", "linestyle": next(places), "linewidth": 1}
        if isinstance(level, int | float | list):
            values = np.atleast_1d(np.array(level, dtype=float)) / panel.get("scale", 1)
        elif level in type(experiment.training).model_fields:
            values = np.unique([float(getattr(experiment.training_of(point), level)) for point in experiment.points])
        else:
            of_role = of_panel[of_panel["role"] == level]
            values = (table[table["quantity"] == level] if of_role.empty else of_role)["value"].unique()
        for value in values[np.isfinite(values)]:
            text = f"{label} {value:g}" if label.endswith(" at") else label
            draw(panel.get("scale", 1) * value, zorder=1, label=text, **look)
            handles[text] = handle(**look)


def _scale(axes: Axes, axis: str, kind: str) -> None:
    """Set an axis to log, labelled 1, 2, 5, 10, … over few decades, or symlog:0.1, linear and grey within ±0.1."""
    name, _, linear = kind.partition(":")
    settings = {"linthresh": float(linear), "linscale": 0.7} if linear else {}
    getattr(axes, f"set_{axis}scale")(name, **settings)
    if not linear:
        getattr(axes, f"set_{axis}lim")(*_limits(axes, axis))
    low, high = getattr(axes, f"get_{axis}lim")()
    of = getattr(axes, f"{axis}axis")
    if linear:
        span = axes.axvspan if axis == "x" else axes.axhspan
        span(-float(linear), float(linear), color="#F0F0F0", zorder=0)
        of.set_major_formatter("{x:g}")
    elif high < 100 * low:
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


def present(shown: dict[str, Any], table: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the panels for which the table has a value."""
    known = set(table.loc[table["value"].notna(), "quantity"])
    return [panel for panel in shown["panels"] if known & set(panel["quantity"])]


def quantities(panels: list[dict[str, Any]]) -> list[str]:
    """List the quantities of some panels."""
    return [name for panel in panels for name in panel["quantity"]]


def combinations(table: pd.DataFrame, columns: Sequence[str]) -> list[dict[str, str]]:
    """List the distinct combinations of values in some columns; without columns a single empty one."""
    return table[[*columns]].drop_duplicates().to_dict("records") if columns else [{}]


def matching(table: pd.DataFrame, place: dict[str, str]) -> pd.DataFrame:
    """Return the rows with these values of their coordinates."""
    for key, value in place.items():
        table = table[table[key] == value]
    return table


def handle(**looks: Any) -> Line2D:
    """Make an entry of a legend: a line, or a marker alone if one is given without `linestyle` and `linewidth`."""
    if "marker" in looks and "linestyle" not in looks:
        looks.setdefault("linewidth", 0)
    return Line2D([], [], **looks)


@contextmanager
def drawing(looks: Looks, shown: dict[str, Any], width: float, height: float, note: str) -> Iterator[tuple]:
    """Open a figure to draw on and a legend to fill by label; adds title and legend at the end.

    Touches no global state.
    """
    handles: Handles = {}
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasAgg(figure)
        yield figure, handles
        for label in _outside(figure):
            del handles[label]
        title = f"{looks.experiment.name}: {shown['title']}; {note}"
        figure.suptitle(textwrap.fill(title, int(12 * width)), fontsize=9.5, x=0.01, ha="left")
        columns = int((width - 0.3) / (0.075 * max(map(len, handles), default=1) + 0.7))
        columns = max(1, min(columns, len(handles)))
        figure.set_figheight(height + 0.19 * math.ceil(len(handles) / columns))
        figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=columns)
