"""The gradient's variance over its squared signal: by baseline, and by position in the response."""

import math
from collections.abc import Iterator
from itertools import product

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dvp.analysis.bias import estimator_places
from dvp.analysis.figures import DARK, MARKERS, STYLE, handle, method_colors, new_figure, plain_log, set_title
from dvp.analysis.formats import rho_text
from dvp.analysis.points import policy_label
from dvp.analysis.statistics import Statistic, lookup
from dvp.experiment.config import Experiment
from dvp.experiment.grid import WHOLE

RATIO, RAW = "variance_over_signal", "gradient_variance"


def variance_by_baseline(experiment: Experiment, measured: list[Statistic]) -> Figure:
    """A panel a policy and engine, a line an estimator; `measured` as of `variance.statistics`."""
    known, colors = lookup(measured), method_colors(experiment)
    names = [(method, rho or "none") for method, rho in experiment.estimators]
    engines, policies = experiment.bias.engines, _policies(experiment)
    with mpl.rc_context(STYLE):
        width = 3.2 * len(engines) + 2.2
        figure = new_figure(width, (0.28 * len(names) + 0.9) * len(policies) + 0.9)
        for axes, policy, engine in _panels(figure, experiment):
            for place, (method, rho) in enumerate(names):
                where = {"policy": policy, "engine": engine, "method": method, "rho": rho, "position": WHOLE}
                for name, shift, looks in ((RATIO, -0.14, {}), (RAW, 0.14, {"mfc": "white", "alpha": 0.6})):
                    _bar(axes, known(name, where), place + shift, colors[method], looks)
            axes.set_xscale("log")
            plain_log(axes.xaxis)
            axes.set_yticks(range(len(names)), [_label(experiment, *name) for name in names])
            axes.set_ylim(len(names) - 0.5, -0.5)
            axes.grid(visible=False, axis="y")
            axes.set_xlabel("variance of one batch" if policy == policies[-1] else "")
        handles = [
            handle("over the squared signal, |E ĝ|²", color=DARK, marker="o"),
            handle("over |g|², the exact gradient's", color=DARK, marker="o", mfc="white"),
        ]
        figure.legend(handles=handles, loc="outside lower center", ncols=len(engines))
        title = (
            "Variance of the policy gradient's estimators. A baseline that includes the response itself shrinks the "
            "estimate: filled marks undo that. Bars: 95 %."
        )
        set_title(figure, title, width)
    return figure


def variance_by_position(experiment: Experiment, measured: list[Statistic]) -> Figure:
    """A panel a policy and engine: over the bins of positions, a line an estimator."""
    known, colors, positions = lookup(measured), method_colors(experiment), experiment.positions
    names = [(method, rho or "none") for method, rho in experiment.estimators]
    with mpl.rc_context(STYLE):
        width = max(3.4 * len(experiment.bias.engines), 4.6)
        figure = new_figure(width + 2.6, 3.0 * len(experiment.bias.policies) + 0.9)
        for axes, policy, engine in _panels(figure, experiment):
            for number, (method, rho) in enumerate(names):
                where = {"policy": policy, "engine": engine, "method": method, "rho": rho}
                shift = 0.5 * ((number + 0.5) / len(names) - 0.5)
                line = [known(RATIO, where | {"position": position}) for position in positions]
                places = [place + shift for place in range(len(positions))]
                looks = {"color": colors[method], "marker": MARKERS[number % len(MARKERS)], "markersize": 4}
                # A line ends at a bin that has no value.
                values = [math.nan if each is None else each.value for each in line]
                axes.plot(places, values, linewidth=0.8, **looks)
                for place, each in zip(places, line, strict=True):
                    if each is not None and math.isfinite(each.low):
                        axes.plot([place, place], [each.low, each.high], color=colors[method], linewidth=0.8, alpha=0.5)
            if all(math.isnan(value) for line in axes.lines for value in line.get_ydata()):
                text = "in no bin can each signal be told from 0"
                axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center")
            axes.set_yscale("log")
            plain_log(axes.yaxis)
            axes.set_xticks(range(len(positions)), [each.replace("-", "–") for each in positions])
            axes.set_xlabel("response tokens" if policy == _policies(experiment)[-1] else "")
            axes.set_ylabel("variance / signal" if engine == experiment.bias.engines[0] else "")
        handles = [
            handle(_label(experiment, *name), color=colors[name[0]], marker=MARKERS[number % len(MARKERS)])
            for number, name in enumerate(names)
        ]
        figure.legend(handles=handles, loc="outside right upper")
        title = (
            "Variance over squared signal of what the tokens of each bin of positions contribute to the gradient of a "
            "batch. Bars: 95 %. No mark where the interval of a set of problems' signal holds 0."
        )
        set_title(figure, title, width)
    return figure


def _panels(figure: Figure, experiment: Experiment) -> Iterator[tuple[Axes, str, str]]:
    engines, policies = experiment.bias.engines, _policies(experiment)
    grid = figure.subplots(len(policies), len(engines), squeeze=False, sharex=True, sharey=True)
    for (row, policy), (column, engine) in product(enumerate(policies), enumerate(engines)):
        grid[row, column].set_title(f"engine {engine}, {policy_label(experiment, policy)}")
        yield grid[row, column], policy, engine


def _policies(experiment: Experiment) -> list[str]:
    return list(dict.fromkeys(where["policy"] for where in estimator_places(experiment)))


def _label(experiment: Experiment, method: str, rho: str) -> str:
    label = experiment.methods[method].label
    return label if rho == "none" else f"{label}, ρ = {rho_text(rho)}"


def _bar(axes: Axes, statistic: Statistic | None, place: float, color: str, looks: dict) -> None:
    if statistic is None:
        return
    axes.plot(statistic.value, place, "o", **({"color": color, "markersize": 5} | looks))
    if math.isfinite(statistic.low):
        axes.plot([statistic.low, statistic.high], [place, place], color=color, linewidth=1.0, alpha=0.6, zorder=1)
