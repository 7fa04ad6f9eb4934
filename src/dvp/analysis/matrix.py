"""Scores as a matrix: each model with every sampler of evaluation.also, and what DVP adds under each of them.

A score is that of a policy: weights, the engine that samples them, and the vocabulary that it samples from. Methods do
not train the same one, so that a single column also compares the columns.
"""

from collections.abc import Callable, Iterator

from dvp.analysis.estimates import Estimate, contrast, over_model, scores
from dvp.analysis.formats import rho_text
from dvp.analysis.load import Scored, cell_name
from dvp.analysis.pages import notes
from dvp.analysis.points import partner, seeds_text
from dvp.analysis.statistics import Statistic, lookup
from dvp.analysis.tables import INTERVAL, Column, Table, interval
from dvp.analysis.training import MARKS, point_cells, point_columns, where_of
from dvp.evaluation import bootstrap
from dvp.experiment.config import Experiment
from dvp.experiment.evaluation import TRAINING, Further
from dvp.experiment.grid import GridPoint, Sampler

SCORE, OVER_UNPRUNED, OVER_REFERENCE = (
    "score_by_policy",
    "score_over_unpruned_by_policy",
    "score_over_reference_by_policy",
)
PAIRINGS = {"unpruned": OVER_UNPRUNED, "reference": OVER_REFERENCE}
OWN, OWN_MARK = "own", " *"
ONLY = "evaluation_only"
"""The role of a row of a model that was trained without DVP, sampled at a ρ."""
ONLY_HEADING = "over ρ at evaluation only (points) [95 %]"


def own_sampler(experiment: Experiment, point: GridPoint) -> Sampler | None:
    """The sampler of the policy whose expected reward a point's updates are estimates for.

    Without an importance correction it is the engine's, as if its samples were the trainer's; with one, which weighs
    them by the trainer's probability over the engine's, it is the trainer's, for which evaluation.engine stands. Either
    is restricted to the safe vocabulary if the method has one. None where that has another rule than a fixed ρ, by
    which no evaluation samples; and for a corrected replay, whose trainer has the engine's sets and its own
    probabilities, which no engine samples with.
    """
    method = experiment.methods[point.method]
    rule, corrected = method.safe_vocabulary, method.importance.level != "none"
    if rule is not None and (not rule.engine_at_rho or (corrected and rule.rule == "replay")):
        return None
    return Sampler(engine=experiment.evaluation.engine if corrected else point.engine, rho=point.rho)


def own_policies(experiment: Experiment) -> list[dict[str, str]]:
    """Where the score of each point under its own policy stands among the statistics."""
    owns = [(point, own_sampler(experiment, point)) for point in experiment.points]
    return [where(experiment, point, own.engine, own.rho) for point, own in owns if own]


def samplers(experiment: Experiment, point: GridPoint | None) -> list[Sampler]:
    """All that a model is sampled with, first what all models are sampled with."""
    return [experiment.sampler, *experiment.samplers(point)]


def statistics(experiment: Experiment, loaded: Scored) -> list[Statistic]:
    """Of every model and sampler its score, and the differences between models under the same kind of policy.

    All have `evaluated_on`, an engine, and `evaluated_rho`, a ρ or `none`, beside the point's place.
    score_by_policy (fraction) is of each model and sampler. score_over_unpruned_by_policy is of points with a safe
    vocabulary, minus the same without: on an engine both from the full vocabulary (evaluated_rho: none), both at the ρ
    (what DVP in training adds to ρ at evaluation alone), or each from its own (evaluated_rho: own); and each under the
    policy that it trained, on its engine (evaluated_on: own, evaluated_rho: own). score_over_reference_by_policy is of
    all points but the reference, minus that: on an engine both from the full vocabulary, or each from its own, and
    each under the policy that it trained.
    """
    score = scores(experiment, loaded)
    return [
        *score_statistics(experiment, score),
        *(
            statistic
            for point in experiment.points
            for pairing, name in PAIRINGS.items()
            for statistic in contrasts(experiment, name, point, pairing, lambda mine, its: score[mine] - score[its])
        ),
    ]


def score_statistics(experiment: Experiment, score: dict[str, Estimate]) -> Iterator[Statistic]:
    """Of every model and sampler its score."""
    for point in (None, *experiment.points):
        for sampler in samplers(experiment, point):
            place, how = where(experiment, point, sampler.engine, sampler.rho), over_model(experiment, point)
            yield score[cell_name(point, sampler)].statistic(SCORE, place, "fraction", how, "share")


def contrasts(
    experiment: Experiment,
    name: str,
    point: GridPoint,
    pairing: str,
    difference: Callable[[str, str], Estimate],
    unit: str = "fraction",
) -> Iterator[Statistic]:
    """Statistics `name` of a point minus its partner, both with samplers that both have.

    Unpruned also both at the point's ρ.
    difference : of two models by their cell_name.
    """
    other = partner(experiment, point, pairing)
    if other is None:
        return
    pairs: dict[tuple[str, str | None], tuple[Sampler, Sampler]] = {}
    for engine in dict.fromkeys(sampler.engine for sampler in samplers(experiment, point)):
        full, mine, its = (Sampler(engine=engine, rho=rho) for rho in (None, point.rho, other.rho))
        pairs[engine, None] = full, full
        if point.rho is not None and pairing == "unpruned":
            pairs[engine, point.rho] = mine, mine
        if point.rho is not None or other.rho is not None:
            pairs[engine, OWN] = mine, its
    own, others = own_sampler(experiment, point), own_sampler(experiment, other)
    if own is not None and others is not None:
        pairs[OWN, OWN] = own, others
    for (engine, rho), (mine, its) in pairs.items():
        if mine in samplers(experiment, point) and its in samplers(experiment, other):
            says = f"{_says(mine)}, minus {other.path}, {_says(its)}"
            measured = difference(cell_name(point, mine), cell_name(other, its))
            yield contrast(experiment, name, where(experiment, point, engine, rho), measured, says, unit)


