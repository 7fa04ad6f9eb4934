"""What earlier jobs of an experiment recorded, to plan its next ones with."""

import csv
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from dvp.experiment.config import Experiment
from dvp.experiment.folder import RESULTS
from dvp.experiment.jobs import Job
from dvp.files import read_json


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

        The longest of what the stage, its steps and Snakemake timed: a stage that was copied from another experiment
        says how long the work itself took, and of training that was continued the job is the end alone. A benchmark of
        a job that was killed may hold anything, and tells nothing then.
        """
        record, seconds = self.of(job), 0.0
        if record is None:
            return None
        path = self.folder / "benchmarks" / f"{'/'.join(filter(None, (job.stage, job.path)))}.tsv"
        with suppress(OSError, LookupError, TypeError, ValueError), open(path, encoding="utf-8", newline="") as file:
            seconds = float(list(csv.DictReader(file, delimiter="\t"))[-1]["s"])
        return max(record["seconds_stage"], record.get("seconds_training", 0.0), seconds)

    @cached_property
    def problems(self) -> dict[str, int]:
        """Evaluation problems by task, as `dvp prepare` counted them; empty before that."""
        record = self.of(self.experiment.job("prepare"))
        return {} if record is None else record["counts"]["evaluation"]

    def preflight(self, path: str) -> dict[str, Any] | None:
        """What a preflight measured; None without one of these settings and GPUs."""
        job = self.experiment.job("preflight", path)
        record = self.of(job)
        return record if record and (record["gpus"], record["nodes"]) == (job.gpus, job.nodes) else None
