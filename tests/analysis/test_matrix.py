"""Scores by policy: which model was sampled with what, what is compared with what, which policy is a model's own."""

import numpy as np
import pytest
from made_up_results import Results, make_experiment

from dvp.analysis.load import Reader
from dvp.analysis.matrix import statistics
from dvp.analysis.samplers import own_sampler
from dvp.analysis.statistics import lookup
from dvp.experiment.grid import GridPoint, Sampler

pytestmark = pytest.mark.slow

ALSO = [{"engine": "training"}, {"engine": "training", "rho": "own"}, {"rho": "own"}]
RHO = "0.01"
NAIVE, MIS = (GridPoint(method=method, engine="coarse") for method in ("rloo", "rloo_mis"))
DVP, DVP_MIS = (GridPoint(method=method, engine="coarse", rho=RHO) for method in ("dvp", "dvp_mis"))
CONTROL = GridPoint(method="rloo", engine="fp32")


@pytest.fixture(scope="module")
def asked():
    return make_experiment(
        seeds=[0, 1, 2], training__steps=2, evaluation__bootstrap_resamples=200, evaluation__also=ALSO
    )


@pytest.fixture
def written(asked, tmp_path):
    return Results(asked, tmp_path)


def test_a_correction_trains_the_trainers_policy_and_dvp_the_pruned_one(asked):
    assert own_sampler(asked, NAIVE) == Sampler(engine="coarse")
    assert own_sampler(asked, MIS) == Sampler(engine="fp32")
    assert own_sampler(asked, DVP) == Sampler(engine="coarse", rho=RHO)
    assert own_sampler(asked, DVP_MIS) == Sampler(engine="fp32", rho=RHO)
    assert own_sampler(asked, CONTROL) == Sampler(engine="fp32")
    for rule in ("dvp_mass", "dvp_margin"):
        assert own_sampler(asked, GridPoint(method=rule, engine="coarse")) is None


def test_statistics_by_hand(asked, written):
    """Of each model and sampler so many of twelve problems are right, always the same of a kind."""
    right = {
        (NAIVE, "fp32", None): 3,
        (NAIVE, "coarse", None): 5,
        (NAIVE, "coarse", RHO): 7,
        (MIS, "fp32", None): 6,
        (MIS, "coarse", None): 2,
        (DVP, "fp32", None): 1,
        (DVP, "coarse", None): 4,
        (DVP, "coarse", RHO): 9,
        (DVP_MIS, "fp32", RHO): 11,
    }
    k = asked.evaluation.samples_per_problem["held_out"]
    for (point, engine, rho), count in right.items():
        sampler = Sampler(engine=engine, rho=rho)
        for seed in asked.seeds:
            correct = np.repeat(np.arange(12) < count, k).reshape(12, k)
            written.write_evaluation(point.run(seed), correct, None if sampler == asked.sampler else sampler)
    measured = list(statistics(asked, Reader(asked, written.folder)))
    known = lookup(measured)

    def of(name, point, engine, rho):
        place = {"method": point.method, "engine": point.engine, "rho": point.rho or "none"}
        return known(name, place | {"evaluated_on": engine, "evaluated_rho": rho or "none"})

    for (point, engine, rho), count in right.items():
        assert of("score_by_policy", point, engine, rho).value == pytest.approx(count / 12)
    unpruned = "score_over_unpruned_by_policy"
    for (point, engine, rho), difference in {
        (DVP, "fp32", None): 1 - 3,  # both on the exact engine from the full vocabulary, as in the main table
        (DVP, "coarse", None): 4 - 5,
        (DVP, "coarse", RHO): 9 - 7,  # beside what ρ at evaluation alone does
        (DVP, "coarse", "own"): 9 - 5,
        (DVP, "own", "own"): 9 - 5,
        (DVP_MIS, "own", "own"): 11 - 6,  # the trainer's pruned policy, and the trainer's
    }.items():
        statistic = of(unpruned, point, engine, rho)
        assert statistic.value == pytest.approx(difference / 12)
        assert statistic.low <= statistic.value <= statistic.high
        assert len(statistic.sources) == 2 * len(asked.seeds)
    reference = "score_over_reference_by_policy"
    assert of(reference, MIS, "fp32", None).value == pytest.approx((6 - 3) / 12)
    assert of(reference, MIS, "coarse", None).value == pytest.approx((2 - 5) / 12)
    assert of(reference, MIS, "own", "own").value == pytest.approx((6 - 5) / 12)
    assert of(reference, NAIVE, "coarse", None) is None
    places = [(statistic.name, tuple(statistic.where.items())) for statistic in measured]
    assert len(set(places)) == len(places)
