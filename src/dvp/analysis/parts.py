"""Of which parts the report of an experiment consists; each is drawn by a rule of its own."""

from dvp.experiment.config import Experiment
from dvp.experiment.data import GeneratedSource
from dvp.experiment.grid import GridPoint

FEWEST_RHOS = 3


def parts(experiment: Experiment) -> list[str]:
    """training: scores of the grid; matrix: under several policies; diversity: different solutions, of problems
    that can have several; curve: along training.

    mismatch, bias: at fixed policies; variance: of gradients, by position, where the measurements of `bias` have it;
    bias_length: over the length of responses, where they are made with several tasks.
    """
    asked = {
        "training": True,
        "matrix": bool(experiment.further_evaluations),
        "diversity": several_solutions(experiment),
        "curve": bool(experiment.snapshots),
        "mismatch": experiment.mismatch is not None,
        "bias": experiment.bias is not None,
        "variance": bool(experiment.positions),
        "bias_length": experiment.bias is not None and len(experiment.bias.tasks) > 1,
    }
    return [name for name, wanted in asked.items() if wanted]


def swept(experiment: Experiment) -> dict[GridPoint, list[str]]:
    """The ρ that are trained of every sweep, a grid point without ρ: three or more are measured at the base policy."""
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
    """Whether the problems of report.task can have several solutions, of which each is right."""
    data, task = experiment.data, experiment.report.task
    source = experiment.sources[data.train if task == "held_out" else task]
    return isinstance(source, GeneratedSource) and source.several_solutions
