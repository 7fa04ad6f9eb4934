"""The figure of scores by policy."""

import matplotlib as mpl
from matplotlib.figure import Figure

from dvp.analysis.figures import COLORS, DARK, STYLE, handle, new_figure, row_label, set_title
from dvp.analysis.formats import rho_text
from dvp.analysis.matrix import ONLY, entries, heading, own_policies
from dvp.analysis.tables import Table
from dvp.evaluation import bootstrap
from dvp.experiment.config import Experiment
from dvp.experiment.evaluation import Further

WIDTH = 9.6
RING = {"marker": "o", "markersize": 12, "color": "none", "markeredgecolor": DARK, "markeredgewidth": 1}


def evaluation_matrix(experiment: Experiment, table: Table) -> Figure:
    """A row a row of the table, a marker a policy: colour by the engine that samples, open at ρ, ringed the own."""
    columns, rows = entries(experiment), list(table.rows.values())
    engines = list(dict.fromkeys(entry.engine for entry in columns.values()))
    colors = {engine: COLORS[place % len(COLORS)] for place, engine in enumerate(engines)}
    owns, drawn = own_policies(experiment), dict.fromkeys((entry.engine, entry.rho) for entry in columns.values())
    with mpl.rc_context(STYLE):
        figure = new_figure(WIDTH, 1.5 + 0.5 * len(rows))
        axes = figure.subplots()
        for height, row in enumerate(rows):
            # A score that stands in two columns, as the engine of training is the evaluation's, is drawn once.
            cells = {id(row[key]): (row[key], entry) for key, entry in reversed(columns.items()) if row.get(key)}
            for place, (cell, entry) in enumerate(reversed(cells.values())):
                y = height + 0.19 * (place - (len(cells) - 1) / 2)
                # Of a model that was trained on the evaluation's engine the two are one.
                exact = cell.where["evaluated_on"] == experiment.evaluation.engine
                engine = experiment.evaluation.engine if exact else entry.engine
                color, drawn[engine, entry.rho] = colors[engine], None
                axes.hlines(y, 100 * cell.low, 100 * cell.high, color=color, linewidth=1.6, zorder=2)
                if cell.where in owns:
                    axes.plot(100 * cell.value, y, linestyle="none", zorder=2, **RING)
                face = "white" if entry.rho else color
                axes.plot(100 * cell.value, y, "o", color=color, markersize=6, markerfacecolor=face, zorder=3)
            if height:
                axes.axhline(height - 0.5, color="#E4E4E4", linewidth=0.6)
        axes.set_yticks(range(len(rows)), [_label(row) for row in rows])
        axes.set_ylim(len(rows) - 0.45, -0.55)
        axes.grid(visible=False, axis="y")
        k = experiment.evaluation.samples_per_problem[experiment.report.task]
        axes.set_xlabel(f"avg@{k} on {experiment.report.task}, %")
        handles = [
            handle(
                heading(Further(engine=engine, rho=rho)),
                marker="o",
                color=colors[engine],
                markersize=6,
                markerfacecolor="white" if rho else colors[engine],
            )
            for engine, rho in drawn
        ]
        ring = handle("the policy that\nthe updates are for", **RING)
        figure.legend(handles=[*handles, ring], loc="outside right upper", title="sampled by", alignment="left")
        over = bootstrap.over(experiment.seeds)
        # Beside the legend.
        set_title(figure, f"{experiment.name}: scores by policy; bars are 95 % intervals over {over}", 0.75 * WIDTH)
    return figure


def _label(row: dict) -> str:
    name = row_label(row)
    return f"{name}\nat ρ = {rho_text(row['evaluated_rho'])} in evaluation only" if row["role"] == ONLY else name
