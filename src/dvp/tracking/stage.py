"""Tracking of a stage while it runs: its record file, and a store that may be unreachable at times."""

import contextlib
import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from dvp.errors import DvpError
from dvp.experiment.grid import whole_run
from dvp.files import write_json
from dvp.provenance import device, git_commit
from dvp.tracking import store
from dvp.tracking.names import final_metrics, result_name, stage_name
from dvp.tracking.record import (
    COLLAPSED,
    FAILURE,
    FOLDER,
    KEY,
    MODEL,
    POLICY_TAG,
    UPSTREAM,
    Record,
    key_of,
    read_record,
    read_rows,
)
from dvp.versions import STAGE_VERSIONS

PAUSE = (
    300.0  # seconds after a failed attempt, which takes at most 20: a dead store costs a stage at most 7 % of its time
)
# Tags that identify a stage's work, apart from the path of its run.
WORK = ("stage", "stage_version", "config_hash", "inputs_hash", "task")


class StageRun:
    """Tracked run of a stage: everything logged is kept in a file and sent to the store whenever it can be reached."""

    def __init__(self, folder: Path, path: Path, record: Record, metrics: Path | None):
        """Write the record to `path` and send it. folder : the experiment's. metrics : the stage's metrics.jsonl."""
        self.key, self.run = record.key, record.tags["run"]
        """Key of the tracked run in any store; path of the training run that the stage works on, empty without one."""
        self._folder, self._path, self._record, self._metrics = folder, path, record, metrics
        self._rows: list[dict] = []
        self._out, self._next_attempt = False, 0.0
        self.flush()

    def alike(self) -> Iterator[tuple[Path, Record]]:
        """Yield folder and record of each other experiment in this results folder that has finished the same work.

        The path of its run may name other training settings than this one's.
        """
        ours = {name: self._record.tags[name] for name in WORK}
        with_any_settings = re.sub(r"(/rho~[^/]+)(/.+)?(/seed~)", r"\1/**\3", self._relative(self._path))
        for other in sorted(self._folder.parent.iterdir()):
            for path in sorted(other.glob(with_any_settings)) if other != self._folder else ():
                with contextlib.suppress(DvpError):
                    theirs = read_record(path)
                    if theirs.status == "FINISHED" and theirs.files and ours.items() <= theirs.tags.items():
                        yield other, theirs

    def log_params(self, params: dict) -> None:
        """Log parameters, flattened to dotted names, without those that are None. A re-run must log the same ones."""
        self._record.params |= {name: str(value) for name, value in _flatten(params, ".") if value is not None}

    def log_step(self, step: int, metrics: dict) -> None:
        """Log the numbers of a training step, a row that is already in the run's metrics.jsonl."""
        self._rows.append(metrics | {"step": step})
        self._record.metrics = self._metrics and self._relative(self._metrics)

    def log_result(self, metrics: dict) -> None:
        """Log the numbers among a stage's results as stage/name, and nested ones as stage/name/name."""
        of, numbers = (self._record.tags["stage"], self._record.tags["task"]), _flatten(metrics, "/")
        self._record.results |= {result_name(*of, name): float(n) for name, n in numbers if isinstance(n, int | float)}

    def log_model(self, path: Path) -> None:
        """Log the path of the weights that the stage wrote. They are not copied."""
        self.tag(MODEL, self._relative(path))

    def describe(self, markdown: str) -> None:
        """Set this stage's part of the description on the experiment's page in the store."""
        self._record.description = markdown

    def log_file(self, path: Path, folder: str = "") -> None:
        """Keep a copy of a file of the experiment's folder with the run, in `folder` of its artifacts."""
        self._record.files[self._relative(path)] = folder

    def tag(self, name: str, value: str) -> None:
        """Set a tag by which the run can be found."""
        self._record.tags[name] = value

    def adopt(self, folder: Path, theirs: Record) -> None:
        """Log what the same stage has logged in another experiment's `folder`, for a result that is copied from there.

        Raises DvpError if their metrics.jsonl cannot be read.
        """
        run = re.escape(theirs.tags["run"])
        moved = re.sub(rf'/{run}(?=[/"])', lambda _: f"/{self.run}", theirs.model_dump_json())
        ours = Record.model_validate_json(moved)
        ours.params |= self._record.params
        for name in ("params", "results", "files", "metrics"):
            setattr(self._record, name, getattr(ours, name))
        self._record.tags |= {name: ours.tags[name] for name in (COLLAPSED, MODEL) if name in ours.tags}
        self._rows += read_rows(folder / theirs.metrics) if theirs.metrics else []

    def flush(self) -> None:
        """Write the record, and send what the store lacks unless it failed less than PAUSE seconds ago."""
        write_json(self._path, self._record.model_dump())
        if time.monotonic() < self._next_attempt:
            return
        try:
            store.send(self._folder, self._record, self._rows)
        except Exception as error:  # a store's client may raise anything; the files have everything
            self._next_attempt = time.monotonic() + PAUSE
            if not self._out:
                config = self._folder / "config.yaml"
                remedy = f"`dvp track --config {config}`" if config.is_file() else "the same command again"
                reason = store.reason_of(error, self._folder.parent)
                self._say(f"cannot be used ({reason}); the stage continues, and {remedy} brings in what it missed")
            self._out = True
        else:
            if self._out:
                self._say("can be used again and has everything of this stage")
            self._out = False

    def end(self, status: str, failure: str | None = None) -> None:
        """Log how the stage ended and, without a failure, the final metrics of its steps; send them to the store."""
        self._record.status, self._record.ended = status, _now()
        if failure is not None:
            self.tag(FAILURE, failure)
        elif self._rows:
            self._record.results |= final_metrics(self._rows)
        self._next_attempt = 0.0
        self.flush()

    def _say(self, what: str) -> None:
        print(f"MLflow store {store.store_name(self._folder.parent)}: {what}", file=sys.stderr, flush=True)

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
    """Track a stage during the block, as a new run or the continuation of an earlier one.

    The run is marked failed if the block raises. An unusable store does not end the stage.

    folder : the experiment's folder (results/E); the default store lies next to it.
    experiment, stage : their names.
    config_hash : hash of the settings that the stage depends on.
    inputs : hash of the files that the stage reads.
    run : path of the run in the grid, with /step~N after a step; None for the stages before the grid.
    task : evaluation task or other part of the stage.
    upstream : for each stage whose output this one reads, the keys of its runs.
    metrics : the metrics.jsonl that has every row given to `log_step`.
    title, params : the policy that the stage makes or works on, in words and as parameters.
    step : step of training after which the stage measures.
    """
    # Another version of the stage, other settings or other input give another result, hence another tracked run.
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
        "device": device(),
        "mlflow.source.name": f"dvp {stage.partition('_')[0]}",
        "mlflow.source.type": "LOCAL",
        "mlflow.source.git.commit": git_commit(),
        "mlflow.user": psutil.Process().username(),
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
    with contextlib.suppress(DvpError):  # there is no earlier record, or it is malformed
        earlier = read_record(path)
        if earlier.key == key:
            record.started, record.metrics = earlier.started, earlier.metrics
    tracked = StageRun(folder, path, record, metrics)
    tracked.log_params(params or {})
    try:
        yield tracked
    except BaseException as error:
        status = "KILLED" if isinstance(error, KeyboardInterrupt | SystemExit) else "FAILED"
        with contextlib.suppress(OSError):  # perhaps a full disk; the error that ended the stage matters more
            tracked.end(status, f"{type(error).__name__}: {error}"[:500])
        raise
    tracked.end("FINISHED")


def _parent(folder: Path, stage: str, run: str | None, upstream: dict[str, list[str]]) -> str | None:
    """Return the key of the stage that trained this stage's policy; None if it trains one itself or has none."""
    if stage == "train" or (run is None and "base" not in upstream):
        return None
    with contextlib.suppress(DvpError):  # the model was not made by a tracked stage
        return read_record(folder / FOLDER / (f"runs/{whole_run(run)}/train.json" if run else "base.json")).key
    return None


def _now() -> int:
    return int(time.time() * 1000)


def _flatten(value: dict, separator: str, prefix: str = "") -> Iterator[tuple[str, object]]:
    for key, item in value.items():
        if isinstance(item, dict):
            yield from _flatten(item, separator, f"{prefix}{key}{separator}")
        else:
            yield f"{prefix}{key}", item
