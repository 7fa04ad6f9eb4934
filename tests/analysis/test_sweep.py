"""What the report makes of a sweep over ρ."""

from pathlib import Path

import numpy as np
import pytest
from made_up_bias import write_cell
from made_up_results import CONFIG, Results, measured_of

from dvp.analysis import estimates
from dvp.analysis.parts import swept
from dvp.analysis.training import middle
from dvp.experiment.grid import GridPoint
from dvp.experiment.loading import load_experiment, parse_experiment

pytestmark = pytest.mark.slow

RHOS = ["exp(-17)", "exp(-13)", "0.0001", "0.001", "0.01", "0.03", "0.1", "0.3"]  # as experiments write them
CURVE = GridPoint(method="dvp_mis", engine="coarse")


def experiment_of():
    value = load_experiment("rho_sweep", CONFIG).model_dump(mode="json")
    value["bias"] |= {"batches": 24, "reference_batches": 48}
    value["evaluation"]["bootstrap_resamples"] = 200
    return parse_experiment(value, Path("test.yaml"))


def make_all(experiment, folder):
    """Of DVP + MIS all is right at the middle three ρ, nothing at the largest, half of the problems at the smallest."""
    results = Results(experiment, folder)
    k = experiment.evaluation.samples_per_problem["held_out"]
    for run in experiment.runs:
        if run.method == "dvp_mis":
            right = np.full((results.problems, k), run.rho in middle(RHOS))
            right[::2] |= run.rho == "exp(-17)"
            results.write_evaluation(run, right)
    for measurement in experiment.measurements("bias"):
        write_cell(experiment, results.folder, measurement)
    return results


@pytest.fixture(scope="module")
def experiment():
    return experiment_of()


@pytest.fixture(scope="module")
def results(experiment, tmp_path_factory):
    return make_all(experiment, tmp_path_factory.mktemp("results"))


@pytest.fixture(scope="module")
def measured(experiment, results):
    estimates._draws.cache_clear()
    part = measured_of(experiment, results.folder, "training")
    assert estimates._draws.cache_info().misses == 1
    return part


def test_what_is_trained_and_measured_at_three_rhos_is_a_sweep(experiment):
    assert {curve: set(rhos) for curve, rhos in swept(experiment).items()} == {CURVE: set(RHOS)}


def with_grid(experiment, *entries):
    value = experiment.model_dump(mode="json")
    value["grid"] = [one for one in value["grid"] if one["method"] != ["dvp_mis"]] + list(entries)
    return parse_experiment(value, Path("test.yaml"))


def test_a_sweep_may_be_written_in_several_lines_and_trained_at_more_rhos_than_are_measured(experiment):
    lines = [{"method": ["dvp_mis"], "engine": ["coarse"], "rho": rhos} for rhos in (RHOS[:4], [*RHOS[4:], "exp(-20)"])]
    assert swept(with_grid(experiment, *lines)) == {CURVE: [*RHOS, "exp(-20)"]}


def test_training_settings_make_sweeps_of_their_own(experiment, tmp_path):
    both = with_grid(
        experiment,
        {"method": ["dvp_mis"], "engine": ["coarse"], "rho": RHOS[:3], "training": {"group_size": [4, 8]}},
    )
    small, large = (CURVE.model_copy(update={"training": {"group_size": size}}) for size in (4, 8))
    assert swept(both) == {small: RHOS[:3], large: RHOS[:3]}
    made = measured_of(both, Results(both, tmp_path).folder, "training")
    assert [one.where for one in made.statistics if one.name == "score_over_small_rho"] == [
        {"method": "dvp_mis", "engine": "coarse", "group_size": size} for size in ("4", "8")
    ]


def test_the_middle_does_not_depend_on_the_order():
    assert middle(RHOS[::-1]) == ["0.0001", "0.001", "0.01"]
    assert middle(["0.1", "0.3", "exp(-17)"]) == ["exp(-17)", "0.1", "0.3"]


def test_the_middle_is_held_against_both_ends(experiment, results, measured):
    small, large = (one for one in measured.statistics if one.name in ("score_over_small_rho", "score_over_large_rho"))
    assert small.value == 0.5
    assert small.low < 0.5 < small.high
    assert (large.value, large.low, large.high) == (1.0, 1.0, 1.0)
    for one, end in ((small, "exp(-17)"), (large, "0.3")):
        assert one.where == {"method": "dvp_mis", "engine": "coarse"}
        asked = {GridPoint(method="dvp_mis", engine="coarse", rho=rho) for rho in (*middle(RHOS), end)}
        runs = {point.run(seed).path for point in asked for seed in experiment.seeds}
        assert set(one.sources) == {f"evals/{run}/held_out/scores.json" for run in runs}
