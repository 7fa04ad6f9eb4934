"""Training and scores of the grid: statistics of every grid point, the main table and the table of the mismatch."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from scipy import stats

from dvp.analysis.axes import settings_note, span
from dvp.analysis.estimates import Estimate, contrast, over_model, score_files, scores
from dvp.analysis.formats import rho_text
from dvp.analysis.load import Scored
from dvp.analysis.pages import notes
from dvp.analysis.points import BASE, partner, seeds_text
from dvp.analysis.statistics import Statistic, lookup
from dvp.analysis.tables import INTERVAL, Cell, Column, Table, interval, number
from dvp.evaluation import bootstrap
from dvp.experiment.config import Experiment
from dvp.experiment.grid import GridPoint, setting_as_written, settings_as_read
from dvp.progress import setting_as_read

LEVEL = 0.95
LAST_STEPS = 10
MARKS = {"control": " (control)", "reference": " (ref.)"}
# Of the table of the mismatch: heading, format, and how a run's last steps become one number.
_AT_THE_END = {
    "k1": ("k1", ".1e", "mean"),
    "k3": ("k3", ".1e", "mean"),
    "max_abs_log_ratio": ("max |log ratio|", ".2g", "max"),
    "ess": ("ESS", ".3f", "mean"),
    "outside_safe_fraction": ("outside V_S", ".1e", "mean"),
    "pruned_mass_mean": ("1 − Z", ".1e", "mean"),
    "masked_fraction": ("masked", ".3f", "mean"),
    "unpruned_k3": ("k3 unpruned", ".1e", "mean"),
    "set_overlap_mean": ("overlap of sets", ".3f", "mean"),
    "sets_bytes": ("sets (bytes a step)", ".3g", "mean"),
    "tokens_per_second": ("tokens/s", ".0f", "mean"),
}
_OF_PRUNED = ("outside_safe_fraction", "pruned_mass_mean")


def part(experiment: Experiment, loaded: Scored) -> tuple[list[Statistic], dict[str, Table]]:
    """The statistics that the report lists, and the tables `main_table` and `mismatch_table`."""
    measured = statistics(experiment, loaded, scores(experiment, loaded))
    tables = {
        "main_table": main_table(experiment, loaded, measured),
        "mismatch_table": mismatch_table(experiment, loaded),
    }
    # That the reference does not differ from itself is no result, and the base model no setting that was tried.
    trivial = [where_of(experiment, None), where_of(experiment, experiment.reference_point)]
    listed = [
        statistic
        for statistic in measured
        if statistic.name != "score_change_percent" or statistic.where not in trivial
    ]
    return listed, tables


def statistics(experiment: Experiment, loaded: Scored, score: dict[str, Estimate]) -> list[Statistic]:
    """Of the base model its score; of every grid point its score, how it ends and how it grew.

    score (fraction), score_change_percent against the reference, score_over_unpruned (fraction) of points with a safe
    vocabulary against the same without, score_over_rloo of points with another baseline against the same with RLOO's;
    smallest_change_percent and smallest_effect, how large the first two would have to be for an interval that leaves
    out 0 in 80 % of such experiments; final_k3, final_gradient_norm, final_reward (means
    over the last ten steps), and so final_pruned_mass (1 − Z a token) of points whose trainer prunes; k3_growth (k3 of
    the last ten steps over that of the first ten); collapsed (fraction of runs). Growth is left out where a run has not
    twice ten steps.
    """
    return [
        *(statistic for point in (None, *experiment.points) for statistic in _scores(experiment, score, point)),
        *(statistic for point in experiment.points for statistic in _training(experiment, loaded, point)),
    ]


def _scores(experiment: Experiment, score: dict[str, Estimate], point: GridPoint | None) -> Iterator[Statistic]:
    own, where = score[point.path if point else BASE], where_of(experiment, point)
    reference, how = experiment.reference_point, over_model(experiment, point)
    k = experiment.evaluation.samples_per_problem[experiment.report.task]

    def smallest(name: str, estimate: Estimate, scale: float, like: Statistic) -> Statistic:
        value = scale * estimate.draws.smallest_effect(estimate.value_R)
        seen = f"power {bootstrap.POWER:.0%}, at the measured standard error; {like.how}"
        return replace(like, name=name, value=value, low=math.nan, high=math.nan, how=seen)

    yield own.statistic("score", where, f"avg@{k}, fraction", how, "share")
    # Of a reference without a correct answer no change is defined.
    ratio = own / score[reference.path]
    change = ratio.statistic("score_change_percent", where, "%", f"{how}, paired with the reference", "ratio")
    ends = {key: 100 * (getattr(change, key) - 1) for key in ("value", "low", "high")}
    yield replace(change, **ends)
    if point not in (None, reference):
        yield smallest("smallest_change_percent", ratio, 100, change)
    for pairing in ("unpruned", "rloo"):
        if point is not None and (other := partner(experiment, point, pairing)) is not None:
            difference = own - score[other.path]
            says = f"score minus that of {other.method} on the same engine"
            compared = contrast(experiment, f"score_over_{pairing}", where, difference, says)
            yield compared
            if pairing == "unpruned":
                yield smallest("smallest_effect", difference, 1, compared)


def _training(experiment: Experiment, loaded: Scored, point: GridPoint) -> Iterator[Statistic]:
    own, steps = loaded.metrics[loaded.metrics["point"] == point.path], experiment.training_of(point).steps
    first = own[own["step"] <= LAST_STEPS].groupby("seed")
    last = own[own["step"] > steps - LAST_STEPS].groupby("seed")
    sources = train_files(loaded, point.path)
    policies = experiment.methods[point.method].policies
    between = {
        "full": "between the full policies",
        "pruned": "between the pruned policies, without tokens outside V_S",
        "full, pruned": "between the trainer's full and the engine's pruned policy",
        "pruned, full": "between the trainer's pruned and the engine's full policy, without tokens outside V_S",
    }[policies]
    for name, values, unit, logarithmic, what in (
        ("final_k3", last["k3"].mean(), "nats per token", True, f"{between}; "),
        ("k3_growth", last["k3"].mean() / first["k3"].mean(), "ratio", True, f"{between}; "),
        ("final_gradient_norm", last["gradient_norm"].mean(), "norm", True, ""),
        ("final_reward", last["reward"].mean(), "fraction", False, ""),
        ("final_pruned_mass", last["pruned_mass_mean"].mean(), "probability", False, "1 − Z of the trainer a token; "),
    ):
        if name == "k3_growth" and steps < 2 * LAST_STEPS:
            continue
        if name == "final_pruned_mass" and not policies.startswith("pruned"):
            continue
        how = f"{what}t interval over {seeds_text(experiment)}" + (", of the logarithm" if logarithmic else "")
        numbers = over_seeds(list(values), logarithmic=logarithmic)
        yield Statistic(name, where_of(experiment, point), *numbers, unit, how, sources)

    runs = loaded.runs[loaded.runs["point"] == point.path]
    collapsed = sum(step is not None for step in runs["collapsed_at"])
    ends = stats.binomtest(collapsed, len(runs)).proportion_ci(LEVEL, method="exact")
    how = f"Clopper-Pearson, {collapsed} of {len(runs)} seeds"
    numbers = (collapsed / len(runs), ends.low, ends.high)
    yield Statistic("collapsed", where_of(experiment, point), *numbers, "fraction of runs", how, sources)


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


def where_of(experiment: Experiment, point: GridPoint | None) -> dict[str, str]:
    """A point, or the base model, as statistics name it: a point also by the settings in which the grid differs."""
    if point is None:
        return {"method": BASE, "engine": "none", "rho": "none"}
    settings = {key: setting_as_written(value) for key, value in experiment.settings_of(point).items()}
    return {"method": point.method, "engine": point.engine, "rho": point.rho or "none"} | settings


def train_files(loaded: Scored, point: str) -> tuple[str, ...]:
    """The train.json of a point's runs."""
    return tuple(loaded.runs.loc[loaded.runs["point"] == point, "source"])


