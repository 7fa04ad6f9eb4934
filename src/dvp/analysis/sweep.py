"""The sweep over ρ: score and KL at the end of training, bias and variance of the gradient before it."""

import math
from collections.abc import Iterator
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from dvp.analysis import bootstrap
from dvp.analysis.bias import pooled
from dvp.analysis.figures import COLORS, STYLE
from dvp.analysis.inputs import arms, is_control, read_evaluations, reference_arm
from dvp.analysis.parts import FEWEST_RHOS, swept
from dvp.analysis.statistics import Measured, Statistic
from dvp.analysis.tables import LAST_STEPS, main_table, seeds_text
from dvp.analysis.training import score_sources, statistics, where_of
from dvp.experiment.config import Experiment
from dvp.experiment.grid import GridPoint, parse_rho

TRAINED = ("score", "final_k3")  # what training and evaluation tell; the rest is measured at the base policy
NEGLIGIBLE = 1e-7  # nats per token: rounding of fp32


def measured(experiment: Experiment, results: Path) -> Measured:
    """Figure rho_sweep, and score_over_small_rho and score_over_large_rho of every sweep. Raises DvpError.

    Both are the mean score over the middle three values of ρ (of an even number the smaller ones) minus the score at
    the smallest, or the largest: above 0, both, where the score is best in between. Which values are in the middle
    does not depend on the scores.
    """
    main = main_table(experiment, results)
    trained = statistics(experiment, results, main)
    found = [one for sweep in swept(experiment).items() for one in _contrasts(experiment, results, *sweep)]
    bias = pooled(experiment, results)
    figure = _figure(experiment, main, {_key(one): one for one in trained}, bias[bias["policy"] == "base"])
    sources = {name for one in trained for name in one.sources}
    measurements = {f"bias/{measurement.path}/bias.json" for measurement in experiment.measurements("bias")}
    return Measured(statistics=found, figures={"rho_sweep": figure}, sources=tuple(sorted(sources | measurements)))


def middle(rhos: list[str]) -> list[str]:
    """The middle three values, the smallest first."""
    ordered = sorted(rhos, key=parse_rho)
    start = (len(ordered) - FEWEST_RHOS) // 2
    return ordered[start : start + FEWEST_RHOS]


def _contrasts(experiment: Experiment, results: Path, curve: tuple[str, str], rhos: list[str]) -> Iterator[Statistic]:
    method, engine = curve
    evaluations = read_evaluations(experiment, results)
    every = {rho: GridPoint(method=method, engine=engine, rho=rho) for rho in rhos}
    correct = {
        rho: [evaluations[arm.run(seed).path].correct_PK for seed in experiment.seeds] for rho, arm in every.items()
    }
    drawn = bootstrap.replicates(correct, experiment.evaluation.bootstrap_resamples, experiment.evaluation.seed)
    scores = {rho: float(np.mean([one.mean() for one in found])) for rho, found in correct.items()}
    ordered, inside = sorted(rhos, key=parse_rho), middle(rhos)
    for name, end in (("score_over_small_rho", ordered[0]), ("score_over_large_rho", ordered[-1])):
        value = float(np.mean([scores[rho] for rho in inside])) - scores[end]
        low, high = bootstrap.interval(np.mean([drawn[rho] for rho in inside], axis=0) - drawn[end])
        how = (
            f"mean at ρ = {', '.join(inside)} minus the score at {end}; hierarchical bootstrap over "
            f"{bootstrap.over(experiment.seeds)}, paired"
        )
        sources = tuple(file for rho in {*inside, end} for file in score_sources(experiment, results, every[rho]))
        yield Statistic(name, {"method": method, "engine": engine}, value, low, high, "fraction", how, sources)


def _key(one: Statistic) -> tuple:
    return one.name, one.where["method"], one.where["engine"], one.where["rho"]


