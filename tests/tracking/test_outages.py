"""Bad nights of the store: real locks, real servers that are killed, files that are deleted. The stage goes on."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from made_up_stages import EXPERIMENT, check_training, contents, title, train
from mlflow.tracking import MlflowClient

from dvp.errors import DvpError
from dvp.tracking import stage as tracking_stage
from dvp.tracking.store import create_store, store_uri
from dvp.tracking.store import track as track_here

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
STEPS = 30


@contextmanager
def locked(store: Path) -> Iterator[subprocess.Popen]:
    """Another process holds an exclusive transaction on the SQLite file until it is killed."""
    code = f"import sqlite3; db = sqlite3.connect({str(store)!r}); db.execute('BEGIN EXCLUSIVE'); print(flush=True)"
    code += "; input()"
    other = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert other.stdout.readline() == b"\n"
        yield other
    finally:
        other.kill()
        other.wait()
        other.stdin.close()
        other.stdout.close()


class Server:
    """A real `mlflow server` on its own SQLite file, that can be killed and started again."""

    def __init__(self, folder: Path):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.uri, self.folder = f"http://127.0.0.1:{self.port}", folder

    def start(self) -> None:
        command = [Path(sys.executable).parent / "mlflow", "server", "--port", str(self.port), "--workers", "1"]
        command += ["--backend-store-uri", f"sqlite:///{self.folder}/mlflow.db"]
        command += ["--artifacts-destination", str(self.folder / "artifacts")]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("MLFLOW_")}
        with open(self.folder / "log", "a", encoding="utf-8") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True, env=environment)
        for _ in range(240):
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.uri}/health", timeout=5):
                return
            assert self.process.poll() is None, (self.folder / "log").read_text()[-2000:]
            time.sleep(0.5)
        raise AssertionError((self.folder / "log").read_text()[-2000:])

    def kill(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


@pytest.fixture
def server(tmp_path, monkeypatch, empty_store) -> Iterator[Server]:
    server = Server(tmp_path / "server")
    server.folder.mkdir()
    shutil.copy(empty_store, server.folder)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.uri)
    server.start()
    yield server
    server.kill()


def lines_of(capfd) -> list[str]:
    return capfd.readouterr().err.splitlines()


def test_a_store_locked_for_a_part_of_the_run(folder, capfd):
    """Locked at step 10, free again at step 20: one line each, and at the end everything is there."""
    lock = contextlib.ExitStack()

    def during(step):
        if step == 10:
            lock.enter_context(locked(folder.parent / "mlflow.db"))
        if step == 20:
            lock.close()

    with lock:
        tracked = train(folder, STEPS, during)
    gone, back = lines_of(capfd)
    name = f"MLflow store sqlite:///{folder.parent}/mlflow.db"
    assert gone == (
        f"{name}: cannot be used ((sqlite3.OperationalError) database is locked); the stage continues, and "
        f"`dvp track --config {folder}/config.yaml` brings in what it missed"
    )
    assert back == f"{name}: can be used again and has everything of this stage"
    check_training(contents(folder)[tracked.key], STEPS)


@pytest.mark.parametrize("uri", ["http://127.0.0.1:9", "sqlite:////dev/null/mlflow.db"])
def test_a_store_that_is_not_there_from_the_start(folder, monkeypatch, capfd, uri):
    """The stage's run is known by a key that needs no store; the links of later stages hold."""
    with monkeypatch.context() as bad:
        bad.setenv("MLFLOW_TRACKING_URI", uri)
        base = train(folder, 1, run="base")
        tracked = train(folder, STEPS, upstream={"base": [base.key]})
        assert [line.startswith(f"MLflow store {uri}: cannot be used (") for line in lines_of(capfd)] == [True, True]
    track_here(folder / "config.yaml")
    runs = contents(folder)
    check_training(runs[tracked.key], STEPS)
    assert runs[runs[tracked.key]["tags"]["upstream.base"]]["name"] == title("base")


def test_a_file_that_cannot_be_opened_is_not_waited_for(tmp_path, monkeypatch):
    """MLflow would try ten times, for 102 s, each time that it is asked."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:////proc/mlflow.db")
    waited = []
    monkeypatch.setattr("mlflow.store.db.utils.time", SimpleNamespace(sleep=waited.append))
    with pytest.raises(DvpError) as error:
        create_store(tmp_path, "x")
    assert waited == []
    assert str(error.value) == (
        "MLflow store sqlite:////proc/mlflow.db: cannot be used ((sqlite3.OperationalError) unable to open database "
        "file); is MLFLOW_TRACKING_URI right?"
    )


def test_an_experiment_that_was_deleted_in_the_pages_is_restored(folder, capfd):
    """By `dvp track`, by a stage, and by `dvp resolve`."""
    client = MlflowClient(tracking_uri=store_uri(folder.parent))
    experiment = client.get_experiment_by_name(EXPERIMENT).experiment_id
    tracked = train(folder, 1)
    for restore in (
        lambda: track_here(folder / "config.yaml"),
        lambda: train(folder, 1, run="base"),
        lambda: create_store(folder.parent, EXPERIMENT),
    ):
        client.delete_experiment(experiment)
        restore()
        check_training(contents(folder)[tracked.key], 1)
    assert lines_of(capfd) == []


@pytest.mark.nightly
def test_a_server_killed_and_started_again_and_killed_again(folder, server, capfd, monkeypatch):
    """kill -9 at step 10, started again at step 20: back while the stage runs. Killed again at 25: `dvp track`."""
    monkeypatch.setattr(tracking_stage, "PAUSE", 1.0)

    def during(step):
        if step == 20:
            server.start()
            time.sleep(2)
        if step in {10, 25}:
            server.kill()

    tracked = train(folder, STEPS, during)
    gone, back, gone_again = lines_of(capfd)
    assert back.startswith(f"MLflow store {server.uri}: can be used again")
    # The reason in between may differ: a connection is refused, or cut off in the middle of an answer.
    for line in (gone, gone_again):
        assert line.startswith(f"MLflow store {server.uri}: cannot be used (")
        assert line.endswith(f"`dvp track --config {folder / 'config.yaml'}` brings in what it missed")
    server.start()
    half = contents(folder)[tracked.key]
    assert half["status"] == "RUNNING"
    assert [point[0] for point in half["metrics"]["train/reward"]] == list(range(1, 26))
    track_here(folder / "config.yaml")
    check_training(contents(folder)[tracked.key], STEPS)


def test_a_server_that_never_answers_costs_little(folder, monkeypatch, capfd):
    """It takes connections and says nothing. One attempt at the start, one at the end, none a step."""
    attempts, send = [], tracking_stage.store.send
    monkeypatch.setattr(tracking_stage.store, "send", lambda *all_: attempts.append(1) or send(*all_))
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "2")
        train(folder, STEPS)
    assert len(attempts) == 2
    [line] = lines_of(capfd)
    assert "cannot be used (" in line
