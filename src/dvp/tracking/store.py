"""The MLflow store; the only file that imports it.

One MLflow experiment per experiment file, one run per stage. What works on a policy is nested below the run that
trained it, which shows the policy's settings, its steps and its scores. A run is found by its key, a tag, so that a
stage that is run again continues its run, in whichever store.
"""

import contextlib
import json
import os
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote, unquote, unquote_plus

from filelock import FileLock, Timeout

from dvp.errors import DvpError, disk_trouble
from dvp.files import sha256_file
from dvp.tracking.names import POLICY, SCORES
from dvp.tracking.record import KEY, OUTCOMES, STAGE, UPSTREAM, Record, key_of, points, read_records
from dvp.tracking.views import links

NOTE_LENGTH = 20_000  # at most, by MLflow
KIND = "mlflow.experimentKind"
NOTE = "mlflow.note.content"  # of an experiment
MODEL_STAGES = ("convert", "train", "base")  # whose model a stage works on, the first of them in its upstream
NOT_IN_A_MODELS_NAME = str.maketrans({"/": "_", ":": "_", ".": "·", "%": None, '"': None, "'": None})
FILES = "files_hash"  # of the files kept with a run, once all of them are
METRICS, PARAMS = 800, 100  # a call; MLflow takes at most 1,000 and 100
# A password may have any character in it as it is, so that it ends at the address's last @; a file's path has none.
USER = re.compile("://(?!/)(.*)@")
QUERY = re.compile("[?&]([^?&=]*)=(?=([^&]*))")
# In the name of a query's value that is not to be shown. Of odbc_connect it is a whole address, with its password.
SECRET = ("pass", "pwd", "token", "secret", "key", "sig", "credential", "odbc_connect")
DATABASES = ("sqlite", "postgresql", "mysql", "mssql")
SHORT = 3  # characters of a secret that other words may hold, too
LOCK_SECONDS = 120  # creating a store takes 8 s on a quiet machine, and many times that on a busy one


def store_uri(results: Path) -> str:
    """MLFLOW_TRACKING_URI if set, else an SQLite file in the results folder."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{results.resolve() / 'mlflow.db'}"


def store_name(results: Path) -> str:
    """The store's address as it may be shown: without the user, the password and other secrets that it may hold."""
    uri = store_uri(results)
    shown = list(uri)
    for start, end in _secrets(uri):
        shown[start:end] = "\0" * (end - start)
    return re.sub("\0+", "***", "".join(shown))


def reason_of(error: Exception, results: Path) -> str:
    """One line of what went wrong with the store, without its address's secrets, as they were given or decoded."""
    uri = store_uri(results)
    lines = (
        line
        for line in re.split(r"\[SQL:|\(Background", str(error))[0].splitlines()
        if not line.startswith("(raised as a result")
    )
    text = " ".join(" ".join(lines).split()).replace(uri, store_name(results)) or type(error).__name__
    secrets = [uri[start:end] for start, end in _secrets(uri)]
    # A client that reads the address in another way takes a part of a password for a host or a port, and names that.
    for user in USER.findall(uri):
        secrets += [*user.split(":", 1), *re.split("[:/@?#]", user)]
    coded = {code(secret) for secret in secrets for code in (str, unquote, unquote_plus, quote)}
    for secret in sorted(filter(None, coded), key=len, reverse=True):
        pattern = re.escape(secret)
        text = re.sub(pattern if len(secret) > SHORT else rf"(?<!\w){pattern}(?!\w)", "***", text, flags=re.IGNORECASE)
    return text if len(text) <= 200 else f"{text[:70]} … {text[-120:]}"  # the cause comes last


def _secrets(uri: str) -> list[tuple[int, int]]:
    """From where to where an address has user and password, and values of its query that are secret."""
    values = [
        value.span(2) for value in QUERY.finditer(uri) if any(word in unquote(value[1]).lower() for word in SECRET)
    ]
    return [user.span(1) for user in USER.finditer(uri)] + values


