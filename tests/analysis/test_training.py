"""Statistics of training runs."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_up_results import Results, make_experiment, training_part

from dvp.analysis.training import over_seeds


def test_the_interval_over_three_seeds_is_students():
    # t with two degrees of freedom: 4.3027 at 97.5 %.
    mean, low, high = over_seeds([1.0, 2.0, 6.0], logarithmic=False)
    reach = 4.302653 * math.sqrt(7.0) / math.sqrt(3.0)
    assert mean == pytest.approx(3.0)
    assert (low, high) == (pytest.approx(3.0 - reach, rel=1e-5), pytest.approx(3.0 + reach, rel=1e-5))


@given(st.lists(st.floats(1e-6, 1e6), min_size=2, max_size=6))
def test_the_logarithmic_interval_holds_the_geometric_mean_and_stays_positive(values):
    mean, low, high = over_seeds(values, logarithmic=True)
    assert mean == pytest.approx(math.exp(np.mean(np.log(values))))
    assert 0 <= low <= mean * (1 + 1e-9)
    assert mean * (1 - 1e-9) <= high


@pytest.mark.parametrize("values", [[1.0, 0.0], [1.0, -1.0], [1.0, math.nan]])
def test_a_logarithm_that_is_not_defined_gives_no_number(values):
    assert all(math.isnan(one) for one in over_seeds(values, logarithmic=True))


def test_one_seed_has_no_interval():
    mean, low, high = over_seeds([2.0], logarithmic=False)
    assert mean == 2.0
    assert math.isnan(low)
    assert math.isnan(high)


def test_growth_is_not_told_where_first_and_last_steps_are_the_same(tmp_path):
    experiment = make_experiment(training__steps=19)
    results = Results(experiment, tmp_path)
    found, _ = training_part(experiment, results.folder)
    assert "final_k3" in {one.name for one in found}
    assert "k3_growth" not in {one.name for one in found}


def test_it_is_said_between_which_policies_a_kl_is(tmp_path):
    experiment = make_experiment()
    results = Results(experiment, tmp_path)
    found, _ = training_part(experiment, results.folder)
    of = {(one.where["method"], one.name): one.how for one in found}
    assert "minus that of rloo_mis on the same engine" in of["dvp_mis", "score_over_unpruned"]
    assert ("rloo_mis", "score_over_unpruned") not in of
    assert not [name for _, name in of if name == "score_over_rloo"]
    assert of["dvp", "final_k3"].startswith("between the pruned policies")
    assert of["rloo", "final_k3"].startswith("between the full policies")
    assert "not over training seeds" in of["rloo", "score"]  # two of them


def test_every_grid_point_has_every_statistic_once_from_its_own_files(tmp_path):
    experiment = make_experiment()
    results = Results(experiment, tmp_path)
    found, tables = training_part(experiment, results.folder)
    rows = tables["main_table"].rows
    names = {"score", "final_k3", "k3_growth", "final_gradient_norm", "final_reward", "collapsed"}
    for point in experiment.points:
        own = {one.name: one for one in found if all(point.path in source for source in one.sources)}
        assert set(own) == (names if point.rho is None else names | {"final_pruned_mass"})
        assert own["score"] == rows[point.path]["score"]
        assert own["collapsed"].value == 0
        assert len(own["final_k3"].sources) == len(experiment.seeds)
    changes = [one for one in found if one.name == "score_change_percent"]
    assert len(changes) == len(experiment.points) - 1
    for one in changes:  # of the point and of the reference, each seed's
        assert len(set(one.sources)) == 2 * len(experiment.seeds)
        assert sum("method~rloo/engine~coarse" in source for source in one.sources) == len(experiment.seeds)
    pruned = [one for one in found if one.name == "score_over_unpruned"]
    assert [one.where["rho"] for one in pruned] == [point.rho for point in experiment.points if point.rho is not None]
    [base] = [one for one in found if one.where["method"] == "base"]
    assert base.name == "score"
    # Each comparison has the smallest effect that it could have shown.
    seen = [one.where for one in found if one.name == "smallest_change_percent"]
    assert seen == [one.where for one in changes]
    assert [one.where for one in found if one.name == "smallest_effect"] == [one.where for one in pruned]
    assert len(found) == 1 + len(experiment.points) * len(names) + 2 * len(changes) + 3 * len(pruned)


def test_a_baseline_is_compared_with_rloo_under_the_same_correction(tmp_path):
    """MIS helps here, and OTB does nothing: against naive RLOO, OTB + MIS would look as if it did."""
    grid = [{"method": ["rloo", "rloo_mis", "otb", "otb_mis"], "engine": "coarse"}]
    experiment = make_experiment(grid=grid, seeds=[0, 1, 2])
    results = Results(experiment, tmp_path, problems=8)
    k = experiment.evaluation.samples_per_problem["held_out"]
    for run in experiment.runs:
        right = k // 2 if run.method in ("rloo", "otb") else k // 2 + 1
        results.write_evaluation(run, np.tile(np.arange(k) < right, (8, 1)))
    found, _ = training_part(experiment, results.folder)
    over = {one.where["method"]: one for one in found if one.name == "score_over_rloo"}
    assert {method: one.value for method, one in over.items()} == {"otb": 0.0, "otb_mis": 0.0}
    assert "minus that of rloo_mis on the same engine" in over["otb_mis"].how
    [change] = [one for one in found if (one.name, one.where["method"]) == ("score_change_percent", "otb_mis")]
    assert change.value > 0
