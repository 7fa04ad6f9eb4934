"""Scores by the policy that was sampled: a summary, the matrix of models and samplers, and different solutions."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dvp.analysis.columns import Column, Layout, Report, Row, cell, counts, difference, interval, percent, point_row
from dvp.analysis.formats import rho_text
from dvp.analysis.points import partner, point_name
from dvp.analysis.samplers import OWN, own_policies, own_sampler, sampler_text
from dvp.analysis.shown import Panel, figure, table
from dvp.analysis.statistics import Statistic
from dvp.experiment.config import Experiment
from dvp.experiment.evaluation import TRAINING, Further
from dvp.experiment.grid import GridPoint, Sampler

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from dvp.analysis.charts import Charts

ONLY = "evaluation_only"
"""The role of a row whose model was trained without DVP and is sampled at a ρ."""
REFERENCE, UNPRUNED = "_reference_by_policy", "_unpruned_by_policy"
"""Endings of the differences of scores by policy."""


@table("Summary by method", part="overview")
def overview_table(report: Report) -> Layout:
    """Everything about the methods of {experiment}, one in a row: the score on the evaluation's engine from the full
    vocabulary, the score under its behaviour policy (its engine, its vocabulary), both also minus the reference, how
    many runs collapsed, the KL divergence between engine and trainer at the end, the share of tokens that were kept,
    and the seconds of a step. Brackets are 95 % intervals. Below the table three sentences say what it shows.
    """
    experiment, reference = report.experiment, report.experiment.reference_point
    exact = {"evaluated_on": experiment.evaluation.engine, "evaluated_rho": "none"}

    def beside_reference(row: Row) -> dict[str, str] | None:
        if row.point.engine != reference.engine:
            return None
        unpruned = row.point.rho is None and reference.rho is None
        return {"evaluated_on": row.point.engine, "evaluated_rho": "none" if unpruned else OWN}

    over_exact = difference("exact_over_reference", "over ref. (pp) [95 %]", f"score_over{REFERENCE}", at=exact)
    over_served = difference(
        "served_over_reference", "over ref. there (pp) [95 %]", f"score_over{REFERENCE}", at=beside_reference
    )
    over_only = _over_evaluation_only(optional=True)
    columns = [
        *report.point_columns(),
        percent("exact", f"{exact['evaluated_on']}, full (%) [95 %]", "score_by_policy", at=exact),
        over_exact,
        percent("served", "behaviour policy (%) [95 %]", "score_by_policy", at=_behaviour),
        over_served,
        over_only,
        counts("collapsed", "collapsed", ["collapsed_runs"], lambda runs: f"{runs} / {report.count}"),
        interval("k3", "k3 (nats per token)", ".1e", "final_k3"),
        interval("k3_full", "k3, full (nats per token)", ".1e"),
        interval("kept", "kept (%)", ".1f", scale=100),
        interval("seconds_per_step", "s per step", ".2f"),
    ]
    name, there = point_name(experiment, reference), "the engine of training, with the vocabulary of training"
    served = _compared(report, over_served, f"On {there}, compared with {name}")
    only = "With a ρ, compared with the same method without a safe vocabulary that is sampled there at ρ"
    sentences = [
        _compared(report, over_exact, f"On {exact['evaluated_on']} from the full vocabulary, compared with {name}"),
        f"{served} {_compared(report, over_only, only)}".strip() if served else "",
        _collapses(report),
    ]
    names = {"only": any(over_only.find(row, report.known) for row in report.points())}
    return Layout("summary by method", report.points(), columns, list(filter(None, sentences)), names=names)


def _behaviour(row: Row) -> dict[str, str] | None:
    """Return the coordinates of the policy that samples a model's responses in training."""
    return row.point and {"evaluated_on": row.point.engine, "evaluated_rho": row.where["rho"]}


def _over_evaluation_only(**more: Any) -> Column:
    def at(row: Row) -> dict[str, str] | None:
        if row.cells["role"] == ONLY or row.point is None or row.point.rho is None:
            return None
        return {"evaluated_on": row.point.engine, "evaluated_rho": row.point.rho}

    heading = "over ρ at evaluation only (pp) [95 %]"
    return difference("over_evaluation_only", heading, f"score_over{UNPRUNED}", at=at, **more)


def _compared(report: Report, column: Column, what: str) -> str:
    """Say which methods' differences in a column have intervals above and below zero; empty without any."""
    reference, above, below, count = report.experiment.reference_point, [], [], 0
    for row in report.points():
        one = column.find(row, report.known)
        if one is not None and row.point != reference:
            count += 1
            name = point_name(report.experiment, row.point, reference)
            above += [name] if one.low > 0 else []
            below += [name] if one.high < 0 else []
    listed = [f"{len(names)} ({'; '.join(names)})" if names else "none" for names in (above, below)]
    inconclusive = count - len(above) - len(below)
    return f"{what}: above it {listed[0]}, below it {listed[1]}, inconclusive {inconclusive}." if count else ""


