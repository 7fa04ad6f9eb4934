"""Scores along training: final, peak and mean of every grid point, and the tokens it takes to reach a score."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from scipy import stats

from dvp.analysis.estimates import Estimate, contrast, draws_of, over
from dvp.analysis.formats import EMPTY
from dvp.analysis.load import Curve
from dvp.analysis.pages import notes
from dvp.analysis.points import partner, seeds_text
from dvp.analysis.reach import mean_weights, peak, tokens_to
from dvp.analysis.statistics import Statistic, lookup
from dvp.analysis.tables import INTERVAL, Cell, Column, Table, interval, number
from dvp.analysis.training import LEVEL, MARKS, over_seeds, point_cells, point_columns, where_of
from dvp.evaluation import bootstrap
from dvp.experiment.config import Experiment
from dvp.experiment.grid import GridPoint

# Names of the statistics that compare, by what is compared.
SCORES = {"final": "score", "peak": "peak_score", "mean": "mean_score"}


@dataclass(frozen=True)
class Group:
    """The curves of a grid point's runs on a task. S seeds, N evaluations (the base model's first), P problems."""

    task: str
    point: GridPoint
    steps: list[int]
    """N, the first is 0."""
    tokens_SN: np.ndarray
    """Sampled until then, in training."""
    score_SN: np.ndarray
    """Means over problems."""
    draws: bootstrap.Draws
    curve_RN: np.ndarray
    """Means over seeds and problems, a row for each replicate of `draws`."""
    score_R: dict[str, np.ndarray]
    """The same of the final, peak and mean score; no peak where a problem has one sample only."""
    peak_steps: list[int]
    """Of each seed, the step that was chosen."""
    until: float
    """Tokens over which the mean score is taken."""
    sources: tuple[str, ...]

    @property
    def where(self) -> dict[str, str]:
        """What its statistics add to the point's place."""
        return {"task": self.task}

    def estimate(self, of: str | int) -> Estimate:
        """Of a score in `score_R`, or of an evaluation."""
        value_R = self.score_R[of] if isinstance(of, str) else self.curve_RN[:, of]
        return Estimate(self.draws, value_R, self.sources)


def groups(experiment: Experiment, loaded: Curve) -> list[Group]:
    """Every grid point on every task, task by task, in the order of the experiment."""
    until = loaded.tokens.groupby(["point", "seed"])["tokens"].max().min()
    return [
        _group(experiment, loaded, task, point, until) for task in experiment.data.tasks for point in experiment.points
    ]


def _group(experiment: Experiment, loaded: Curve, task: str, point: GridPoint, until: float) -> Group:
    scores = loaded.scores[(loaded.scores["task"] == task) & (loaded.scores["point"] == point.path)]
    tokens = loaded.tokens[loaded.tokens["point"] == point.path].pivot(index="seed", columns="step", values="tokens")
    by_evaluation = scores.set_index(["seed", "step", "problem"])[["all", "odd", "even"]].sort_index()
    shape = *tokens.shape, -1
    all_SNP, odd_SNP, even_SNP = (by_evaluation[part].to_numpy().reshape(shape) for part in ("all", "odd", "even"))
    S, N, P = all_SNP.shape
    draws = draws_of(experiment, P)
    count_RU, count_RSP = draws.count_RU, draws.count_RU.reshape(-1, S, P)
    curve_RN = count_RU @ all_SNP.transpose(0, 2, 1).reshape(S * P, N) / (S * P)
    weight_SN = np.array([mean_weights(tokens_N, until) for tokens_N in tokens.to_numpy()])
    mean_SP = np.einsum("sn,snp->sp", weight_SN, all_SNP)
    score_R = {"final": curve_RN[:, -1], "mean": count_RU @ mean_SP.ravel() / (S * P)}
    peak_steps: list[int] = []
    if np.isfinite(odd_SNP).all():
        score_R["peak"], place_RS = peak(count_RSP, odd_SNP, even_SNP)
        peak_steps = [int(tokens.columns[place]) for place in place_RS[0]]
    sources = loaded.sources[(loaded.sources["task"] == task) & (loaded.sources["point"] == point.path)]["source"]
    runs = loaded.runs[loaded.runs["point"] == point.path]["source"]
    return Group(
        task,
        point,
        [int(step) for step in tokens.columns],
        tokens.to_numpy(),
        all_SNP.mean(axis=2),
        draws,
        curve_RN,
        score_R,
        peak_steps,
        until,
        tuple(dict.fromkeys([*sources, *runs])),
    )


def target(experiment: Experiment, groups: list[Group], task: str) -> float:
    """The score that counts as having reached the reference: report.reached_within below its final one."""
    reference = experiment.reference_point
    [own] = [group for group in groups if (group.task, group.point) == (task, reference)]
    return float(own.score_R["final"][0]) - experiment.report.reached_within / 100


