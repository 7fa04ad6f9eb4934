"""The MLflow store. This is the only module that imports mlflow.

There is one MLflow experiment per experiment file and one run per stage. Stages that work on a policy are nested below
the run that trained it, which shows the policy's settings, steps and scores. A run is found by its key, a tag, so that
a stage that is rerun continues its run in any store. Sending is idempotent: only what the store lacks is sent.
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

from filelock import FileLock

from dvp.errors import DvpError
from dvp.experiment.folder import ExperimentDir
from dvp.files import sha256_file
from dvp.tracking.names import SCORES, metric_name
from dvp.tracking.record import KEY, MODEL, OUTCOMES, UPSTREAM, Record, key_of, read_records, read_rows
from dvp.tracking.views import links, view_tags

NOTE, NOTE_LENGTH = "mlflow.note.content", 20_000  # tag of an experiment's description; MLflow's limit of its length
FILES = "files_hash"  # tag, set once all files of a run have been sent
# Stages that make a model, and its kind; a stage works on the model of the first of these in its upstream.
KINDS = {"convert": "converted", "train": "checkpoint", "base": "base"}
POLICY = ("method", "label", "engine", "rho", "rho_text", "seed")  # parameters that identify a policy
NOT_IN_A_MODELS_NAME = str.maketrans({"/": "_", ":": "_", ".": "·", "%": None, '"': None, "'": None})
ROWS, ITEMS = 6, 100  # per call; MLflow accepts at most 1,000 metrics, and 100 parameters or tags
LOCK_SECONDS = 120  # creating a store takes 8 s on a quiet machine, and many times that on a busy one
# MLflow's own defaults wait for a dead server for minutes, and keep a deleted file open.
ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_SQLALCHEMYSTORE_POOLCLASS": "NullPool",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}


def store_uri(results: Path) -> str:
    """Return the store's address: MLFLOW_TRACKING_URI if set, else an SQLite file in the results folder."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{results.resolve() / 'mlflow.db'}"


def store_name(results: Path) -> str:
    """Return the store's address without user, password and query, cut short rather than revealing a secret."""
    scheme, slashes, rest = store_uri(results).partition("://")
    address, _, query = rest.partition("?")
    if "@" in query:  # the ? may be part of a password
        address = "***"
    return scheme + slashes + (address if address.startswith("/") else address.rpartition("@")[2])


def reason_of(error: Exception, results: Path) -> str:
    """Summarise a store's error in one line; only its type if the message could reveal a secret in the address."""
    text = " ".join(re.split(r"\[SQL:|\(Background", str(error))[0].split())
    if not text or store_uri(results) != store_name(results):
        return type(error).__name__
    return text if len(text) <= 200 else f"{text[:70]} … {text[-120:]}"  # the cause comes last


def create_store(results: Path, experiment: str, tags: dict[str, str] | None = None) -> None:
    """Create the store and the experiment in it if they do not exist, and set the experiment's tags.

    Raises DvpError if the store cannot be used: this is called once before the stages, when that is the user's mistake.
    """
    with _usable(results), _opened(results) as client:
        there = _experiment(client, results, experiment)
        for name, value in (tags or {}).items():
            client.set_experiment_tag(there, name, value)


def track(config: Path) -> None:
    """Send to the store from the files what it lacks of every stage of an experiment that has begun.

    Raises DvpError if a file is malformed or the store cannot be used.
    """
    directory = ExperimentDir(config)
    # Everything is read before anything is sent, so that a malformed file leaves the store as it was.
    stages = [
        (record, read_rows(directory.folder / record.metrics) if record.metrics else [])
        for record in read_records(directory.folder)
    ]
    create_store(directory.results, directory.experiment.name, view_tags(directory.experiment))
    for record, rows in stages:
        with _usable(directory.results):
            send(directory.folder, record, rows)
        print(record.name)
    print(f"stages in {store_name(directory.results)}: {len(stages)}")