def create_store(results: Path, experiment: str, tags: dict[str, str] | None = None) -> None:
    """Create the store and the experiment in it, if they are not there; the experiment gets these tags.

    Called once before the stages: a store that cannot be used at all is the user's mistake.
    Raises DvpError if it cannot.
    """
    with _usable(results), _opened(results) as client:
        there = _experiment(client, results, experiment)
        for name, value in (tags or {}).items():
            if there.tags.get(name) != value:
                client.set_experiment_tag(there.experiment_id, name, value)


def track(folder: Path, record: Record, rows: list[dict]) -> Counter:
    """Bring into the store what it lacks of a stage; how many metrics, params, tags, files that were.

    Raises DvpError if the store cannot be used.
    """
    with _usable(folder.parent):
        feed = Feed(folder, record)
        feed.update(record, rows)
    return feed.sent


def lineage(results: Path, key: str) -> dict[str, list[str]]:
    """MLflow run ids by stage of everything that the run of this key came from, itself included.

    Raises DvpError if a linked run is not in the store.
    """
    with _opened(results) as client:
        pass
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    runs: dict[str, list[str]] = {}
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
        runs.setdefault(run.data.tags[STAGE], []).append(run.info.run_id)
        waiting += [
            linked for name, value in run.data.tags.items() if name.startswith(UPSTREAM) for linked in value.split()
        ]
    return runs


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
        with _opened(folder.parent) as self._client:
            self._experiment = _experiment(self._client, folder.parent, record.experiment).experiment_id
            self._parent = self._parent_run(record.parent) if record.parent else None
            run = self._find_or_create(record)
        self._id = run.info.run_id
        self._ended = (run.info.status, run.info.end_time)
        self._tags, self._params, self._latest = run.data.tags, run.data.params, run.data.metrics
        self._known = {
            (name, point.step) for name in self._latest for point in self._client.get_metric_history(self._id, name)
        }
        self._datasets = {item.dataset.digest for item in run.inputs.dataset_inputs}
        self._outputs = {item.model_id for item in run.outputs.model_outputs}
        # Whose results these are: the model's that the stage works on, until it has made one.
        self._model = self._source_model(record, {item.model_id for item in run.inputs.model_inputs})
        self._made = False
        self._scores: dict[str, dict[int, float]] = {}
        self._rows = 0  # of those given to `update`, how many the store has

    def update(self, record: Record, rows: list[dict]) -> None:
        """Send what the store lacks of `record` and `rows`. A later call has the same rows, and more."""
        from mlflow.entities import Metric, Param, RunTag

        parent = {} if self._parent is None else {"mlflow.parentRunId": self._parent.info.run_id}
        tags = {name: value for name, value in (record.tags | parent).items() if self._tags.get(name) != value}
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
            new = [point for point in points(rows, record.started) if point[:2] not in self._known]
            for batch in _batches(new, METRICS):
                self._log_metrics(self._id, [Metric(name, value, when, step) for name, step, value, when in batch])
                self._known |= {point[:2] for point in batch}
            self._rows = len(rows)
        self._link(record)
        self._log_results(record)
        self._keep_files(record.files)
        if record.description is not None:
            self._describe()
        ended = (record.status, record.ended)
        if record.status != self._ended[0] or (record.ended is not None and record.ended != self._ended[1]):
            if record.ended is None:
                self._client.update_run(self._id, status=record.status)
            else:
                self._client.set_terminated(self._id, record.status, record.ended)
            self._ended = ended

    def _source_model(self, record: Record, known: set[str]):
        """The model that the run reads, if the store has it; it is now among the run's inputs."""
        from mlflow.entities import LoggedModelInput

        for stage in MODEL_STAGES:
            keys = record.tags.get(UPSTREAM + stage, "").split()
            model = self._find_model(keys[0]) if len(keys) == 1 else None
            if model is not None:
                if model.model_id not in known:
                    self._client.log_inputs(self._id, models=[LoggedModelInput(model.model_id)])
                    self.sent["models"] += 1
                return model
        return None

    def _link(self, record: Record) -> None:
        """The datasets that the run read, and the model that it made."""
        from mlflow.entities import Dataset, DatasetInput, InputTag, LoggedModelOutput

        datasets = [item for item in record.datasets if item.digest not in self._datasets]
        if not datasets and (record.model is None or self._made):
            return
        with _lock(self._folder.parent):  # another process may bring the same
            if datasets:
                inputs = [
                    DatasetInput(
                        Dataset(item.name, item.digest, "local", json.dumps({"uri": item.path})),
                        [InputTag("mlflow.data.context", item.context)],
                    )
                    for item in datasets
                ]
                self._client.log_inputs(self._id, datasets=inputs)
                self._datasets |= {item.digest for item in datasets}
                self.sent["datasets"] += len(datasets)
            if record.model is not None and not self._made:
                self._model = self._find_model(record.key) or self._client.create_logged_model(
                    self._experiment,
                    name=f"{record.title} · {record.model.kind}".translate(NOT_IN_A_MODELS_NAME),
                    source_run_id=self._id,
                    tags={KEY: record.key, "path": record.model.path},
                    params={name: record.params[name] for name in POLICY if name in record.params},
                    model_type=record.model.kind,
                )
                if self._model.model_id not in self._outputs:
                    self._client.log_outputs(self._id, [LoggedModelOutput(self._model.model_id, self._rows)])
                    self.sent["models"] += 1
                if self._model.status != "READY":
                    self._model = self._client.finalize_logged_model(self._model.model_id, "READY")
                self._made = True

    def _log_results(self, record: Record) -> None:
        """The stage's own numbers: as its metrics, as its model's, and scores as those of the run that trained it."""
        from mlflow.entities import Metric

        when, belongs, of_model = record.ended or record.started, {}, None
        if self._model is not None and (record.model or record.parent):
            belongs["model_id"] = self._model.model_id
            of_model = {(metric.key, metric.value) for metric in self._model.metrics or []}
            if record.datasets:
                belongs |= {"dataset_name": record.datasets[0].name, "dataset_digest": record.datasets[0].digest}
        lacking = [
            item
            for item in record.results.items()
            if self._latest.get(item[0]) != item[1] or (of_model is not None and item not in of_model)
        ]
        for batch in _batches(lacking, METRICS):
            self._log_metrics(self._id, [Metric(name, value, when, record.step, **belongs) for name, value in batch])
        if lacking and self._model is not None:
            self._model = self._client.get_logged_model(self._model.model_id)
        self._latest |= dict(lacking)
        if self._parent is not None:
            scores = [
                (name, value)
                for name, value in record.results.items()
                if name.startswith(SCORES) and self._of_parent(name).get(record.step) != value
            ]
            parent, step = self._parent.info.run_id, record.step
            self._log_metrics(parent, [Metric(name, value, when, step) for name, value in scores])
            for name, value in scores:
                self._of_parent(name)[step] = value

    def _of_parent(self, name: str) -> dict[int, float]:
        """A metric of the run below which this one is shown, by step; of a step that was measured twice, the last."""
        if name not in self._scores:
            history = self._client.get_metric_history(self._parent.info.run_id, name)
            self._scores[name] = {
                point.step: point.value for point in sorted(history, key=lambda point: point.timestamp)
            }
        return self._scores[name]

    def _log_metrics(self, run_id: str, metrics: list) -> None:
        if metrics:
            self._client.log_batch(run_id, metrics=metrics)
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

    def _describe(self) -> None:
        """The experiment's own page: what its stages say of it, the first of them first."""
        records = sorted(read_records(self._folder), key=lambda record: record.started)
        text = "\n\n".join([links(self._experiment), *(each.description for each in records if each.description)])
        text = text if len(text) <= NOTE_LENGTH else f"{text[: NOTE_LENGTH - 1]}…"
        if self._client.get_experiment(self._experiment).tags.get(NOTE) != text:
            self._client.set_experiment_tag(self._experiment, NOTE, text)
            self.sent["descriptions"] += 1

    def _parent_run(self, key: str):
        run = _find(self._client, [self._experiment], key)
        if run is None:  # the store missed it, or lost it
            with contextlib.suppress(DvpError):
                for record in read_records(self._folder):
                    if record.key == key:
                        return self._find_or_create(record)
        return run

    def _find_or_create(self, record: Record):
        run = _find(self._client, [self._experiment], record.key)
        if run is None:
            run = self._client.create_run(
                self._experiment, start_time=record.started, tags=record.tags, run_name=record.name
            )
            self.sent["runs"] += 1
        return self._client.get_run(run.info.run_id)  # with its inputs, which a search leaves out

    def _find_model(self, key: str):
        models = self._client.search_logged_models([self._experiment], f"tags.{KEY} = '{key}'", max_results=1)
        return models[0] if models else None


