"""What earlier jobs of an experiment recorded, to plan its next ones with."""

import csv
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean, median
from typing import Any

from dvp.experiment.config import Experiment
from dvp.experiment.folder import RESULTS
from dvp.experiment.grid import Run
from dvp.experiment.jobs import Job
from dvp.files import read_json
from dvp.tracking.record import read_rows


@dataclass(frozen=True)
class Trained:
    """What the steps of a run tell."""

    seconds_per_token: float
    """Of a response; the mean over all."""
    tokens: float
    """Of a response, the mean over all."""
    kl: float
    """k3 in nats a token, the median over the steps: a run that collapses ends with a huge one."""


class Records:
    """What is below `folder` (results/E), which need not exist."""

    def __init__(self, experiment: Experiment, folder: Path):
        self._experiment, self._folder = experiment, folder

    def of(self, job: Job) -> dict[str, Any] | None:
        """The JSON file with which a job ended; None if it has not run, or ran under other settings."""
        path = self._folder / RESULTS[job.stage].replace("{of}", job.path)
        if not path.is_file():
            return None
        record = read_json(path, "config_hash", "seconds_stage")
        return record if record["config_hash"] == self._experiment.config_hash(job.stage, job.path) else None

    def seconds(self, job: Job) -> float | None:
        """Of a finished job, start-up included.

        The longer of what the stage and what Snakemake timed: a stage that was copied from another experiment says how
        long the work itself took.
        """
        record = self.of(job)
        return None if record is None else max(record["seconds_stage"], self._benchmark(job).get("s", 0.0))

    def peak_memory(self, job: Job) -> float | None:
        """Bytes of memory that a finished job held at most, by Snakemake's benchmark; None if that is not known."""
        megabytes = None if self.of(job) is None else self._benchmark(job).get("max_rss")
        return None if megabytes is None else megabytes * 2**20

    def _benchmark(self, job: Job) -> dict[str, float]:
        """Seconds (s) and MB (max_rss); a file of a job that was killed may hold anything, and tells nothing then."""
        path = self._folder / "benchmarks" / f"{'/'.join(filter(None, (job.stage, job.path)))}.tsv"
        with suppress(OSError, LookupError, TypeError, ValueError), open(path, encoding="utf-8", newline="") as file:
            row = list(csv.DictReader(file, delimiter="\t"))[-1]
            return {key: float(row[key]) for key in ("s", "max_rss")}
        return {}

    @cached_property
    def problems(self) -> dict[str, int]:
        """Evaluation problems by task, as `dvp prepare` counted them; empty before that."""
        record = self.of(self._experiment.job("prepare"))
        return {} if record is None else record["counts"]["evaluation"]

    @cached_property
    def training(self) -> dict[str, Trained]:
        """What the steps of each run tell, by the run's path.

        Data and base model were those of now; learning rate, steps or size of a batch may have been others, so that a
        few steps of a run tell what all of them will take. Raises DvpError for a file that cannot be read.
        """
        rates = {}
        for run in self._experiment.runs if self._current else ():
            path = self._folder / "runs" / run.path / "metrics.jsonl"
            rows = read_rows(path) if path.is_file() else []
            tokens = sum(row["tokens_per_second"] * row["seconds"] for row in rows)
            if tokens > 0:
                seconds = sum(row["seconds"] for row in rows)
                length = fmean(row["response_tokens_mean"] for row in rows)
                rates[run.path] = Trained(seconds / tokens, length, median(row["k3"] for row in rows))
        return rates

    def preflight(self, path: str) -> dict[str, Any] | None:
        """What a preflight measured, its checks by name; None without one of these settings and GPUs."""
        job = self._experiment.job("preflight", path)
        record = self.of(job)
        if record is None or (record["gpus"], record["nodes"]) != (job.gpus, job.nodes):
            return None
        return record | {"checks": {line["check"]: line for line in record["checks"]}}

    def startup(self, run: Run) -> float | None:
        """Seconds of a finished training job outside its steps."""
        path = self._folder / "runs" / run.path / "train.json"
        if not self._current or not path.is_file():
            return None
        record = read_json(path, "seconds_stage", "seconds_training")
        seconds = record["seconds_stage"] - record["seconds_training"]
        return seconds if seconds > 0 else None  # a job that was continued has timed its last leg only

    @cached_property
    def _current(self) -> bool:
        """Whether the base model in the folder is the experiment's."""
        return self.of(self._experiment.job("base")) is not None