def send(folder: Path, record: Record, rows: list[dict]) -> None:
    """Send to the store what it lacks of a stage.

    Of the steps, only those after the last one in the store are sent: if a resumed run did a step twice, the first
    numbers stay. A row is sent whole, and its time depends only on the files, so that two processes that send the same
    rows write the same points, which a store keeps once.

    May raise any exception of MLflow or its dependencies.
    """
    from mlflow.entities import Metric, Param, RunTag

    with _opened(folder.parent) as client:
        experiment = _experiment(client, folder.parent, record.experiment)
        run = _find(client, experiment, record.key)
        if run is None:
            run = client.create_run(experiment, record.started, record.tags, record.name)
        run = client.get_run(run.info.run_id)  # a search does not return the run's inputs
        parent = _find(client, experiment, record.parent)
        ends = record.results or MODEL in record.tags  # only a finished stage has them
        model = _model(client, experiment, run, record, len(rows)) if ends else None
    there, run_id = run.data, run.info.run_id

    def log(**of_a_kind: list) -> None:
        [(kind, items)] = of_a_kind.items()
        for start in range(0, len(items), ITEMS):
            client.log_batch(run_id, **{kind: items[start : start + ITEMS]})

    files = {name: below for name, below in record.files.items() if (folder / name).is_file()}
    tags = record.tags | ({"mlflow.parentRunId": parent.info.run_id} if parent else {})
    if files:
        tags[FILES] = key_of({name: sha256_file(folder / name) for name in files})
        if tags[FILES] != there.tags.get(FILES):
            for name, below in files.items():
                client.log_artifact(run_id, str(folder / name), below or None)
    for name in OUTCOMES:
        if name in there.tags and name not in record.tags:  # left by an earlier attempt
            client.delete_tag(run_id, name)
    log(tags=[RunTag(*item) for item in tags.items() if there.tags.get(item[0]) != item[1]])
    log(params=[Param(*item) for item in record.params.items() if item[0] not in there.params])

    # Every row has `seconds`, whose history therefore shows the last step in the store.
    history = client.get_metric_history(run_id, metric_name("seconds")) if rows else []
    last, when, new = max((point.step for point in history), default=0), float(record.started), []
    for row in rows:
        when += 1000 * row.get("seconds", 0.0)
        numbers = {name: float(row[name]) for name in row if name != "step" and isinstance(row[name], int | float)}
        if row["step"] > last:
            new.append([Metric(metric_name(name), numbers[name], round(when), row["step"]) for name in numbers])
    for start in range(0, len(new), ROWS):
        client.log_batch(run_id, list(chain(*new[start : start + ROWS])))

    # The stage's results; scores are also logged to the run that trained the policy.
    results, ended = record.results.items(), record.ended or record.started
    of_model = {(metric.key, metric.value) for metric in (model and model.metrics) or []}
    belongs = {"model_id": model.model_id} if model else {}
    lacking = [item for item in results if there.metrics.get(item[0]) != item[1] or (model and item not in of_model)]
    log(metrics=[Metric(*item, ended, record.step, **belongs) for item in lacking])
    for name, value in results if parent else ():
        if name.startswith(SCORES):
            history = client.get_metric_history(parent.info.run_id, name)
            at = [point for point in history if point.step == record.step]
            if not at or max(at, key=lambda point: point.timestamp).value != value:
                client.log_metric(parent.info.run_id, name, value, ended, record.step)

    if record.description is not None:
        _describe(client, experiment, folder)
    if record.ended is not None and (run.info.status, run.info.end_time) != (record.status, record.ended):
        client.set_terminated(run_id, record.status, record.ended)
    elif run.info.status != record.status:
        client.update_run(run_id, record.status)


