"""`dvp track`: from files into a store that is empty, half-fed or full."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

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
from dvp.experiment.folder import ExperimentDir
from dvp.tracking.record import Record, read_record, read_rows, write_record
from dvp.tracking.stage import stage_run
from dvp.tracking.store import Feed, create_store
from dvp.tracking.track import track as track_here

pytestmark = pytest.mark.slow

RECORD = f"tracking/runs/{RUN}/train.json"


@pytest.fixture
def stages(folder):
    """A store after a failed and a finished training run, an evaluation, and a report on them."""
    first = train(folder, 12).key
    convert(folder, first)
    second = evaluate(folder, {"train": [first]}).key
    other = RUN.replace("seed~0", "seed~1")

    def fail(step):
        raise DvpError(f"no more after step {step}")

    with pytest.raises(DvpError):
        train(folder, 3, fail, run=other)
    with stage_run(
        folder, EXPERIMENT, "report_training", config_hash="x", upstream={"evaluate": [second], "train": [first]}
    ):
        pass
    return folder


@pytest.fixture
def one_stage(tmp_path):
    """A stage's record, and no store."""
    folder = make_folder(tmp_path / "results")
    record = Record(experiment=EXPERIMENT, name="train", tags={"tracking_key": "k"}, started=1)
    write_record(folder / RECORD, record)
    return folder


def test_an_empty_store_becomes_what_the_first_one_was(stages, monkeypatch):
    before = contents(stages)
    assert sorted(run["status"] for run in before.values()) == ["FAILED", *["FINISHED"] * 4]
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{stages.parent}/another.db")
    track_here(stages / "config.yaml")
    assert contents(stages) == before


def test_a_second_time_nothing_is_added(stages, capsys):
    before = contents(stages)
    files = {path: path.read_bytes() for path in stages.rglob("*") if path.is_file()}
    for _ in range(2):
        track_here(stages / "config.yaml")
        assert contents(stages) == before
    assert {path: path.read_bytes() for path in stages.rglob("*") if path.is_file()} == files
    lines = capsys.readouterr().out.splitlines()
    assert [line.endswith(": complete") for line in lines] == [True] * 5 + [False] + [True] * 5 + [False]
    assert lines[-1] == f"stages in sqlite:///{stages.parent}/mlflow.db: 5"


def test_a_record_without_its_key_is_refused_in_a_line(stages):
    value = json.loads((stages / RECORD).read_text())
    del value["tags"]["tracking_key"]
    (stages / RECORD).write_text(json.dumps(value))
    with pytest.raises(DvpError, match=r"\.json: tags: expected a tracking_key$"):
        read_record(stages / RECORD)


@pytest.mark.parametrize("path", ["/etc/passwd", "../../x", "runs/../../x", "x\0y"])
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("files", lambda path: {"config.yaml": "", path: ""}),
        ("files", lambda path: {"config.yaml": path}),
        ("metrics", lambda path: path),
        ("datasets.0.path", lambda path: [{"path": path, "digest": "d" * 16, "context": "training"}]),
        ("model.path", lambda path: {"path": path, "kind": "checkpoint"}),
        ("experiment", lambda path: path),
    ],
)
def test_a_record_names_nothing_outside_the_results(one_stage, key, value, path):
    """Neither to be read, as its files are, nor to be written, as the store's folders are."""
    record = json.loads((one_stage / RECORD).read_text())
    (one_stage / RECORD).write_text(json.dumps(record | {key.partition(".")[0]: value(path)}))
    with pytest.raises(DvpError) as error:
        track_here(one_stage / "config.yaml")
    expected = f"{one_stage / RECORD}: {key}: expected a relative path without '..', found {path!r}"
    assert str(error.value) == expected


def test_the_results_are_above_the_experiment_by_its_name(stages, monkeypatch, tmp_path):
    """From within its folder, and through a link to another disk, the store is where the stages feed it."""
    results = stages.parent
    monkeypatch.chdir(stages)
    assert ExperimentDir(Path("config.yaml")).results == results
    elsewhere = tmp_path / "disk"
    shutil.move(stages, elsewhere)
    stages.symlink_to(elsewhere)
    assert ExperimentDir(stages / "config.yaml").results == results


