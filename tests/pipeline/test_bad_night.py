"""Training as it is run, vLLM and all, through a bad night: killed, terminated, started twice."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from mlflow.tracking import MlflowClient

from dvp import cli
from dvp.files import sha256_file
from dvp.tracking.store import store_uri

pytestmark = [pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(1500)]
HERE = Path(__file__).parent
RUN = "method~otb_mass/engine~coarse/rho~none/seed~0"
# No two runs agree on the clock; everything else in metrics.jsonl must be the same to the last digit.
CLOCK = ("seconds", "seconds_rollout", "seconds_reward", "seconds_update", "seconds_sync", "tokens_per_second")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory, root) -> Path:
    """A folder with the smoke experiment's data and base model, RL of eight steps before it."""
    folder = tmp_path_factory.mktemp("night")
    shutil.copytree(root / "config", folder / "config")
    file = folder / "config/experiments/start/smoke.yaml"
    value = yaml.safe_load(file.read_text())
    value["training"] |= {"steps": 8, "checkpoint_every": 3, "minibatches": 2}
    # A base model so good, at problems so easy, that some answers are right and the weights move in nearly every step.
    value["sources"]["stories_small"]["steps"] = [1, 1]
    value["base"]["warm_start"] |= {"steps": 180, "careless_fraction": 0.0}
    file.write_text(yaml.safe_dump(value, sort_keys=False))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        config = Path("results/smoke/config.yaml")
        cli.resolve("smoke", config.parent)
        cli.prepare(config=config)
        cli.base(config=config, threads=1)
    return folder


def start(place: Path, *struck: str) -> subprocess.Popen:
    """Start `dvp train`, struck at a moment if one is given."""
    program = [HERE / "dvp_struck.py", *struck] if struck else ["-m", "dvp.cli"]
    return subprocess.Popen(
        [sys.executable, *program, "train", "--config", "results/smoke/config.yaml", "--run", RUN, "--threads", "1"],
        cwd=place,
        env={key: value for key, value in os.environ.items() if key != "MLFLOW_TRACKING_URI"}
        | {"TORCH_EXTENSIONS_DIR": str(place / "extensions")},
        stderr=subprocess.PIPE,
        text=True,
    )


def train(place: Path, *struck: str) -> tuple[int, str]:
    """Run it to its end: exit status (−9 for SIGKILL) and standard error."""
    process = start(place, *struck)
    errors = process.communicate(timeout=900)[1]
    return process.returncode, errors


def rows(place: Path) -> list[dict]:
    lines = [json.loads(line) for line in (run_folder(place) / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in CLOCK} for line in lines]


def run_folder(place: Path) -> Path:
    return place / "results/smoke/runs" / RUN


def checkpoints(place: Path) -> list[str]:
    return sorted(path.name for path in (run_folder(place) / "checkpoints").glob("*/*"))


def final_weights(place: Path) -> dict[str, str]:
    """SHA-256 of every file that DeepSpeed wrote last: weights and optimiser."""
    record = json.loads((run_folder(place) / "train.json").read_text())
    files = (run_folder(place) / record["checkpoint"]).rglob("*.pt")
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


@pytest.fixture(scope="module")
def uninterrupted(prepared, tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("uninterrupted") / "place"
    shutil.copytree(prepared, place)
    status, errors = train(place)
    assert status == 0, errors
    assert sum(row["updates"] for row in rows(place)) >= 8
    return place


def test_a_run_that_is_struck_four_times_ends_as_if_it_had_been_left_alone(prepared, uninterrupted, tmp_path):
    """Killed in a rollout, terminated in a rollout, killed in an update, killed while a checkpoint is written.

    In between a second training is started on the same run.
    """
    place = tmp_path / "place"
    shutil.copytree(prepared, place)
    status, errors = train(place, "SIGKILL", "rollout", "2")
    assert status == -signal.SIGKILL, errors
    assert len(rows(place)) == 1
    assert checkpoints(place) == []

    status, errors = train(place, "SIGTERM", "rollout", "3")
    assert status == 143, errors
    assert errors.strip().splitlines()[-1] == "dvp train: stopped by SIGTERM after step 2; run again to continue"
    assert "Traceback" not in errors
    assert len(rows(place)) == 2
    assert checkpoints(place) == ["step-000002"]
    client = MlflowClient(tracking_uri=store_uri(place / "results"))
    (tracked,) = client.search_runs([client.get_experiment_by_name("smoke").experiment_id], "tags.stage = 'train'")
    assert tracked.info.status == "KILLED"

    # Held in an update, where it has the run's lock; a second training gives up; then the first one is killed.
    first = start(place, "SIGSTOP", "update", "4")
    try:
        assert os.waitid(os.P_PID, first.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT).si_code == os.CLD_STOPPED
        status, errors = train(place)
        assert status == 2
        line = errors.strip().splitlines()[-1]
        assert line.endswith(f"{RUN}: another process is training this run; wait for it or stop it")
    finally:
        first.kill()
        first.communicate()
    before = checkpoints(place)

    status, errors = train(place, "SIGKILL", "checkpoint", "1")
    assert status == -signal.SIGKILL, errors
    assert f"continuing from {Path('results/smoke/runs') / RUN}/checkpoints" in errors
    half_written = [name for name in checkpoints(place) if name not in before]
    assert len(half_written) == 1
    assert half_written[0].startswith(".step-")

    status, errors = train(place)
    assert status == 0, errors
    assert rows(place) == rows(uninterrupted)
    assert final_weights(place) == final_weights(uninterrupted)
    assert sha256_file(run_folder(place) / "probe.safetensors") == sha256_file(
        run_folder(uninterrupted) / "probe.safetensors"
    )
    assert not [name for name in checkpoints(place) if name.startswith(".")]
    # Nothing is compiled: torch's lock on what is being compiled survives a SIGKILL, and stops every later training.
    assert not (place / "extensions").exists()
    (again,) = client.search_runs([tracked.info.experiment_id], "tags.stage = 'train'")
    assert (again.info.run_id, again.info.status) == (tracked.info.run_id, "FINISHED")
    history = client.get_metric_history(again.info.run_id, "train/reward")
    assert [metric.step for metric in history] == list(range(1, 9))
