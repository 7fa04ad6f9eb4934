"""The figure of scores along training: by step and by sampled tokens."""

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter

from dvp.analysis.curve import Group, target
from dvp.analysis.figures import DARK, STYLE, fill, handle, new_figure, set_title
from dvp.analysis.training_figures import Style, panels, styles
from dvp.evaluation import bootstrap
from dvp.experiment.config import Experiment
from dvp.experiment.grid import GridPoint

BASELINE = {"color": "black", "linestyle": (0, (4, 1.5)), "linewidth": 1.4}
PANEL = 3.6  # inches, of the width of a panel


def score_curve(experiment: Experiment, groups: list[Group]) -> Figure:
    """A row of panels for each task, engine, training settings and ρ: on the left by step, on the right by tokens.

    The reference's curve is drawn in the other panels too, so that settings can be compared.
    """
    style, reference = styles(experiment), experiment.reference_point
    shown_in = [(task, *panel) for task in experiment.data.tasks for panel in panels(experiment)]
    by_task = {task: {group.point: group for group in groups if group.task == task} for task in experiment.data.tasks}
    with mpl.rc_context(STYLE):
        figure = new_figure(10.6, 2.9 * len(shown_in) + 0.6)
        grid = figure.subplots(len(shown_in), 2, squeeze=False, sharex="col")
        for place, (row, (task, name, shown)) in enumerate(zip(grid, shown_in, strict=True)):
            own, goal = by_task[task], target(experiment, groups, task)
            for axes, by_tokens in zip(row, (False, True), strict=True):
                for point in shown:
                    _draw(axes, own[point], style[point], by_tokens, shade=0.4 / max(3, len(shown)))
                if reference not in shown:
                    _draw_reference(axes, own[reference], by_tokens)
                axes.axhline(100 * goal, color=DARK, linewidth=0.8, linestyle=":")
                axes.set_title(fill(name if len(by_task) == 1 else f"{task}, {name}", PANEL))
            row[0].set_ylabel(f"score on {task}, %")
            # Of a task, all panels.
            first = grid[place - place % (len(shown_in) // len(by_task)), 0]
            for axes in row:
                if axes is not first:
                    axes.sharey(first)
            first.autoscale(axis="y")  # to what all of them show so far
            row[1].tick_params(labelleft=False)
            row[1].xaxis.set_major_formatter(EngFormatter())
        grid[-1, 0].set_xlabel("training step (0: base model)")
        grid[-1, 1].set_xlabel("tokens sampled in training")
        over = bootstrap.over(experiment.seeds)
        set_title(figure, f"Scores along training; bands are 95 % intervals over {over}", 8.5)
        elsewhere = any(reference not in shown for _, _, shown in shown_in)
        handles = _handles(experiment, style, reference, elsewhere=elsewhere)
        figure.legend(handles=handles, loc="outside right upper", handlelength=2.6)
    return figure


def _draw(axes: Axes, group: Group, look: Style, by_tokens: bool, shade: float) -> None:
    x = group.tokens_SN.mean(axis=0) if by_tokens else group.steps
    estimates = [group.draws.estimate(value_R, "share") for value_R in group.curve_RN.T]
    value, low, high = 100 * np.array(estimates).T
    axes.fill_between(x, low, high, color=look.color, alpha=shade, linewidth=0)
    for tokens_N, score_N in zip(group.tokens_SN, group.score_SN, strict=True):
        axes.plot(tokens_N if by_tokens else x, 100 * score_N, color=look.color, linewidth=0.6, alpha=0.5)
    axes.plot(x, value, color=look.color, linestyle=look.line, marker="o", markersize=3, linewidth=2)


def _draw_reference(axes: Axes, group: Group, by_tokens: bool) -> None:
    x = group.tokens_SN.mean(axis=0) if by_tokens else group.steps
    axes.plot(x, 100 * group.curve_RN[0], **BASELINE)


def _handles(
    experiment: Experiment, style: dict[GridPoint, Style], reference: GridPoint, *, elsewhere: bool
) -> list[Line2D]:
    """`elsewhere`: whether the reference is drawn in a panel that is not its own."""
    looks = dict.fromkeys((look.name, look.color, look.line) for look in style.values())
    within = experiment.report.reached_within
    name = style[reference].label + style[reference].settings.replace(", ", "\n", 1)
    return [
        *(handle(label, color=color, linestyle=line, linewidth=2) for label, color, line in looks),
        handle(" ", linewidth=0),
        handle("mean over seeds", color=DARK, linewidth=2, marker="o", markersize=3, linestyle="-"),
        handle("one seed", color=DARK, linewidth=0.6, alpha=0.5),
        *([handle(f"reference: {name}", **BASELINE)] if elsewhere else []),
        handle(f"{within:g} points below\nthe final score of\n{name}", color=DARK, linewidth=0.8, linestyle=":"),
    ]
