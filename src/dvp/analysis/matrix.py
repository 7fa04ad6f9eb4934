"""Scores by policy: of each model with every sampler of evaluation.also, and what DVP adds under each of them.

A score belongs to a policy: weights, the engine that samples them, and the vocabulary that it samples from. Methods
train different policies, so that scores with a single sampler reflect the choice of the sampler as well.
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
"""The role of a row whose model was trained without DVP and is sampled at a ρ."""


def own_sampler(experiment: Experiment, point: GridPoint) -> Sampler | None:
    """Return the sampler of a point's target policy: its updates estimate the gradient of that policy's reward.

    Without an importance correction this is the engine's policy, whose samples are taken for the trainer's; with one,
    which weighs samples by the trainer's probability over the engine's, the trainer's, for which evaluation.engine
    stands. Either is restricted to the safe vocabulary if the method has one.

    None if the safe vocabulary has another rule than a fixed ρ, as no evaluation samples by it; and for a corrected
    replay, whose trainer combines the engine's sets with its own probabilities, which no engine samples from.
    """
    method = experiment.methods[point.method]
    rule, corrected = method.safe_vocabulary, method.importance.corrects
    if rule is not None and (not rule.engine_at_rho or (corrected and rule.rule == "replay")):
        return None
    return Sampler(engine=experiment.evaluation.engine if corrected else point.engine, rho=point.rho)


def own_policies(experiment: Experiment) -> list[dict[str, str]]:
    """List the coordinates of each point's score under its own target policy."""
    owns = [(point, own_sampler(experiment, point)) for point in experiment.points]
    return [where_of(experiment, point, own) for point, own in owns if own]


def samplers(experiment: Experiment, point: GridPoint | None) -> list[Sampler]:
    """List the samplers of a model; the first is the one of all models."""
    return [experiment.sampler, *experiment.samplers(point)]


def statistics(experiment: Experiment, reader: Reader) -> Iterator[Statistic]:
    """Yield the score of every model and sampler, and the differences between models under the same kind of policy.

    All have `evaluated_on`, an engine, and `evaluated_rho`, a ρ or `none`, beside the point's coordinates.

    score_by_policy (fraction) is the score of each model and sampler. score_over_unpruned_by_policy is that of points
    with a safe vocabulary, minus the same without: on an engine both from the full vocabulary (evaluated_rho: none),
    both at the ρ (what DVP in training adds to ρ at evaluation alone), or each from its own (evaluated_rho: own); and
    each under the policy that it trained, on its engine (evaluated_on: own, evaluated_rho: own).
    score_over_reference_by_policy is that of all points but the reference, minus the reference's: on an engine both
    from the full vocabulary, or each from its own, and each under the policy that it trained.
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
    """Yield NAME_over_unpruned_by_policy and NAME_over_reference_by_policy of every point with a partner.

    A pair of samplers (see `statistics`) is compared if the point has the first and its partner the second.
    """
    for point in experiment.points:
        for pairing in ("unpruned", "reference"):
            other = partner(experiment, point, pairing)
            if other is None:
                continue
            for where, mine, its in compared_samplers(experiment, point, other, pairing):
                says = f"{sampler_text(mine)}, minus {other.path}, {sampler_text(its)}"
                measured = difference((point, mine), (other, its))
                yield contrast(experiment, f"{name}_over_{pairing}_by_policy", where, measured, says, unit)


def compared_samplers(
    experiment: Experiment, point: GridPoint, other: GridPoint, pairing: str
) -> Iterator[tuple[dict[str, str], Sampler, Sampler]]:
    """Yield coordinates of a difference between two points, and the sampler of each; both are scored with theirs."""
    for (engine, rho), (mine, its) in _pairs(experiment, point, other, pairing).items():
        if mine in samplers(experiment, point) and its in samplers(experiment, other):
            yield where_of(experiment, point) | {"evaluated_on": engine, "evaluated_rho": rho or "none"}, mine, its


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
    """Describe a sampler: `fp32, full` or `coarse, ρ = 0.01`."""
    return f"{sampler.engine}, " + ("full" if sampler.rho is None else f"ρ = {rho_text(sampler.rho)}")


def entries(experiment: Experiment) -> dict[str, Further]:
    """Return the samplers that are columns, by key: the one of all models, then those of evaluation.also."""
    exact = experiment.evaluation.engine
    named = [entry.model_copy(update={"engine": entry.engine or exact}) for entry in experiment.evaluation.also]
    return {f"{entry.engine}_{'rho' if entry.rho else 'full'}": entry for entry in (Further(engine=exact), *named)}


def heading(entry: Further) -> str:
    """Return the heading of a column: engine and vocabulary."""
    engine = "engine of training" if entry.engine == TRAINING else entry.engine
    return f"{engine}, {'at ρ' if entry.rho else 'full'}"


def models(experiment: Experiment) -> list[tuple[GridPoint | None, str | None, bool]]:
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


def sampler_in(experiment: Experiment, entry: Further, point: GridPoint | None, rho: str | None) -> Sampler | None:
    """Return the sampler of a row's model in a column.

    None if the model is not sampled so, or, for the base model, if the grid has several engines besides the
    evaluation's.
    """
    every = [sampler for sampler in experiment.samplers_of(entry, point) if sampler.rho == (entry.rho and rho)]
    if len(every) > 1:
        every = [sampler for sampler in every if sampler.engine != experiment.evaluation.engine]
    return every[0] if len(every) == 1 else None
