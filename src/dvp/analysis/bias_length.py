"""Relate the bias of the gradient estimators to the length of responses, from a stage `bias` with several tasks.

Everything is a function of sums over seeds: of squared biases and of |g|². If the weights of an engine allow it at
every task, squared biases are paired with the exact gradient by the same samples (dvp.measurement.paired_bias);
otherwise they are against other samples of it (dvp.measurement.estimator_bias), which is noisier. Intervals are by the
jackknife over seeds.

Shape suffixes: R replicates, the value first; S seeds; L tasks, in the order of their responses' length.
"""

import math
from collections.abc import Iterator

import numpy as np
import pandas as pd

from dvp.analysis.estimates import over_seeds
from dvp.analysis.load import Reader
from dvp.analysis.points import estimator_places
from dvp.analysis.statistics import Statistic, without_interval
from dvp.evaluation import bootstrap
from dvp.experiment.config import Experiment
from dvp.measurement.files import SMALLEST_ESS

RELATIVE, ABSOLUTE = "bias_exponent", "absolute_bias_exponent"
SMALLEST = "weight_ess_smallest"
SHORTEST_SPAN = 1.5
"""The smallest usable ratio of the longest to the shortest mean length: below it a slope says nothing about length."""


def statistics(experiment: Experiment, reader: Reader) -> Iterator[Statistic]:
    """Yield the bias of every estimator at every policy and engine by task, and its slopes on the response length.

    With sums Σ over seeds: relative_bias, Σ |E ĝ − ∇J|² / Σ |g|² of each task, and bias_exponent, the slope of its
    logarithm on that of the length by least squares over the tasks; absolute_bias_exponent, the slope for
    Σ |E ĝ − ∇J|² alone.

    If the sequence weights of any task and seed have an ESS below SMALLEST_ESS at an engine, none of its biases is
    paired: two kinds of estimates in one slope would compare their noise. No slope is given if lengths span less than
    SHORTEST_SPAN, or if a logarithm is not defined.

    weight_ess_smallest is that ESS. Per policy and task also response_tokens and reward, means over its own responses.
    """
    places = estimator_places(experiment)
    table = reader.bias["estimators"].set_index([*places[0], "seed"]).sort_index()
    for place in places:
        if place["task"] == experiment.bias.tasks[0]:
            yield from _estimator(experiment, table, place)
    # From the trainer's own samples, which are the same for every engine.
    first = reader.bias["estimators"][reader.bias["estimators"]["engine"] == experiment.bias.engines[0]]
    first = first.drop_duplicates(["policy", "task", "seed"])
    for (policy, task), rows in first.groupby(["policy", "task"], sort=False):
        how = f"mean of the reference's responses; t interval over {len(rows)} seeds"
        where, sources = {"policy": policy, "task": task}, tuple(rows["source"])
        yield Statistic("response_tokens", where, *over_seeds(list(rows["response_tokens"])), "tokens", how, sources)
        yield Statistic("reward", where, *over_seeds(list(rows["reference_reward"])), "fraction", how, sources)


def _estimator(experiment: Experiment, table: pd.DataFrame, place: dict[str, str]) -> Iterator[Statistic]:
    """Yield the statistics of one estimator over all tasks; `place` is its coordinates at any one of them."""
    count, covered = len(experiment.seeds), bootstrap.covers_seeds(experiment.seeds)
    draws = bootstrap.draws(count, 1, 1, 0, shared=False)
    over = f"jackknife over {count} seeds, quantiles of t" if covered else "no interval"
    rows, where = _rows(experiment, table, place), {key: value for key, value in place.items() if key != "task"}
    tokens_L = np.array([own["response_tokens"].mean() for own in rows.values()])
    sources = tuple(source for own in rows.values() for source in own["source"])
    # These weights belong to the samples without a safe vocabulary, the same for every estimator of an engine.
    smallest_ess = min(own["weight_ess"].min() for own in rows.values())
    column, samples = "squared_bias", "other"
    if smallest_ess >= SMALLEST_ESS:
        column, samples = "paired_squared_bias", "the same"

    def sums(rows: dict[str, pd.DataFrame]) -> np.ndarray:
        """Sum the squared bias |E ĝ − ∇J|², not relative to |g|², over seeds; (R, L)."""
        return draws.count_RU @ np.array([own[column] * own["squared_norm"] for own in rows.values()]).T

    def statistic(name: str, where: dict[str, str], value_R: np.ndarray, unit: str, how: str) -> Iterator[Statistic]:
        if math.isfinite(value_R[0]):
            numbers = draws.estimate(value_R if covered else value_R[:1])
            how = f"{how}; ∇J by {samples} samples; {over}"
            yield Statistic(name, where, *numbers, unit, how, sources)

    yield without_interval(SMALLEST, where, smallest_ess, "fraction", "the smallest of a task and seed", sources)
    bias_RL, norm_RL = sums(rows), draws.count_RU @ np.array([own["squared_norm"] for own in rows.values()]).T
    # Intervals are on the plain scale, as an unbiased estimate of a square may be negative and its interval include 0.
    for index, task in enumerate(rows):
        of_task, how = where | {"task": task}, "Σ |E ĝ − ∇J|² / Σ |g|² over seeds"
        yield from statistic("relative_bias", of_task, bias_RL[:, index] / norm_RL[:, index], "of |g|²", how)
    if tokens_L[-1] < SHORTEST_SPAN * tokens_L[0]:
        return
    how, unit = f"over {', '.join(rows)}", "power of the length"
    yield from statistic(RELATIVE, where, _slope(_log(bias_RL / norm_RL), tokens_L), unit, how)
    yield from statistic(ABSOLUTE, where, _slope(_log(bias_RL), tokens_L), unit, how)


def _rows(experiment: Experiment, table: pd.DataFrame, place: dict[str, str]) -> dict[str, pd.DataFrame]:
    """Return an estimator's rows, one per seed, by task; the task with the shortest responses first."""
    rows = {
        task: table.loc[tuple((place | {"task": task}).values())].loc[experiment.seeds]
        for task in experiment.bias.tasks
    }
    return dict(sorted(rows.items(), key=lambda one: one[1]["response_tokens"].mean()))


def _slope(value_RL: np.ndarray, tokens_L: np.ndarray) -> np.ndarray:
    """Return the slope on the logarithm of the length by least squares, (R,)."""
    centred_L = np.log(tokens_L) - np.log(tokens_L).mean()
    return value_RL @ centred_L / (centred_L @ centred_L)


def _log(value_RL: np.ndarray) -> np.ndarray:
    return np.log(np.where(value_RL > 0, value_RL, np.nan))
