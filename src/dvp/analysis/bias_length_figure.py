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

REACH = 1.0  # of the lower panels: beside an estimator that has hardly any bias, pruning may add it many times over
BELOW = 30.0  # below its value, times: where a bar ends that would go on to 0 and beyond
MARGIN = 1.25  # beside the shortest and the longest, times
SPREAD = 0.03  # of the logarithm of the length, by which lines of a panel stand side by side


def bias_by_length(experiment: Experiment, measured: list[Statistic]) -> Figure:
    """With `bias_length.statistics`: above the squared bias, below what pruning takes from it; a column an engine.

    Two rows of panels a policy, a line an estimator.
    """
    known, colors, engines = lookup(measured), method_colors(experiment), experiment.bias.engines
    policies = list(dict.fromkeys(place["policy"] for place in estimator_places(experiment)))
    names = [(method, rho or "none") for method, rho in experiment.estimators]
    with mpl.rc_context(STYLE):
        width = 3.6 * len(engines)
        figure = new_figure(width + 2.6, 5.0 * len(policies) + 0.9)
        grid = figure.subplots(2 * len(policies), len(engines), squeeze=False, sharey="row")
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
                    points = {lengths[task] * shift: known(name, where | {"task": task}) for task in lengths}
                    _line(axes, points, looks)
            removed.set_ylim(-REACH, REACH)
            for axes in (bias, removed):
                axes.set_xscale("log")
                axes.set_xticks(list(lengths.values()), [f"{tokens:.0f}" for tokens in lengths.values()])
                axes.set_xticks([], minor=True)
                # Also where a panel has no mark.
                axes.set_xlim(min(lengths.values()) / MARGIN, max(lengths.values()) * MARGIN)
            low, high = bias.get_ylim()
            plain_log(bias.yaxis, (1, 2, 5) if high < 100 * low else (1,))
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
            f"takes away (within ±{REACH:g}). Bars: 95 %, cut off where one holds 0. No mark where the estimate is not "
            "above 0.",
            width,
        )
    return figure


def _line(axes: Axes, points: dict[float, Statistic | None], looks: dict) -> None:
    """A line ends at a point that has no value, or that a logarithmic axis has no place for."""
    values = [math.nan if one is None else one.value for one in points.values()]
    if axes.get_yscale() == "log":
        values = [value if value > 0 else math.nan for value in values]
    axes.plot(points.keys(), values, linewidth=0.9, zorder=3, **looks)
    for (x, one), value in zip(points.items(), values, strict=True):
        if math.isfinite(value) and math.isfinite(one.low):
            # Below 0 a logarithmic axis has no end for a bar: it goes on to the axis.
            low = max(one.low, value / BELOW) if axes.get_yscale() == "log" else one.low
            axes.plot([x, x], [low, one.high], color=looks["color"], linewidth=0.9, alpha=0.6, zorder=2)
