"""The figures of the report. An arm looks the same in all of them: colour by method, line and marker by ρ.

Each function returns a matplotlib Figure and touches no global state; `save` writes it as SVG, byte for byte
the same each time, and as PNG.
"""

import math
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullFormatter

from dvp.analysis.claims import Claim
from dvp.analysis.formats import rho_text
from dvp.analysis.inputs import BASE, arms, is_control, reference_arm
from dvp.experiment.config import Experiment
from dvp.experiment.grid import GridPoint, parse_rho
from dvp.files import atomic_path

SMOOTHING = 5
# An exact engine has a KL of 0 up to rounding, which a logarithmic axis cannot show.
FLOOR = 1e-12
DPI = 150

# Okabe and Ito: distinguishable with the common colour-vision deficiencies.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#5D3A9B")
_GREYS = ("#707070", "#A0A0A0", "#404040")
_LINES = ("-", (0, (5, 1.2, 1, 1.2)), (0, (1, 1)), (0, (7, 2)), (0, (3, 1, 1, 1, 1, 1)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p", "*")
STYLE = {
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#E4E4E4",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "svg.hashsalt": "dvp",
    "svg.fonttype": "path",
}


@dataclass(frozen=True)
class Style:
    """How an arm is drawn and called."""

    color: str
    line: str | tuple
    marker: str
    label: str


def styles(experiment: Experiment) -> dict[GridPoint, Style]:
    """Colour by method, line and marker by ρ, both in the order of the grid; controls dashed and grey."""
    every = arms(experiment)
    methods = list(dict.fromkeys(arm.method for arm in every))
    rhos = [None, *_rhos(every)]
    several = len({arm.engine for arm in every if not is_control(experiment, arm)}) > 1
    result = {}
    for arm in every:
        method, rho = methods.index(arm.method), rhos.index(arm.rho)
        label = experiment.methods[arm.method].label
        if arm.rho is not None:
            label += f", ρ = {rho_text(arm.rho)}"
        if is_control(experiment, arm):
            label += f"\n(control: engine {arm.engine})"
            result[arm] = Style(_GREYS[method % len(_GREYS)], (0, (4, 2)), MARKERS[rho % len(MARKERS)], label)
        else:
            label += f", {arm.engine}" if several else ""
            # With and without a single ρ the line is solid: the colour already tells the methods apart.
            line = _LINES[max(rho - 1, 0) % len(_LINES)]
            result[arm] = Style(COLORS[method % len(COLORS)], line, MARKERS[rho % len(MARKERS)], label)
    return result


def learning_curves(experiment: Experiment, metrics: pd.DataFrame) -> Figure:
    """Reward of the sampled responses by step; `metrics` as of `inputs.read_metrics`."""

    def draw(axes: Axes) -> None:
        axes.set_ylabel("mean reward (0 to 1)")

    return _curves(experiment, metrics, "reward", draw=draw, title="Reward of the responses sampled in each step")


def gradient_norm(experiment: Experiment, metrics: pd.DataFrame) -> Figure:
    """Norm of the gradient before clipping by step; skipped steps, and those where it is 0, are gaps."""
    metrics = metrics.assign(gradient_norm=metrics["gradient_norm"].where(metrics["gradient_norm"] > 0))

    def draw(axes: Axes) -> None:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.set_ylabel("gradient norm before clipping")
        clipping = experiment.training.gradient_clipping
        axes.axhline(clipping, color="black", linewidth=0.8, linestyle=":")
        _write_at(axes, clipping, f"clipped at {clipping:g}")

    return _curves(experiment, metrics, "gradient_norm", draw=draw, title="Gradient norm")


def mismatch_curves(experiment: Experiment, metrics: pd.DataFrame, bound: Claim) -> Figure:
    """k3 between the sampled policies by step, logarithmic, with a floor; `bound` is the published one.

    Controls lie orders of magnitude below the rest and have an axis of their own.
    """

    def draw(axes: Axes) -> None:
        _log_axis(axes)
        axes.set_ylabel("k3, nats per token")
        axes.axhline(bound.value, color="black", linewidth=0.8, linestyle=":")
        _write_at(axes, bound.value, f"published bound for DVP (Fig. 1): {bound.value:g}")

    title = "k3 estimate of KL(engine‖trainer) between the sampled policies: pruned with ρ, full without"
    if (metrics["k3"] < FLOOR).any():
        title += f"; below {FLOOR:g} drawn at {FLOOR:g}"
    metrics = metrics.assign(k3=metrics["k3"].clip(lower=FLOOR))
    return _curves(experiment, metrics, "k3", draw=draw, title=title, draw_controls=_log_axis)


def scores(experiment: Experiment, table: pd.DataFrame) -> Figure:
    """avg@k of every arm with its interval and its seeds, `table` as of `tables.main_table`."""
    every, style = arms(experiment), styles(experiment)
    rows = {row["arm"]: row for row in table.to_dict("records")}
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(8.6, 1.6 + 0.42 * len(every)), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots()
        lines = [(rows[BASE], "black", (0, (1, 1.5)), "base model")]
        lines += [
            (rows[arm.path], style[arm].color, style[arm].line, style[arm].label)
            for arm in every
            if is_control(experiment, arm)
        ]
        handles = []
        for row, color, line, label in lines:
            axes.axvline(100 * row["score"], color=color, linestyle=line, linewidth=1.2, zorder=1)
            handles.append(Line2D([], [], color=color, linestyle=line, linewidth=1.2, label=label))
        for height, arm in enumerate(every):
            row, look = rows[arm.path], style[arm]
            low, high = 100 * row["score_low"], 100 * row["score_high"]
            axes.plot(
                [low, high],
                [height, height],
                color=look.color,
                linewidth=2.2,
                solid_capstyle="butt",
                zorder=2,
            )
            axes.plot(100 * row["score"], height, look.marker, color=look.color, markersize=7, zorder=3)
            seeds = [100 * score for score in row["seed_scores"]]
            axes.plot(
                seeds,
                [height + 0.27] * len(seeds),
                "o",
                color=look.color,
                markersize=3.5,
                mfc="white",
                zorder=3,
            )
        axes.set_yticks(range(len(every)), [_row_label(experiment, arm, style[arm]) for arm in every])
        axes.set_ylim(len(every) - 0.4, -0.6)
        axes.grid(visible=False, axis="y")
        axes.set_xlabel(
            f"avg@{int(table['k'].iloc[0])} on {experiment.report.task}, % "
            f"(engine {experiment.evaluation.engine}); bars: 95 % bootstrap interval"
        )
        handles += [
            Line2D([], [], color="#404040", marker="o", linewidth=2.2, label="mean over seeds, interval"),
            Line2D(
                [],
                [],
                color="#404040",
                marker="o",
                markersize=3.5,
                mfc="white",
                linewidth=0,
                label="one seed",
            ),
        ]
        axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.01, 1.0), borderaxespad=0)
    return figure


