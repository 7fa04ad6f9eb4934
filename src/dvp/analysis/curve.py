"""Scores along training: final, peak and mean of every grid point, and the tokens it takes to reach a score.

Shape suffixes: S seeds, N evaluations (the base model's first), P problems, R replicates, the value first.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise

import numpy as np
from scipy.optimize import isotonic_regression

from dvp.analysis.estimates import (
    Estimate,
    contrasts,
    draws_of,
    mean,
    over,
    over_seeds,
    share_of_runs,
    t_over_seeds,
)
from dvp.analysis.load import Reader
from dvp.analysis.points import evaluated, partner, where_of
from dvp.analysis.statistics import Statistic, without_interval
from dvp.evaluation import bootstrap
from dvp.experiment.config import Experiment
from dvp.experiment.grid import GridPoint

# Names of the compared statistics, by kind of score and by pairing.
SCORES = {"final": "score", "peak": "peak_score", "mean": "mean_score"}
UNDEFINED = "not defined, as a run has it from the start or never, or both before they are first evaluated"
SAVED = {"reference": "tokens_saved_percent", "equal_settings": "tokens_saved_equal_settings_percent"}


@dataclass(frozen=True, eq=False)
class Group:
    """The curves of a grid point's runs on a task."""

    experiment: Experiment
    task: str
    point: GridPoint
    steps: list[int]
    """Those of the N evaluations; the first is 0."""
    tokens_SN: np.ndarray
    """Tokens sampled in training up to each evaluation."""
    share_SNP: dict[str, np.ndarray]
    """Share of correct samples: `all`, and those of `odd` and of `even` number."""
    until: float
    """Number of tokens over which the mean score is taken."""
    sources: tuple[str, ...]

    @cached_property
    def score_SN(self) -> np.ndarray:
        """Return the score of each seed at each evaluation, a mean over problems."""
        return self.share_SNP["all"].mean(axis=2)

    @property
    def where(self) -> dict[str, str]:
        """Return the coordinates of its statistics."""
        return where_of(self.experiment, self.point) | {"task": self.task}

    @property
    def draws(self) -> bootstrap.Draws:
        """Return the replicates over the task's problems, which all grid points share."""
        return draws_of(self.experiment, self.share_SNP["all"].shape[2])

    @cached_property
    def curve_RN(self) -> np.ndarray:
        """Return the replicates of the mean score over seeds and problems at each evaluation."""
        S, N, P = self.share_SNP["all"].shape
        return self.draws.count_RU @ self.share_SNP["all"].transpose(0, 2, 1).reshape(S * P, N) / (S * P)

    @cached_property
    def peak(self) -> tuple[np.ndarray, list[int]] | None:
        """Return the peak's replicates, (R,), and the step chosen for each seed; None if problems have one sample."""
        odd_SNP, even_SNP = self.share_SNP["odd"], self.share_SNP["even"]
        if not np.isfinite(odd_SNP).all():
            return None
        S, _, P = odd_SNP.shape
        value_R, place_RS = peak(self.draws.count_RU.reshape(-1, S, P), odd_SNP, even_SNP)
        return value_R, [self.steps[place] for place in place_RS[0]]

    @cached_property
    def score(self) -> dict[str, Estimate]:
        """Return the final and the mean score, and the peak if there is one."""
        weight_SN = np.array([mean_weights(tokens_N, self.until) for tokens_N in self.tokens_SN])
        mean_SP = np.einsum("sn,snp->sp", weight_SN, self.share_SNP["all"])
        scores = {"final": self.at(-1), "mean": mean(self.experiment, mean_SP, self.sources)}
        return scores | ({"peak": Estimate(self.draws, self.peak[0], self.sources)} if self.peak else {})

    def at(self, n: int) -> Estimate:
        """Return the score at evaluation `n`."""
        return Estimate(self.draws, self.curve_RN[:, n], self.sources)

    def tokens_taken(self, score: float) -> list[float]:
        """Return, for each seed, the sampled tokens until its curve reaches a score; infinite if it never does."""
        return [tokens_to(score, *run) for run in zip(self.tokens_SN, self.score_SN, strict=True)]


def groups(reader: Reader) -> list[Group]:
    """Read the curves of every grid point on every task, task by task, in the order of the experiment."""
    experiment = reader.experiment
    sampled = {point: _sampled(experiment, reader, point) for point in experiment.points}
    until = min(tokens_SN[:, -1].min() for tokens_SN in sampled.values())
    found = []
    for task in experiment.data.tasks:
        base = reader.scored(None, task=task)
        for point in experiment.points:
            steps = evaluated(experiment, point)
            later = [reader.scored(point, task=task, step=step) for step in [*steps[1:-1], None]]
            shape = later[0].share_SP["all"].shape
            share_SNP = {
                part: np.stack([np.broadcast_to(first_SP, shape), *(each.share_SP[part] for each in later)], axis=1)
                for part, first_SP in base.share_SP.items()
            }
            runs = reader.runs.loc[reader.runs["point"] == point.path, "source"]
            run_by_run = chain(*zip(*(each.sources for each in later), strict=True))
            sources = tuple(dict.fromkeys([base.sources[0], *run_by_run, *runs]))
            found.append(Group(experiment, task, point, steps, sampled[point], share_SNP, until, sources))
    return found


