"""Scores by policy: of each model with every sampler of evaluation.also, and what DVP adds under each of them.

A score belongs to a policy: weights, the engine that samples them, and the vocabulary that it samples from. Methods
train different policies, so that scores with a single sampler reflect the choice of the sampler as well.
"""

from collections.abc import Callable, Iterator

from dvp.analysis.estimates import Estimate, contrast, over_model, score
from dvp.analysis.load import Reader
from dvp.analysis.points import partner, where_of
from dvp.analysis.samplers import OWN, own_sampler, sampler_text, samplers
from dvp.analysis.statistics import Statistic
from dvp.experiment.config import Experiment
from dvp.experiment.grid import GridPoint, Sampler


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
