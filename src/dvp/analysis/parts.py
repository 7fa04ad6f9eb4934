"""Of which parts the report of an experiment consists; each is drawn by a rule of its own."""

from dvp.experiment.config import Experiment

FEWEST_RHOS = 3


def parts(experiment: Experiment) -> list[str]:
    """training: scores and curves of the grid; mismatch and bias: the measurements at fixed policies; sweep: over ρ."""
    asked = {
        "training": True,
        "mismatch": experiment.mismatch is not None,
        "bias": experiment.bias is not None,
        "sweep": bool(swept(experiment)),
    }
    return [name for name, wanted in asked.items() if wanted]


def swept(experiment: Experiment) -> dict[tuple[str, str], list[str]]:
    """The ρ that are trained of every sweep, by method and engine: three or more are measured at the base policy."""
    if experiment.bias is None or "base" not in experiment.bias.policies:
        return {}
    trained: dict[tuple[str, str], list[str]] = {}
    for run in experiment.runs:
        rhos = trained.setdefault((run.method, run.engine), [])
        if run.rho is not None and run.rho not in rhos:
            rhos.append(run.rho)
    return {
        (method, engine): rhos
        for (method, engine), rhos in trained.items()
        if engine in experiment.bias.engines
        and sum((method, rho) in experiment.estimators for rho in rhos) >= FEWEST_RHOS
    }
