"""Everything about a method in one row: its scores where it may be served, whether it collapsed, and what it cost."""

from collections.abc import Iterable

import pandas as pd
from scipy import stats

from dvp.analysis.formats import rho_text
from dvp.analysis.load import Scored
from dvp.analysis.matrix import ONLY_HEADING, OVER_REFERENCE, OVER_UNPRUNED, OWN, SCORE, where
from dvp.analysis.pages import notes
from dvp.analysis.points import seeds_text
from dvp.analysis.statistics import Statistic, lookup
from dvp.analysis.tables import INTERVAL, Cell, Column, Table, interval
from dvp.analysis.training import (
    LAST_STEPS,
    LEVEL,
    MARKS,
    over_seeds,
    point_cells,
    point_columns,
    role,
    train_files,
    where_of,
)
from dvp.evaluation import bootstrap
from dvp.experiment.config import Experiment
from dvp.experiment.grid import GridPoint, settings_as_read


def table(experiment: Experiment, loaded: Scored, measured: list[Statistic]) -> Table:
    """A row a grid point, `measured` as of `matrix.statistics`.

    `exact` is the score on the evaluation's engine from the full vocabulary, `served` that on the engine of training
    from the vocabulary of training; `_over_reference` the paired difference to the reference, of `served` where that
    was trained on the same engine; `over_evaluation_only` that of a method with ρ to the same method without a safe
    vocabulary, both sampled at ρ on the engine of training. k3 and k3_full (nats per token; between the policies of
    training and between the full ones) and kept (the share of sampled tokens with a weight above 0) are means over a
    run's last steps, seconds_per_step the median over its steps; all with a t interval over seeds.
    In the CSV scores and shares are fractions.
    """
    known = lookup(measured)
    exact, reference = experiment.evaluation.engine, experiment.reference_point
    rows = {}
    for point in experiment.points:
        runs = loaded.runs[loaded.runs["point"] == point.path]
        rows[point.path] = point_cells(experiment, point) | {
            "exact": known(SCORE, where(experiment, point, exact, None)),
            "exact_over_reference": known(OVER_REFERENCE, where(experiment, point, exact, None)),
            "served": known(SCORE, where(experiment, point, point.engine, point.rho)),
            "served_over_reference": _served_over_reference(experiment, point, measured),
            "over_evaluation_only": point.rho
            and known(OVER_UNPRUNED, where(experiment, point, point.engine, point.rho)),
            "collapsed": Cell(_of(runs["collapsed_at"]), train_files(loaded, point.path)),
            **_over_runs(experiment, loaded, point),
        }
    score, difference = interval(".1f", 100), interval("+.1f", 100)
    pruned = any(row["over_evaluation_only"] is not None for row in rows.values())
    columns = [
        *point_columns(experiment, rows, MARKS),
        Column("exact", f"{exact}, full (%) [95 %]", score, INTERVAL),
        Column("exact_over_reference", "over ref. (points) [95 %]", difference, INTERVAL),
        Column("served", "as in training (%) [95 %]", score, INTERVAL),
        Column("served_over_reference", "over ref. there (points) [95 %]", difference, INTERVAL),
        *([Column("over_evaluation_only", ONLY_HEADING, difference, INTERVAL)] if pruned else []),
        Column("collapsed", "collapsed"),
        Column("k3", "k3 (nats a token)", interval(".1e"), INTERVAL),
        Column("k3_full", "k3, full (nats a token)", interval(".1e"), INTERVAL),
        Column("kept", "kept (%)", interval(".1f", 100), INTERVAL),
        Column("seconds_per_step", "s a step", interval(".2f"), INTERVAL),
    ]
    k = experiment.evaluation.samples_per_problem[experiment.report.task]
    steps = [experiment.training_of(point).steps for point in experiment.points]
    below = [
        *_sentences(experiment, loaded, rows),
        *notes(
            "overview_table",
            experiment,
            evaluation=experiment.evaluation,
            k=k,
            over=bootstrap.over(experiment.seeds),
            seeds=seeds_text(experiment),
            reference=_name(experiment, reference),
            last=min(LAST_STEPS, max(steps)),
            control=any(row["role"] == "control" for row in rows.values()),
            pruned=pruned,
            reported="sets_bytes" in loaded.metrics,
        ),
    ]
    return Table(f"{experiment.name}: a method in a row", columns, rows, below)


