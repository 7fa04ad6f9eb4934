"""The sweep over ρ: score and KL at the end of training, bias and variance of the gradient before it."""

import math
from collections.abc import Callable, Iterator

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dvp.analysis.estimates import Estimate, contrast
from dvp.analysis.figures import GREY, STYLE, method_colors, new_figure, plain_log
from dvp.analysis.parts import FEWEST_RHOS, swept
from dvp.analysis.points import seeds_text
from dvp.analysis.statistics import Statistic, lookup
from dvp.analysis.training import LAST_STEPS, where_of
from dvp.experiment.config import Experiment
from dvp.experiment.grid import GridPoint, parse_rho, settings_as_read, settings_path

TRAINED = ("score", "final_k3")  # what training and evaluation tell; the rest is measured at the base policy
NEGLIGIBLE = 1e-7  # nats per token: rounding of fp32
_LINES = ("-", "--", "-.", ":")  # of engines


def statistics(experiment: Experiment, score: dict[str, Estimate]) -> list[Statistic]:
    """score_over_small_rho and score_over_large_rho of every sweep.

    Both are the mean score over the middle three values of ρ (of an even number the smaller ones) minus the score at
    the smallest, or the largest: above 0, both, where the score is best in between. Which values are in the middle
    does not depend on the scores.
    """
    return [one for sweep in swept(experiment).items() for one in _contrasts(experiment, score, *sweep)]


def middle(rhos: list[str]) -> list[str]:
    """The middle three values, the smallest first."""
    ordered = sorted(rhos, key=parse_rho)
    start = (len(ordered) - FEWEST_RHOS) // 2
    return ordered[start : start + FEWEST_RHOS]


def _contrasts(
    experiment: Experiment, score: dict[str, Estimate], curve: GridPoint, rhos: list[str]
) -> Iterator[Statistic]:
    of = {rho: score[curve.model_copy(update={"rho": rho}).path] for rho in rhos}
    ordered, inside = sorted(rhos, key=parse_rho), middle(rhos)
    mean_R = np.mean([of[rho].value_R for rho in inside], axis=0)
    mean = Estimate(of[inside[0]].draws, mean_R, tuple(file for rho in inside for file in of[rho].sources))
    where = {key: value for key, value in where_of(experiment, curve).items() if key != "rho"}
    for name, end in (("score_over_small_rho", ordered[0]), ("score_over_large_rho", ordered[-1])):
        says = f"mean at ρ = {', '.join(inside)} minus the score at {end}"
        yield contrast(experiment, name, where, mean - of[end], says)


def rho_sweep(experiment: Experiment, statistics: list[Statistic]) -> Figure:
    """Five panels against ρ, `statistics` as of training and bias; horizontal lines are grid points without ρ."""
    k = experiment.evaluation.samples_per_problem[experiment.report.task]
    panels = {
        "score": ("after training: score", f"avg@{k} on {experiment.report.task}, %"),
        "final_k3": (f"last {LAST_STEPS} steps: KL of the sampled policies", "k3, nats per token"),
        "squared_bias": ("base policy: squared bias of the gradient", "units of |g|²"),
        "variance": ("base policy: variance of a batch's gradient", "units of |g|²"),
        "mse": ("base policy: squared bias + variance", "units of |g|²"),
    }
    known = lookup(statistics)

    def of(name: str, **where: str) -> Statistic | None:
        if name not in TRAINED:  # of the estimators, which have no training settings
            where = {"policy": "base"} | {key: where[key] for key in ("method", "engine", "rho")}
        return known(name, where)

    curves, colors = _curves(experiment), method_colors(experiment)
    kinds = dict.fromkeys((curve.engine, settings_path(curve.training)) for curve in curves)
    lines = {kind: _LINES[index % len(_LINES)] for index, kind in enumerate(kinds)}
    with mpl.rc_context(STYLE):
        figure = new_figure(12.0, 6.2)
        grid = figure.subplots(2, 3, sharex=True)
        places = (grid[0, 0], grid[0, 1], *grid[1])
        for axes, (name, (title, label)) in zip(places, panels.items(), strict=True):
            axes.set(xscale="log", title=title, ylabel=label)
            axes.set_xlabel("" if name in TRAINED else "ρ (logarithmic); larger prunes more")
            if name in ("final_k3", "variance"):
                axes.set_yscale("log")
                plain_log(axes.yaxis)
            scale = 100 if name == "score" else 1
            for curve, rhos in curves.items():
                where = where_of(experiment, curve)
                points = {parse_rho(rho): statistic for rho in rhos if (statistic := of(name, **where | {"rho": rho}))}
                if points:  # there are none of training for what is measured at the base policy alone
                    x, rows = sorted(points), [points[rho] for rho in sorted(points)]
                    value, low, high = scale * np.array([(row.value, row.low, row.high) for row in rows]).T
                    color, line = colors[curve.method], lines[curve.engine, settings_path(curve.training)]
                    axes.plot(x, value, "o", linestyle=line, color=color, label=_label(experiment, curve), markersize=5)
                    axes.vlines(x, low, high, color=color, linewidth=1.8, alpha=0.6)
            _horizontal(axes, experiment, name, scale, of, colors)
        handles = {
            label: handle for axes in places for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        grid[0, 2].set_axis_off()
        grid[0, 2].legend(handles.values(), handles.keys(), loc="center left")
        figure.suptitle(f"{experiment.name}: bars are 95 % intervals; {seeds_text(experiment)}", fontsize=9.5)
    return figure


def _curves(experiment: Experiment) -> dict[GridPoint, list[str]]:
    """Every curve, a grid point without ρ, with its ρ: the sweeps, then what is measured at the base policy alone."""
    sweeps = swept(experiment)
    measured: dict[GridPoint, list[str]] = {}
    for method, rho in experiment.estimators:
        for engine in dict.fromkeys(curve.engine for curve in sweeps):
            if rho is not None and not any((curve.method, curve.engine) == (method, engine) for curve in sweeps):
                measured.setdefault(GridPoint(method=method, engine=engine), []).append(rho)
    return sweeps | {curve: rhos for curve, rhos in measured.items() if len(rhos) >= FEWEST_RHOS}


def _horizontal(
    axes: Axes, experiment: Experiment, name: str, scale: float, of: Callable, colors: dict[str, str]
) -> None:
    """A line for each grid point without ρ; an exact engine's KL, far below all others, in words."""
    for point in (point for point in experiment.points if point.rho is None):
        color, line = (GREY, "--") if experiment.is_control(point) else (colors[point.method], ":")
        statistic, label = of(name, **where_of(experiment, point)), _label(experiment, point)
        value = statistic.value if statistic else math.nan
        if name == "final_k3" and not value >= NEGLIGIBLE:  # rounding may bring it below 0, too
            axes.text(0.02, 0.03, f"{label}: below {NEGLIGIBLE:g}", color=color, transform=axes.transAxes)
        elif math.isfinite(value):
            axes.axhline(scale * value, color=color, linestyle=line, linewidth=1.5, label=label)


def _label(experiment: Experiment, point: GridPoint) -> str:
    parts = [experiment.methods[point.method].label, f"engine {point.engine}"]
    return ", ".join([*parts, *settings_as_read(experiment.settings_of(point))])
