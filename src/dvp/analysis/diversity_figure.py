"""The figure of different solutions."""

import matplotlib as mpl
from matplotlib.figure import Figure

from dvp.analysis.figures import COLORS, STYLE, handle, new_figure, row_label, set_title
from dvp.analysis.tables import Table
from dvp.evaluation import bootstrap
from dvp.experiment.config import Experiment

WIDTH = 10.4
PANELS = {
    "score": ("score, %", 100),
    "solutions": ("different solutions\na problem", 1),
    "differing": ("pairs of right samples\nthat differ, %", 100),
}


def solutions(experiment: Experiment, table: Table) -> Figure:
    """A row a row of the table; filled: evaluation.engine, full vocabulary; open: as in training, if that differs."""
    rows = list(table.rows.values())
    with mpl.rc_context(STYLE):
        figure = new_figure(WIDTH, 1.7 + 0.42 * len(rows))
        panels = figure.subplots(1, len(PANELS), sharey=True)
        for axes, (key, (heading, scale)) in zip(panels, PANELS.items(), strict=True):
            for height, row in enumerate(rows):
                for place, (name, face) in enumerate(((key, COLORS[0]), (f"served_{key}", "white"))):
                    cell = row.get(name)
                    if cell is not None:
                        y = height + 0.24 * (place - 0.5)
                        axes.hlines(y, scale * cell.low, scale * cell.high, color=COLORS[0], linewidth=1.6, zorder=2)
                        axes.plot(scale * cell.value, y, "o", color=COLORS[0], markerfacecolor=face, zorder=3)
            axes.set_xlabel(heading)
            axes.grid(visible=False, axis="y")
        panels[0].set_yticks(range(len(rows)), [row_label(row) for row in rows])
        panels[0].set_ylim(len(rows) - 0.5, -0.5)
        looks = {"marker": "o", "color": COLORS[0], "markersize": 6}
        filled = handle(f"{experiment.evaluation.engine}, full vocabulary", **looks)
        hollow = handle("as in training", **looks, markerfacecolor="white")
        figure.legend(handles=[filled, hollow], loc="outside lower right", ncols=2)
        over = bootstrap.over(experiment.seeds)
        set_title(figure, f"{experiment.name}: different solutions; bars are 95 % intervals over {over}", WIDTH)
    return figure
