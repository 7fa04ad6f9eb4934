"""`dvp track`: from files into a store that is empty, half-fed or full."""

import json
import os
import subprocess
import sys

import pytest
from made_up_stages import (
    EXPERIMENT,
    RUN,
    check_training,
    contents,
    convert,
    evaluate,
    make_folder,
    title,
    track,
    train,
)

from dvp.errors import DvpError
from dvp.files import write_json
from dvp.tracking.record import Record, read_record
from dvp.tracking.stage import stage_run
from dvp.tracking.store import track as track_here

pytestmark = pytest.mark.slow

RECORD = f"tracking/runs/{RUN}/train.json"
METRICS = f"runs/{RUN}/metrics.jsonl"


@pytest.fixture
def stages(folder):
    """A store after a failed and a finished training run, an evaluation, and a report on them."""
    first = train(folder, 12).key
    convert(folder, first)
    second = evaluate(folder, {"train": [first]}).key

    def fail(step):
        raise DvpError(f"no more after step {step}")

    with pytest.raises(DvpError):
        train(folder, 3, fail, run=RUN.replace("seed~0", "seed~1"))
    upstream = {"evaluate": [second], "train": [first]}
    with stage_run(folder, EXPERIMENT, "report", config_hash="x", upstream=upstream):
        pass
    return folder


@pytest.fixture
def one_stage(tmp_path):
    """A stage's record, and no store."""
    folder = make_folder(tmp_path / "results")
    record = Record(experiment=EXPERIMENT, name="train", tags={"tracking_key": "k"}, metrics=METRICS, started=1)
    write_json(folder / RECORD, record.model_dump())
    (folder / METRICS).parent.mkdir(parents=True)
    (folder / METRICS).write_text('{"step": 1}\n')
    return folder


def test_an_empty_store_becomes_what_the_first_one_was(stages, monkeypatch, capsys):
    """And a second time nothing is added, nor are files changed, which name no place of this machine."""
    before = contents(stages)
    assert sorted(run["status"] for run in before.values()) == ["FAILED", *["FINISHED"] * 4]
    files = {path: path.read_bytes() for path in stages.rglob("*") if path.is_file()}
    assert not [path for path in (stages / "tracking").rglob("*.json") if str(stages.parent).encode() in files[path]]
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{stages.parent}/another.db")
    for _ in range(2):
        capsys.readouterr()
        track_here(stages / "config.yaml")
        assert contents(stages) == before
        *lines, last = capsys.readouterr().out.splitlines()
        assert len(lines) == 5
        assert last == f"stages in sqlite:///{stages.parent}/another.db: 5"
    assert {path: path.read_bytes() for path in stages.rglob("*") if path.is_file()} == files


@pytest.mark.parametrize("path", ["/etc/passwd", "runs/../../x", "x\0y"])
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("files", lambda path: {"config.yaml": "", path: ""}),
        ("files", lambda path: {"config.yaml": path}),
        ("metrics", lambda path: path),
        ("experiment", lambda path: path),
    ],
)
def test_a_record_names_nothing_outside_the_results(one_stage, key, value, path):
    """Neither to be read, as its files are, nor to be written, as the store's folders are."""
    record = json.loads((one_stage / RECORD).read_text())
    (one_stage / RECORD).write_text(json.dumps(record | {key: value(path)}))
    with pytest.raises(DvpError) as error:
        track_here(one_stage / "config.yaml")
    expected = f"{one_stage / RECORD}: {key}: expected a relative path without '..', found {path!r}"
    assert str(error.value) == expected


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (RECORD, b'{"experiment": "smoke"}', "name: Field required"),
        (METRICS, b'{"step": 1}\nx\n', "line 2: Invalid JSON"),
        (METRICS, b'{"reward": 1}\n', "line 1: step: Field required"),
        (METRICS, None, "cannot be read (No such file or directory)"),
    ],
)
def test_a_damaged_file_is_named_and_nothing_is_sent(one_stage, name, text, message):
    (one_stage / name).unlink()
    if text is not None:
        (one_stage / name).write_bytes(text)
    with pytest.raises(DvpError) as error:
        track_here(one_stage / "config.yaml")
    assert str(error.value).startswith(f"{one_stage / name}: {message}")
    assert "\n" not in str(error.value)
    assert not (one_stage.parent / "mlflow.db").exists()


def test_a_killed_stage_is_fed_as_far_as_it_came_and_continued(folder):
    """SIGKILL in the middle of a line, without a store; then the store, then the rest of the run."""
    code = (
        "import os, sys; from pathlib import Path; sys.path.insert(0, 'tests/tracking');"
        "from made_up_stages import train;"
        f"folder = Path({str(folder)!r});"
        "train(folder, 9, lambda step: step == 5 and os.kill(os.getpid(), 9))"
    )
    environment = os.environ | {"MLFLOW_TRACKING_URI": "http://127.0.0.1:9"}
    options = {"stderr": subprocess.PIPE, "text": True, "timeout": 120, "env": environment}
    killed = subprocess.run([sys.executable, "-c", code], check=False, **options)
    assert (killed.returncode, killed.stderr.count("\n")) == (-9, 1)
    with open(folder / METRICS, "a", encoding="utf-8") as file:
        file.write('{"step": 6, "reward": 0.')
    assert track(folder).startswith(f"{title(RUN)}\n")
    key = read_record(folder / RECORD).key
    run = contents(folder)[key]
    assert run["status"] == "RUNNING"
    assert [point[0] for point in run["metrics"]["train/reward"]] == [1, 2, 3, 4, 5]
    train(folder, 9)
    check_training(contents(folder)[key], 9)


def test_rows_of_other_settings_are_not_this_runs(folder):
    """A run begun with other settings and killed before its first step finds the old rows in its place."""
    old = train(folder, 5).key
    with (
        pytest.raises(SystemExit),
        stage_run(folder, EXPERIMENT, "train", config_hash="new", run=RUN, metrics=folder / METRICS) as tracked,
    ):
        raise SystemExit(143)
    track_here(folder / "config.yaml")
    runs = contents(folder)
    assert runs[tracked.key]["metrics"] == {}
    check_training(runs[old], 5)
