"""Statistics of training runs."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_up_results import Results, make_experiment, training_part

from dvp.analysis.estimates import over_seeds
from dvp.analysis.points import where_of

pytestmark = pytest.mark.slow


@given(st.lists(st.floats(1e-6, 1e6), min_size=2, max_size=6))
def test_the_logarithmic_interval_holds_the_geometric_mean_and_stays_positive(values):
    mean, low, high = over_seeds(values, logarithmic=True)
    assert mean == pytest.approx(math.exp(np.mean(np.log(values))))
    assert 0 <= low <= mean * (1 + 1e-9)
    assert mean * (1 - 1e-9) <= high


@pytest.mark.parametrize("values", [[1.0, 0.0], [1.0, -1.0], [1.0, math.nan]])
def test_a_logarithm_that_is_not_defined_gives_no_number(values):
    assert all(math.isnan(one) for one in over_seeds(values, logarithmic=True))


def test_growth_is_not_told_where_first_and_last_steps_are_the_same(tmp_path):
    experiment = make_experiment(training__steps=19)
    results = Results(experiment, tmp_path)
    found, _ = training_part(experiment, results.folder)
    assert "final_k3" in {one.name for one in found}
    assert "k3_growth" not in {one.name for one in found}


def test_every_grid_point_has_every_statistic_once_from_its_own_files(tmp_path):
    experiment = make_experiment()
    found, tables = training_part(experiment, Results(experiment, tmp_path).folder)
    places = [(one.name, *one.where.values()) for one in found]
    assert len(places) == len(set(places))
    for point in experiment.points:
        own = {one.name: one for one in found if one.where == where_of(experiment, point)}
        assert {"final_k3", "k3_growth", "final_reward", "collapsed", "kept", "sampled_tokens"} <= set(own)
        assert ("final_pruned_mass" in own) == ("score_over_unpruned" in own) == (point.rho is not None)
        assert ("score_over_reference" in own) == (point != experiment.reference_point)
        assert own["score"] == tables["main_table"].rows[point.path]["score"]
        assert own["collapsed"].value == 0
        assert len(own["final_k3"].sources) == len(experiment.seeds)
        # Each comparison has the smallest effect that it could have shown, and is of both points' files.
        for name, smallest in (
            ("score_over_reference", "smallest_change_percent"),
            ("score_over_unpruned", "smallest_effect"),
        ):
            assert (name in own) == (smallest in own)
            assert name not in own or len(set(own[name].sources)) == 2 * len(experiment.seeds)


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


def test_the_end_of_training_by_hand(tmp_path):
    """Of 12 steps the last ten, over three seeds; the pruned run's k3 between the full policies is another number."""
    grid = [{"method": "rloo", "engine": "coarse"}, {"method": "dvp", "engine": "coarse", "rho": "0.01"}]
    experiment = make_experiment(grid=grid, seeds=[0, 1, 2], training__steps=12, evaluation__bootstrap_resamples=100)
    results, point = Results(experiment, tmp_path, problems=4), experiment.points[1]
    for seed in experiment.seeds:
        rows = results.metrics(point.run(seed), np.random.default_rng(seed))
        for row in rows:
            late = row["step"] > 2
            row["masked_fraction"] = 0.25 + 0.05 * seed if late else 0.9
            row["k3"] = 10.0 ** -(2 + seed) if late else 1.0
            row["unpruned_k3"] = 3 * row["k3"]
            row["seconds"] = 1.5 * 2.0**seed if late else 60.0
        results.write_training(point.run(seed), rows, collapsed_at=9 if seed == 2 else None)
    found = [one for one in training_part(experiment, tmp_path)[0] if one.where == where_of(experiment, point)]
    own = {one.name: one for one in found}
    expected = {"final_k3": 1e-3, "k3_full": 3e-3, "seconds_per_step": 3.0}  # geometric means
    expected |= {"kept": 0.70, "collapsed_runs": 1, "collapsed": 1 / 3}
    assert {name: own[name].value for name in expected} == pytest.approx(expected)
    # 0.75, 0.70 and 0.65 on the logit scale: a standard error of 0.05 / sqrt(3), and t of two degrees of freedom.
    odds = 0.70 / 0.30 * np.exp(4.302653 * 0.05 / 3**0.5 / (0.70 * 0.30))
    assert own["kept"].high == pytest.approx(odds / (1 + odds), rel=1e-5)


def test_how_far_both_moved_is_there_by_step(tmp_path):
    experiment = make_experiment(seeds=[3], training__steps=19)

    class Drifting(Results):
        def metrics(self, run, rng):
            """Measured at steps 1 and 10; not in the others' rows."""
            rows = super().metrics(run, rng)
            for step in (1, 10):
                for name in ("trainer", "engine", "apart", "share"):
                    rows[step - 1] |= {f"drift_{name}": 0.01 * step, f"drift_{name}_se": 0.001}
            return rows

    found, _ = training_part(experiment, Drifting(experiment, tmp_path).folder)
    point = experiment.points[0]
    apart = [
        one for one in found if one.name == "drift_apart" and one.where.items() >= where_of(experiment, point).items()
    ]
    assert [(one.where["seed"], one.where["step"], one.value) for one in apart] == [("3", "1", 0.01), ("3", "10", 0.1)]
    assert (apart[1].low, apart[1].high) == pytest.approx((0.1 - 0.00196, 0.1 + 0.00196), abs=1e-6)


def test_a_problem_counts_as_mixed_whose_samples_are_neither_all_right_nor_all_wrong(tmp_path):
    experiment = make_experiment()
    results = Results(experiment, tmp_path)
    correct = np.zeros((4, 8), dtype=bool)
    correct[1, :3] = correct[2] = correct[3, 7] = True  # none, three, all, one of eight
    results.write_evaluation(None, correct)
    found, _ = training_part(experiment, results.folder)
    [base] = [one for one in found if one.name == "mixed_at_k" and one.where == where_of(experiment, None)]
    assert base.value == 0.5
    assert base.low < 0.5 < base.high