def _sampled(experiment: Experiment, reader: Reader, point: GridPoint) -> np.ndarray:
    training, own = experiment.training_of(point), reader.metrics[reader.metrics["point"] == point.path]
    steps = evaluated(experiment, point)
    rows = []
    for seed in experiment.seeds:
        tokens = own.loc[own["seed"] == seed, "response_tokens_mean"].cumsum()
        sampled = [0.0, *(training.prompts_per_step * training.group_size * tokens)]
        rows.append([sampled[step] for step in steps])
    return np.array(rows)


def statistics(experiment: Experiment, reader: Reader) -> Iterator[Statistic]:
    """Yield the scores along training of every grid point and task, and the tokens it takes to reach the target score.

    The target score is report.reached_within below the reference's final one.

    final_score, peak_score, mean_score (fractions); score_over_reference, peak_score_over_reference,
    mean_score_over_reference and the same …_over_equal_settings, against the reference's method with the same training
    settings; peak_step of each seed; score_at_step and tokens_at_step at each evaluated step, and both of each seed.
    mean_score_tokens, over which mean scores are taken. See `_tokens` for the rest.
    """
    every = groups(reader)
    how, sources = "sampled by the run that sampled fewest", tuple(reader.runs["source"])
    yield without_interval("mean_score_tokens", {}, every[0].until, "tokens", how, sources)
    for group in every:
        same_task = {other.point: other for other in every if other.task == group.task}
        final = float(same_task[experiment.reference_point].score["final"].value_R[0])
        yield from _scores(experiment, group, same_task)
        yield from _steps(experiment, group)
        yield from _tokens(experiment, group, same_task, final - experiment.report.reached_within / 100)


def _scores(experiment: Experiment, group: Group, same_task: dict[GridPoint, Group]) -> Iterator[Statistic]:
    says = {
        "final": "",
        "peak": "the best evaluation of each run, chosen by its odd samples and read from the even ones; ",
        "mean": f"over the first {group.until:,.0f} sampled tokens of each run; ",
    }
    for key, estimate in group.score.items():
        yield estimate.statistic(f"{key}_score", group.where, "fraction", says[key] + over(experiment), "share")
        compared = contrasts(
            experiment,
            SCORES[key],
            group.point,
            SAVED,
            lambda point, key=key: same_task[point].score[key],
            lambda _, other, key=key: f"{says[key]}minus that of {other.path}",
            task=group.task,
        )
        yield from (statistic for statistic, _ in compared)


def _steps(experiment: Experiment, group: Group) -> Iterator[Statistic]:
    where, sources = group.where, group.sources
    for seed, step in zip(experiment.seeds, group.peak[1] if group.peak else (), strict=bool(group.peak)):
        yield without_interval("peak_step", where | {"seed": str(seed)}, step, "step", "", sources)
    for n, step in enumerate(group.steps):
        at, tokens_S = where | {"step": str(step)}, group.tokens_SN[:, n]
        yield group.at(n).statistic("score_at_step", at, "fraction", over(experiment), "share")
        yield without_interval("tokens_at_step", at, tokens_S.mean(), "tokens", "mean over seeds", sources)
        for seed, score, tokens in zip(experiment.seeds, group.score_SN[:, n], tokens_S, strict=True):
            own = at | {"seed": str(seed)}
            yield without_interval("score_at_step", own, score, "fraction", "a single run", sources)
            yield without_interval("tokens_at_step", own, tokens, "tokens", "a single run", sources)


