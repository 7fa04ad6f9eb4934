"""How all figures look: a method has one colour everywhere, and a figure is the same each time, byte for byte."""

import textwrap
from collections import Counter
from functools import cache
from pathlib import Path

import matplotlib as mpl
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullFormatter

from dvp.analysis.formats import rho_text
from dvp.experiment.config import Experiment
from dvp.files import atomic_path

DPI = 150
# Okabe and Ito: distinguishable with the common colour-vision deficiencies.
COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#5D3A9B", "#D55E00", "#303030")
LIGHTER = 0.5  # of a method without a safe vocabulary: how much white is in its colour
DARKER = (0.6, 0.4, 0.8)  # of rules for it other than the paper's: how much of the colour is left
DARK, GREY = "#404040", "#808080"
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


def method_colors(experiment: Experiment) -> dict[str, str]:
    """The colour of every method that the experiment trains or compares, the same in all experiments but for clashes.

    Methods that differ only in the safe vocabulary share a hue, which is lighter without it, and one of three darker
    shades for any rule but the paper's. The hue follows from the order of the catalogue; where two of the experiment
    would have the same, the later one takes the next free hue. Shades follow from what else the experiment has.
    """
    used = dict.fromkeys([*(run.method for run in experiment.runs), *(method for method, _ in experiment.estimators)])

    @cache
    def kind(method: str) -> str:
        return experiment.methods[method].model_dump_json(exclude={"label", "safe_vocabulary"})

    preferred = {name: place for place, name in enumerate(dict.fromkeys(map(kind, experiment.methods)))}
    hues: dict[str, str] = {}
    for name in sorted(dict.fromkeys(map(kind, used)), key=preferred.__getitem__):
        wanted = [COLORS[(preferred[name] + step) % len(COLORS)] for step in range(len(COLORS))]
        hues[name] = next((color for color in wanted if color not in hues.values()), wanted[0])
    colors, others = {}, Counter[str]()
    for method in filter(used.__contains__, experiment.methods):
        hue, rule = hues[kind(method)], experiment.methods[method].safe_vocabulary
        if rule is None:
            colors[method] = to_hex([channel + (1 - channel) * LIGHTER for channel in to_rgb(hue)])
        elif rule.rule == "fixed":
            colors[method] = hue
        else:
            colors[method] = to_hex([channel * DARKER[others[hue] % len(DARKER)] for channel in to_rgb(hue)])
            others[hue] += 1
    return colors


def new_figure(width: float, height: float) -> Figure:
    """To be drawn on within `mpl.rc_context(STYLE)`; touches no global state."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def set_title(figure: Figure, title: str, width: float) -> None:
    """On the left, in lines of `width` inches."""
    figure.suptitle(fill(title, width), fontsize=9.5, x=0.01, ha="left")


def fill(title: str, width: float) -> str:
    """In lines of `width` inches."""
    return textwrap.fill(title, int(13 * width))


def plain_log(axis: Axis, subs: tuple[int, ...] = (1, 2, 5)) -> None:
    """Label a logarithmic axis of few decades: 1, 2, 5, 10, …"""
    axis.set_major_locator(LogLocator(subs=subs))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter(NullFormatter())


def handle(label: str, **looks) -> Line2D:
    """An entry of a legend; without `linestyle` or `linewidth` a marker alone if there is one."""
    if "marker" in looks and "linestyle" not in looks:
        looks.setdefault("linewidth", 0)
    return Line2D([], [], label=label, **looks)


def row_label(row: dict) -> str:
    """Of a table's row that begins with `point_cells`: which model it is of."""
    parts = [row["label"], row["engine"], None if row["rho"] is None else f"ρ = {rho_text(row['rho'])}"]
    settings = [f"{key.partition('.')[2]} {value}" for key, value in row.items() if key.startswith("training.")]
    return ", ".join(filter(None, [*parts, *settings]))


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
