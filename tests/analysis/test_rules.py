"""The rules of claims ask for numbers that their experiments measure: hours of runs answer them, or nothing."""

from pathlib import Path

import pytest
from made_up_bias import write_cell
from made_up_results import CLAIMS, CONFIG, Results

from dvp.analysis.claims import load_file
from dvp.analysis.evidence import MISSING, Report, _answer_condition
from dvp.analysis.load import Reader
from dvp.analysis.parts import parts
from dvp.analysis.report import Part, measure
from dvp.experiment.loading import load_experiment, parse_experiment, read_yaml

pytestmark = pytest.mark.slow
EVIDENCE = read_yaml(CONFIG / "config.yaml")["evidence"]
ASKED = [condition for claim in load_file(CLAIMS).claims for condition in claim.conditions]
TRAINED = [
    *("otb_groups_short", "otb_groups_equal", "otb_groups_between", "otb_groups_long", "otb_single", "otb_tools"),
    *("otb_mismatch", "noise_collapse", "staleness"),
]
BY_POLICY = [
    *("evaluation_matrix", "tiny_replay", "noise_tail", "noise_dial", "noise_dial_tail", "remedies", "remedies_sets"),
    *("adaptive_rho", "surrogates", "surrogates_gspo", "horizon", "horizon_coarse", "natural_tail"),
    *("diversity_paths", "diversity_colors"),
]
VARIANCE = ["otb_variance", "otb_variance_long"]


@pytest.mark.parametrize("name", [*TRAINED, *BY_POLICY, *VARIANCE])
def test_each_condition_fits_one_statistic(name, tmp_path):
    """Of the experiment as it is shipped, with two seeds and few resamples; scores by policy after two steps."""
    value = load_experiment(EVIDENCE[name], CONFIG).model_dump(mode="json")
    value["seeds"] = [0, 1]
    value["evaluation"]["bootstrap_resamples"] = 100
    if name in BY_POLICY:
        value["training"]["steps"] = 2
    if name in VARIANCE:
        value["bias"] |= {"policies": ["base"], "batches": 24, "reference_batches": 48}
    experiment = parse_experiment(value, Path("test.yaml"))
    if name in VARIANCE:
        wanted = ["variance"]
        for measurement in experiment.measurements("bias"):
            write_cell(experiment, tmp_path, measurement)
    else:
        wanted = {"training", "matrix", "diversity", "curve"} & set(parts(experiment))
        Results(experiment, tmp_path, problems=3)
    statistics = measure(experiment, Reader(experiment, tmp_path), *wanted)
    report = Report(tmp_path, experiment, Part(statistics, {}, {}))
    asked = [each for each in ASKED if each.experiment == name]
    if name in BY_POLICY:
        asked = [each for each in asked if each.statistic.endswith("_by_policy")]
    assert len(asked) >= 2
    for condition in asked:
        answered = _answer_condition(condition.says, condition, {name: report})
        assert answered["status"] != MISSING, answered["instead"]