def role(experiment: Experiment, point: GridPoint | None) -> str:
    if point is None:
        return BASE
    if point == experiment.reference_point:
        return "reference"
    return "control" if experiment.is_control(point) else ""


# --- tables -------------------------------------------------------------------------------------------------


def main_table(experiment: Experiment, loaded: Scored, measured: list[Statistic]) -> Table:
    """Scores on report.task: the base model, then a row a grid point, `measured` as of `statistics`.

    In the CSV scores are fractions and changes percent; a row's role is `base`, `control`, `reference` or empty, and
    `collapsed_at` holds the step at which each seed's run collapsed, None where it did not.
    """
    known = lookup(measured)
    k = experiment.evaluation.samples_per_problem[experiment.report.task]
    rows = {}
    for point in (None, *experiment.points):
        name = point.path if point else BASE
        evaluated = loaded.scores[loaded.scores["point"] == name]
        runs = loaded.runs[loaded.runs["point"] == name]
        files = score_files(loaded, name)
        rows[name] = point_cells(experiment, point) | {
            "k": k,
            "pass_at_k": Cell(math.fsum(evaluated["pass"]) / len(evaluated), files),
            "maj_at_k": Cell(math.fsum(evaluated["maj"]) / len(evaluated), files),
            "seed_scores": Cell(list(evaluated["avg"]), files),
            "collapsed_at": Cell(list(runs["collapsed_at"]), train_files(loaded, name)),
            "per_seed": Cell(list(zip(evaluated["avg"], runs["collapsed_at"], strict=True)), files) if point else None,
        }
        for key in ("score", "score_change_percent", "score_over_unpruned"):
            rows[name][key.replace("score_", "")] = known(key, where_of(experiment, point))
    reference = where_of(experiment, experiment.reference_point)
    change = interval("+.1f")
    columns = [
        *point_columns(experiment, rows, MARKS),
        Column("k", None),
        Column("score", f"avg@{k} (%) [95 %]", interval(".1f", 100), INTERVAL),
        Column("pass_at_k", f"pass@{k} (%)", number(".1f", 100)),
        Column("maj_at_k", f"maj@{k} (%)", number(".1f", 100)),
        Column(
            "change_percent",
            "change (%) [95 %]",
            lambda cell: "reference" if cell.where == reference else change(cell),
            INTERVAL,
        ),
        Column("over_unpruned", "DVP adds (points) [95 %]", interval("+.1f", 100), INTERVAL),
        Column("seed_scores", None),
        Column("collapsed_at", None),
        Column("per_seed", "per seed (%)", _per_seed, shown_only=True),
    ]
    title = f"{experiment.name}: scores on {experiment.report.task}"
    return Table(title, columns, rows, _main_notes(experiment, loaded, rows, measured))


