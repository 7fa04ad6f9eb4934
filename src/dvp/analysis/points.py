"""Grid points: the coordinates of their statistics, the points that they are compared with, and their names."""

from collections.abc import Iterable
from itertools import product

from dvp.analysis.formats import rho_text
from dvp.experiment.config import Experiment
from dvp.experiment.grid import WHOLE, GridPoint, Sampler, setting_as_written, settings_as_read

BASE = "base"


# By pairing: the setting that the counterpart leaves out, its value then, and the settings that may differ.
_LEFT_OUT = {
    "unpruned": ("safe_vocabulary", None, ["safe_vocabulary"]),
    # true_norms may differ, too, as only OTB uses it.
    "rloo": ("advantage", "rloo", ["advantage", "true_norms"]),
}


def where_of(experiment: Experiment, point: GridPoint | None, sampler: Sampler | None = None) -> dict[str, str]:
    """Return the coordinates of a point's statistics, or the base model's: method, engine, ρ and the grid's settings.

    sampler : adds evaluated_on and evaluated_rho, for numbers that depend on the sampler.
    """
    where = {"method": BASE, "engine": "none", "rho": "none"}
    if point is not None:
        settings = {key: setting_as_written(value) for key, value in experiment.settings_of(point).items()}
        where = {"method": point.method, "engine": point.engine, "rho": point.rho or "none"} | settings
    return where | ({"evaluated_on": sampler.engine, "evaluated_rho": sampler.rho or "none"} if sampler else {})


def counterpart(experiment: Experiment, method: str, among: Iterable[str], pairing: str) -> str | None:
    """Find the method in `among` that is like `method` except for the setting of the pairing.

    unpruned : it has no safe vocabulary. rloo : it has RLOO's advantage.
    None if there is none, or if `method` is such a method itself.
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
    """Find the `counterpart` of a method among the compared estimators."""
    return counterpart(experiment, method, (name for name, _ in experiment.estimators), pairing)


def partner(experiment: Experiment, point: GridPoint, pairing: str) -> GridPoint | None:
    """Return the point that one is compared with; None if there is none, or if it is the point itself.

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
    """Return a point's role: `base` (without a point), `reference`, `control` or an empty string."""
    if point is None:
        return BASE
    if point == experiment.reference_point:
        return "reference"
    return "control" if experiment.is_control(point) else ""


def point_name(experiment: Experiment, point: GridPoint, beside: GridPoint | None = None) -> str:
    """Describe a point in words; its engine is left out if it is that of `beside`."""
    engine = [] if beside is not None and beside.engine == point.engine else [point.engine]
    parts = [experiment.methods[point.method].label, *engine, *settings_as_read(experiment.settings_of(point))]
    return ", ".join(parts if point.rho is None else [*parts, f"ρ = {rho_text(point.rho)}"])


def policy_label(experiment: Experiment, policy: str) -> str:
    """Describe the policy of a measurement, which is `base` or a grid point's path."""
    for point in experiment.points:
        if point.path == policy:
            rho = "" if point.rho is None else f", ρ = {rho_text(point.rho)}"
            settings = "".join(f", {text}" for text in settings_as_read(experiment.settings_of(point)))
            return f"after {experiment.methods[point.method].label}, {point.engine}{rho}{settings}"
    return "base model"


def seeds_text(experiment: Experiment) -> str:
    """Say in words how many seeds there are, or base models if the experiment has several."""
    count = len(experiment.repetitions)
    if experiment.bases:
        return f"{count} base models"
    return "one training seed" if count == 1 else f"{count} training seeds"


def estimator_places(experiment: Experiment) -> list[dict[str, str]]:
    """List the coordinates of all that the stage `bias` measures: policy, engine, task if any, method and ρ."""
    settings = experiment.bias
    return [
        {"policy": policy if policy == "base" else policy.path, "engine": engine}
        | ({"task": task} if task else {})
        | {"method": method, "rho": rho or "none"}
        for policy, engine, task, (method, rho) in product(
            settings.policies, settings.engines, settings.tasks or [None], experiment.estimators
        )
    ]


def variance_places(experiment: Experiment) -> list[dict[str, str]]:
    """List the coordinates of all that is measured by position: those of `estimator_places`, and position."""
    return [
        where | {"position": position}
        for where in estimator_places(experiment)
        for position in [WHOLE, *experiment.positions]
    ]


def evaluated(experiment: Experiment, point: GridPoint) -> list[int]:
    """List the training steps at which there is a score; the first is 0, the base model."""
    return [0, *experiment.evaluated_steps(point), experiment.training_of(point).steps]