def _served_over_reference(experiment: Experiment, point: GridPoint, measured: Iterable[Statistic]) -> Statistic | None:
    """A point minus the reference, each with the vocabulary of its training; none where their engines differ."""
    reference = experiment.reference_point
    if point.engine != reference.engine:
        return None
    own = None if point.rho is None and reference.rho is None else OWN
    return lookup(measured)(OVER_REFERENCE, where(experiment, point, point.engine, own))


def _of(collapsed_at: pd.Series) -> str:
    return f"{sum(step is not None for step in collapsed_at)} / {len(collapsed_at)}"


def _over_runs(experiment: Experiment, loaded: Scored, point: GridPoint) -> dict[str, Statistic]:
    own = loaded.metrics[loaded.metrics["point"] == point.path]
    last = own[own["step"] > experiment.training_of(point).steps - LAST_STEPS].groupby("seed")
    measured = {
        "k3": (last["k3"].mean(), "nats per token"),
        "seconds_per_step": (own.groupby("seed")["seconds"].median(), "s"),
    }
    # Where the engine prunes, it alone knows its full policy; of a trainer that prunes alone it is not measured.
    full = "k3" if experiment.methods[point.method].safe_vocabulary is None else "unpruned_k3"
    if full in own and own[full].notna().all():
        measured["k3_full"] = (last[full].mean(), "nats per token")
    how, place, sources = (
        f"t interval over {seeds_text(experiment)}",
        where_of(experiment, point),
        train_files(loaded, point.path),
    )
    value, low, _ = over_seeds(list(1 - last["masked_fraction"].mean()), logarithmic=False)
    kept = (value, *bootstrap.ends(value, value - low, "share"))
    return {"kept": Statistic("kept", place, *kept, "fraction", f"{how}, on the logit scale", sources)} | {
        name: Statistic(
            name, place, *over_seeds(list(values), logarithmic=True), unit, f"{how}, of the logarithm", sources
        )
        for name, (values, unit) in measured.items()
    }


def _name(experiment: Experiment, point: GridPoint, beside: GridPoint | None = None) -> str:
    """A point in words; its engine where that is not the one of `beside`."""
    engine = [] if beside is not None and beside.engine == point.engine else [point.engine]
    parts = [experiment.methods[point.method].label, *engine, *settings_as_read(experiment.settings_of(point))]
    return ", ".join(parts if point.rho is None else [*parts, f"ρ = {rho_text(point.rho)}"])


def _sentences(experiment: Experiment, loaded: Scored, rows: dict[str, dict]) -> list[str]:
    """What the table says in three: who is told from the reference by either score, and who collapsed.

    The second says as well what is left of it next to ρ at evaluation alone.
    """
    reference = _name(experiment, experiment.reference_point)
    result = []
    for key, policy in (
        ("exact_over_reference", f"On {experiment.evaluation.engine} from the full vocabulary"),
        ("served_over_reference", "On the engine of training, with the vocabulary of training"),
    ):
        said = _told(experiment, rows, key, f"{policy}, compared with {reference}")
        if said and key.startswith("served"):
            only = "With a ρ, compared with the same method without a safe vocabulary that is sampled there at ρ"
            said = " ".join(filter(None, [said, _told(experiment, rows, "over_evaluation_only", only)]))
        result += filter(None, [said])
    runs = loaded.runs
    seeds, total = len(experiment.seeds), sum(step is not None for step in runs["collapsed_at"])
    bound = stats.binomtest(0, seeds).proportion_ci(LEVEL, method="exact").high
    which = [
        _name(experiment, point)
        for point in experiment.points
        if not rows[point.path]["collapsed"].value.startswith("0 ")
    ]
    rules_out = f"no collapse in {seeds} of {seeds} rules out a rate above {bound:.0%} of a method's runs"
    ending = f"of {'; '.join(which)}" if which else rules_out
    return [*result, f"{total} of {len(runs)} runs collapsed: {ending}."]


def _told(experiment: Experiment, rows: dict[str, dict], key: str, of: str) -> str | None:
    """Which rows a difference's interval tells from 0, after `of`. None without any."""
    reference = experiment.reference_point
    compared = {
        _name(experiment, point, beside=reference): rows[point.path][key]
        for point in experiment.points
        if rows[point.path][key] is not None and role(experiment, point) != "reference"
    }
    above = [name for name, each in compared.items() if each.low > 0]
    below = [name for name, each in compared.items() if each.high < 0]
    if not compared:
        return None
    return (
        f"{of}: above it {_counted(above)}, below it {_counted(below)}, "
        f"not told from it {len(compared) - len(above) - len(below)}."
    )


def _counted(names: list[str]) -> str:
    return f"{len(names)} ({'; '.join(names)})" if names else "none"
