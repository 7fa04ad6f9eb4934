"""Scores by policy: of each model with every sampler of evaluation.also, and what DVP adds under each of them.

A score is that of a policy: weights, the engine that samples them, and the vocabulary that it samples from. Methods do
not train the same one, so that a single column also compares the columns.
"""

from collections.abc import Callable, Iterator

from dvp.analysis.estimates import Estimate, contrast, over_model, score
from dvp.analysis.formats import rho_text
from dvp.analysis.load import Reader
from dvp.analysis.points import partner, where_of
from dvp.analysis.statistics import Statistic
from dvp.experiment.config import Experiment
from dvp.experiment.evaluation import TRAINING, Further
from dvp.experiment.grid import GridPoint, Sampler

OWN = "own"
ONLY = "evaluation_only"
"""The role of a row of a model that was trained without DVP, sampled at a ρ."""


def own_sampler(experiment: Experiment, point: GridPoint) -> Sampler | None:
    """The sampler of the policy whose expected reward a point's updates are estimates for.

    Without an importance correction it is the engine's, as if its samples were the trainer's; with one, which weighs
    them by the trainer's probability over the engine's, it is the trainer's, for which evaluation.engine stands. Either
    is restricted to the safe vocabulary if the method has one. None where that has another rule than a fixed ρ, by
    which no evaluation samples; and for a corrected replay, whose trainer has the engine's sets and its own
    probabilities, which no engine samples with.
    """
    method = experiment.methods[point.method]
    rule, corrected = method.safe_vocabulary, method.importance.corrects
    if rule is not None and (not rule.engine_at_rho or (corrected and rule.rule == "replay")):
        return None
    return Sampler(engine=experiment.evaluation.engine if corrected else point.engine, rho=point.rho)


def own_policies(experiment: Experiment) -> list[dict[str, str]]:
    """Where the score of each point under its own policy stands among the statistics."""
    owns = [(point, own_sampler(experiment, point)) for point in experiment.points]
    return [where_of(experiment, point, own) for point, own in owns if own]


def samplers(experiment: Experiment, point: GridPoint | None) -> list[Sampler]:
    """All that a model is sampled with, first what all models are sampled with."""
    return [experiment.sampler, *experiment.samplers(point)]


def statistics(experiment: Experiment, reader: Reader) -> Iterator[Statistic]:
    """Of every model and sampler its score, and the differences between models under the same kind of policy.

    All have `evaluated_on`, an engine, and `evaluated_rho`, a ρ or `none`, beside the point's place.
    score_by_policy (fraction) is of each model and sampler. score_over_unpruned_by_policy is of points with a safe
    vocabulary, minus the same without: on an engine both from the full vocabulary (evaluated_rho: none), both at the ρ
    (what DVP in training adds to ρ at evaluation alone), or each from its own (evaluated_rho: own); and each under the
    policy that it trained, on its engine (evaluated_on: own, evaluated_rho: own). score_over_reference_by_policy is of
    all points but the reference, minus that: on an engine both from the full vocabulary, or each from its own, and
    each under the policy that it trained.
    """
    for point in (None, *experiment.points):
        for sampler in samplers(experiment, point):
            place, how = where_of(experiment, point, sampler), over_model(experiment, point)
            yield score(reader, point, sampler).statistic("score_by_policy", place, "fraction", how, "share")
    yield from contrasts(experiment, "score", lambda mine, its: score(reader, *mine) - score(reader, *its))


def contrasts(
    experiment: Experiment,
    name: str,
    difference: Callable[[tuple[GridPoint, Sampler], tuple[GridPoint, Sampler]], Estimate],
    unit: str = "fraction",
) -> Iterator[Statistic]:
    """NAME_over_unpruned_by_policy and NAME_over_reference_by_policy of every point with a partner.

    Of both with samplers that both have; unpruned also both at the point's ρ.
    """
    for point in experiment.points:
        for pairing in ("unpruned", "reference"):
            other = partner(experiment, point, pairing)
            if other is None:
                continue
            for (engine, rho), (mine, its) in _pairs(experiment, point, other, pairing).items():
                if mine in samplers(experiment, point) and its in samplers(experiment, other):
                    says = f"{sampler_text(mine)}, minus {other.path}, {sampler_text(its)}"
                    where = where_of(experiment, point) | {"evaluated_on": engine, "evaluated_rho": rho or "none"}
                    measured = difference((point, mine), (other, its))
                    yield contrast(experiment, f"{name}_over_{pairing}_by_policy", where, measured, says, unit)


def _pairs(
    experiment: Experiment, point: GridPoint, other: GridPoint, pairing: str
) -> dict[tuple[str, str | None], tuple[Sampler, Sampler]]:
    pairs: dict[tuple[str, str | None], tuple[Sampler, Sampler]] = {}
    for engine in dict.fromkeys(sampler.engine for sampler in samplers(experiment, point)):
        full, mine, its = (Sampler(engine=engine, rho=rho) for rho in (None, point.rho, other.rho))
        pairs[engine, None] = full, full
        if point.rho is not None and pairing == "unpruned":
            pairs[engine, point.rho] = mine, mine
        if point.rho is not None or other.rho is not None:
            pairs[engine, OWN] = mine, its
    own, others = own_sampler(experiment, point), own_sampler(experiment, other)
    return pairs | ({(OWN, OWN): (own, others)} if own is not None and others is not None else {})


def sampler_text(sampler: Sampler) -> str:
    """A sampler in words: `fp32, full` or `coarse, ρ = 0.01`."""
    return f"{sampler.engine}, " + ("full" if sampler.rho is None else f"ρ = {rho_text(sampler.rho)}")


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


def sampler_in(experiment: Experiment, entry: Further, point: GridPoint | None, rho: str | None) -> Sampler | None:
    """What a row's model is sampled with in a column.

    None if it is not, or, of the base model, if the grid has several engines besides the evaluation's.
    """
    every = [sampler for sampler in experiment.samplers_of(entry, point) if sampler.rho == (entry.rho and rho)]
    if len(every) > 1:
        every = [sampler for sampler in every if sampler.engine != experiment.evaluation.engine]
    return every[0] if len(every) == 1 else None