def save(figure: Figure, folder: Path, name: str) -> list[Path]:
    """Write folder/NAME.svg and folder/NAME.png; each is whole or absent."""
    paths = []
    with mpl.rc_context(STYLE):
        for suffix, metadata in (("svg", {"Date": None}), ("png", {"Software": None})):
            path = folder / f"{name}.{suffix}"
            with atomic_path(path) as temporary:
                figure.savefig(temporary, format=suffix, dpi=DPI, metadata=metadata)
            paths.append(path)
    return paths


def panels(experiment: Experiment) -> list[tuple[str, list[GridPoint]]]:
    """Titles and arms of the panels: one for each mismatched engine and ρ.

    Arms without ρ are drawn in all panels of their engine, controls in all panels.
    """
    every = arms(experiment)
    controls = [arm for arm in every if is_control(experiment, arm)]
    result = []
    for engine in dict.fromkeys(arm.engine for arm in every if arm not in controls):
        own = [arm for arm in every if arm.engine == engine]
        for rho in _rhos(own) or [None]:
            title = f"engine {engine}" + (f", ρ = {rho_text(rho)}" if rho else "")
            result.append((title, [arm for arm in every if arm in controls or (arm in own and arm.rho in (None, rho))]))
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
    """Thin lines for seeds, bold ones for their mean, smoothed.

    `draw` sets the y axis. With `draw_controls` the controls are drawn on a low axis of their own below each
    panel.
    """
    style, parts = styles(experiment), panels(experiment)
    controls = {arm for arm in style if is_control(experiment, arm)} if draw_controls else set()
    bands = 2 if controls else 1
    columns = min(len(parts), 3)
    rows = math.ceil(len(parts) / columns)
    width = max(3.6 * columns, 5.2)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(width + 2.6, 3.4 * rows + 0.5), layout="constrained")
        FigureCanvasAgg(figure)
        heights = [4, 1][:bands] * rows
        grid = figure.subplots(rows * bands, columns, squeeze=False, sharex=True, height_ratios=heights)
        for index in range(rows * columns):
            row, place = divmod(index, columns)
            stack = grid[row * bands : (row + 1) * bands, place]
            if index >= len(parts):
                for axes in stack:
                    axes.remove()
                continue
            name, shown = parts[index]
            stack[0].set_title(name)
            for band, axes in enumerate(stack):
                if index:
                    axes.sharey(grid[band, 0])
                for arm in shown:
                    if (arm in controls) == (band == 1):
                        _draw_arm(axes, metrics[metrics["arm"] == arm.path], column, style[arm])
                (draw_controls if band and draw_controls else draw)(axes)
                if place:
                    axes.set_ylabel("")
                    axes.tick_params(labelleft=False)
                last = band == bands - 1 and index + columns >= len(parts)
                axes.tick_params(labelbottom=last)
                axes.set_xlabel("training step" if last else "")
        for axes in grid[bands - 1 :: bands, 0] if controls else []:
            axes.set_ylabel("control")
        figure.suptitle(textwrap.fill(title, int(13 * width)), fontsize=9.5, x=0.01, ha="left")
        _legend(figure, style)
    return figure


