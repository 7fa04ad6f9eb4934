"""Squared bias against variance of the gradient estimators."""

from collections.abc import Callable
from itertools import cycle, product

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from dvp.analysis.bias import estimator_places, partner_of
from dvp.analysis.figures import DARK, MARKERS, STYLE, handle, method_colors, new_figure, plain_log, set_title
from dvp.analysis.formats import rho_text
from dvp.analysis.points import policy_label
from dvp.analysis.statistics import Statistic, lookup
from dvp.experiment.config import Experiment
from dvp.experiment.grid import parse_rho

LINEAR = 0.1  # |squared bias| up to which the figure's axis is linear


def bias_variance(experiment: Experiment, measured: list[Statistic]) -> Figure:
    """A panel a policy and engine, with `bias.statistics`; an arrow from each estimator to itself with DVP."""
    known, places, colors = lookup(measured), estimator_places(experiment), method_colors(experiment)
    engines, policies = experiment.bias.engines, list(dict.fromkeys(where["policy"] for where in places))
    prunings = _prunings(experiment)
    markers = dict(zip(prunings, cycle(MARKERS[1:]), strict=False))
    with mpl.rc_context(STYLE):
        width = max(3.1 * len(engines), 4.2)
        figure = new_figure(width + 2.7, 3.3 * len(policies) + 0.9)
        grid = figure.subplots(len(policies), len(engines), squeeze=False, sharex=True, sharey=True)
        for (row, policy), (column, engine) in product(enumerate(policies), enumerate(engines)):
            axes = grid[row, column]
            axes.set_xscale("log")
            plain_log(axes.xaxis)
            axes.set_yscale("symlog", linthresh=LINEAR, linscale=0.7)
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}".replace("-", "−")))
            axes.axhspan(-LINEAR, LINEAR, color="#F0F0F0", zorder=0)
            axes.axhline(0, color="#808080", linewidth=0.8, zorder=1)
            axes.set_title(f"engine {engine}, {policy_label(experiment, policy)}")
            axes.set_xlabel("variance of one batch, of |g|²" if row == len(policies) - 1 else "")
            axes.set_ylabel("" if column else "squared bias, of |g|²")
            for where in places:
                if (where["policy"], where["engine"]) == (policy, engine):
                    shape = markers.get(_pruning(experiment, where["method"], where["rho"]), "o")
                    partner = partner_of(experiment, where["method"])
                    start = where | {"method": partner, "rho": "none"} if partner else None
                    _estimator(axes, known, where, start, colors[where["method"]], shape)
        title = (
            "Estimators of the policy gradient against the exact one: lower is less biased, further left less noisy. "
            f"Bars: 95 %. The vertical axis is linear within ±{LINEAR:g} (grey)."
        )
        set_title(figure, title, width)
        plain = dict.fromkeys(partner_of(experiment, where["method"]) or where["method"] for where in places)
        handles = [handle(experiment.methods[method].label, color=colors[method], marker="o") for method in plain]
        handles.append(handle(" ", linewidth=0))
        handles += [handle(label, color=DARK, marker=markers[pruning]) for pruning, label in prunings.items()]
        handles += [
            handle("what DVP changes", color=DARK, marker=r"$\rightarrow$", markersize=11),
            handle("95 % interval of the\nbias holds 0", color=DARK, marker="o", mfc="white"),
        ]
        if any(known("paired_squared_bias", where) for where in places):
            looks = {"marker": "_", "markersize": 11, "markeredgewidth": 1.4}
            handles.append(handle("the same bias, paired\n(thick: 95 %)", color=DARK, **looks))
        figure.legend(handles=handles, loc="outside right upper")
    return figure


def _estimator(
    axes: Axes, known: Callable, where: dict[str, str], start: dict[str, str] | None, color: str, shape: str
) -> None:
    bias, variance = known("squared_bias", where), known("variance", where)
    x, y = variance.value, bias.value
    if start:
        before = tuple(known(name, start).value for name in ("variance", "squared_bias"))
        looks = {"arrowstyle": "->", "color": color, "linewidth": 0.9, "alpha": 0.75, "shrinkA": 3, "shrinkB": 3}
        axes.annotate("", (x, y), before, arrowprops=looks, zorder=2)
    faint = {"color": color, "linewidth": 0.8, "alpha": 0.4, "zorder": 2}
    axes.plot([x, x], [bias.low, bias.high], **faint)
    # A logarithmic axis has no place for what is not above 0.
    axes.plot([max(variance.low, x / 10), variance.high], [y, y], **faint)
    paired = known("paired_squared_bias", where)
    if paired:
        axes.plot([x, x], [paired.low, paired.high], color=color, linewidth=2.2, zorder=4)
        axes.plot(x, paired.value, "_", color=color, markersize=11, markeredgewidth=1.4, zorder=4)
    axes.plot(x, y, shape, color=color, markersize=5, mfc=color if bias.low > 0 else "white", zorder=3)


def _pruning(experiment: Experiment, method: str, rho: str) -> tuple[str, str] | None:
    """The rule for the safe vocabulary with its settings, and its ρ; None without one."""
    rule = experiment.methods[method].safe_vocabulary
    return None if rule is None else (rule.model_dump_json(), rho)


def _prunings(experiment: Experiment) -> dict[tuple[str, str], str]:
    """Every rule and ρ, those of DVP with a fixed ρ first and the largest ρ first; how each is called."""
    labels, order = {}, {}
    for method, rho in ((method, rho or "none") for method, rho in experiment.estimators):
        pruning = _pruning(experiment, method, rho)
        if pruning is not None:
            rule = experiment.methods[method].safe_vocabulary.rule
            fixed, value = rule == "fixed", 0.0 if rho == "none" else parse_rho(rho)
            name = "with DVP" if fixed else f"with DVP, {rule.replace('_', ' ')}"
            labels[pruning] = name if rho == "none" else f"{name}, ρ = {rho_text(rho)}"
            order[pruning] = (not fixed, pruning[0], -value)
    return {pruning: labels[pruning] for pruning in sorted(labels, key=order.__getitem__)}
