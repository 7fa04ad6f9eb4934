"""The bias of the gradient estimators against the length of responses: what of the stage `bias` with several tasks.

Everything is a function of sums over seeds: of squared biases and of |g|². Where the weights of an engine allow it at
every task, squared biases are paired with the exact gradient by the same samples (dvp.measurement.paired_bias);
elsewhere they are against other samples of it (dvp.measurement.estimator_bias), which is noisier. Intervals leave out
a seed at a time.

Shape suffixes: R replicates, the value first; S seeds; L tasks, in the order of their responses' length.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pandas as pd

from dvp.analysis.bias import estimator_places
from dvp.analysis.estimates import over_seeds
from dvp.analysis.load import Reader
from dvp.analysis.points import estimator_counterpart
from dvp.analysis.statistics import Statistic
from dvp.evaluation import bootstrap
from dvp.experiment.config import Experiment
from dvp.measurement.files import SMALLEST_ESS

RELATIVE, ABSOLUTE = "bias_exponent", "absolute_bias_exponent"
REMOVED, REMOVED_SLOPE = "bias_removed", "bias_removed_per_doubling"
SMALLEST = "weight_ess_smallest"
SHORTEST_SPAN = 1.5
"""Of the longest responses' mean length over the shortest: below it no slope says anything about length."""


@dataclass(frozen=True, eq=False)
class _Line:
    """One estimator over the tasks, in the order of their length."""

    tasks: list[str]
    smallest_ess: float
    """Of the weights of a seed's samples for a task, the smallest."""
    squared_bias_SL: np.ndarray
    """|E ĝ − ∇J|², not over |g|²."""
    squared_norm_SL: np.ndarray
    tokens_L: np.ndarray
    sources: tuple[str, ...]


def statistics(experiment: Experiment, reader: Reader) -> list[Statistic]:
    """Of every estimator at every policy and engine, with sums over seeds:

    relative_bias, Σ |E ĝ − ∇J|² / Σ |g|² of each task, and bias_exponent, the slope of its logarithm on that of the
    length by least squares over the tasks; absolute_bias_exponent, the same of Σ |E ĝ − ∇J|² alone; bias_removed of
    each task, 1 − Σ |E ĝ − ∇J|² / that of the same correction without safe vocabulary, and bias_removed_per_doubling,
    its slope on log₂ of the length.

    Of an engine at which the sequence weights of any task and seed have an ESS below SMALLEST_ESS no bias is paired:
    two kinds of estimates in one slope would compare their noise. No slope is given where lengths span less than
    SHORTEST_SPAN, or where a logarithm is not defined.

    weight_ess_smallest: that ESS. And of each task response_tokens and reward, means over a policy's own responses.
    """
    count = len(experiment.seeds)
    draws = bootstrap.draws(count, 1, 1, 0, shared=False)
    over = (
        f"jackknife over {count} seeds, quantiles of t" if bootstrap.covers_seeds(experiment.seeds) else "no interval"
    )
    found: list[Statistic] = []

    def add(name: str, where: dict[str, str], value_R: np.ndarray, unit: str, how: str, line: _Line) -> None:
        if not math.isfinite(value_R[0]):
            return
        value_R = value_R if bootstrap.covers_seeds(experiment.seeds) else value_R[:1]
        exact = "∇J by the same samples" if line.smallest_ess >= SMALLEST_ESS else "∇J by other samples"
        numbers = draws.estimate(value_R)
        found.append(Statistic(name, where, *numbers, unit, f"{how}; {exact}; {over}", line.sources))

    for where, line, partner in _lines(experiment, reader):
        bias_RL, norm_RL = draws.count_RU @ line.squared_bias_SL, draws.count_RU @ line.squared_norm_SL
        how = "the smallest of a task and seed"
        found.append(Statistic(SMALLEST, where, line.smallest_ess, math.nan, math.nan, "fraction", how, line.sources))
        theirs_RL = None if partner is None else draws.count_RU @ partner.squared_bias_SL
        # Intervals are plain ones: an unbiased estimate of a square may lie below 0, and its interval hold 0.
        for place, task in enumerate(line.tasks):
            of_task = where | {"task": task}
            how = "Σ |E ĝ − ∇J|² / Σ |g|² over seeds"
            add("relative_bias", of_task, bias_RL[:, place] / norm_RL[:, place], "of |g|²", how, line)
            if theirs_RL is not None:
                removed_R = 1 - _ratio(bias_RL[:, place], theirs_RL[:, place])
                how = "1 − Σ |E ĝ − ∇J|² / that without a safe vocabulary"
                add(REMOVED, of_task, removed_R, "fraction", how, line)
        if line.tokens_L[-1] < SHORTEST_SPAN * line.tokens_L[0]:
            continue
        of = f"over {', '.join(line.tasks)}"
        add(RELATIVE, where, _slope(_log(bias_RL / norm_RL), line.tokens_L), "power of the length", of, line)
        add(ABSOLUTE, where, _slope(_log(bias_RL), line.tokens_L), "power of the length", of, line)
        if theirs_RL is not None:
            slope_R = _slope(1 - _ratio(bias_RL, theirs_RL), line.tokens_L) * math.log(2)
            add(REMOVED_SLOPE, where, slope_R, "fraction per doubling of the length", of, line)
    return [*found, *_responses(experiment, reader)]


