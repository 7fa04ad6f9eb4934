"""Combine the reports of several base models: means over them, with intervals over them, and tests of differences."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

from dvp.analysis.estimates import over_seeds, t_over_seeds
from dvp.analysis.hypotheses import equivalence_test, holm, log_odds, t_test
from dvp.analysis.matrix import compared_samplers
from dvp.analysis.points import partner, where_of
from dvp.analysis.statistics import Statistic, lookup, without_interval
from dvp.experiment.config import Experiment
from dvp.experiment.grid import GridPoint

# Quantities that mean the same for every base model, and whose interval within one is over its problems and seeds.
QUANTITIES = (
    *("score", "pass_at_k", "maj_at_k", "score_change_percent"),
    *("score_over_reference", "score_over_unpruned", "score_over_rloo"),
    *("score_by_policy", "score_over_reference_by_policy", "score_over_unpruned_by_policy"),
    *("final_k3", "final_reward", "kept"),
)
OF_EACH = ("score", "score_over_reference", "score_over_unpruned")  # also of each base model, as seed_NAME
Sources = tuple[str, ...]


def folders(experiment: Experiment, folder: Path) -> list[Path]:
    """Return the folders of the experiments with one base model each, which lie beside the one of all, `folder`."""
    return [folder.parent / name for name in experiment.of_bases]


class BaseModels:
    """The statistics of several base models, and what they say together.

    An interval covers everything in which base models differ: weights, runs, and problems if they have their own. It is
    made from their values alone.
    """

    def __init__(self, experiment: Experiment, measured: list[list[Statistic]]):
        """Index the statistics of each base model, in the order of `experiment.bases`."""
        self.experiment, self._first = experiment, measured[0]
        self._known = list(map(lookup, measured))

    def means(self) -> Iterator[Statistic]:
        """Yield QUANTITIES as means over base models with t intervals, and those in OF_EACH also of each."""
        for first in self._first:
            each = self._each(first.name, first.where) if first.name in QUANTITIES else None
            if each is None:
                continue
            values, sources = [one.value for one in each], self._sources(each)
            yield self._mean(first.name, first.where, values, first.unit, sources)
            for base, value in zip(self.experiment.bases, values, strict=True) if first.name in OF_EACH else ():
                where = first.where | {"seed": str(base)}
                yield without_interval(f"seed_{first.name}", where, value, first.unit, "mean of its seeds", sources)

    def tests(self) -> Iterator[Statistic]:
        """Yield differences of log-odds between points, and p-values of tests that they are 0.

        log_odds_over_reference and log_odds_over_unpruned: the mean over base models of ln(s / (1 − s)) at the point's
        score minus that at the score of its partner. p_over_reference and p_over_unpruned: of its t test. The same of
        every policy, _by_policy. adjusted_p_over_reference: of the points in report.primary, by Holm's procedure.
        equivalence_p_over_unpruned: that the difference of scores lies within ± report.equivalent_within.
        """
        report, primary = self.experiment.report, []
        for point, pairing in product(self.experiment.points, ("reference", "unpruned")):
            if (other := partner(self.experiment, point, pairing)) is None:
                continue
            for suffix, where, *scores in self._compared(point, other, pairing):
                mine, its = (self._each(*score) for score in scores)
                if mine is None or its is None:
                    continue
                values = [log_odds(one.value) - log_odds(two.value) for one, two in zip(mine, its, strict=True)]
                sources = tuple(dict.fromkeys(self._sources(mine) + self._sources(its)))
                yield self._mean(f"log_odds_over_{pairing}{suffix}", where, values, "log-odds", sources)
                tested = self._p(f"p_over_{pairing}{suffix}", where, t_test(values), "log-odds, two-sided", sources)
                yield tested
                primary += [tested] if tested.name == "p_over_reference" and point in report.primary else []
            each = self._each("score_over_unpruned", where_of(self.experiment, point))
            if pairing == "unpruned" and report.equivalent_within is not None and each is not None:
                p = equivalence_test([one.value for one in each], report.equivalent_within / 100)
                how = f"scores, two one-sided, within ± {report.equivalent_within:g} pp"
                yield self._p("equivalence_p_over_unpruned", each[0].where, p, how, self._sources(each))
        for tested, p in zip(primary, holm([one.value for one in primary]), strict=True):
            how = f"{tested.how}; Holm's procedure over {len(primary)} primary differences"
            yield replace(tested, name="adjusted_p_over_reference", value=p, how=how)

    def _compared(self, point: GridPoint, other: GridPoint, pairing: str) -> Iterator[tuple]:
        """Yield suffix and coordinates of each difference of two points, and name and coordinates of both scores."""
        where, its_where = (where_of(self.experiment, one) for one in (point, other))
        yield "", where, ("score", where), ("score", its_where)
        for where, *samplers in compared_samplers(self.experiment, point, other, pairing):
            models = zip((point, other), samplers, strict=True)
            scores = [("score_by_policy", where_of(self.experiment, *model)) for model in models]
            yield "_by_policy", where, *scores

    def _each(self, name: str, where: dict[str, str]) -> list[Statistic] | None:
        """Return a statistic of every base model; None if one lacks it."""
        found = [known(name, where) for known in self._known]
        return None if None in found else found

    def _sources(self, each: list[Statistic]) -> tuple[str, ...]:
        named = zip(self.experiment.of_bases, each, strict=True)
        return tuple(f"../{name}/{file}" for name, one in named for file in one.sources)

    def _mean(self, name: str, where: dict[str, str], values: list[float], unit: str, sources: Sources) -> Statistic:
        return Statistic(name, where, *over_seeds(values), unit, t_over_seeds(self.experiment), sources)

    def _p(self, name: str, where: dict[str, str], p: float, how: str, sources: Sources) -> Statistic:
        return without_interval(name, where, p, "p-value", f"t test, {how}; {len(self._known)} base models", sources)