def where(experiment: Experiment, point: GridPoint | None, engine: str, rho: str | None) -> dict[str, str]:
    """A point, or the base model, and what it was sampled with, as statistics name it."""
    return where_of(experiment, point) | {"evaluated_on": engine, "evaluated_rho": rho or "none"}


def _says(sampler: Sampler) -> str:
    """A sampler in words: `fp32, full` or `coarse, ρ = 0.01`."""
    return f"{sampler.engine}, " + ("full" if sampler.rho is None else f"ρ = {rho_text(sampler.rho)}")


# --- table --------------------------------------------------------------------------------------------------


def entries(experiment: Experiment) -> dict[str, Further]:
    """The columns of policies by their keys: what all models are sampled with, then those of evaluation.also."""
    exact = experiment.evaluation.engine
    named = [entry.model_copy(update={"engine": entry.engine or exact}) for entry in experiment.evaluation.also]
    return {f"{entry.engine}_{'rho' if entry.rho else 'full'}": entry for entry in (Further(engine=exact), *named)}


def heading(entry: Further) -> str:
    """Of a column: engine and vocabulary."""
    engine = "engine of training" if entry.engine == TRAINING else entry.engine
    return f"{engine}, {'at ρ' if entry.rho else 'full'}"


def models(experiment: Experiment) -> list[tuple[GridPoint | None, str | None, bool]]:
    """The rows: a model, the ρ at which it is sampled, and whether that is a ρ of the evaluation only.

    The base model and every point; below a point with ρ its counterpart without a safe vocabulary at that ρ; below a
    model without ρ those of its ρ at which it is nobody's counterpart.
    """
    counterparts = {
        (without.path, point.rho)
        for point in experiment.points
        if point.rho is not None and (without := partner(experiment, point, "unpruned")) is not None
    }
    rows: list[tuple[GridPoint | None, str | None, bool]] = []
    for point in (None, *experiment.points):
        rows.append((point, point and point.rho, False))
        if point is not None and point.rho is not None:
            without = partner(experiment, point, "unpruned")
            if without is not None and point.rho in _rhos(experiment, without):
                rows.append((without, point.rho, True))
        else:
            path = point and point.path
            rows += [(point, rho, True) for rho in _rhos(experiment, point) if (path, rho) not in counterparts]
    return rows


def _rhos(experiment: Experiment, point: GridPoint | None) -> list[str]:
    """At which ρ a model is sampled."""
    return list(dict.fromkeys(sampler.rho for sampler in experiment.samplers(point) if sampler.rho is not None))


def _sampler(experiment: Experiment, entry: Further, point: GridPoint | None, rho: str | None) -> Sampler | None:
    """What a row's model is sampled with in a column.

    None if it is not, or, of the base model, if the grid has several engines besides the evaluation's.
    """
    every = [sampler for sampler in experiment.samplers_of(entry, point) if sampler.rho == (entry.rho and rho)]
    if len(every) > 1:
        every = [sampler for sampler in every if sampler.engine != experiment.evaluation.engine]
    return every[0] if len(every) == 1 else None


def table(experiment: Experiment, measured: list[Statistic]) -> Table:
    """A row a model (see `models`), a column a policy, `measured` as of `statistics`.

    In the CSV scores are fractions; `own_policy` says which policy the row's model trained. A row's role is that of the
    main table, or `evaluation_only`.
    """
    known, columns_of, rows = lookup(measured), entries(experiment), {}
    for point, rho, only in models(experiment):
        row = point_cells(experiment, point) | {"evaluated_rho": rho}
        for key, entry in columns_of.items():
            sampler = _sampler(experiment, entry, point, rho)
            if sampler is not None and (entry.rho or not only):
                row[key] = known(SCORE, where(experiment, point, sampler.engine, sampler.rho))
        if only:
            row["role"] = ONLY
        elif point is not None:
            own = own_sampler(experiment, point)
            row["own_policy"] = own and _says(own)
            row["over_unpruned"] = known(OVER_UNPRUNED, where(experiment, point, OWN, OWN))
            if rho is not None:
                row["over_evaluation_only"] = known(OVER_UNPRUNED, where(experiment, point, point.engine, rho))
        rows[f"{row['point']} {rho or 'none'}"] = row
    owns = own_policies(experiment)
    shown = interval(".1f", 100)
    adds = interval("+.1f", 100)
    columns = [
        *point_columns(experiment, rows, MARKS | {ONLY: ", ρ at evaluation only"}),
        Column("evaluated_rho", "ρ at evaluation", rho_text),
        *(
            Column(
                key,
                f"{heading(entry)} (%) [95 %]",
                lambda cell: shown(cell) + (OWN_MARK if cell.where in owns else ""),
                INTERVAL,
            )
            for key, entry in columns_of.items()
        ),
        Column("own_policy", None),
        Column("over_unpruned", "DVP adds, own policies (points) [95 %]", adds, INTERVAL),
        Column("over_evaluation_only", ONLY_HEADING, adds, INTERVAL),
    ]
    k = experiment.evaluation.samples_per_problem[experiment.report.task]
    below = notes(
        "matrix_table",
        experiment,
        evaluation=experiment.evaluation,
        k=k,
        over=bootstrap.over(experiment.seeds),
        seeds=seeds_text(experiment),
        pruned=any(point.rho is not None for point in experiment.points),
        control=any(row["role"] == "control" for row in rows.values()),
    )
    return Table(f"{experiment.name}: avg@{k} on {experiment.report.task} by policy", columns, rows, below)