def _model(client, experiment: str, run, record: Record, steps: int):
    """Return the MLflow model to which a stage's results belong: the one it makes, else the one it works on, or None.

    The model that the stage works on becomes an input of its run, and the one that it makes an output.
    steps : number of training steps of the model that the stage makes.
    """
    from mlflow.entities import LoggedModelInput, LoggedModelOutput

    def find(key: str):
        return next(iter(client.search_logged_models([experiment], f"tags.{KEY} = '{key}'", max_results=1)), None)

    keys = (record.tags.get(UPSTREAM + stage, "").split() for stage in KINDS)
    # A report reads several models; its results belong to none of them.
    model = next((found for own in keys if len(own) == 1 and (found := find(own[0]))), None)
    if model and model.model_id not in {item.model_id for item in run.inputs.model_inputs}:
        client.log_inputs(run.info.run_id, models=[LoggedModelInput(model.model_id)])
    if MODEL not in record.tags:
        return model if record.parent else None
    kind = KINDS[record.tags["stage"]]
    model = find(record.key) or client.create_logged_model(
        experiment,
        f"{record.title} · {kind}".translate(NOT_IN_A_MODELS_NAME),
        run.info.run_id,
        {KEY: record.key, "path": record.tags[MODEL]},
        {name: record.params[name] for name in POLICY if name in record.params},
        kind,
    )
    if model.model_id not in {item.model_id for item in run.outputs.model_outputs}:
        client.log_outputs(run.info.run_id, [LoggedModelOutput(model.model_id, steps)])
    return model if model.status == "READY" else client.finalize_logged_model(model.model_id, "READY")


def _describe(client, experiment: str, folder: Path) -> None:
    """Set the description on the experiment's page: links to the views, then each stage's part in order of start."""
    records = sorted(read_records(folder), key=lambda record: record.started)
    text = "\n\n".join([links(experiment), *(each.description for each in records if each.description)])
    client.set_experiment_tag(experiment, NOTE, text if len(text) <= NOTE_LENGTH else f"{text[: NOTE_LENGTH - 1]}…")


def _experiment(client, results: Path, name: str) -> str:
    """Return MLflow's id of an experiment, which is created or restored if necessary."""
    there = client.get_experiment_by_name(name)
    if there is None:
        # A server has its own folder for artifacts; with a bare SQLite file they would land in the current folder.
        sqlite = store_uri(results).startswith("sqlite:")
        location = (results.resolve() / "mlartifacts" / name).as_uri() if sqlite else None
        return client.create_experiment(name, location, {"mlflow.experimentKind": "custom_model_development"})
    if there.lifecycle_stage == "deleted":  # by a user in MLflow's pages; the name cannot be reused
        client.restore_experiment(there.experiment_id)
    return there.experiment_id


def _find(client, experiment: str, key: str | None):
    order = ["attributes.start_time ASC"]
    runs = client.search_runs([experiment], f"tags.{KEY} = '{key}'", max_results=1, order_by=order) if key else []
    return runs[0] if runs else None


@contextmanager
def _opened(results: Path) -> Iterator:
    """Yield MLflow's client under a lock, as two processes could create the same store, experiment, run or model."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    import sqlalchemy
    from mlflow.tracking import MlflowClient

    results.mkdir(parents=True, exist_ok=True)
    # Tried before the lock is taken, so that no other process waits for a store that does not answer, and without
    # MLflow, which would try for minutes to open a database.
    uri = store_uri(results)
    if uri.startswith("http"):
        MlflowClient(tracking_uri=uri).search_experiments(max_results=1)
    elif uri.startswith(("sqlite", "postgresql", "mysql", "mssql")):
        engine = sqlalchemy.create_engine(uri, poolclass=sqlalchemy.NullPool)
        if uri.startswith("sqlite") and engine.url.database:
            Path(engine.url.database).parent.mkdir(parents=True, exist_ok=True)
        sqlalchemy.inspect(engine)
    with FileLock(results / ".mlflow.lock", timeout=LOCK_SECONDS):
        yield MlflowClient(tracking_uri=uri)


@contextmanager
def _usable(results: Path) -> Iterator[None]:
    """Turn any exception of an unusable store (MLflow, SQLAlchemy, requests, a missing driver) into a DvpError."""
    try:
        yield
    except DvpError:
        raise
    except Exception as error:
        given = "MLFLOW_TRACKING_URI" in os.environ
        remedy = "is MLFLOW_TRACKING_URI right?" if given else "MLFLOW_TRACKING_URI can name another store"
        raise DvpError(
            f"MLflow store {store_name(results)}: cannot be used ({reason_of(error, results)}); {remedy}"
        ) from None
