"""Statistics of training runs by name (see config/claims.yaml)."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from dvp.analysis import bootstrap
from dvp.analysis.inputs import (
    GridPoint,
    arms,
    evaluation_folder,
    read_collapses,
    read_metrics,
    reference_arm,
    unpruned_arm,
)
from dvp.analysis.statistics import Statistic
from dvp.analysis.tables import LAST_STEPS, seeds_text
from dvp.experiment.config import Experiment

LEVEL = 0.95


def statistics(experiment: Experiment, results: Path, main: pd.DataFrame) -> list[Statistic]:
    """Of every arm: its score, how it ends and how it grew. `main` is `tables.main_table`.

    score (fraction), score_change_percent against the reference, score_over_unpruned (fraction) of arms with a safe
    vocabulary against the same without; final_k3, final_gradient_norm, final_reward (means
    over the last ten steps); k3_growth (k3 of the last ten steps over that of the first ten); collapsed (fraction of
    runs). Growth is left out where a run has not twice ten steps.
    """
    metrics = read_metrics(experiment, results)
    rows = main.set_index("arm").to_dict("index")
    return [one for arm in arms(experiment) for one in _of_arm(experiment, results, arm, rows[arm.path], metrics)]


def _of_arm(
    experiment: Experiment, results: Path, arm: GridPoint, scored: dict[str, Any], metrics: pd.DataFrame
) -> Iterator[Statistic]:
    def statistic(
        name: str, numbers: tuple[float, float, float], unit: str, how: str, against: GridPoint | None = None
    ) -> Statistic:
        if not name.startswith("score"):
            found = train_sources(experiment, arm)
        else:
            found = tuple(file for one in (arm, against) if one for file in score_sources(experiment, results, one))
        return Statistic(name, where_of(arm), *numbers, unit, how, found)

    how = f"hierarchical bootstrap over {bootstrap.over(experiment.seeds)}"
    score = tuple(scored[key] for key in ("score", "score_low", "score_high"))
    yield statistic("score", score, f"avg@{scored['k']}, fraction", how)
    if scored["role"] != "reference":
        change = tuple(scored[key] for key in ("change_percent", "change_low", "change_high"))
        paired = f"{how}, paired with the reference"
        yield statistic("score_change_percent", change, "%", paired, reference_arm(experiment))
    over = tuple(scored[key] for key in ("over_unpruned", "over_unpruned_low", "over_unpruned_high"))
    without = unpruned_arm(experiment, arm)
    if without is not None:
        told = f"score minus that of {without.method} on the same engine; {how}, paired"
        yield statistic("score_over_unpruned", over, "fraction", told, without)

    own, steps = metrics[metrics["arm"] == arm.path], experiment.training.steps
    first = own[own["step"] <= LAST_STEPS].groupby("seed")
    last = own[own["step"] > steps - LAST_STEPS].groupby("seed")
    pruned = experiment.methods[arm.method].safe_vocabulary is not None
    between = "between the pruned policies, without tokens outside V_S" if pruned else "between the full policies"
    for name, values, unit, logarithmic, what in (
        ("final_k3", last["k3"].mean(), "nats per token", True, f"{between}; "),
        ("k3_growth", last["k3"].mean() / first["k3"].mean(), "ratio", True, f"{between}; "),
        ("final_gradient_norm", last["gradient_norm"].mean(), "norm", True, ""),
        ("final_reward", last["reward"].mean(), "fraction", False, ""),
    ):
        if name == "k3_growth" and steps < 2 * LAST_STEPS:
            continue
        how = f"{what}t interval over {seeds_text(experiment)}" + (", of the logarithm" if logarithmic else "")
        yield statistic(name, over_seeds(list(values), logarithmic=logarithmic), unit, how)

    collapses = read_collapses(experiment, results, arm)
    collapsed = sum(step is not None for step in collapses)
    interval = stats.binomtest(collapsed, len(collapses)).proportion_ci(LEVEL, method="exact")
    numbers = (collapsed / len(collapses), interval.low, interval.high)
    how = f"Clopper-Pearson, {collapsed} of {len(collapses)} seeds"
    yield statistic("collapsed", numbers, "fraction of runs", how)


def over_seeds(values: Sequence[float], *, logarithmic: bool) -> tuple[float, float, float]:
    """Mean and 95 % t interval, or their exponentials in the logarithm (the geometric mean).

    The interval is NaN with fewer than two values; all is NaN where a logarithm, or a value, is not defined.
    """
    numbers = np.asarray(values, dtype=float)
    if not np.isfinite(numbers).all() or (logarithmic and (numbers <= 0).any()):
        return math.nan, math.nan, math.nan
    if logarithmic:
        return tuple(math.exp(value) for value in over_seeds(np.log(numbers), logarithmic=False))
    mean = float(numbers.mean())
    if len(numbers) < 2:
        return mean, math.nan, math.nan
    reach = stats.t.ppf((1 + LEVEL) / 2, len(numbers) - 1) * stats.sem(numbers)
    return mean, mean - reach, mean + reach


def where_of(arm: GridPoint) -> dict[str, str]:
    """An arm as statistics name it."""
    return {"method": arm.method, "engine": arm.engine, "rho": arm.rho or "none"}


def train_sources(experiment: Experiment, arm: GridPoint) -> tuple[str, ...]:
    """The train.json of an arm's runs, relative to the experiment's folder."""
    return tuple(f"runs/{arm.run(seed).path}/train.json" for seed in experiment.seeds)


def score_sources(experiment: Experiment, results: Path, arm: GridPoint) -> tuple[str, ...]:
    """The scores.json of an arm's models on report.task, relative to the experiment's folder."""
    return tuple(
        (evaluation_folder(results, arm.run(seed), experiment.report.task) / "scores.json")
        .relative_to(results)
        .as_posix()
        for seed in experiment.seeds
    )