def _legend(figure: Figure, style: dict[GridPoint, Style]) -> None:
    dark, mean = "#404040", f"mean over seeds,\ntrailing mean of {SMOOTHING} steps"
    handles = [
        Line2D([], [], color=look.color, linestyle=look.line, linewidth=2, label=look.label) for look in style.values()
    ]
    handles += [
        Line2D([], [], linewidth=0, label=" "),
        Line2D([], [], color=dark, linewidth=2, label=mean),
        Line2D([], [], color=dark, linewidth=0.6, alpha=0.5, label="one seed, not smoothed"),
    ]
    figure.legend(handles=handles, loc="outside right upper", handlelength=2.6)


def _draw_arm(axes: Axes, metrics: pd.DataFrame, column: str, look: Style) -> None:
    table = metrics.pivot(index="step", columns="seed", values=column)
    axes.plot(table.index, table, color=look.color, linewidth=0.6, alpha=0.35)
    smooth = table.mean(axis=1).rolling(SMOOTHING, min_periods=1).mean()
    # Where every seed has a gap, so has their mean.
    smooth = smooth.where(table.notna().any(axis=1))
    axes.plot(table.index, smooth, color=look.color, linestyle=look.line, linewidth=2)


def _log_axis(axes: Axes) -> None:
    axes.set_yscale("log")
    axes.yaxis.set_minor_formatter(NullFormatter())


def _row_label(experiment: Experiment, arm: GridPoint, look: Style) -> str:
    return look.label + (" (ref.)" if arm == reference_arm(experiment) else "")


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
    return sorted({arm.rho for arm in every if arm.rho is not None}, key=parse_rho)