def _responses(experiment: Experiment, reader: Reader) -> Iterator[Statistic]:
    # Of the trainer's own samples, which are the same whatever engine is measured beside it.
    first = reader.bias["estimators"][reader.bias["estimators"]["engine"] == experiment.bias.engines[0]]
    first = first.drop_duplicates(["policy", "task", "seed"])
    for (policy, task), rows in first.groupby(["policy", "task"], sort=False):
        how = f"mean of the reference's responses; t interval over {len(rows)} seeds"
        where = {"policy": policy, "task": task}
        for name, column, unit in (
            ("response_tokens", "response_tokens", "tokens"),
            ("reward", "reference_reward", "fraction"),
        ):
            numbers = over_seeds(list(rows[column]))
            yield Statistic(name, where, *numbers, unit, how, tuple(rows["source"]))


def _lines(experiment: Experiment, reader: Reader) -> Iterator[tuple[dict[str, str], _Line, _Line | None]]:
    """Where each estimator is, the estimator, and the same correction without safe vocabulary if that is compared."""
    table = reader.bias["estimators"].set_index([*estimator_places(experiment)[0], "seed"]).sort_index()
    places = [{key: value for key, value in where.items() if key != "task"} for where in estimator_places(experiment)]
    for where in [dict(items) for items in dict.fromkeys(tuple(place.items()) for place in places)]:
        name = estimator_counterpart(experiment, where["method"], "unpruned")
        partner = None if name is None else _line(experiment, table, where | {"method": name, "rho": "none"})
        yield where, _line(experiment, table, where), partner


def _line(experiment: Experiment, table: pd.DataFrame, where: dict[str, str]) -> _Line:
    *columns, _ = table.index.names
    rows = {
        task: table.loc[tuple((where | {"task": task})[key] for key in columns)].loc[experiment.seeds]
        for task in experiment.bias.tasks
    }
    tokens = {task: float(own["response_tokens"].mean()) for task, own in rows.items()}
    tasks = sorted(rows, key=tokens.__getitem__)
    # Of the samples without a safe vocabulary: the same for every estimator of an engine.
    smallest_ess = float(min(own["weight_ess"].min() for own in rows.values()))
    column = "paired_squared_bias" if smallest_ess >= SMALLEST_ESS else "squared_bias"
    norm_SL = np.array([rows[task]["squared_norm"] for task in tasks]).T
    relative_SL = np.array([rows[task][column] for task in tasks]).T
    tokens_L = np.array([tokens[task] for task in tasks])
    sources = tuple(source for task in tasks for source in rows[task]["source"])
    return _Line(tasks, smallest_ess, relative_SL * norm_SL, norm_SL, tokens_L, sources)


def _slope(value_RL: np.ndarray, tokens_L: np.ndarray) -> np.ndarray:
    """Least squares on log T, (R,)."""
    centred_L = np.log(tokens_L) - np.log(tokens_L).mean()
    return value_RL @ centred_L / (centred_L @ centred_L)


def _log(value_RL: np.ndarray) -> np.ndarray:
    return np.log(np.where(value_RL > 0, value_RL, np.nan))


def _ratio(own_R: np.ndarray, theirs_R: np.ndarray) -> np.ndarray:
    """NaN where what it is over is not estimated above 0."""
    return own_R / np.where(theirs_R > 0, theirs_R, np.nan)
