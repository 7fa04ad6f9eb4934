"""Combine experiments that differ in the base model: means over them, with intervals over them."""

from collections.abc import Iterator
from pathlib import Path

from dvp.analysis.estimates import over_seeds, t_over_seeds
from dvp.analysis.statistics import Statistic, lookup, without_interval
from dvp.experiment.config import Experiment

# Quantities that mean the same for every base model, and whose interval within one is over its problems and seeds.
QUANTITIES = (
    *("score", "pass_at_k", "maj_at_k", "score_change_percent"),
    *("score_over_reference", "score_over_unpruned", "score_over_rloo"),
    *("final_k3", "final_reward", "kept"),
)
OF_EACH = ("score", "score_over_reference", "score_over_unpruned")  # also per replicate, as seed_NAME


def folders(experiment: Experiment, folder: Path) -> list[Path]:
    """Return the folders of an experiment's replicates, which lie beside its own, `folder`."""
    return [folder.parent / name for name in experiment.replicates]


def across(experiment: Experiment, measured: list[list[Statistic]]) -> Iterator[Statistic]:
    """Yield QUANTITIES as means over the replicates with t intervals, and those in OF_EACH also per replicate.

    An interval covers everything in which replicates differ: base models, runs, and problems if they have their own. It
    is made from the replicates' values alone.

    Args:
        measured: the statistics of each replicate, in the order of `experiment.replicates`.
    """
    each = list(map(lookup, measured))
    for first in measured[0]:
        found = [known(first.name, first.where) for known in each]
        if first.name not in QUANTITIES or None in found:
            continue
        values = [one.value for one in found]
        sources = tuple(
            f"../{name}/{file}" for name, one in zip(experiment.replicates, found, strict=True) for file in one.sources
        )
        yield Statistic(first.name, first.where, *over_seeds(values), first.unit, t_over_seeds(experiment), sources)
        for seed, value in zip(experiment.seeds, values, strict=True) if first.name in OF_EACH else ():
            where = first.where | {"seed": str(seed)}
            yield without_interval(f"seed_{first.name}", where, value, first.unit, "mean of its seeds", sources)
