"""Squared bias and variance of the gradient estimators, a row each."""

from itertools import product

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from dvp.analysis.bias import estimator_places
from dvp.analysis.figures import DARK, STYLE, handle, method_colors, new_figure, plain_log, set_title
from dvp.analysis.formats import rho_text
from dvp.analysis.points import estimator_counterpart, policy_label
from dvp.analysis.statistics import Statistic, lookup
from dvp.experiment.config import Experiment
from dvp.experiment.grid import parse_rho

LINEAR = 0.1  # |squared bias| up to which the figure's axis is linear
PAIRED = "paired_squared_bias"


def bias_variance(experiment: Experiment, measured: list[Statistic]) -> Figure:
    """With `bias.statistics`, a row of panels a policy and two columns an engine: squared bias, and variance.

    An estimator without a safe vocabulary stands above itself with each.
    """
    known, colors = lookup(measured), method_colors(experiment)
    engines = experiment.bias.engines
    # Of each row of panels what all its estimators share, but for the engine.
    shared = [{key: where[key] for key in ("policy", "task") if key in where} for where in estimator_places(experiment)]
    lines = [dict(items) for items in dict.fromkeys(tuple(each.items()) for each in shared)]
    families = _families(experiment)
    rows = [estimator for family in families for estimator in family]
    labels = [_label(experiment, family, *estimator) for family in families for estimator in family]
    with mpl.rc_context(STYLE):
        width = 2.2 + 3.6 * len(engines)
        figure = new_figure(width, (0.18 * len(rows) + 0.6) * len(lines) + 1.5)
        grid = figure.subplots(
            len(lines),
            2 * len(engines),
            squeeze=False,
            sharex="col",
            sharey=True,
            width_ratios=[1.3, 1] * len(engines),
        )
        for (line, of), (column, engine) in product(enumerate(lines), enumerate(engines)):
            bias, variance = grid[line, 2 * column : 2 * column + 2]
            bias.axvspan(-LINEAR, LINEAR, color="#F0F0F0", zorder=0)
            bias.axvline(0, color="#808080", linewidth=0.8, zorder=1)
            problems = f", {of['task']}" if "task" in of else ""
            bias.set_title(f"engine {engine}, {policy_label(experiment, of['policy'])}{problems}", loc="left")
            for place, (method, rho) in enumerate(rows):
                where = of | {"engine": engine, "method": method, "rho": rho}
                _row(bias, place, known("squared_bias", where), known(PAIRED, where), colors[method])
                _row(variance, place, known("variance", where), None, colors[method], logarithmic=True)
            for axes in (bias, variance):
                axes.grid(visible=False, axis="y")
                axes.tick_params(axis="y", length=0)
                for end in _ends(families):
                    axes.axhline(end, color="#D8D8D8", linewidth=0.6, zorder=0)
            bias.set_xscale("symlog", linthresh=LINEAR, linscale=0.7)
            bias.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}".replace("-", "−")))
            variance.set_xscale("log")
            if line == len(lines) - 1:
                bias.set_xlabel("squared bias, of |g|²")
                variance.set_xlabel("variance, of |g|²")
        # All columns of a kind have one scale, so that engines can be compared.
        for kind in (0, 1):
            columns = grid[0, kind::2]
            ends = [axes.get_xlim() for axes in columns]
            for axes in columns:
                low, high = min(low for low, _ in ends), max(high for _, high in ends)
                axes.set_xlim(low, high)
                if kind == 1:
                    plain_log(axes.xaxis, (1, 3) if high < 100 * low else (1,))  # a panel is narrow
        grid[0, 0].set_yticks(range(len(rows)), labels)
        grid[0, 0].set_ylim(len(rows) - 0.5, -0.5)
        set_title(
            figure,
            "Estimators of the policy gradient g against the exact one: bias, and variance of one batch. Bars: 95 %. "
            f"The axis of the bias is linear within ±{LINEAR:g} (grey).",
            width,
        )
        handles = [
            handle("biased", color=DARK, marker="o", markersize=5),
            handle("95 % interval of the bias holds 0", color=DARK, marker="o", markersize=5, mfc="white"),
        ]
        if any(statistic.name == PAIRED for statistic in measured):
            handles.append(handle("the same bias, paired (thick: 95 %)", color=DARK, marker="|", markersize=7))
        figure.legend(handles=handles, loc="outside lower center", ncols=1 if len(engines) == 1 else len(handles))
    return figure


def _row(
    axes: Axes,
    place: float,
    statistic: Statistic,
    paired: Statistic | None,
    color: str,
    *,
    logarithmic: bool = False,
) -> None:
    axes.plot([statistic.low, statistic.high], [place, place], color=color, linewidth=0.9, alpha=0.6, zorder=2)
    if paired:
        axes.plot([paired.low, paired.high], [place, place], color=color, linewidth=2.6, zorder=3)
        axes.plot(paired.value, place, "|", color=color, markersize=7, zorder=3)
    filled = logarithmic or statistic.low > 0
    axes.plot(statistic.value, place, "o", color=color, markersize=4, mfc=color if filled else "white", zorder=4)


def _families(experiment: Experiment) -> list[list[tuple[str, str]]]:
    """Method and ρ of the estimators: each that has no safe vocabulary, and after it itself with one.

    The largest fixed ρ comes first, and rules that are not a fixed ρ last. An estimator without such a counterpart is a
    family of its own.
    """
    families: dict[str, list[tuple[str, str]]] = {}
    for method, rho in experiment.estimators:
        family = estimator_counterpart(experiment, method, "unpruned") or method
        families.setdefault(family, []).append((method, rho or "none"))

    def order(estimator: tuple[str, str]) -> tuple[bool, bool, float]:
        method, rho = estimator
        rule = experiment.methods[method].safe_vocabulary
        return rule is not None, rule is not None and rule.rule != "fixed", -(0.0 if rho == "none" else parse_rho(rho))

    return [sorted(family, key=order) for family in families.values()]


def _label(experiment: Experiment, family: list[tuple[str, str]], method: str, rho: str) -> str:
    """What tells an estimator from the first of its family; of the first, what it is called."""
    rule = experiment.methods[method].safe_vocabulary
    at = "" if rho == "none" else f", ρ = {rho_text(rho)}"
    if (method, rho) == family[0] or rule is None:
        return f"{experiment.methods[method].label}{at}"
    return f"with DVP{'' if rule.rule == 'fixed' else f', {rule.rule}'.replace('_', ' ')}{at}"


def _ends(families: list[list[tuple[str, str]]]) -> list[float]:
    """Where a line separates a family from the next."""
    lengths = [len(family) for family in families[:-1]]
    return [sum(lengths[: place + 1]) - 0.5 for place in range(len(lengths))]
