"""Times that earlier jobs of an experiment recorded, to plan its next ones with."""

import json
from functools import cached_property
from pathlib import Path
from statistics import fmean

from dvp.errors import DvpError
from dvp.experiment.config import Experiment
from dvp.experiment.grid import Run
from dvp.files import read_json

RATES = ("seconds", "tokens_per_second", "response_tokens_mean")


class Records:
    """What is below `folder` (results/E), which need not exist."""

    def __init__(self, experiment: Experiment, folder: Path):
        self._experiment, self._folder = experiment, folder

    def seconds(self, file: str, config_hash: str) -> float | None:
        """Of the finished job that wrote `file`; None if it has not run, or ran under other settings."""
        record = self._read(file, "config_hash", "seconds_stage")
        return record["seconds_stage"] if record and record["config_hash"] == config_hash else None

    def problems(self) -> dict[str, int]:
        """Evaluation problems by task, as `dvp prepare` counted them; empty before that."""
        record = self._read("data/manifest.json", "config_hash", "counts")
        current = record and record["config_hash"] == self._experiment.config_hash("prepare")
        return dict(record["counts"]["evaluation"]) if current else {}

    @cached_property
    def training(self) -> dict[str, tuple[float, float]]:
        """By run: seconds per response token and mean tokens of a response, over the steps that it has made.

        Data and base model were those of now; learning rate, steps or size of a batch may have been others, so that a
        few steps of a run tell what all of them will take. Raises DvpError, naming file and line.
        """
        found = {}
        for run in self._experiment.runs if self._current else ():
            rows = _rows(self._folder / "runs" / run.path / "metrics.jsonl")
            tokens = sum(row["tokens_per_second"] * row["seconds"] for row in rows)
            if tokens > 0:
                seconds = sum(row["seconds"] for row in rows)
                found[run.path] = (seconds / tokens, fmean(row["response_tokens_mean"] for row in rows))
        return found

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


def _rows(path: Path) -> list[dict[str, float]]:
    """The rates of every whole row of a metrics.jsonl; none if there is no such file."""
    if not path.is_file():
        return []
    rows = []
    *lines, _ = path.read_text(encoding="utf-8").split("\n")  # what follows the last newline is still being written
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            rows.append({key: float(row[key]) for key in RATES})
        except (ValueError, KeyError, TypeError) as error:
            raise DvpError(f"{path}: line {number}: not a row of metrics ({type(error).__name__}: {error})") from None
    return rows