def _collapses(report: Report) -> str:
    """Say how many runs collapsed, and of which methods, or what rate none rules out."""
    from dvp.analysis.estimates import share_of_runs  # imports scipy

    every = [(row.point, report.known("collapsed_runs", row.where)) for row in report.points()]
    collapsed = [point_name(report.experiment, point) for point, runs in every if runs and round(runs.value)]
    count = report.count
    total = f"{sum(report.values('collapsed_runs')):.0f} of {count * len(every)} runs collapsed:"
    if collapsed:
        return f"{total} of {'; '.join(collapsed)}."
    rate = 100 * share_of_runs(0, count)[2]
    return f"{total} no collapse in {count} of {count} rules out a rate above {rate:.0f}% of a method's runs."


@table("Scores by policy", part="matrix")
def matrix_table(report: Report) -> Layout:
    """Scores of {experiment} by policy: a row for each model, a column for what sampled it: an engine, from the full
    vocabulary or from the safe one at ρ. An asterisk marks the policy that the model's updates are for. Rows "ρ at
    evaluation only" are models that were trained without DVP. Brackets are 95 % intervals over problems and, from three
    on, training seeds. Differences are paired: all rows and columns use the same problems and seeds.
    """
    experiment, own = report.experiment, own_policies(report.experiment)

    def starred(row: Row, one: Statistic, text: str) -> str:
        return f"{text} *" if one.where in own else text

    def sampled(entry: Further) -> Callable[[Row], dict[str, str] | None]:
        def at(row: Row) -> dict[str, str] | None:
            sampler = _sampler_in(experiment, entry, row.point, row.cells["evaluated_rho"])
            if sampler is None or (row.cells["role"] == ONLY and not entry.rho):
                return None
            return {"evaluated_on": sampler.engine, "evaluated_rho": sampler.rho or "none"}

        return at

    def each_its_own(row: Row) -> dict[str, str] | None:
        return None if row.point is None or row.cells["role"] == ONLY else {"evaluated_on": OWN, "evaluated_rho": OWN}

    adds = "DVP adds, own policies (pp) [95 %]"
    columns = [
        *report.point_columns(),
        cell("evaluated_rho", "ρ at evaluation", rho_text),
        *(
            percent(key, f"{_heading(entry)} (%) [95 %]", "score_by_policy", at=sampled(entry), mark=starred)
            for key, entry in _entries(experiment).items()
        ),
        cell("own_policy"),
        difference("over_unpruned", adds, f"score_over{UNPRUNED}", at=each_its_own),
        _over_evaluation_only(),
    ]
    rows = [_sampled(experiment, *model) for model in _models(experiment)]
    return Layout(f"avg@{report.k} on {experiment.report.task} by policy", rows, columns)


@table("Different solutions", part="diversity")
def diversity_table(report: Report) -> Layout:
    """Different solutions in {experiment}, whose problems can have several: how many are among the samples of a
    problem, and how often two correct samples of a problem are different solutions. Brackets are 95 % intervals over
    problems and, from three on, training seeds. Differences are paired.
    """
    exact = report.experiment.evaluation.engine
    full = {"at": {"evaluated_on": exact, "evaluated_rho": "none"}}

    def behaviour(row: Row) -> dict[str, str] | None:
        same = row.point and Sampler(engine=row.point.engine, rho=row.point.rho) == report.experiment.sampler
        return None if same else _behaviour(row)

    served = {"at": behaviour}
    solutions, pairs = "different_solutions_by_policy", "differing_pairs"
    columns = [
        *report.point_columns(),
        percent("score", f"{exact}, full (%) [95 %]", "score_by_policy", **full),
        interval("solutions", "different solutions per problem [95 %]", ".2f", solutions, **full),
        percent("differing", "pairs that differ (%) [95 %]", f"{pairs}_by_policy", **full),
        difference("differing_over_reference", "over ref. (pp) [95 %]", f"{pairs}_over{REFERENCE}", **full),
        difference("differing_over_unpruned", "over no pruning (pp) [95 %]", f"{pairs}_over{UNPRUNED}", **full),
        interval("tokens", "tokens used [95 %]", ".0f", "tokens_used_by_policy", **full),
        percent("served_score", "behaviour policy (%) [95 %]", "score_by_policy", **served),
        interval("served_solutions", "behaviour policy: different solutions [95 %]", ".2f", solutions, **served),
        percent("served_differing", "behaviour policy: pairs that differ (%) [95 %]", f"{pairs}_by_policy", **served),
    ]
    return Layout(f"different solutions on {report.experiment.report.task}", report.points(base=True), columns)