def test_a_run_with_holes_is_completed_exactly(stages, monkeypatch, empty_store):
    before = contents(stages)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{shutil.copy(empty_store, stages.parent / 'another.db')}")
    create_store(stages.parent, EXPERIMENT)
    record = read_record(stages / RECORD)
    # Batches lost in the middle: whole steps, half a step, all of a metric, parameters, the files, the last word.
    rows = read_rows(stages / record.metrics)
    kept = [{key: row[key] for key in list(row)[: 9 if row["step"] % 2 else 99]} for row in rows if row["step"] != 6]
    record.params.pop("seed")
    record.files, record.results, record.status, record.ended = {}, {}, "RUNNING", None
    kept[0]["seconds"] = rows[0]["seconds"]
    Feed(stages, record).update(record, kept[2:])
    half = contents(stages)[record.key]
    assert 0 < sum(map(len, half["metrics"].values())) < sum(map(len, before[record.key]["metrics"].values()))
    track_here(stages / "config.yaml")
    check_training(contents(stages)[record.key], 12)
    assert {key: run["params"] for key, run in contents(stages).items()} == {
        key: run["params"] for key, run in before.items()
    }


def test_files_that_were_lost_or_changed_are_kept_again(stages):
    before = contents(stages)
    key = read_record(stages / RECORD).key
    for copy in (stages.parent / "mlartifacts").rglob("train.json"):
        copy.unlink()
    assert contents(stages) != before
    track_here(stages / "config.yaml")
    assert contents(stages) == before
    (stages / "runs" / RUN / "train.json").write_text('{"steps": 7}')
    track_here(stages / "config.yaml")
    [copy] = [path for path in (stages.parent / "mlartifacts").rglob("train.json") if "7" in path.read_text()]
    assert contents(stages)[key]["files"][1] == ("results/train.json", copy.stat().st_size)


def test_a_killed_stage_is_fed_as_far_as_it_came_and_continued(folder):
    """SIGKILL in the middle of a line, without a store; then the store, then the rest of the run."""
    code = (
        "import os, sys; from pathlib import Path; sys.path.insert(0, 'tests/tracking');"
        "from made_up_stages import train;"
        f"folder = Path({str(folder)!r});"
        "train(folder, 9, lambda step: step == 5 and os.kill(os.getpid(), 9))"
    )
    killed = subprocess.run(
        [sys.executable, "-c", code],
        check=False,
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
        env=os.environ | {"MLFLOW_TRACKING_URI": "http://127.0.0.1:9"},
    )
    assert killed.returncode == -9
    assert killed.stderr.count("\n") == 1
    metrics = folder / "runs" / RUN / "metrics.jsonl"
    with open(metrics, "a", encoding="utf-8") as file:
        file.write('{"step": 6, "reward": 0.')
    assert track(folder).startswith(f"{title(RUN)}: runs +1, ")
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
        stage_run(
            folder, EXPERIMENT, "train", config_hash="new", run=RUN, metrics=folder / "runs" / RUN / "metrics.jsonl"
        ) as tracked,
    ):
        raise SystemExit(143)
    track_here(folder / "config.yaml")
    runs = contents(folder)
    assert runs[tracked.key]["metrics"] == {}
    check_training(runs[old], 5)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (RECORD, "{", "Invalid JSON: EOF while parsing"),
        (RECORD, '{"experiment": "smoke"}', "name: Field required"),
        (f"runs/{RUN}/metrics.jsonl", '{"step": 1}\nx\n', "line 2: not valid JSON"),
        (f"runs/{RUN}/metrics.jsonl", '{"reward": 1}\n', "line 1: expected a JSON object with an integer 'step'"),
        (f"runs/{RUN}/metrics.jsonl", b'{"step": 1}\n\xff\n', "not UTF-8 text (invalid start byte at byte 12)"),
        (f"runs/{RUN}/metrics.jsonl", '{"step": 1, "step": 2}\n', "line 1: not valid JSON (key 'step' is there twice)"),
        (
            f"runs/{RUN}/metrics.jsonl",
            '{"step": 1, "seconds": NaN}\n',
            "line 1: seconds: expected a finite number, 0 or more, found nan",
        ),
        (f"runs/{RUN}/metrics.jsonl", None, "no such file"),
    ],
)
def test_a_damaged_file_is_named_and_nothing_is_sent(stages, monkeypatch, name, text, message):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{stages.parent}/another.db")
    (stages / name).unlink()
    if text is not None:
        (stages / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(DvpError) as error:
        track_here(stages / "config.yaml")
    assert str(error.value).startswith(f"{stages / name}: {message}")
    assert "\n" not in str(error.value)
    assert not (stages.parent / "another.db").exists()


def test_a_store_that_cannot_be_used_is_an_error_here(stages, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    with pytest.raises(DvpError, match=r"^MLflow store http://127.0.0.1:9: cannot be used \("):
        track_here(stages / "config.yaml")


def test_the_record_is_plain_json_without_addresses(stages):
    value = json.loads((stages / RECORD).read_text())
    assert value["status"] == "FINISHED"
    assert str(stages.parent) not in json.dumps(value)
