"""The parts of an experiment's report, each with statistics and tables of its own."""

from dvp.experiment.config import Experiment
from dvp.experiment.data import GeneratedSource
from dvp.experiment.grid import GridPoint

FEWEST_RHOS = 3


def parts(experiment: Experiment) -> list[str]:
    """List the parts that an experiment's report has.

    training: scores of the grid; matrix: scores under several policies; overview: both by method, of one base model;
    diversity: different solutions, if problems can have several; curve: scores along training; bases: tests over base
    models, if there are several; mismatch, bias: measurements at fixed policies; variance: of gradients by position, if
    `bias` measures it; bias_length: bias over the length of responses, if `bias` has several tasks.
    """
    asked = {
        "training": True,
        "matrix": bool(experiment.further_evaluations),
        "overview": bool(experiment.further_evaluations) and not experiment.bases,
        "diversity": several_solutions(experiment),
        "curve": bool(experiment.snapshots),
        "bases": bool(experiment.bases),
        "mismatch": experiment.mismatch is not None,
        "bias": experiment.bias is not None,
        "variance": bool(experiment.positions),
        "bias_length": experiment.bias is not None and len(experiment.bias.tasks) > 1,
    }
    return [name for name, wanted in asked.items() if wanted]


def swept(experiment: Experiment) -> dict[GridPoint, list[str]]:
    """Return the trained ρ of every sweep, keyed by its grid point without ρ.

    A sweep has at least three ρ whose estimators are measured at the base policy, on the engine of training.
    """
    if experiment.bias is None or "base" not in experiment.bias.policies or experiment.bias.tasks:
        return {}
    trained: dict[GridPoint, list[str]] = {}
    for point in experiment.points:
        if point.rho is not None:
            trained.setdefault(point.model_copy(update={"rho": None}), []).append(point.rho)
    return {
        curve: rhos
        for curve, rhos in trained.items()
        if curve.engine in experiment.bias.engines
        and sum((curve.method, rho) in experiment.estimators for rho in rhos) >= FEWEST_RHOS
    }


def several_solutions(experiment: Experiment) -> bool:
    """Return whether the problems of report.task can have several solutions that the verifier accepts."""
    data, task = experiment.data, experiment.report.task
    source = experiment.sources[data.train if task == "held_out" else task]
    return isinstance(source, GeneratedSource) and source.several_solutions and data.reward is None
