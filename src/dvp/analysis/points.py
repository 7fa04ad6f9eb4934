"""Grid points: where a number of theirs stands, with which others they are compared, and how they are called."""

from collections.abc import Iterable

from dvp.analysis.formats import rho_text
from dvp.experiment.config import Experiment
from dvp.experiment.grid import GridPoint, Sampler, setting_as_written, settings_as_read

BASE = "base"


# What a method is compared with in each pairing: the setting that is left out, its value then, what may differ besides.
_LEFT_OUT = {
    "unpruned": ("safe_vocabulary", None, ["safe_vocabulary"]),
    # With the true norms of gradients or with their proxy, OTB alone has use for either.
    "rloo": ("advantage", "rloo", ["advantage", "true_norms"]),
}


def where_of(experiment: Experiment, point: GridPoint | None, sampler: Sampler | None = None) -> dict[str, str]:
    """A point, or the base model, as statistics name it: a point also by the settings in which the grid differs.

    sampler : beside that, what it was sampled with.
    """
    where = {"method": BASE, "engine": "none", "rho": "none"}
    if point is not None:
        settings = {key: setting_as_written(value) for key, value in experiment.settings_of(point).items()}
        where = {"method": point.method, "engine": point.engine, "rho": point.rho or "none"} | settings
    return where | ({"evaluated_on": sampler.engine, "evaluated_rho": sampler.rho or "none"} if sampler else {})


def counterpart(experiment: Experiment, method: str, among: Iterable[str], pairing: str) -> str | None:
    """Of `among` the method without safe vocabulary (`unpruned`) or with RLOO's advantage (`rloo`) that is like
    `method` in all else; None if there is none, and of such methods themselves.
    """
    own = experiment.methods[method]
    setting, value, free = _LEFT_OUT[pairing]
    if getattr(own, setting) == value:
        return None
    for name in among:
        other = experiment.methods[name]
        if getattr(other, setting) == value and other.like(own, but=free):
            return name
    return None


def estimator_counterpart(experiment: Experiment, method: str, pairing: str) -> str | None:
    """The same among the compared estimators."""
    return counterpart(experiment, method, (name for name, _ in experiment.estimators), pairing)


def partner(experiment: Experiment, point: GridPoint, pairing: str) -> GridPoint | None:
    """With which point one is compared; None if there is none, and of that point itself.

    unpruned, rloo : its counterpart on the same engine with the same training settings (of rloo with the same ρ).
    reference : the reference. equal_settings : the reference's method on the same engine with the same settings.
    """
    reference = experiment.reference_point
    if pairing == "reference":
        return None if point == reference else reference
    training = experiment.training_of(point)
    alike = [
        other
        for other in experiment.points
        if other.engine == point.engine and experiment.training_of(other) == training
    ]
    if pairing == "equal_settings":
        name = None if point.method == reference.method else reference.method
    else:
        rho = None if pairing == "unpruned" else point.rho
        alike = [other for other in alike if other.rho == rho]
        name = counterpart(experiment, point.method, (other.method for other in alike), pairing)
    return next((other for other in alike if other.method == name), None)


def role(experiment: Experiment, point: GridPoint | None) -> str:
    """`base`, `reference`, `control` or nothing."""
    if point is None:
        return BASE
    if point == experiment.reference_point:
        return "reference"
    return "control" if experiment.is_control(point) else ""


def point_name(experiment: Experiment, point: GridPoint, beside: GridPoint | None = None) -> str:
    """A point in words; its engine where that is not the one of `beside`."""
    engine = [] if beside is not None and beside.engine == point.engine else [point.engine]
    parts = [experiment.methods[point.method].label, *engine, *settings_as_read(experiment.settings_of(point))]
    return ", ".join(parts if point.rho is None else [*parts, f"ρ = {rho_text(point.rho)}"])


def policy_label(experiment: Experiment, policy: str) -> str:
    """How the policy of a measurement is called, `base` or a grid point's path."""
    for point in experiment.points:
        if point.path == policy:
            rho = "" if point.rho is None else f", ρ = {rho_text(point.rho)}"
            settings = "".join(f", {text}" for text in settings_as_read(experiment.settings_of(point)))
            return f"after {experiment.methods[point.method].label}, {point.engine}{rho}{settings}"
    return "base model"


def seeds_text(experiment: Experiment) -> str:
    """How many seeds, in words."""
    count = len(experiment.seeds)
    if experiment.replicates:
        return f"{count} base models"
    return "one training seed" if count == 1 else f"{count} training seeds"