def statistics(experiment: Experiment, groups: list[Group]) -> list[Statistic]:
    """Of every grid point and task how high it comes, and how many sampled tokens it takes.

    peak_score, mean_score (fractions); score_over_reference, peak_score_over_reference, mean_score_over_reference
    and the same …_over_equal_settings, against the reference's method with the same training settings;
    sampled_tokens of a run; reached_score (share of runs); tokens_to_score (geometric mean), median_tokens_to_score;
    tokens_saved_percent against the reference, tokens_saved_equal_settings_percent as above. Those of tokens are not
    defined where a run never reaches the score, but for the median; nor are savings where both runs of a seed reach it
    before they are evaluated: that far a curve is one straight line from the base model, and hides which came first.
    """
    result = []
    for group in groups:
        same_task = {other.point: other for other in groups if other.task == group.task}
        rivals = {
            f"over_{pairing}": same_task.get(partner(experiment, group.point, pairing))
            for pairing in ("reference", "equal_settings")
        }
        result += _scores(experiment, group, rivals)
        result += _tokens(experiment, group, rivals, target(experiment, groups, group.task))
    return result


def _scores(experiment: Experiment, group: Group, rivals: dict[str, Group | None]) -> Iterator[Statistic]:
    says = {
        "final": "",
        "peak": "the best evaluation of each run, chosen by its odd samples and read from the even ones; ",
        "mean": f"over the first {group.until:,.0f} sampled tokens of each run; ",
    }
    where = where_of(experiment, group.point) | group.where
    for key, name in SCORES.items():
        if key not in group.score_R:
            continue
        if key != "final":  # part `training` has it
            yield group.estimate(key).statistic(name, where, "fraction", says[key] + over(experiment), "share")
        for suffix, other in rivals.items():
            if other is not None:
                difference = group.estimate(key) - other.estimate(key)
                compared = f"{says[key]}minus that of {other.point.path}"
                yield contrast(experiment, f"{name}_{suffix}", where, difference, compared)


def _tokens(experiment: Experiment, group: Group, rivals: dict[str, Group | None], score: float) -> Iterator[Statistic]:
    def statistic(name: str, numbers: tuple[float, float, float], unit: str, how: str, *others: Group) -> Statistic:
        where = where_of(experiment, group.point) | group.where
        sources = tuple(dict.fromkeys(file for each in (group, *others) for file in each.sources))
        return Statistic(name, where, *numbers, unit, how, sources)

    over = f"t interval over {seeds_text(experiment)}"
    total = over_seeds(list(group.tokens_SN[:, -1]), logarithmic=False)
    yield statistic("sampled_tokens", total, "tokens", f"of a run in training; {over}")

    taken = tokens_taken(group, score)
    reached = sum(map(math.isfinite, taken))
    to = f"the score {100 * score:.1f} %"
    ends = stats.binomtest(reached, len(taken)).proportion_ci(LEVEL, method="exact")
    share = (reached / len(taken), ends.low, ends.high)
    how = f"{to}: Clopper-Pearson, {reached} of {len(taken)} seeds"
    yield statistic("reached_score", share, "fraction of runs", how)
    undefined = "; not defined, as the base model has it already" if 0 in taken else ""
    if reached < len(taken):
        undefined = f"; not defined, as {len(taken) - reached} of {len(taken)} never reach it"
    of_log = f"{over}, of the logarithm{undefined}"
    numbers = over_seeds(taken, logarithmic=True)
    yield statistic("tokens_to_score", numbers, "tokens", f"sampled in training until {to}; {of_log}")
    middle = (float(np.median(taken)), math.nan, math.nan)
    how = f"sampled in training until {to}; median of the runs, one that never reaches it being the slowest"
    yield statistic("median_tokens_to_score", middle, "tokens", how)
    for name, other in zip(
        ("tokens_saved_percent", "tokens_saved_equal_settings_percent"), rivals.values(), strict=True
    ):
        if other is None:
            continue
        theirs = tokens_taken(other, score)
        early = [
            a < first and b < its_first
            for a, b, first, its_first in zip(taken, theirs, group.tokens_SN[:, 1], other.tokens_SN[:, 1], strict=True)
        ]
        ratios = [
            a / b if 0 < a < math.inf and 0 < b < math.inf and not hidden else math.nan
            for a, b, hidden in zip(taken, theirs, early, strict=True)
        ]
        value, low, high = over_seeds(ratios, logarithmic=True)
        why = ""
        if lacking := sum(map(math.isnan, ratios)):
            why = f"; not defined, as in {lacking} of {len(ratios)} a run has it from the start or never"
            if any(early):
                why += ", or both before they are first evaluated"
        how = f"until {to}, against {other.point.path} with the same seed; {over}, of the ratio's logarithm{why}"
        saved = (100 * (1 - value), 100 * (1 - high), 100 * (1 - low))
        yield statistic(name, saved, "%", how, other)


def tokens_taken(group: Group, score: float) -> list[float]:
    """Of each seed the sampled tokens until its curve reaches a score; infinite if it never does."""
    return [tokens_to(score, *run) for run in zip(group.tokens_SN, group.score_SN, strict=True)]


