"""What earlier jobs of an experiment recorded, to plan its next ones with."""

import csv
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from dvp.experiment.config import Experiment
from dvp.experiment.folder import RESULTS
from dvp.experiment.jobs import Job
from dvp.files import read_json
from dvp.tracking.record import read_rows


class Trained(NamedTuple):
    """What the steps of a run tell."""

    seconds_per_token: float
    """Of a response; the mean over all."""
    tokens: float
    """Of a response, the mean over all."""


@dataclass(frozen=True)
class Records:
    """What is below `folder` (results/E), which need not exist."""

    experiment: Experiment
    folder: Path

    def of(self, job: Job) -> dict[str, Any] | None:
        """The JSON file with which a job ended; None if it has not run, or ran under other settings."""
        path = self.folder / RESULTS[job.stage].replace("{of}", job.path)
        if not path.is_file():
            return None
        record = read_json(path, "config_hash", "seconds_stage")
        return record if record["config_hash"] == self.experiment.config_hash(job.stage, job.path) else None

    def took(self, job: Job) -> float | None:
        """Seconds of a finished job, start-up included; None: not known.

        The longer of what the stage and what Snakemake timed: a stage that was copied from another experiment says how
        long the work itself took. A benchmark of a job that was killed may hold anything, and tells nothing then.
        """
        record, seconds = self.of(job), 0.0
        if record is None:
            return None
        path = self.folder / "benchmarks" / f"{'/'.join(filter(None, (job.stage, job.path)))}.tsv"
        with suppress(OSError, LookupError, TypeError, ValueError), open(path, encoding="utf-8", newline="") as file:
            seconds = float(list(csv.DictReader(file, delimiter="\t"))[-1]["s"])
        return max(record["seconds_stage"], seconds)

    @cached_property
    def problems(self) -> dict[str, int]:
        """Evaluation problems by task, as `dvp prepare` counted them; empty before that."""
        record = self.of(self.experiment.job("prepare"))
        return {} if record is None else record["counts"]["evaluation"]

    @cached_property
    def training(self) -> dict[str, Trained]:
        """What the steps of each run tell, by the run's path.

        Data and base model were those of now; learning rate, steps or size of a batch may have been others, so that a
        few steps of a run tell what all of them will take. Raises DvpError for a file that cannot be read.
        """
        rates = {}
        for path, file in self._of_runs("metrics.jsonl"):
            rows = read_rows(file)
            tokens = sum(row["tokens_per_second"] * row["seconds"] for row in rows)
            if tokens > 0:
                seconds = sum(row["seconds"] for row in rows)
                length = fmean(row["response_tokens_mean"] for row in rows)
                rates[path] = Trained(seconds / tokens, length)
        return rates

    @cached_property
    def startup(self) -> float | None:
        """Seconds of a training job outside its steps, the mean of the finished ones; None if there are none."""
        records = [read_json(file, "seconds_stage", "seconds_training") for _, file in self._of_runs("train.json")]
        seconds = [record["seconds_stage"] - record["seconds_training"] for record in records]
        return fmean(known) if (known := [one for one in seconds if one > 0]) else None  # a continued job timed its end

    def _of_runs(self, name: str) -> list[tuple[str, Path]]:
        """The runs that have a file of this name, none if the base model in the folder is not the experiment's."""
        if self.of(self.experiment.job("base")) is None:
            return []
        files = ((run.path, self.folder / "runs" / run.path / name) for run in self.experiment.runs)
        return [(path, file) for path, file in files if file.is_file()]

    def preflight(self, path: str) -> dict[str, Any] | None:
        """What a preflight measured, its checks by name; None without one of these settings and GPUs."""
        job = self.experiment.job("preflight", path)
        record = self.of(job)
        if record is None or (record["gpus"], record["nodes"]) != (job.gpus, job.nodes):
            return None
        return record | {"checks": {line["check"]: line for line in record["checks"]}}
