"""The MLflow store; the only file that imports it.

One MLflow experiment per experiment file, a parent run per grid point, a child run per stage. A run is found by its
key, a tag, so that a stage that is run again continues its run, in whichever store.
"""

import os
import re
from collections import Counter
from pathlib import Path
from urllib.parse import unquote

from filelock import FileLock

from dvp.errors import DvpError
from dvp.files import sha256_file
from dvp.tracking.record import KEY, OUTCOMES, UPSTREAM, Record, key_of, points

GRID_POINT = "grid point"
FILES = "files_hash"  # of the files kept with a run, once all of them are
METRICS, PARAMS = 800, 100  # a call; MLflow takes at most 1,000 and 100
LOCK_SECONDS = 30


def store_uri(results: Path) -> str:
    """MLFLOW_TRACKING_URI if set, else an SQLite file in the results folder."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{results.resolve() / 'mlflow.db'}"


def store_name(results: Path) -> str:
    """The store's address as it may be shown: without the password that it may hold."""
    name = re.sub(r"(://[^:/@]*):.*@", r"\1:***@", store_uri(results))
    return re.sub(r"([?&]password=)[^&]*", r"\1***", name)


def reason_of(error: Exception, results: Path) -> str:
    """One line of what went wrong with the store, without its password, as it was given or decoded."""
    uri = store_uri(results)
    lines = (line for line in str(error).split("[SQL:")[0].splitlines() if not line.startswith("(raised as a result"))
    text = " ".join(" ".join(lines).split()).replace(uri, store_name(results)) or type(error).__name__
    found = re.findall(r"://[^:/@]*:(.*)@", uri) + re.findall(r"[?&]password=([^&]*)", uri)
    for password in filter(None, [*found, *map(unquote, found)]):
        text = text.replace(password, "***")
    return text if len(text) <= 200 else f"{text[:70]} … {text[-120:]}"  # the cause comes last


def create_store(results: Path, experiment: str) -> None:
    """Create the store and the experiment in it, if they are not there.

    Called once before the stages: a store that cannot be used at all is the user's mistake.
    Raises DvpError if it cannot.
    """
    try:
        with _lock(results):
            _experiment_id(_client(results), results, experiment)
    except Exception as error:  # MLflow's own, SQLAlchemy's, requests', a missing driver's
        raise _unusable(error, results) from None


def track(folder: Path, record: Record, rows: list[dict]) -> Counter:
    """Bring into the store what it lacks of a stage; how many metrics, params, tags, files that were.

    Raises DvpError if the store cannot be used.
    """
    try:
        feed = Feed(folder, record)
        feed.update(record, rows)
    except Exception as error:
        raise _unusable(error, folder.parent) from None
    return feed.sent


def lineage(results: Path, key: str) -> dict[str, list[str]]:
    """MLflow run ids by stage of everything that the run of this key came from, itself included.

    Raises DvpError if a linked run is not in the store.
    """
    client = _client(results)
    experiments = [found.experiment_id for found in client.search_experiments()]
    found: dict[str, list[str]] = {}
    seen: set[str] = set()
    waiting = [key]
    while waiting:
        current = waiting.pop()
        if current in seen:
            continue
        seen.add(current)
        run = _find(client, experiments, current)
        if run is None:
            raise DvpError(f"MLflow store {store_name(results)}: no run has the {KEY} {current}; `dvp track` adds it")
        found.setdefault(run.data.tags["stage"], []).append(run.info.run_id)
        waiting += [one for name, value in run.data.tags.items() if name.startswith(UPSTREAM) for one in value.split()]
    return found


