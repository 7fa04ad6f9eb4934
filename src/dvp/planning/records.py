"""Times that earlier jobs of an experiment recorded, to plan its next ones with."""

import csv
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean, median

from dvp.errors import DvpError
from dvp.experiment.config import Experiment
from dvp.experiment.folder import RESULTS
from dvp.experiment.grid import Run
from dvp.files import expect_keys, read_json
from dvp.planning.dag import Job
from dvp.tracking.record import read_rows

RECORDS = {
    "manifest.json",
    "preflight.json",
    "train.json",
    "conversion.json",
    "scores.json",
    "mismatch.json",
    "bias.json",
}
"""With which the stages before the report end."""
NEEDED = dict.fromkeys(("seconds", "tokens_per_second", "response_tokens_mean"), "a finite number, 0 or more") | {
    "k3": "a finite number"
}
"""What a plan needs of a step."""
REHEARSED = (
    dict.fromkeys(("seconds", "kept"), "an object")
    | dict.fromkeys(("kept_at", "gpus", "nodes"), "a finite number, 0 or more")
    | {"kl": "a finite number", "utilisation": "a finite number or null", "device": "a text"}
)
REHEARSED_SECONDS = dict.fromkeys(("rollout_token", "update_token", "synchronise"), "a finite number, 0 or more")
REHEARSED_CHECKS = dict.fromkeys(("memory", "save"), "an object")
"""What it needs of a preflight, of its seconds, and of its checks by name."""


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

    def seconds(self, job: Job) -> float | None:
        """Of a finished job, start-up included; None if it has not run, or ran under other settings.

        The longer of what the stage and what Snakemake timed: a stage that was copied from another experiment says how
        long the work itself took.
        """
        record = self._record(job)
        if record is None:
            return None
        measured = self._benchmark(job)
        return max(record["seconds_stage"], 0.0 if measured is None else measured["s"])

    def peak_memory(self, job: Job) -> float | None:
        """Bytes of memory that a finished job held at most, by Snakemake's benchmark; None if that is not known."""
        measured = None if self._record(job) is None else self._benchmark(job)
        return None if measured is None else measured["max_rss"] * 2**20

    def _record(self, job: Job) -> dict | None:
        """The JSON file with which a job ends, if its settings were those of now."""
        file = next((name for name in job.outputs if Path(name).name in RECORDS or name.startswith("report/")), None)
        record = None if file is None else self._read(file, "config_hash", "seconds_stage")
        current = record is not None and record["config_hash"] == self._config_hash(job)
        return record if current else None

    def _config_hash(self, job: Job) -> str:
        of = job.wildcards
        if job.stage == "evaluate":
            return self._experiment.config_hash(job.stage, f"{of['run']}{of.get('by', '')}/{of['task']}")
        path = of.get("run", of.get("measurement", of.get("engine", "")))
        return self._experiment.config_hash(job.stage, path)

    def _benchmark(self, job: Job) -> dict[str, float] | None:
        path = self._folder / job.benchmark if job.benchmark else None
        if path is None or not path.is_file():
            return None
        try:
            with open(path, encoding="utf-8", newline="") as file:
                rows = list(csv.DictReader(file, delimiter="\t"))
            measured = {key: float(rows[-1][key]) for key in ("s", "max_rss")}
        except (IndexError, ValueError, KeyError, TypeError, csv.Error) as error:
            raise DvpError(f"{path}: not a benchmark of Snakemake's ({type(error).__name__}: {error})") from None
        expect_keys(measured, dict.fromkeys(measured, "a finite number, 0 or more"), f"{path}: ")
        return measured

    def problems(self) -> dict[str, int]:
        """Evaluation problems by task, as `dvp prepare` counted them; empty before that."""
        record = self._read("data/manifest.json", "config_hash", "counts")
        current = record and record["config_hash"] == self._experiment.config_hash("prepare")
        if not current:
            return {}
        where = f"{self._folder / 'data/manifest.json'}: counts."
        expect_keys(record["counts"], {"evaluation": "an object"}, where)
        counted = record["counts"]["evaluation"]
        expect_keys(counted, dict.fromkeys(counted, "a finite number, 0 or more"), f"{where}evaluation.")
        return dict(counted)

    @cached_property
    def training(self) -> dict[str, Trained]:
        """What the steps of each run tell, by the run's path.

        Data and base model were those of now; learning rate, steps or size of a batch may have been others, so that a
        few steps of a run tell what all of them will take. Raises DvpError, naming file and line.
        """
        rates = {}
        for run in self._experiment.runs if self._current else ():
            path = self._folder / "runs" / run.path / "metrics.jsonl"
            rows = read_rows(path) if path.is_file() else []
            for number, row in enumerate(rows, start=1):
                expect_keys(row, NEEDED, f"{path}: line {number}: ")
            tokens = sum(row["tokens_per_second"] * row["seconds"] for row in rows)
            if tokens > 0:
                seconds = sum(row["seconds"] for row in rows)
                length = fmean(row["response_tokens_mean"] for row in rows)
                rates[run.path] = Trained(seconds / tokens, length, median(row["k3"] for row in rows))
        return rates

    def preflight(self, path: str) -> dict | None:
        """What a preflight measured, its checks by name; None without one of these settings and GPUs."""
        keys = ("config_hash", "seconds", "kl", "kept", "kept_at", "utilisation", "device", "gpus", "nodes", "checks")
        record = self._read(RESULTS["preflight"].replace("{of}", path), *keys)
        training = self._experiment.training
        if record is None or record["config_hash"] != self._experiment.config_hash("preflight", path):
            return None
        where = f"{self._folder / RESULTS['preflight'].replace('{of}', path)}: "
        expect_keys(record, REHEARSED, where)
        expect_keys(record["seconds"], REHEARSED_SECONDS, f"{where}seconds.")
        expect_keys(record["kept"], dict.fromkeys(record["kept"], "a finite number, 0 or more"), f"{where}kept.")
        for number, line in enumerate(record["checks"]):
            expect_keys(line, dict.fromkeys(("check", "says"), "a text"), f"{where}checks.{number}.")
        checks = {line["check"]: line for line in record["checks"]}
        expect_keys(checks, REHEARSED_CHECKS, f"{where}checks.")
        if (record["gpus"], record["nodes"]) != (training.gpus, training.nodes):
            return None
        return record | {"checks": checks}

    def startup(self, run: Run) -> float | None:
        """Seconds of a finished training job outside its steps."""
        record = self._read(f"runs/{run.path}/train.json", "seconds_stage", "seconds_training")
        if not record or not self._current:
            return None
        seconds = record["seconds_stage"] - record["seconds_training"]
        return seconds if seconds > 0 else None  # a job that was continued has timed its last leg only

    @cached_property
    def _current(self) -> bool:
        """Whether the base model in the folder is the experiment's."""
        record = self._read("base/manifest.json", "config_hash")
        return bool(record) and record["config_hash"] == self._experiment.config_hash("base")

    def _read(self, file: str, *keys: str) -> dict | None:
        path = self._folder / file
        return read_json(path, *keys) if path.is_file() else None