def _figure(experiment: Experiment, main: pd.DataFrame, trained: dict[tuple, Statistic], bias: pd.DataFrame) -> Figure:
    """Five panels against ρ; horizontal lines are arms without ρ."""
    panels = {
        "score": ("after training: score", f"avg@{int(main['k'].iloc[0])} on {experiment.report.task}, %"),
        "final_k3": (f"last {LAST_STEPS} steps: KL of the sampled policies", "k3, nats per token"),
        "squared_bias": ("base policy: squared bias of the gradient", "units of |g|²"),
        "variance": ("base policy: variance of a batch's gradient", "units of |g|²"),
        "mse": ("base policy: squared bias + variance", "units of |g|²"),
    }
    drawn = _curves(experiment)
    colors = {curve: COLORS[index % len(COLORS)] for index, curve in enumerate(drawn)}
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(12.0, 6.2), layout="constrained")
        FigureCanvasAgg(figure)
        grid = figure.subplots(2, 3, sharex=True)
        places = (grid[0, 0], grid[0, 1], *grid[1])
        for axes, (name, (title, label)) in zip(places, panels.items(), strict=True):
            axes.set(xscale="log", title=title, ylabel=label)
            if name in ("final_k3", "variance"):
                axes.set_yscale("log")
            scale = 100 if name == "score" else 1
            for (method, engine), rhos in drawn.items():
                if name not in TRAINED:
                    own = bias[(bias["method"] == method) & (bias["engine"] == engine) & bias["rho"].isin(rhos)]
                    keys = [name, f"{name}_low", f"{name}_high"]
                    rows = [(parse_rho(row["rho"]), *(row[key] for key in keys)) for row in own.to_dict("records")]
                else:
                    found = {parse_rho(rho): trained.get((name, method, engine, rho)) for rho in rhos}
                    rows = [(rho, one.value, one.low, one.high) for rho, one in found.items() if one is not None]
                if rows:  # there are none of training for what is measured at the base policy alone
                    _points(axes, rows, scale, colors[method, engine], _label(experiment, method, engine))
            _horizontal(axes, experiment, name, scale, trained, bias)
        for axes in grid[1]:
            axes.set_xlabel("ρ (logarithmic); larger prunes more")
        handles = {
            label: handle for axes in places for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        grid[0, 2].set_axis_off()
        grid[0, 2].legend(handles.values(), handles.keys(), loc="center left")
        figure.suptitle(f"{experiment.name}: bars are 95 % intervals; {seeds_text(experiment)}", fontsize=9.5)
    return figure


def _curves(experiment: Experiment) -> dict[tuple[str, str], list[str]]:
    """Method and engine of every curve, with its ρ: the sweeps, then what is measured at the base policy alone."""
    sweeps = swept(experiment)
    measured: dict[tuple[str, str], list[str]] = {}
    for method, rho in experiment.estimators:
        for engine in dict.fromkeys(engine for _, engine in sweeps):
            if rho is not None and (method, engine) not in sweeps:
                measured.setdefault((method, engine), []).append(rho)
    return sweeps | {curve: rhos for curve, rhos in measured.items() if len(rhos) >= FEWEST_RHOS}


def _horizontal(
    axes: Axes, experiment: Experiment, name: str, scale: float, trained: dict[tuple, Statistic], bias: pd.DataFrame
) -> None:
    """A line for each arm without ρ; an exact engine's KL, far below all others, in words."""
    for arm, color, line in _levels(experiment):
        if name in TRAINED:
            value = trained[name, *where_of(arm).values()].value
        else:
            own = bias[(bias["method"] == arm.method) & (bias["engine"] == arm.engine) & (bias["rho"] == "none")]
            value = own[name].iloc[0] if len(own) else math.nan
        label = _label(experiment, arm.method, arm.engine)
        if name == "final_k3" and not value >= NEGLIGIBLE:  # rounding may bring it below 0, too
            axes.text(0.02, 0.03, f"{label}: below {NEGLIGIBLE:g}", color=color, transform=axes.transAxes)
        elif math.isfinite(value):
            axes.axhline(scale * value, color=color, linestyle=line, linewidth=1.3, label=label)


def _label(experiment: Experiment, method: str, engine: str) -> str:
    return f"{experiment.methods[method].label}, engine {engine}"


def _levels(experiment: Experiment) -> list[tuple[GridPoint, str, str]]:
    """Arms without ρ: controls grey and dashed, the reference black."""
    result = []
    for arm in arms(experiment):
        if arm.rho is not None:
            continue
        if is_control(experiment, arm):
            result.append((arm, "#808080", "--"))
        else:
            result.append((arm, "black" if arm == reference_arm(experiment) else COLORS[-1], ":"))
    return result


def _points(axes: Axes, rows: list[tuple[float, float, float, float]], scale: float, color: str, label: str) -> None:
    rho, value, low, high = np.array(sorted(rows)).T
    axes.plot(rho, scale * value, "o-", color=color, label=label, markersize=5)
    axes.vlines(rho, scale * low, scale * high, color=color, linewidth=1.8, alpha=0.6)
