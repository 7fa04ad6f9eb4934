"""Samplers of a grid point's model: which policies its scores belong to, and which one its updates are for."""

from dvp.analysis.formats import rho_text
from dvp.analysis.points import where_of
from dvp.experiment.config import Experiment
from dvp.experiment.grid import GridPoint, Sampler

OWN = "own"
"""Stands for the sampler of each point's own policy, in the coordinates of a difference."""


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


def sampler_text(sampler: Sampler) -> str:
    """Describe a sampler: `fp32, full` or `coarse, ρ = 0.01`."""
    return f"{sampler.engine}, " + ("full" if sampler.rho is None else f"ρ = {rho_text(sampler.rho)}")
