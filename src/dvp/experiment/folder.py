"""An experiment's folder, results/E: where each stage's files are."""

import os
from pathlib import Path

from dvp.experiment.config import Experiment
from dvp.experiment.grid import Run
from dvp.experiment.loading import read_resolved

# The small JSON file that each stage writes last, its result; the stage's other files are beside it. `{of}` is the path
# of a run or of a measurement.
RESULTS = {
    "prepare": "data/manifest.json",
    "base": "base/manifest.json",
    "preflight": "preflight/engine~{of}/preflight.json",
    "train": "runs/{of}/train.json",
    "convert": "models/{of}/conversion.json",
    "evaluate": "evals/{of}/scores.json",
    "mismatch": "mismatch/{of}/mismatch.json",
    "bias": "bias/{of}/bias.json",
    "report": "report/manifest.json",
}


def named(folder: Path) -> Path:
    """Make `.` and `..` absolute without resolving symlinks, so that the parent is the folder of results."""
    return folder if folder.name not in ("", "..") else Path(os.path.abspath(folder))


class ExperimentDir:
    """An experiment and where its files are, as `results/E/config.yaml` says."""

    def __init__(self, config: Path):
        """Read the resolved experiment. Raises DvpError."""
        self.experiment: Experiment = read_resolved(config)
        self.folder = named(config.parent)
        self.results = self.folder.parent
        self.data = self.folder / "data"
        self.base = self.folder / "base"

    def result(self, stage: str, of: str = "") -> Path:
        """Return the path of the JSON file that a stage writes last.

        of: the path of the run (evaluate: of run and task, RUN/TASK or RUN/by~ENGINE/min_p~RHO/TASK) or of the
        measurement; the engine of the preflight.
        """
        return self.folder / RESULTS[stage].replace("{of}", of)

    def model(self, run: Run | None) -> tuple[str, Path]:
        """Return the stage that makes a run's model (None: the base model), and its JSON file.

        The model's own files are beside the latter.
        """
        stage = "base" if run is None else "convert"
        return stage, self.result(stage, "" if run is None else run.path)