def mismatch_table(experiment: Experiment, loaded: Scored) -> Table:
    """The mismatch between engine and trainer at the end of training, a row a grid point.

    Of each number the mean over a run's last 10 steps (the largest of the log-ratio), as the mean over seeds with the
    smallest and largest seed (`_min`, `_max`). `policies` says between which policies k1, k3, the log-ratio and ESS
    are, the trainer's first if they differ. skipped_steps counts all steps of all seeds, out of `steps`. Only where an
    engine reports its sets are there columns of them.
    """
    shown = {name: how for name, how in _AT_THE_END.items() if name in loaded.metrics}
    rows = {}
    for point in experiment.points:
        own, sources = loaded.metrics[loaded.metrics["point"] == point.path], train_files(loaded, point.path)
        last = own[own["step"] > experiment.training_of(point).steps - LAST_STEPS].groupby("seed")
        policies = experiment.methods[point.method].policies
        skipped = int(own["skipped"].sum())
        rows[point.path] = point_cells(experiment, point) | {
            "policies": policies,
            "skipped_steps": Cell(skipped, sources),
            "steps": Cell(len(own), sources),
            "skipped": Cell(f"{skipped} / {len(own)}", sources),
        }
        for name, (_, _, one_number) in shown.items():
            if last[name].count().all() and (name not in _OF_PRUNED or policies.startswith("pruned")):
                seed_values = last[name].agg(one_number)
                numbers = (seed_values.mean(), seed_values.min(), seed_values.max())
                how = "mean of the seeds; smallest and largest seed"
                rows[point.path][name] = Statistic(
                    name, where_of(experiment, point), *map(float, numbers), "", how, sources
                )
    several = len(experiment.seeds) > 1
    measured = [
        Column(name, heading, (interval if several else number)(spec), ("min", "max"))
        for name, (heading, spec, _) in shown.items()
    ]
    columns = [
        *point_columns(experiment, rows, {"control": MARKS["control"]}),
        Column("policies", "policies"),
        *measured[:-1],
        Column("skipped_steps", None),
        Column("steps", None),
        Column("skipped", "skipped steps", shown_only=True),
        measured[-1],
    ]
    steps = [experiment.training_of(point).steps for point in experiment.points]
    title = f"{experiment.name}: mismatch between engine and trainer at the end of training"
    below = notes(
        "mismatch_table",
        experiment,
        evaluation=experiment.evaluation,
        last=min(LAST_STEPS, max(steps)),
        shortest=min(steps),
        settings=settings_note(experiment, loaded),
        seeds=seeds_text(experiment),
        control=any(row["role"] == "control" for row in rows.values()),
        reported="sets_bytes" in shown,
    )
    return Table(title, columns, rows, below)