class Feed:
    """One run of the store, found or created, and what it takes to make it equal to its record.

    Only what is missing is sent, so a run may be fed any number of times. Points of metrics are told apart by name and
    step: of a step that was done twice, as a resumed run's may be, the first numbers stay. Any exception may come out,
    of MLflow and of what it is made of; then the state of the store is unknown, and another Feed finds it out.
    """

    def __init__(self, folder: Path, record: Record):
        """folder : the experiment's own, that the record's paths are relative to."""
        self.sent: Counter = Counter()
        self._folder = folder
        self._client = _client(folder.parent)
        with _lock(folder.parent):  # what two processes look for at once is created once
            experiment_id = _experiment_id(self._client, folder.parent, record.experiment)
            self._parent = None
            tags = dict(record.tags)
            if record.run is not None:
                parent_key = key_of(record.experiment, GRID_POINT, record.run)
                parent_tags = {KEY: parent_key, "stage": GRID_POINT, "run": record.run}
                self._parent = self._find_or_create(experiment_id, record.run, parent_tags, record.started)
                tags["mlflow.parentRunId"] = self._parent.info.run_id
            run = self._find_or_create(experiment_id, record.name, tags, record.started)
        self._id = run.info.run_id
        self._ended = (run.info.status, run.info.end_time)
        self._tags, self._params, self._latest = run.data.tags, run.data.params, run.data.metrics
        self._known = {
            (name, point.step) for name in self._latest for point in self._client.get_metric_history(self._id, name)
        }
        self._rows = 0  # of those given to `update`, how many the store has

    def update(self, record: Record, rows: list[dict]) -> None:
        """Send what the store lacks of `record` and `rows`. A later call has the same rows, and more."""
        from mlflow.entities import Metric, Param, RunTag

        tags = {name: value for name, value in record.tags.items() if self._tags.get(name) != value}
        if tags:
            self._client.log_batch(self._id, tags=[RunTag(name, value) for name, value in tags.items()])
            self._tags |= tags
            self.sent["tags"] += len(tags)
        for name in OUTCOMES:
            if name in self._tags and name not in record.tags:  # of an earlier attempt
                self._client.delete_tag(self._id, name)
                del self._tags[name]
                self.sent["tags"] += 1
        params = {name: value for name, value in record.params.items() if name not in self._params}
        for batch in _batches(list(params.items()), PARAMS):
            self._client.log_batch(self._id, params=[Param(name, value) for name, value in batch])
            self.sent["params"] += len(batch)
        self._params |= params
        if len(rows) > self._rows:
            new = [one for one in points(rows, record.started) if one[:2] not in self._known]
            for batch in _batches(new, METRICS):
                self._log_metrics([Metric(name, value, when, step) for name, step, value, when in batch])
                self._known |= {one[:2] for one in batch}
            self._rows = len(rows)
        results = {name: value for name, value in record.results.items() if self._latest.get(name) != value}
        when = record.ended or record.started
        for batch in _batches(list(results.items()), METRICS):
            self._log_metrics([Metric(name, value, when, 0) for name, value in batch])
        self._latest |= results
        self._keep_files(record.files)
        ended = (record.status, record.ended)
        if record.status != self._ended[0] or (record.ended is not None and record.ended != self._ended[1]):
            for run_id in filter(None, [self._id, self._parent and self._parent.info.run_id]):
                if record.ended is None:
                    self._client.update_run(run_id, status=record.status)
                else:
                    self._client.set_terminated(run_id, record.status, record.ended)
            self._ended = ended

    def _log_metrics(self, metrics: list) -> None:
        self._client.log_batch(self._id, metrics=metrics)
        self.sent["metrics"] += len(metrics)

    def _keep_files(self, files: dict[str, str]) -> None:
        there = {name: folder for name, folder in files.items() if (self._folder / name).is_file()}
        if not there:
            return
        digest = key_of({name: sha256_file(self._folder / name) for name in there})
        kept = {
            item.path
            for folder in set(there.values())
            for item in self._client.list_artifacts(self._id, folder or None)
        }
        if self._tags.get(FILES) == digest and kept >= {
            "/".join(filter(None, [folder, Path(name).name])) for name, folder in there.items()
        }:
            return
        for name, folder in there.items():
            self._client.log_artifact(self._id, str(self._folder / name), folder or None)
        self._client.set_tag(self._id, FILES, digest)
        self._tags[FILES] = digest
        self.sent["files"] += len(there)

    def _find_or_create(self, experiment_id: str, name: str, tags: dict[str, str], started: int):
        found = _find(self._client, [experiment_id], tags[KEY])
        if found is None:
            found = self._client.create_run(experiment_id, start_time=started, tags=tags, run_name=name)
            self.sent["runs"] += 1
        return found


def _client(results: Path):
    """MLflow's client, impatient: its own defaults wait for a dead server for minutes, and keep a deleted file open."""
    for name, value in {
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
        "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
        "MLFLOW_SQLALCHEMYSTORE_POOLCLASS": "NullPool",
        "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    }.items():
        os.environ.setdefault(name, value)
    from mlflow.tracking import MlflowClient

    results.mkdir(parents=True, exist_ok=True)
    return MlflowClient(tracking_uri=store_uri(results))


def _lock(results: Path) -> FileLock:
    """Several processes that create an SQLite store, or a run in any store, at the same moment would collide."""
    results.mkdir(parents=True, exist_ok=True)
    return FileLock(results / ".mlflow.lock", timeout=LOCK_SECONDS)


def _experiment_id(client, results: Path, name: str) -> str:
    found = client.get_experiment_by_name(name)
    if found is not None:
        return found.experiment_id
    # A server has its own place for artifacts; a bare SQLite file would put them in the current folder.
    location = None
    if store_uri(results).startswith("sqlite:"):
        location = (results.resolve() / "mlartifacts" / name).as_uri()
    return client.create_experiment(name, artifact_location=location)


def _find(client, experiments: list[str], key: str):
    found = client.search_runs(
        experiments, f"tags.{KEY} = '{key}'", max_results=1, order_by=["attributes.start_time ASC"]
    )
    return found[0] if found else None


def _batches(items: list, size: int) -> list[list]:
    return [items[start : start + size] for start in range(0, len(items), size)]


def _unusable(error: Exception, results: Path) -> DvpError:
    return DvpError(
        f"MLflow store {store_name(results)}: cannot be used ({reason_of(error, results)}); "
        "is MLFLOW_TRACKING_URI right?"
    )
