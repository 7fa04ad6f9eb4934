"""Steps of training that are evaluated: what may be written, what is then called how, and what depends on it."""

from pathlib import Path

import pytest
from test_axes import experiment, refused

from dvp.errors import DvpError
from dvp.experiment.loading import parse_experiment
from dvp.progress import readable
from dvp.tracking.names import policy_params, policy_title

RLOO = {"method": "rloo", "engine": "fp32"}
LONG = RLOO | {"training": {"steps": [12, 48]}}
PATH = "method~rloo/engine~fp32/rho~none/seed~0"


def test_by_default_only_the_last_weights_are_evaluated_and_nothing_depends_on_it():
    plain, asked = experiment(RLOO), experiment(RLOO, evaluation__at=[1])
    assert plain.snapshots == []
    assert "at" not in plain.model_dump(mode="json")["evaluation"]
    [run] = plain.runs
    for stage in ("prepare", "base", "convert", "evaluate"):
        assert plain.config_hash(stage, run, "held_out") == asked.config_hash(stage, run, "held_out")
    for stage in ("train", "report"):
        assert plain.config_hash(stage, run) != asked.config_hash(stage, run)


@pytest.mark.parametrize(
    ("at", "steps"),
    [
        ([10, 2], {12: [2, 10], 48: [2, 10]}),
        ([12], {12: [], 48: [12]}),
        ({"every": 4}, {12: [4, 8], 48: [4, 8, 12, 16, 20, 24, 28, 32, 36, 40, 44]}),
        ({"every": 5}, {12: [5, 10], 48: [5, 10, 15, 20, 25, 30, 35, 40, 45]}),
        ({"every": 12}, {12: [], 48: [12, 24, 36]}),
        ({"times": 4}, {12: [3, 6, 9], 48: [12, 24, 36]}),
        ({"times": 5}, {12: [2, 5, 7, 10], 48: [10, 19, 29, 38]}),
        ({"times": 12}, {12: [*range(1, 12)], 48: [*range(4, 48, 4)]}),
    ],
)
def test_each_run_has_the_steps_of_its_own_length_and_its_last_is_the_run_itself(at, steps):
    made = experiment(LONG, training__steps=48, report__reference_training={"steps": 12}, evaluation__at=at)
    assert {made.training_of(point).steps: made.evaluated_steps(point) for point in made.points} == steps
    assert parse_experiment(made.model_dump(mode="json"), Path("again.yaml")) == made
    assert [run.step for run in made.snapshots] == [step for own in steps.values() for step in own]


@pytest.mark.parametrize(
    ("at", "message"),
    [
        ([0], "evaluation.at: expected whole numbers from 1 on, found 0"),
        ([-3], "evaluation.at: expected whole numbers from 1 on, found -3"),
        ([1.5], "evaluation.at: expected whole numbers from 1 on, found 1.5"),
        ([True], "evaluation.at: expected whole numbers from 1 on, found True"),
        ([2, 1, 2], "evaluation.at: step 2 is listed twice"),
        (
            {"times": 1},
            "evaluation.at: it has no step but the last, which is evaluated in any case; remove it",
        ),
        ([], "evaluation.at: expected a list of steps, {every: n} or {times: n}, found []"),
        (3, "evaluation.at: expected a list of steps, {every: n} or {times: n}, found 3"),
        ({"each": 3}, "evaluation.at: expected a list of steps, {every: n} or {times: n}, found {'each': 3}"),
        ({"every": 0}, "evaluation.at: expected whole numbers from 1 on, found 0"),
        ({"every": "2"}, "evaluation.at: expected whole numbers from 1 on, found '2'"),
        ([2, 13], f"evaluation.at: step 13 is beyond the last, 12, of {PATH.replace('seed~0', 'steps~12')}"),
        (
            {"every": 2, "times": 3},
            "evaluation.at: expected a list of steps, {every: n} or {times: n}, found {'every': 2, 'times': 3}",
        ),
        (
            {"times": 13},
            f"evaluation.at: 13 times are more than the steps, 12, of {PATH.replace('seed~0', 'steps~12')}",
        ),
        ({"every": 20}, f"evaluation.at: step 20 is beyond the last, 12, of {PATH.replace('seed~0', 'steps~12')}"),
    ],
)
def test_mistakes_are_one_line(at, message):
    assert refused(LONG, training__steps=48, report__reference_training={"steps": 12}, evaluation__at=at) == message


def test_a_step_of_a_run_has_a_path_of_its_own_that_reads_well():
    made = experiment(RLOO, evaluation__at=[2])
    [run], [snapshot] = made.runs, made.snapshots
    assert snapshot.path == f"{PATH}/step~2"
    assert snapshot.after(None) == run == made.policy(PATH)
    assert made.policy(f"{PATH}/step~2") == snapshot
    assert readable(snapshot.path, {"rloo": "RLOO"}) == "RLOO · fp32 · seed 0 · step 2"
    assert policy_title(made, snapshot) == policy_title(made, run) + " · step 2"
    assert policy_params(made, snapshot) == policy_params(made, run) | {"step": 2}
    with pytest.raises(DvpError, match=r"step~1': this step is not in evaluation.at of experiment 'smoke'"):
        made.policy(f"{PATH}/step~1")
    with pytest.raises(DvpError, match="is not in the grid"):
        made.run(snapshot.path)


def test_other_steps_are_another_training_and_each_step_another_model():
    made = experiment(RLOO, training__steps=4, evaluation__at=[1, 2])
    [run] = made.runs
    same = experiment(RLOO, training__steps=4, evaluation__at=[2, 1])
    more = experiment(RLOO, training__steps=4, evaluation__at={"every": 1})
    assert made.config_hash("train", run) == same.config_hash("train", run) != more.config_hash("train", run)
    policies = [*made.snapshots, run]
    for stage in ("convert", "evaluate"):
        assert len({made.config_hash(stage, policy, "held_out") for policy in policies}) == 3
        assert made.config_hash(stage, policies[0], "held_out") == more.config_hash(stage, policies[0], "held_out")
