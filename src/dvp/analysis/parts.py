"""Of which parts the report of an experiment consists; each is drawn by a rule of its own."""

from dvp.config import Experiment

FEWEST_RHOS = 3


def parts(experiment: Experiment) -> list[str]:
    """training: scores and curves of the grid; mismatch and bias: the measurements at fixed policies; sweep: over ρ."""
    asked = {
        "training": True,
        "mismatch": experiment.diagnose is not None,
        "bias": experiment.bias is not None,
        "sweep": bool(swept(experiment)),
    }
    return [name for name, wanted in asked.items() if wanted]


def swept(experiment: Experiment) -> list[tuple[str, str, list[str]]]:
    """Method, engine and the values of ρ of every sweep: trained, and at three or more measured at the base policy."""
    if experiment.bias is None or "base" not in experiment.bias.policies:
        return []
    result = []
    for entry in experiment.grid:
        for method in entry.method:
            measured = [rho for name, rho in experiment.estimators if name == method]
            rhos = [rho for rho in entry.rho or [] if rho in measured]
            if len(rhos) >= FEWEST_RHOS:
                result += [(method, engine, rhos) for engine in entry.engine if engine in experiment.bias.engines]
    return result
