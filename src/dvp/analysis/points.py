"""Grid points, their counterparts without a safe vocabulary or with RLOO, and how they are called."""

from collections.abc import Iterable

from dvp.analysis.formats import rho_text
from dvp.experiment.config import Experiment
from dvp.experiment.grid import GridPoint, settings_as_read

BASE = "base"


def unpruned(experiment: Experiment, method: str, among: Iterable[str]) -> str | None:
    """Of `among` the method without safe vocabulary that is like `method` in all else, if that has one."""
    own = experiment.methods[method]
    if own.safe_vocabulary is None:
        return None
    for name in among:
        other = experiment.methods[name]
        if other.safe_vocabulary is None and other.like(own, but=["safe_vocabulary"]):
            return name
    return None


def unpruned_point(experiment: Experiment, point: GridPoint) -> GridPoint | None:
    """The point on the same engine that differs in having no safe vocabulary; None if there is none."""
    training = experiment.training_of(point)
    here = [
        other
        for other in experiment.points
        if other.engine == point.engine and other.rho is None and experiment.training_of(other) == training
    ]
    name = unpruned(experiment, point.method, (other.method for other in here))
    return next((other for other in here if other.method == name), None)


def rloo_point(experiment: Experiment, point: GridPoint) -> GridPoint | None:
    """The point that differs in having RLOO's advantage; None if there is none, and of such points themselves."""
    own = experiment.methods[point.method]
    if own.advantage == "rloo":
        return None
    for other in experiment.points:
        method = experiment.methods[other.method]
        same_place = (other.engine, other.rho) == (point.engine, point.rho)
        alike = method.advantage == "rloo" and method.like(own, but=["advantage"])
        if same_place and alike and experiment.training_of(other) == experiment.training_of(point):
            return other
    return None


def policy_label(experiment: Experiment, policy: str) -> str:
    """How the policy of a measurement is called, `base` or a grid point's path."""
    settings = [part for part in (experiment.mismatch, experiment.bias) if part is not None]
    for point in (point for part in settings for point in part.policies):
        if point != BASE and point.path == policy:
            rho = "" if point.rho is None else f", ρ = {rho_text(point.rho)}"
            settings = "".join(f", {text}" for text in settings_as_read(experiment.settings_of(point)))
            return f"after {experiment.methods[point.method].label}, {point.engine}{rho}{settings}"
    return "base model"


def seeds_text(experiment: Experiment) -> str:
    """How many seeds, in words."""
    count = len(experiment.seeds)
    return "one training seed" if count == 1 else f"{count} training seeds"