def _tokens(
    experiment: Experiment, group: Group, same_task: dict[GridPoint, Group], score: float
) -> Iterator[Statistic]:
    """Yield the tokens that a group takes to `score`, and how many it saves.

    sampled_tokens of a run; target_score; reached_score (share of runs) and reached_runs; tokens_to_score (geometric
    mean), median_tokens_to_score; tokens_saved_percent against the reference, tokens_saved_equal_settings_percent.

    If a run never reaches the score, tokens_to_score and savings are not defined, but the median is. Savings are not
    defined either if both runs of a seed reach it before their first evaluation: up to there a curve is one straight
    line from the base model, which does not show which came first.
    """
    to, t_over, none = f"the score {100 * score:.1f} %", t_over_seeds(experiment), (math.nan, math.nan)

    def statistic(name: str, numbers: tuple[float, float, float], unit: str, how: str, *others: Group) -> Statistic:
        sources = tuple(dict.fromkeys(file for each in (group, *others) for file in each.sources))
        return Statistic(name, group.where, *numbers, unit, how, sources)

    total = over_seeds(list(group.tokens_SN[:, -1]))
    yield statistic("sampled_tokens", total, "tokens", f"of a run in training; {t_over}")
    taken = group.tokens_taken(score)
    reached = sum(map(math.isfinite, taken))
    yield statistic(
        "target_score", (score, *none), "fraction", "below the reference's final score, report.reached_within"
    )
    yield statistic("reached_runs", (reached, *none), "runs", f"{to}: of {len(taken)}")
    how = f"{to}: Clopper-Pearson, {reached} of {len(taken)} seeds"
    yield statistic("reached_score", share_of_runs(reached, len(taken)), "fraction of runs", how)
    undefined = "; not defined, as the base model has it already" if 0 in taken else ""
    if reached < len(taken):
        undefined = f"; not defined, as {len(taken) - reached} of {len(taken)} never reach it"
    how = f"sampled in training until {to}; {t_over}, of the logarithm{undefined}"
    yield statistic("tokens_to_score", over_seeds(taken, logarithmic=True), "tokens", how)
    how = f"sampled in training until {to}; median of the runs, one that never reaches it being the slowest"
    yield statistic("median_tokens_to_score", (float(np.median(taken)), *none), "tokens", how)
    for pairing, name in SAVED.items():
        if (rival := partner(experiment, group.point, pairing)) is not None:
            other = same_task[rival]
            value, low, high = _ratio(group, other, score)
            why = "" if math.isfinite(value) else f"; {UNDEFINED}"
            how = f"until {to}, against {other.point.path} with the same seed; {t_over}, of the ratio's logarithm{why}"
            saved = (100 * (1 - value), 100 * (1 - high), 100 * (1 - low))
            yield statistic(name, saved, "%", how, other)


def _ratio(group: Group, other: Group, score: float) -> tuple[float, float, float]:
    """Return the ratio of the tokens that two groups take to a score, paired by seed, with its interval.

    NaN where it is UNDEFINED.
    """
    ratios = [
        a / b if 0 < a < math.inf and 0 < b < math.inf and not (a < first and b < its_first) else math.nan
        for a, b, first, its_first in zip(
            *(group.tokens_taken(score), other.tokens_taken(score), group.tokens_SN[:, 1], other.tokens_SN[:, 1]),
            strict=True,
        )
    ]
    return over_seeds(ratios, logarithmic=True)


def peak(count_RSP: np.ndarray, choose_SNP: np.ndarray, read_SNP: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return, per replicate, the mean over seeds of a run's best score, (R,), and which evaluation that was, (R, S).

    The best evaluation is chosen by one half of the samples and read from the other: the largest of several noisy
    scores is biased upwards. Each replicate chooses again, so that its spread includes the choice's. The base model is
    no candidate.

    count_RSP : how often each problem of each seed counts; the counts of a replicate add up to S · P.
    choose_SNP, read_SNP : scores of the problems from two independent halves of the samples.
    """
    chosen_RSN = np.einsum("rsp,snp->rsn", count_RSP, choose_SNP[:, 1:], optimize=True)
    place_RS = 1 + chosen_RSN.argmax(axis=2)
    read_RSN = np.einsum("rsp,snp->rsn", count_RSP, read_SNP, optimize=True)
    best_RS = np.take_along_axis(read_RSN, place_RS[:, :, None], axis=2)[:, :, 0]
    return best_RS.sum(axis=1) / (count_RSP.shape[1] * count_RSP.shape[2]), place_RS


def mean_weights(tokens_N: np.ndarray, until: float) -> np.ndarray:
    """Return each evaluation's weight in the mean score over the first `until` tokens, (N,); they add up to 1.

    The mean is the area under the curve, straight between two evaluations, divided by `until` (trapezoids). Raises
    ValueError for an `until` that the curve does not reach.
    """
    if not 0 < until <= tokens_N[-1]:
        raise ValueError(f"until: expected a number of tokens from 0 to {tokens_N[-1]}, found {until}")
    weight_N = np.zeros(len(tokens_N))
    for n, (begin, end) in enumerate(pairwise(tokens_N)):
        width = min(end, until) - begin
        if width <= 0:
            break
        # The mean over a part of the line is its value in the middle of the part.
        middle = width / 2 / (end - begin)
        weight_N[n] += width * (1 - middle)
        weight_N[n + 1] += width * middle
    return weight_N / until


def tokens_to(target: float, tokens_N: np.ndarray, score_N: np.ndarray) -> float:
    """Return the tokens until a curve reaches the score `target`; infinite if it never does.

    The curve is the isotonic regression of the scores, the non-decreasing curve with the least squared distance to
    them, so that a single lucky evaluation does not count as reaching, and a score that is lost again is averaged with
    those that follow. It is straight between two evaluations.
    """
    rising_N = isotonic_regression(score_N).x
    if not rising_N[-1] >= target:
        return math.inf
    n = int(np.argmax(rising_N >= target))
    if n == 0:
        return float(tokens_N[0])
    share = (target - rising_N[n - 1]) / (rising_N[n] - rising_N[n - 1])
    return float(tokens_N[n - 1] + share * (tokens_N[n] - tokens_N[n - 1]))
