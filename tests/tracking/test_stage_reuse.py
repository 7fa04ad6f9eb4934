"""A stage takes over what another experiment has made of the same settings, code and inputs, and nothing else."""

import json
import shutil

import pytest
from made_up_stages import EXPERIMENT, RUN, contents, made_up_row

from dvp.files import read_json, sha256_file, write_json
from dvp.stage import Stage
from dvp.tracking.record import COLLAPSED
from dvp.tracking.stage import stage_run
from dvp.tracking.store import create_store
from dvp.versions import STAGE_VERSIONS

pytestmark = pytest.mark.slow

WORK = {"config_hash": "abc", "inputs": "def", "run": RUN}
STEPS = 3
SAME = ("git_commit", "seconds_stage", "files", "checkpoint")


@pytest.fixture
def other(folder):
    """Another experiment's folder beside `folder`, with a finished training run and its MLflow run."""
    other = folder.parent / "other"
    shutil.copytree(folder, other)
    create_store(other.parent, "other")
    run = other / "runs" / RUN
    (run / "checkpoints/0123/step-3").mkdir(parents=True)
    (run / "checkpoints/0123/step-3/weights").write_text("weights")
    (run / "metrics.jsonl").write_text("".join(json.dumps(made_up_row(step)) + "\n" for step in range(1, STEPS + 1)))
    with stage_run(other, "other", "train", metrics=run / "metrics.jsonl", **WORK) as tracked:
        tracked.log_params({"seed": 0})
        for step in range(1, STEPS + 1):
            tracked.log_step(step, made_up_row(step))
        tracked.log_model(run / "checkpoints/0123/step-3")
        tracked.tag(COLLAPSED, "at step 2: reward")
        record = {
            "files": {"metrics.jsonl": sha256_file(run / "metrics.jsonl")},
            "checkpoint": "checkpoints/0123/step-3",
            "git_commit": "c" * 40,
            "seconds_stage": 12.5,
            "tracking_key": tracked.key,
        }
        write_json(run / "train.json", record)
        tracked.log_file(run / "train.json")
    return other


def taken(folder, **changes) -> bool:
    work = WORK | changes
    run = folder / "runs" / work["run"]
    with stage_run(folder, EXPERIMENT, "train", metrics=run / "metrics.jsonl", **work) as tracked:
        return Stage(folder, run / "train.json", tracked, WORK["config_hash"], started=0.0).reuse()


def test_files_and_tracking_are_taken_over_from_another_experiment(folder, other):
    """With the weights that were kept along training."""
    there, run = other / "runs" / RUN, folder / "runs" / RUN
    kept = "checkpoints/0123/weights-000002"
    (there / kept).mkdir()
    (there / kept / "model.safetensors").write_text("weights")
    write_json(there / "train.json", read_json(there / "train.json") | {"kept": {"2": kept}})
    assert taken(folder)
    assert (run / "checkpoints/0123/step-3/weights").read_text() == "weights"
    assert (run / kept / "model.safetensors").read_text() == "weights"
    assert (run / "metrics.jsonl").read_bytes() == (there / "metrics.jsonl").read_bytes()
    ours, theirs = read_json(run / "train.json"), read_json(there / "train.json")
    assert ours["reused_from"] == f"other {theirs['tracking_key']}"
    assert ours["tracking_key"] != theirs["tracking_key"]
    assert {key: ours[key] for key in SAME} == {key: theirs[key] for key in SAME}
    stored = contents(folder)[ours["tracking_key"]]
    assert stored["tags"][COLLAPSED] == "at step 2: reward"
    points = stored["metrics"]["train/reward"]
    assert [point[:2] for point in points] == [(step, made_up_row(step)["reward"]) for step in range(1, STEPS + 1)]
    assert stored["metrics"]["final/collapsed"]


def test_a_run_is_the_same_where_its_settings_are_part_of_its_path(folder, other):
    """There the training section says what here an entry of the grid says."""
    own = RUN.replace("/seed~", "/group_size~4/steps~3/seed~")
    theirs = read_json(other / "runs" / RUN / "train.json")
    write_json(other / "runs" / RUN / "train.json", theirs | {"run": RUN})
    run, work = folder / "runs" / own, WORK | {"run": own, "params": {"seed": 5}}
    with stage_run(folder, EXPERIMENT, "train", metrics=run / "metrics.jsonl", **work) as tracked:
        assert Stage(folder, run / "train.json", tracked, WORK["config_hash"], started=0.0).reuse()
    ours = read_json(run / "train.json")
    assert (ours["run"], ours["reused_from"]) == (own, f"other {theirs['tracking_key']}")
    record = read_json(folder / "tracking" / "runs" / own / "train.json")
    assert record["metrics"] == f"runs/{own}/metrics.jsonl"
    assert record["tags"]["model"] == f"runs/{own}/checkpoints/0123/step-3"
    assert record["params"]["seed"] == "5"  # what says which policy it is, is its own
    assert len(contents(folder)[ours["tracking_key"]]["metrics"]["train/reward"]) == STEPS


def damage(other):
    with open(other / "runs" / RUN / "metrics.jsonl", "a") as file:
        file.write("{}\n")


def lose_weights(other):
    there = other / "runs" / RUN / "train.json"
    write_json(there, read_json(there) | {"kept": {"2": "checkpoints/0123/weights-000002"}})


@pytest.mark.parametrize(
    ("changes", "harm"),
    [
        ({"config_hash": "xyz"}, None),
        ({"inputs": "xyz"}, None),
        ({"run": f"{RUN[:-1]}1"}, None),
        ({}, damage),
        ({}, lose_weights),
    ],
)
def test_other_work_and_damaged_work_are_not_taken_over(folder, other, changes, harm):
    if harm:
        harm(other)
    assert not taken(folder, **changes)
    assert not (folder / "runs" / RUN / "train.json").exists()


def test_another_version_of_the_stage_is_other_work(folder, other, monkeypatch):
    monkeypatch.setitem(STAGE_VERSIONS, "train", STAGE_VERSIONS["train"] + 1)
    assert not taken(folder)