def _sampled(experiment: Experiment, point: GridPoint | None, rho: str | None, only: bool) -> Row:
    """Return the row of a model sampled at a ρ; `only` if the ρ belongs to the evaluation alone."""
    row = point_row(experiment, point)
    cells = row.cells | {"evaluated_rho": rho}
    if only:
        cells |= {"role": ONLY, "method": f"{row.cells['label']}, ρ at evaluation only"}
    elif point is not None:
        own = own_sampler(experiment, point)
        cells["own_policy"] = own and sampler_text(own)
    return Row(f"{row.name} {rho or 'none'}", row.where, cells, point)


def _entries(experiment: Experiment) -> dict[str, Further]:
    """Return the samplers that are columns, by key: the one of all models, then those of evaluation.also."""
    exact = experiment.evaluation.engine
    named = [entry.model_copy(update={"engine": entry.engine or exact}) for entry in experiment.evaluation.also]
    return {f"{entry.engine}_{'rho' if entry.rho else 'full'}": entry for entry in (Further(engine=exact), *named)}


def _heading(entry: Further) -> str:
    """Return the heading of a column: engine and vocabulary."""
    engine = "engine of training" if entry.engine == TRAINING else entry.engine
    return f"{engine}, {'at ρ' if entry.rho else 'full'}"


def _models(experiment: Experiment) -> list[tuple[GridPoint | None, str | None, bool]]:
    """List the rows: a model, the ρ at which it is sampled, and whether that ρ belongs to the evaluation only.

    The base model and every point; below a point with ρ its counterpart without a safe vocabulary, sampled at that ρ;
    below a model without ρ the model itself at each ρ at which it is no point's counterpart.
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
    """List the ρ at which a model is sampled."""
    return list(dict.fromkeys(sampler.rho for sampler in experiment.samplers(point) if sampler.rho is not None))


def _sampler_in(experiment: Experiment, entry: Further, point: GridPoint | None, rho: str | None) -> Sampler | None:
    """Return the sampler of a row's model in a column.

    None if the model is not sampled so, or, for the base model, if the grid has several engines besides the
    evaluation's.
    """
    every = [sampler for sampler in experiment.samplers_of(entry, point) if sampler.rho == (entry.rho and rho)]
    if len(every) > 1:
        every = [sampler for sampler in every if sampler.engine != experiment.evaluation.engine]
    return every[0] if len(every) == 1 else None


@figure("Score differences from the reference")
def differences_by_policy(draw: "Charts") -> "Figure | None":
    """Differences of scores from the reference in {experiment}, in percentage points, by the engine that samples both
    models from the full vocabulary. Bars are 95 % intervals over problems and training seeds, paired: all models are
    scored on the same problems and seeds. The dashed line is no difference, the dotted ones are two points, the
    criterion of the claims.
    """
    table = draw.table.query("evaluated_rho == 'none'")
    across = {"no difference": [0], "criterion, 2 pp": [-2, 2]}
    panel = Panel(f"score_over{REFERENCE}", "score difference, pp", scale=100, across=across)
    title = draw.finding("Score differences", "to the reference", table, panel.quantities)
    return draw.intervals(title, table, [panel], columns=["evaluated_on"])


@figure("Scores by policy")
def evaluation_matrix(draw: "Charts") -> "Figure | None":
    """The scores of the table by policy in {experiment}: colour says which engine sampled the model, a filled marker
    the full vocabulary, an open one the safe vocabulary at ρ. A ring is around the policy that the model's updates are
    for. Bars are 95 % intervals of each score alone; the paired differences are in the table.
    """
    panel = Panel("score_by_policy", f"avg@{draw.k} on {draw.task}, %", scale=100)
    rings = own_policies(draw.experiment)
    return draw.intervals("Scores by policy", draw.table, [panel], colour="evaluated_on", rings=rings)


@figure("Different solutions, drawn")
def solutions(draw: "Charts") -> "Figure | None":
    """Scores, different solutions per problem and pairs of correct samples that differ in {experiment}. Colour says
    which engine sampled the model, a filled marker the full vocabulary, an open one the safe vocabulary at ρ. Bars are
    95 % intervals of each number alone; the paired differences are in the table.
    """
    if not draw.has("different_solutions_by_policy"):
        return None
    panels = [
        Panel("score_by_policy", "score, %", scale=100),
        Panel("different_solutions_by_policy", "different solutions per problem"),
        Panel("differing_pairs_by_policy", "pairs of correct samples that differ, %", scale=100),
    ]
    return draw.intervals("Scores and different solutions by policy", draw.table, panels, colour="evaluated_on")