@contextmanager
def _opened(results: Path) -> Iterator:
    """MLflow's client, while no other process creates what it creates: the store, an experiment, a run.

    It is impatient: MLflow's own defaults wait for a dead server for minutes, and keep a deleted file open. Nobody else
    waits for what does not answer.
    """
    for name, value in {
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
        "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
        "MLFLOW_SQLALCHEMYSTORE_POOLCLASS": "NullPool",
        "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    }.items():
        os.environ.setdefault(name, value)
    import sqlalchemy
    from mlflow.tracking import MlflowClient

    with _lock(results):  # what cannot be written is no fault of the store
        pass
    uri = store_uri(results)
    if uri.startswith("http"):
        MlflowClient(tracking_uri=uri).search_experiments(max_results=1)
    elif uri.startswith(DATABASES):  # MLflow would try for minutes to open it
        engine = sqlalchemy.create_engine(uri, poolclass=sqlalchemy.NullPool)
        if uri.startswith("sqlite") and engine.url.database:
            Path(engine.url.database).parent.mkdir(parents=True, exist_ok=True)
        sqlalchemy.inspect(engine)
    with _lock(results):
        yield MlflowClient(tracking_uri=uri)


@contextmanager
def _lock(results: Path) -> Iterator[None]:
    """Several processes that create an SQLite store, or a run in any store, at the same moment would collide."""
    lock = FileLock(results / ".mlflow.lock", timeout=LOCK_SECONDS)
    try:
        results.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        raise
    except OSError as error:
        raise DvpError(f"{results}: results cannot be written there ({error.strerror})") from None
    try:
        yield
    finally:
        lock.release()


def _experiment(client, results: Path, name: str):
    experiment = client.get_experiment_by_name(name)
    if experiment is not None:
        if experiment.lifecycle_stage == "deleted":  # by somebody, in MLflow's pages; its name cannot be used again
            client.restore_experiment(experiment.experiment_id)
        return experiment
    # A server has its own place for artifacts; a bare SQLite file would put them in the current folder.
    location = None
    if store_uri(results).startswith("sqlite:"):
        location = (results.resolve() / "mlartifacts" / name).as_uri()
    return client.get_experiment(client.create_experiment(name, location, {KIND: "custom_model_development"}))


def _find(client, experiments: list[str], key: str):
    runs = client.search_runs(
        experiments, f"tags.{KEY} = '{key}'", max_results=1, order_by=["attributes.start_time ASC"]
    )
    return runs[0] if runs else None


def _batches(items: list, size: int) -> list[list]:
    return [items[start : start + size] for start in range(0, len(items), size)]


@contextmanager
def _usable(results: Path) -> Iterator[None]:
    """Make a DvpError of what a store that cannot be used raises: MLflow, SQLAlchemy, requests, a missing driver."""
    try:
        yield
    except DvpError:
        raise
    except Exception as error:
        if disk_trouble(error):
            remedy = ""
        elif "MLFLOW_TRACKING_URI" in os.environ:
            remedy = "; is MLFLOW_TRACKING_URI right?"
        else:
            remedy = "; MLFLOW_TRACKING_URI can name another store"
        raise DvpError(
            f"MLflow store {store_name(results)}: cannot be used ({reason_of(error, results)}){remedy}"
        ) from None