def point_cells(experiment: Experiment, point: GridPoint | None) -> dict:
    """The cells that say of which point a row is, or that it is of the base model."""
    return {
        "point": point.path if point else BASE,
        "label": experiment.methods[point.method].label if point else "base model",
        "engine": point.engine if point else None,
        "rho": point.rho if point else None,
        **{
            f"training.{key}": setting_as_written(value)
            for key, value in (experiment.settings_of(point) if point else {}).items()
        },
        "role": role(experiment, point),
        "seeds": list(experiment.seeds) if point else [],
    }


def point_columns(experiment: Experiment, rows: dict[str, dict], marks: dict[str, str]) -> list[Column]:
    """The columns of `point_cells`; `marks` are set behind a method, by the row's role."""
    for row in rows.values():
        row["method"] = row["label"] + marks.get(row["role"], "")
    return [
        Column("point", None),
        Column("label", None),
        Column("method", "method", shown_only=True),
        Column("engine", "engine"),
        Column("rho", "ρ", rho_text),
        *(Column(f"training.{key}", setting_as_read(key)) for key in experiment.axes),
        Column("role", None),
        Column("seeds", None),
    ]


def _per_seed(cell: list[tuple[float, int | None]]) -> str:
    return " ".join(
        f"{100 * score:.1f}" + ("" if step is None else f" (collapsed at step {step})") for score, step in cell
    )


def _percents(measured: list[Statistic], name: str, scale: float) -> str | None:
    """The smallest and the largest of a statistic's values, as text; None if it is defined nowhere."""
    values = [scale * one.value for one in measured if one.name == name and math.isfinite(one.value)]
    ends = sorted({f"{value:.1f}" for value in (min(values), max(values))}, key=float) if values else []
    return " to ".join(ends) or None


def _main_notes(
    experiment: Experiment,
    loaded: Scored,
    rows: dict[str, dict],
    measured: list[Statistic],
) -> list[str]:
    return notes(
        "main_table",
        experiment,
        steps=span([experiment.training_of(point).steps for point in experiment.points]),
        settings=settings_note(experiment, loaded),
        reference_settings=", ".join(settings_as_read(experiment.settings_of(experiment.reference_point))),
        evaluation=experiment.evaluation,
        k=rows[BASE]["k"],
        seeds=seeds_text(experiment),
        covers_seeds=bootstrap.covers_seeds(experiment.seeds),
        smallest_changes=_percents(measured, "smallest_change_percent", 1),
        smallest_effects=_percents(measured, "smallest_effect", 100),
        reference=experiment.reference_point,
        pruned=any(row["over_unpruned"] for row in rows.values()),
        collapsed=any(step is not None for row in rows.values() for step in row["collapsed_at"].value),
        control=any(row["role"] == "control" for row in rows.values()),
    )
