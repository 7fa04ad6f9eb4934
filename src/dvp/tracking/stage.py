"""A stage while it runs: its record, and a store that may come and go."""

import contextlib
import getpass
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dvp.errors import DvpError
from dvp.experiment.grid import whole_run
from dvp.provenance import code_hash, device, git_commit
from dvp.tracking.names import final_metrics, result_name, stage_name
from dvp.tracking.record import (
    COLLAPSED,
    FAILURE,
    FOLDER,
    KEY,
    POLICY_TAG,
    UPSTREAM,
    Dataset,
    Model,
    Record,
    key_of,
    read_record,
    read_rows,
    write_record,
)
from dvp.tracking.store import Feed, reason_of, store_name
from dvp.versions import STAGE_VERSIONS

WAIT = 10.0  # seconds after a failed attempt at least, and
SHARE = 20  # times what the attempt took: a dead store costs a stage 5 % of its time at most
# The tags that say what a stage works on.
WORK = ("stage", "stage_version", "config_hash", "inputs_hash", "run", "task")


class StageRun:
    """What a stage logs. It is kept in a file, and sent to the store whenever that can be reached."""

    def __init__(self, folder: Path, path: Path, record: Record, metrics: Path | None):
        self.key = record.key
        self._work = {name: record.tags[name] for name in WORK}
        self._folder, self._path, self._record = folder, path, record
        self._metrics = metrics
        self._rows: list[dict] = []
        self._saved: Record | None = None
        self._feed: Feed | None = None
        self._out = False
        self._next_attempt = 0.0
        self._save()
        self._send()

    @property
    def run(self) -> str:
        """Path of the run that the stage works on; empty without one."""
        return self._work["run"]

    def key_in(self, experiment: str, run: str) -> str:
        """The key that the same work (stage, version, settings, inputs, task) has in another experiment.

        run : the path of this run there.
        """
        return key_of(experiment, self._work | {"run": run})

    def log_params(self, params: dict) -> None:
        """Parameters, flattened to dotted names; what is not set is left out. A re-run has the same ones."""
        self._record.params |= {name: str(value) for name, value in _flatten(params, ".") if value is not None}

    def log_step(self, step: int, metrics: dict) -> None:
        """The numbers among `metrics`, a row that the run's metrics.jsonl has already."""
        self._rows.append(metrics | {"step": step})
        if self._metrics is not None:
            self._record.metrics = self._relative(self._metrics)

    def log_result(self, metrics: dict) -> None:
        """The stage's own numbers as stage/name, nested ones as stage/name/name."""
        stage, task = self._work["stage"], self._work["task"]
        self._record.results |= {result_name(stage, task, name): float(value) for name, value in _flatten(metrics, "/")}

    def log_final(self) -> None:
        """What the steps given to `log_step` came to."""
        self._record.results |= final_metrics(self._rows)

    def log_dataset(self, path: Path, sha256: str, context: str) -> None:
        """Problems that the stage reads, in a file with this checksum: for training, evaluation or measurement."""
        self._record.datasets.append(Dataset(path=self._relative(path), digest=sha256[:16], context=context))

    def log_model(self, path: Path, kind: str) -> None:
        """Weights that the stage wrote: the base model, a checkpoint, or a converted model. They are not copied."""
        self._record.model = Model(path=self._relative(path), kind=kind)

    def describe(self, markdown: str) -> None:
        """What the experiment's page in the store is to say of this stage's part."""
        self._record.description = markdown

    def log_file(self, path: Path, folder: str = "") -> None:
        """Keep a copy of a file of the experiment's folder with the run, in `folder` of its artifacts."""
        self._record.files[self._relative(path)] = folder

    def tag(self, name: str, value: str) -> None:
        """Something to find the run by."""
        self._record.tags[name] = value

    def adopt(self, folder: Path, run: str) -> None:
        """Log what the same stage has logged in another experiment's `folder`, of a run with the path `run` there.

        Raises DvpError.
        """

        def there(path: str) -> str:
            return path.replace(f"/{self.run}/", f"/{run}/")

        def here(path: str) -> str:
            return path.replace(f"/{run}/", f"/{self.run}/")

        other = read_record(folder / there(self._relative(self._path)))
        self._record.params, self._record.results = other.params | self._record.params, dict(other.results)
        self._record.files = {here(path): of for path, of in other.files.items()}
        self._record.metrics = other.metrics and here(other.metrics)
        self._record.datasets = other.datasets
        self._record.model = other.model and other.model.model_copy(update={"path": here(f"{other.model.path}/")[:-1]})
        if COLLAPSED in other.tags:
            self.tag(COLLAPSED, other.tags[COLLAPSED])
        if other.metrics:
            self._rows += read_rows(folder / other.metrics)

    def flush(self) -> None:
        """Send what the store lacks, unless it failed a moment ago."""
        self._save()
        if time.monotonic() >= self._next_attempt:
            self._send()

    def end(self, status: str, failure: str | None = None) -> None:
        """The last word: how the stage ended."""
        self._record.status = status
        self._record.ended = _now()
        if failure is not None:
            self.tag(FAILURE, failure)
        self._save()
        self._send()

    def _save(self) -> None:
        if self._record != self._saved:
            write_record(self._path, self._record)
            self._saved = self._record.model_copy(deep=True)

    def _send(self) -> None:
        started = time.monotonic()
        try:
            if self._feed is None:
                self._feed = Feed(self._folder, self._record)
            self._feed.update(self._record, self._rows)
        except Exception as error:  # whatever a store's client may raise: the files have everything, the stage goes on
            # Another feed asks the store what it has: of what was on its way, nobody knows.
            self._feed = None
            ended = time.monotonic()
            self._next_attempt = ended + max(WAIT, SHARE * (ended - started))
            if not self._out:
                config = self._folder / "config.yaml"
                remedy = f"`dvp track --config {config}`" if config.is_file() else "the same command again"
                self._say(
                    f"cannot be used ({reason_of(error, self._folder.parent)}); the stage goes on, and "
                    f"{remedy} brings in what it missed"
                )
            self._out = True
        else:
            if self._out:
                self._say("can be used again and has everything of this stage")
            self._out = False

    def _say(self, what: str) -> None:
        print(f"MLflow store {store_name(self._folder.parent)}: {what}", file=sys.stderr, flush=True)

    def _relative(self, path: Path) -> str:
        return path.relative_to(self._folder).as_posix()


