"""The rules of claims ask for numbers that their experiments measure: hours of runs answer them, or nothing.

Those that ask for scores by policy are in test_matrix.py.
"""

from pathlib import Path

import pytest
from made_up_bias import write_cell
from made_up_results import CLAIMS, CONFIG, Results, training_part

from dvp.analysis import curve, variance
from dvp.analysis.claims import load_claims
from dvp.analysis.evidence import MISSING, _answer_condition
from dvp.analysis.load import Reader
from dvp.experiment.loading import load_experiment, parse_experiment, read_yaml

pytestmark = pytest.mark.slow
EVIDENCE = read_yaml(CONFIG / "config.yaml")["evidence"]
ASKED = [
    condition
    for claim in load_claims(CLAIMS).values()
    for condition in claim.conditions
    if not condition.statistic.endswith("_by_policy")
]


def shipped(name: str, **bias):
    """The experiment as it is shipped, with two seeds and few resamples, and changes to its `bias`."""
    value = load_experiment(EVIDENCE[name], CONFIG).model_dump(mode="json")
    value["seeds"] = [0, 1]
    value["evaluation"]["bootstrap_resamples"] = 100
    if bias:
        value["bias"] |= bias
    return parse_experiment(value, Path("test.yaml"))


def check(name: str, statistics: list) -> None:
    conditions = [condition for condition in ASKED if condition.experiment == name]
    assert len(conditions) >= 2
    report = {"statistics": [vars(statistic) for statistic in statistics], "measured": {}, "earlier": None}
    for condition in conditions:
        answered = _answer_condition(condition.says, condition, {condition.experiment: report})
        assert answered["status"] != MISSING, answered["instead"]


@pytest.mark.parametrize(
    "name",
    [
        "otb_groups_short",
        "otb_groups_equal",
        "otb_groups_between",
        "otb_groups_long",
        "otb_single",
        "otb_tools",
        "otb_mismatch",
        "noise_collapse",
        "staleness",
    ],
)
def test_each_condition_on_training_fits_one_statistic(name, tmp_path):
    experiment = shipped(name)
    Results(experiment, tmp_path, problems=3)
    statistics, _ = training_part(experiment, tmp_path)
    if experiment.evaluation.at is not None:
        statistics += curve.statistics(experiment, Reader(experiment, tmp_path))
    check(name, statistics)


@pytest.mark.parametrize("name", ["otb_variance", "otb_variance_long"])
def test_each_condition_on_the_variance_fits_one_statistic(name, tmp_path):
    experiment = shipped(name, policies=["base"], batches=24, reference_batches=48)
    for measurement in experiment.measurements("bias"):
        write_cell(experiment, tmp_path, measurement)
    check(name, list(variance.statistics(experiment, Reader(experiment, tmp_path))))


def test_no_experiment_of_otb_is_left_out():
    asked = {condition.experiment for condition in ASKED}
    assert {name for name in EVIDENCE if name.startswith("otb_")} <= asked