# --- tables -------------------------------------------------------------------------------------------------


def tables(experiment: Experiment, groups: list[Group], measured: list[Statistic]) -> dict[str, Table]:
    """`curve_table`: a row a grid point and task; `score_curve`: a row an evaluation of it."""
    return {
        "curve_table": _curve_table(experiment, groups, measured),
        "score_curve": _score_curve(experiment, groups),
    }


def _curve_table(experiment: Experiment, groups: list[Group], measured: list[Statistic]) -> Table:
    """In the CSV scores are fractions; `peak_steps` has the step that was chosen for each seed."""
    known, rows = lookup(measured), {}
    for group in groups:
        where = where_of(experiment, group.point) | group.where
        taken = tokens_taken(group, target(experiment, groups, group.task))
        reached = sum(map(math.isfinite, taken))
        row = point_cells(experiment, group.point) | {
            "task": group.task,
            "final": group.estimate("final").statistic("score", where, "fraction", "", "share"),
            "peak_steps": Cell(group.peak_steps, group.sources) if group.peak_steps else None,
            "target": Cell(target(experiment, groups, group.task), group.sources),
            "reached": Cell(reached, group.sources),
            "reached_of": Cell(f"{reached} of {len(taken)}", group.sources),
        }
        for name in (
            *("peak_score", "mean_score", "sampled_tokens", "tokens_to_score", "median_tokens_to_score"),
            *("tokens_saved_percent", "tokens_saved_equal_settings_percent"),
        ):
            row[name] = known(name, where)
        rows[f"{group.point.path} {group.task}"] = row
    several = len(experiment.data.tasks) > 1
    goals = {group.task: 100 * target(experiment, groups, group.task) for group in groups}
    goal = "the score" if several else f"{next(iter(goals.values())):.1f} %"
    columns = [
        *point_columns(experiment, rows, MARKS),
        Column("task", "task" if several else None),
        Column("final", "final (%) [95 %]", interval(".1f", 100), INTERVAL),
        Column("peak_score", "peak (%) [95 %]", interval(".1f", 100), INTERVAL),
        Column("peak_steps", "at step", lambda steps: " ".join(map(str, steps))),
        Column("mean_score", "mean (%) [95 %]", interval(".1f", 100), INTERVAL),
        Column("sampled_tokens", "tokens of a run", number(tokens_text), INTERVAL),
        Column("target", None),
        Column("reached", None),
        Column("reached_of", f"reach {goal}", shown_only=True),
        Column("tokens_to_score", f"tokens to {goal} [95 %]", interval(tokens_text), INTERVAL),
        Column("median_tokens_to_score", "median", number(tokens_text)),
        Column("tokens_saved_percent", "tokens saved (%) [95 %]", interval("+.0f"), INTERVAL),
        Column("tokens_saved_equal_settings_percent", "at equal settings (%) [95 %]", interval("+.0f"), INTERVAL),
    ]
    below = notes(
        "curve_table",
        experiment,
        goals=goals,
        reference=experiment.reference_point,
        until=groups[0].until,
        halves=any(group.peak_steps for group in groups),
        over=bootstrap.over(experiment.seeds),
        seeds=seeds_text(experiment),
    )
    return Table(f"{experiment.name}: scores along training", columns, rows, below)


def _score_curve(experiment: Experiment, groups: list[Group]) -> Table:
    """Step 0 is the base model. `tokens` are means over seeds, `seed_scores` the scores of each."""
    rows = {}
    for group in groups:
        for n, step in enumerate(group.steps):
            rows[f"{group.point.path} {group.task} {step}"] = point_cells(experiment, group.point) | {
                "task": group.task,
                "step": step,
                "tokens": Cell(float(group.tokens_SN[:, n].mean()), group.sources),
                "score": group.estimate(n).statistic("score", {}, "fraction", "", "share"),
                "seed_scores": Cell([float(score) for score in group.score_SN[:, n]], group.sources),
            }
    columns = [
        *point_columns(experiment, rows, MARKS),
        Column("task", "task"),
        Column("step", "step"),
        Column("tokens", "sampled tokens", tokens_text),
        Column("score", "score (%) [95 %]", interval(".1f", 100), INTERVAL),
        Column("seed_scores", "per seed (%)", lambda scores: " ".join(f"{100 * score:.1f}" for score in scores)),
    ]
    below = notes("score_curve", experiment, over=bootstrap.over(experiment.seeds), seeds=seeds_text(experiment))
    return Table(f"{experiment.name}: scores at the evaluated steps", columns, rows, below)


def tokens_text(tokens: float) -> str:
    """A number of tokens with three digits: `950`, `12.3 k`, `1.25 M`."""
    if not math.isfinite(tokens):
        return EMPTY
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if tokens >= size * 0.9995:
            return f"{tokens / size:#.3g} {unit}".replace(". ", " ")
    return f"{tokens:.0f}"