@contextmanager
def stage_run(
    folder: Path,
    experiment: str,
    stage: str,
    *,
    config_hash: str,
    inputs: str = "",
    run: str | None = None,
    task: str | None = None,
    upstream: dict[str, list[str]] | None = None,
    metrics: Path | None = None,
    title: str = "",
    params: dict | None = None,
    step: int = 0,
) -> Iterator[StageRun]:
    """A stage as tracked, begun or continued; marked failed if the block raises. No state of the store ends it.

    folder : the experiment's own (results/E); the store is beside it.
    inputs : hash of the files that the stage reads.
    run : path of the grid point, None for the stages before the grid; with /step~N of it after a step.
    upstream : for each stage whose output this one reads, the keys of its runs.
    metrics : the metrics.jsonl that has every row given to `log_step`.
    title, params : the policy that the stage makes or works on, in words and as parameters.
    step : of training, after which the stage measures.
    """
    # Another version of the stage, other settings or other input make another result, and so another run.
    tags = {
        "stage": stage,
        "stage_version": str(STAGE_VERSIONS[stage]),
        "config_hash": config_hash,
        "inputs_hash": inputs,
        "run": run or "",
        "task": task or "",
    }
    key = key_of(experiment, tags)
    tags |= {
        KEY: key,
        "code_hash": code_hash(),
        "device": device(),
        "mlflow.source.name": f"dvp {stage.partition('_')[0]}",
        "mlflow.source.type": "LOCAL",
        "mlflow.source.git.commit": git_commit(),
        "mlflow.user": _user(),
    }
    tags |= {UPSTREAM + source: " ".join(keys) for source, keys in (upstream or {}).items()}
    if "SLURM_JOB_ID" in os.environ:
        tags["slurm_job"] = os.environ["SLURM_JOB_ID"]
    path = folder / FOLDER / (f"runs/{run}" if run else "") / ("-".join(filter(None, [stage, task])) + ".json")
    record = Record(
        experiment=experiment,
        name=stage_name(stage, task or "", title),
        title=title,
        tags=tags,
        step=step,
        started=_now(),
    )
    record.parent = _parent(folder, stage, run, upstream or {})
    if title and record.parent is None:
        record.tags[POLICY_TAG] = title
    with contextlib.suppress(DvpError):  # there is none, or it is of no use
        earlier = read_record(path)
        if earlier.key == key:
            record.started, record.metrics = earlier.started, earlier.metrics
    tracked = StageRun(folder, path, record, metrics)
    tracked.log_params(params or {})
    try:
        yield tracked
    except BaseException as error:
        status = "KILLED" if isinstance(error, KeyboardInterrupt | SystemExit) else "FAILED"
        with contextlib.suppress(OSError):  # a full disk, perhaps; what ended the stage is what is to be said
            tracked.end(status, f"{type(error).__name__}: {error}"[:500])
        raise
    tracked.end("FINISHED")


def _parent(folder: Path, stage: str, run: str | None, upstream: dict[str, list[str]]) -> str | None:
    """The key of the stage that trained the policy which this one works on; None if it trains one, or has none."""
    if stage == "train" or (run is None and "base" not in upstream):
        return None
    with contextlib.suppress(DvpError):  # a model from elsewhere
        return read_record(folder / FOLDER / (f"runs/{whole_run(run)}/train.json" if run else "base.json")).key
    return None


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        return str(os.getuid())


def _now() -> int:
    return int(time.time() * 1000)


def _flatten(value: dict, separator: str, prefix: str = "") -> Iterator[tuple[str, object]]:
    for key, item in value.items():
        if isinstance(item, dict):
            yield from _flatten(item, separator, f"{prefix}{key}{separator}")
        else:
            yield f"{prefix}{key}", item
