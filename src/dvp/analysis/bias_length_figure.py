"""The bias of the gradient estimators against the length of responses."""

import math
from itertools import product

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dvp.analysis.bias import estimator_places
from dvp.analysis.bias_length import REMOVED, tokens_by_task
from dvp.analysis.figures import MARKERS, STYLE, handle, method_colors, new_figure, plain_log, set_title
from dvp.analysis.formats import rho_text
from dvp.analysis.points import policy_label
from dvp.analysis.statistics import Statistic, lookup
from dvp.experiment.config import Experiment

SPREAD = 0.03  # of the logarithm of the length, by which lines of a panel stand side by side


def bias_by_length(experiment: Experiment, measured: list[Statistic]) -> Figure:
    """With `bias_length.statistics`: above the squared bias, below what pruning takes from it; a column an engine.

    Two rows of panels a policy, a line an estimator.
    """
    known, colors, engines = lookup(measured), method_colors(experiment), experiment.bias.engines
    policies = list(dict.fromkeys(place["policy"] for place in estimator_places(experiment)))
    names = [(method, rho or "none") for method, rho in experiment.estimators]
    with mpl.rc_context(STYLE):
        width = 3.6 * len(engines) + 2.6
        figure = new_figure(width, 5.0 * len(policies) + 0.9)
        grid = figure.subplots(2 * len(policies), len(engines), squeeze=False, sharex=True, sharey="row")
        for (line, policy), (column, engine) in product(enumerate(policies), enumerate(engines)):
            bias, removed = grid[2 * line : 2 * line + 2, column]
            lengths = tokens_by_task(measured, policy)
            bias.set_title(f"engine {engine}, {policy_label(experiment, policy)}", loc="left")
            bias.set_yscale("log")
            removed.axhline(0, color="#808080", linewidth=0.8, zorder=1)
            for number, (method, rho) in enumerate(names):
                where = {"policy": policy, "engine": engine, "method": method, "rho": rho}
                shift = math.exp(SPREAD * (number - (len(names) - 1) / 2))
                looks = {"color": colors[method], "marker": MARKERS[number % len(MARKERS)], "markersize": 4}
                for axes, name in ((bias, "relative_bias"), (removed, REMOVED)):
                    line_of = {task: known(name, where | {"task": task}) for task in lengths}
                    points = {lengths[task] * shift: one for task, one in line_of.items() if one is not None}
                    _line(axes, points, looks)
            bias.set_xscale("log")
            ticks = [round(tokens) for tokens in lengths.values()]
            removed.set_xticks(ticks, [str(tick) for tick in ticks])
            removed.set_xticks([], minor=True)
            plain_log(bias.yaxis)
            if column == 0:
                bias.set_ylabel("squared bias, of |g|²")
                removed.set_ylabel("removed by pruning, fraction")
            if line == len(policies) - 1:
                removed.set_xlabel("mean response length, tokens")
        handles = []
        for number, (method, rho) in enumerate(names):
            label = experiment.methods[method].label + ("" if rho == "none" else f", ρ = {rho_text(rho)}")
            handles.append(handle(label, color=colors[method], marker=MARKERS[number % len(MARKERS)]))
        figure.legend(handles=handles, loc="outside right upper")
        set_title(
            figure,
            "Squared bias of the policy gradient's estimators by the length of responses, and how much of it pruning "
            "takes away. Bars: 95 %. No mark where the estimate is not above 0.",
            width,
        )
    return figure


def _line(axes: Axes, points: dict[float, Statistic], looks: dict) -> None:
    """On a logarithmic axis a value that is not above 0 has no mark."""
    shown = {x: one for x, one in points.items() if axes.get_yscale() != "log" or one.value > 0}
    axes.plot(shown.keys(), [one.value for one in shown.values()], linewidth=0.9, zorder=3, **looks)
    for x, one in shown.items():
        if math.isfinite(one.low):
            axes.plot([x, x], [one.low, one.high], color=looks["color"], linewidth=0.9, alpha=0.6, zorder=2)
