"""The figures of training and scores. In all of them colour is by method, line and marker by ρ.

Where the grid's points differ in training settings, curves have a panel for each combination of them.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import matplotlib as mpl
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from dvp.analysis.figures import DARK, MARKERS, STYLE, fill, handle, method_colors, new_figure, plain_log, set_title
from dvp.analysis.formats import rho_text
from dvp.experiment.config import Experiment
from dvp.experiment.grid import GridPoint, parse_rho, settings_as_read

SMOOTHING = 5
MOST_WITH_SEEDS = 8
LINE_OF_LEGEND = 0.21  # inches
# An exact engine has a KL of 0 up to rounding, which a logarithmic axis cannot show.
FLOOR = 1e-12
PUBLISHED_BOUND = 1e-3  # of the KL with DVP, nats per token: Fig. 1 of the paper
_GREYS = ("#707070", "#A0A0A0", "#404040")
_LINES = ("-", (0, (5, 1.2, 1, 1.2)), (0, (1, 1)), (0, (7, 2)), (0, (3, 1, 1, 1, 1, 1)))


@dataclass(frozen=True)
class Style:
    """How a grid point is drawn and called."""

    color: str
    line: str | tuple
    marker: str
    name: str
    """Without its engine, which the title of a panel says."""
    label: str
    """With its engine, where the grid has several."""
    settings: str
    """The training settings in which the grid differs, as a label ends with them; empty without any."""


def styles(experiment: Experiment) -> dict[GridPoint, Style]:
    """Colour by method, line and marker by ρ in the order of the grid; controls dashed and grey.

    Where there are more methods than colours, those of one colour have lines of their own. Where there are more methods
    with controls than greys, controls have their methods' colours.
    """
    every, colors = experiment.points, method_colors(experiment)
    methods, rhos = list(dict.fromkeys(point.method for point in every)), [None, *_rhos(every)]
    earlier = {
        method: [colors[other] for other in methods[:place]].count(colors[method])
        for place, method in enumerate(methods)
    }
    controls = list(dict.fromkeys(point.method for point in every if experiment.is_control(point)))
    several = len({point.engine for point in every if not experiment.is_control(point)}) > 1
    result = {}
    for point in every:
        rho = rhos.index(point.rho)
        name = experiment.methods[point.method].label
        name += "" if point.rho is None else f", ρ = {rho_text(point.rho)}"
        # With and without a single ρ the line is solid: the colour already tells the methods apart.
        color, line = colors[point.method], _LINES[(max(rho - 1, 0) + earlier[point.method]) % len(_LINES)]
        if experiment.is_control(point):
            name += f"\n(control: engine {point.engine})"
            line = (0, (4, 2))
            color = _GREYS[controls.index(point.method)] if len(controls) <= len(_GREYS) else color
        engine = f", {point.engine}" if several and not experiment.is_control(point) else ""
        settings = "".join(f", {text}" for text in settings_as_read(experiment.settings_of(point)))
        result[point] = Style(color, line, MARKERS[rho % len(MARKERS)], name, name + engine, settings)
    return result


def learning_curves(experiment: Experiment, metrics: pd.DataFrame) -> Figure:
    """Reward of the sampled responses by step; `metrics` as of `load.Scored`."""

    def draw(axes: Axes) -> None:
        axes.set_ylabel("mean reward (0 to 1)")

    return _curves(experiment, metrics, "reward", draw=draw, title="Reward of the responses sampled in each step")


def gradient_norm(experiment: Experiment, metrics: pd.DataFrame) -> Figure:
    """Norm of the gradient before clipping by step; skipped steps, and those where it is 0, are gaps."""
    metrics = metrics.assign(gradient_norm=metrics["gradient_norm"].where(metrics["gradient_norm"] > 0))

    def draw(axes: Axes) -> None:
        axes.set_yscale("log")
        plain_log(axes.yaxis)
        axes.set_ylabel("gradient norm before clipping")
        for clipping in sorted({experiment.training_of(point).gradient_clipping for point in experiment.points}):
            axes.axhline(clipping, color="black", linewidth=0.8, linestyle=":")
            _write_at(axes, clipping, f"clipped at {clipping:g}")

    return _curves(experiment, metrics, "gradient_norm", draw=draw, title="Gradient norm")


def mismatch_curves(experiment: Experiment, metrics: pd.DataFrame) -> Figure:
    """k3 between the sampled policies by step, logarithmic, with a floor and PUBLISHED_BOUND.

    Controls lie orders of magnitude below the rest and have an axis of their own.
    """

    def draw(axes: Axes) -> None:
        _log_axis(axes)
        axes.set_ylabel("k3, nats per token")
        axes.axhline(PUBLISHED_BOUND, color="black", linewidth=0.8, linestyle=":")
        _write_at(axes, PUBLISHED_BOUND, f"published bound for DVP (Fig. 1): {PUBLISHED_BOUND:g}")

    title = "k3 estimate of KL(engine‖trainer) between the sampled policies: pruned with ρ, full without"
    if (metrics["k3"] < FLOOR).any():
        title += f"; below {FLOOR:g} drawn at {FLOOR:g}"
    metrics = metrics.assign(k3=metrics["k3"].clip(lower=FLOOR))
    return _curves(experiment, metrics, "k3", draw=draw, title=title, draw_controls=_log_axis)


def panels(experiment: Experiment) -> list[tuple[str, list[GridPoint]]]:
    """Titles and points of the panels: one for each mismatched engine, training settings and ρ.

    Points without ρ are drawn in all panels of their engine and settings, controls in those of their settings, or in
    all panels if there is none of these.
    """
    every, style = experiment.points, styles(experiment)
    controls = [point for point in every if experiment.is_control(point)]
    result = []
    kinds = dict.fromkeys((point.engine, style[point].settings) for point in every if point not in controls)
    shown = {settings for _, settings in kinds}
    for engine, settings in kinds:
        own = [point for point in every if (point.engine, style[point].settings) == (engine, settings)]
        beside = [
            point for point in controls if style[point].settings == settings or style[point].settings not in shown
        ]
        for rho in _rhos(own) or [None]:
            title = f"engine {engine}{settings}" + (f", ρ = {rho_text(rho)}" if rho else "")
            result.append(
                (title, [point for point in every if point in beside or (point in own and point.rho in (None, rho))])
            )
    return result


def _curves(
    experiment: Experiment,
    metrics: pd.DataFrame,
    column: str,
    *,
    draw: Callable[[Axes], None],
    title: str,
    draw_controls: Callable[[Axes], None] | None = None,
) -> Figure:
    """Bold lines for means over seeds, smoothed; thin ones for seeds, unless a panel has more than MOST_WITH_SEEDS.

    `draw` sets the y axis. With `draw_controls` the controls are drawn on a low axis of their own below each
    panel.
    """
    style, shown_in = styles(experiment), panels(experiment)
    controls = {point for point in style if experiment.is_control(point)} if draw_controls else set()
    bands = 2 if controls else 1
    columns = min(len(shown_in), 3)
    rows = math.ceil(len(shown_in) / columns)
    width = max(3.6 * columns, 5.2)
    with mpl.rc_context(STYLE):
        # Points that differ in their settings alone look alike where the panels' titles say them.
        titled = {look.settings for point, look in style.items() if not experiment.is_control(point)}
        looks = dict.fromkeys(
            (look.name + (look.settings if look.settings not in titled else ""), look.color, look.line)
            for look in style.values()
        )
        # Seeds of many methods in one panel hide their means.
        seeds = max(len(shown) for _, shown in shown_in) <= MOST_WITH_SEEDS
        handles = [handle(label, color=color, linestyle=line, linewidth=2) for label, color, line in looks]
        handles += [
            handle(" ", linewidth=0),
            handle(f"mean over seeds,\ntrailing mean of {SMOOTHING} steps", color=DARK, linewidth=2),
        ]
        if seeds:
            handles.append(handle("one seed, not smoothed", color=DARK, linewidth=0.6, alpha=0.5))
        legend = LINE_OF_LEGEND * sum(entry.get_label().count("\n") + 1 for entry in handles)
        figure = new_figure(width + 2.6, max(3.4 * rows, legend) + 0.5)
        heights = [4, 1][:bands] * rows
        grid = figure.subplots(rows * bands, columns, squeeze=False, sharex=True, height_ratios=heights)
        for index in range(rows * columns):
            row, place = divmod(index, columns)
            stack = grid[row * bands : (row + 1) * bands, place]
            if index >= len(shown_in):
                for axes in stack:
                    axes.remove()
                continue
            name, shown = shown_in[index]
            stack[0].set_title(fill(name, width / columns))
            for band, axes in enumerate(stack):
                if index:
                    axes.sharey(grid[band, 0])
                for point in shown:
                    if (point in controls) == (band == 1):
                        _draw_point(axes, metrics[metrics["point"] == point.path], column, style[point], seeds=seeds)
                (draw_controls if band and draw_controls else draw)(axes)
                if place:
                    axes.set_ylabel("")
                    axes.tick_params(labelleft=False)
                last = band == bands - 1 and index + columns >= len(shown_in)
                axes.tick_params(labelbottom=last)
                axes.set_xlabel("training step" if last else "")
        for axes in grid[bands - 1 :: bands, 0] if controls else []:
            axes.set_ylabel("control")
        set_title(figure, title, width)
        figure.legend(handles=handles, loc="outside right upper", handlelength=2.6)
    return figure


def _draw_point(axes: Axes, metrics: pd.DataFrame, column: str, look: Style, *, seeds: bool) -> None:
    table = metrics.pivot(index="step", columns="seed", values=column)
    if seeds:
        axes.plot(table.index, table, color=look.color, linewidth=0.6, alpha=0.35)
    smooth = table.mean(axis=1).rolling(SMOOTHING, min_periods=1).mean()
    # Where every seed has a gap, so has their mean.
    smooth = smooth.where(table.notna().any(axis=1))
    axes.plot(table.index, smooth, color=look.color, linestyle=look.line, linewidth=2)


def _log_axis(axes: Axes) -> None:
    axes.set_yscale("log")
    axes.yaxis.set_minor_formatter(NullFormatter())


def _write_at(axes: Axes, height: float, text: str) -> None:
    axes.annotate(
        text,
        (0.99, height),
        xycoords=axes.get_yaxis_transform(),
        xytext=(0, 2),
        textcoords="offset points",
        ha="right",
        va="bottom",
        fontsize=7.5,
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.7, "pad": 0.5},
    )


def _rhos(every: list[GridPoint]) -> list[str]:
    """The values of ρ, the smallest first."""
    return sorted({point.rho for point in every if point.rho is not None}, key=parse_rho)
