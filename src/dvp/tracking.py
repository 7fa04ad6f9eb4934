"""MLflow around every stage; the only file that imports it.

One MLflow experiment per experiment file, a parent run per grid point, a child run per stage. A stage's run is found by
its tags, so that a stage that is run again continues its run. The files under results/ are the source of truth.
"""

import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dvp.errors import DvpError
from dvp.provenance import code_hash, git_commit

UPSTREAM = "upstream."  # + stage: the MLflow run id that a stage's input came from
GRID_POINT = "grid point"
BATCH = 800  # metrics a call; MLflow takes at most 1,000


def store_uri(results: Path) -> str:
    """MLFLOW_TRACKING_URI if set, else an SQLite file in the results folder."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{results.resolve() / 'mlflow.db'}"


def store_name(results: Path) -> str:
    """The store's address as it may be shown: without the password that it may hold."""
    return re.sub(r"(://[^:/@]*):.*@", r"\1:***@", store_uri(results))


def create_store(results: Path, experiment: str) -> None:
    """Create the store and the experiment in it, if they are not there.

    Called once before the stages: several processes that create an SQLite store at the same moment would collide.
    """
    _open(results, experiment)


class StageRun:
    """The MLflow run of one stage. Metrics are sent in batches."""

    def __init__(self, client, run_id: str):
        self.run_id = run_id
        self._client = client
        self._waiting: list = []
        self._logged_step = self._last_step()

    def log_params(self, params: dict) -> None:
        """Parameters, flattened to dotted names. A re-run has the same ones."""
        from mlflow.entities import Param

        flat = [Param(name, str(value)) for name, value in _flatten(params)]
        for start in range(0, len(flat), 100):
            self._client.log_batch(self.run_id, params=flat[start : start + 100])

    def log_step(self, step: int, metrics: dict) -> None:
        """Queue the numbers among `metrics`; steps that the run already has are left out."""
        from mlflow.entities import Metric

        if step <= self._logged_step:
            return
        now = int(time.time() * 1000)
        self._waiting += [
            Metric(name, float(value), now, step)
            for name, value in metrics.items()
            if isinstance(value, int | float) and name != "step"
        ]

    def flush(self) -> None:
        """Send what is queued."""
        while self._waiting:
            batch, self._waiting = self._waiting[:BATCH], self._waiting[BATCH:]
            self._client.log_batch(self.run_id, metrics=batch)

    def log_file(self, path: Path, folder: str | None = None) -> None:
        """Keep a copy of a file with the run."""
        self._client.log_artifact(self.run_id, str(path), folder)

    def log_result(self, metrics: dict) -> None:
        """The stage's own numbers, nested ones under dotted names, at step 0."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        self._client.log_batch(
            self.run_id,
            metrics=[Metric(name.replace("@", "_at_"), float(value), now, 0) for name, value in _flatten(metrics)],
        )

    def _last_step(self) -> int:
        history = self._client.get_metric_history(self.run_id, "reward")
        return max((metric.step for metric in history), default=0)


@contextmanager
def stage_run(
    results: Path,
    experiment: str,
    stage: str,
    *,
    identity: str,
    inputs: str = "",
    run: str | None = None,
    task: str | None = None,
    upstream: dict[str, str] | None = None,
) -> Iterator[StageRun]:
    """The MLflow run of a stage, begun or continued; marked failed if the block raises.

    inputs : hash of the files that the stage reads.
    run : path of the grid point, None for the stages before the grid.
    upstream : MLflow run id of each stage whose output this one reads.
    """
    client, experiment_id = _open(results, experiment)
    parent_id = None
    if run is not None:
        parent_id = _find_or_create(client, experiment_id, run, {"stage": GRID_POINT, "run": run})
    # Other settings, other code or other input make another result, and so another run.
    tags = {
        "stage": stage,
        "config_hash": identity,
        "code_hash": code_hash(stage),
        "inputs_hash": inputs,
        "run": run or "",
        "task": task or "",
    }
    name = " ".join(part for part in (stage, task, run) if part)
    if parent_id is not None:
        tags["mlflow.parentRunId"] = parent_id
    run_id = _find_or_create(client, experiment_id, name, tags)
    client.set_tag(run_id, "git_commit", git_commit())
    for source, source_id in (upstream or {}).items():
        client.set_tag(run_id, UPSTREAM + source, source_id)
    client.update_run(run_id, status="RUNNING")
    stage_of_run = StageRun(client, run_id)
    try:
        yield stage_of_run
        stage_of_run.flush()
    except BaseException as error:
        client.set_tag(run_id, "failure", f"{type(error).__name__}: {error}"[:500])
        client.set_terminated(run_id, "KILLED" if isinstance(error, KeyboardInterrupt | SystemExit) else "FAILED")
        raise
    if "failure" in client.get_run(run_id).data.tags:
        client.delete_tag(run_id, "failure")  # of an earlier attempt
    client.set_terminated(run_id, "FINISHED")
    if parent_id is not None:
        client.set_terminated(parent_id, "FINISHED")


def lineage(results: Path, run_id: str) -> dict[str, str]:
    """MLflow run ids by stage of everything that the run `run_id` came from, itself included.

    Raises DvpError if a linked run is not in the store.
    """
    from mlflow.exceptions import MlflowException

    client = _client(results)
    found: dict[str, str] = {}
    waiting = [run_id]
    while waiting:
        current = waiting.pop()
        try:
            tags = client.get_run(current).data.tags
        except MlflowException:
            raise DvpError(f"MLflow run {current}: not in the store {store_name(results)}") from None
        found[tags["stage"]] = current
        waiting += [value for key, value in tags.items() if key.startswith(UPSTREAM)]
    return found


def _client(results: Path):
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    from mlflow.tracking import MlflowClient

    results.mkdir(parents=True, exist_ok=True)
    return MlflowClient(tracking_uri=store_uri(results))


def _open(results: Path, experiment: str):
    """A client and the experiment's id. Raises DvpError if the store cannot be used."""
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    try:
        client = _client(results)
        return client, _experiment_id(client, results, experiment)
    except (MlflowException, SQLAlchemyError, OSError) as error:
        reason = " ".join(str(error).replace(store_uri(results), store_name(results)).split())[:200]
        raise DvpError(
            f"MLflow store {store_name(results)}: cannot be used ({reason}); is MLFLOW_TRACKING_URI right?"
        ) from None


def _experiment_id(client, results: Path, name: str) -> str:
    from mlflow.exceptions import MlflowException

    found = client.get_experiment_by_name(name)
    if found is not None:
        return found.experiment_id
    # A server has its own place for artifacts; a bare SQLite file would put them in the current folder.
    location = None
    if store_uri(results).startswith("sqlite:"):
        location = (results.resolve() / "mlartifacts" / name).as_uri()
    try:
        return client.create_experiment(name, artifact_location=location)
    except MlflowException:
        found = client.get_experiment_by_name(name)  # another stage was faster
        if found is None:
            raise
        return found.experiment_id


def _find_or_create(client, experiment_id: str, name: str, tags: dict[str, str]) -> str:
    wanted = " and ".join(f"tags.`{key}` = '{value}'" for key, value in tags.items() if value)
    for found in client.search_runs([experiment_id], wanted, order_by=["attributes.start_time DESC"]):
        if all(found.data.tags.get(key, "") == value for key, value in tags.items()):
            return found.info.run_id
    return client.create_run(experiment_id, tags=tags, run_name=name).info.run_id


def _flatten(value: dict, prefix: str = "") -> Iterator[tuple[str, object]]:
    for key, item in value.items():
        if isinstance(item, dict):
            yield from _flatten(item, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", item
