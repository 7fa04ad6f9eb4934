"""An experiment's folder: where each stage finds its files, its MLflow run, and how it ends."""

import time
from pathlib import Path

from dvp.experiment.config import Experiment
from dvp.experiment.grid import Run
from dvp.experiment.loading import read_resolved
from dvp.files import read_json, sha256_json, verify_checksums, write_json
from dvp.provenance import git_commit
from dvp.tracking.record import KEY
from dvp.tracking.stage import StageRun, stage_run

BASE = "base"  # the pseudo-run of the model before RL


class ExperimentDir:
    """An experiment and where its files are: `results/E/config.yaml` says both."""

    def __init__(self, config: Path):
        self.experiment: Experiment = read_resolved(config)
        self.folder = config.parent
        self.results = config.resolve().parent.parent
        self.data = self.folder / "data"
        self.base = self.folder / "base"

    def run_folder(self, run: Run) -> Path:
        return self.folder / "runs" / run.path

    def model(self, run: str) -> Path:
        """The model to evaluate under this run's path."""
        return self.base if run == BASE else self.folder / "models" / run

    def verified_model(self, run: Run | None) -> tuple[Path, Path, str]:
        """A model (None: the base) whose files, and the data's, are as they were written.

        The model, the JSON file that vouches for it, and the stage that wrote that. Raises DvpError.
        """
        model = self.model(BASE if run is None else run.path)
        source = model / ("manifest.json" if run is None else "conversion.json")
        verify_checksums(model, read_json(source, "files")["files"])
        verify_checksums(self.data, read_json(self.data / "manifest.json", "files")["files"])
        return model, source, "base" if run is None else "convert"

    def tracked(self, stage: str, config_hash: str, upstream: dict[str, Path | list[Path]], **more):
        """The stage's MLflow run, linked to those of its inputs (JSON files with a `tracking_key`)."""
        links, files = {}, []
        for name, paths in upstream.items():
            read = [read_json(path, KEY, "files") for path in ([paths] if isinstance(paths, Path) else paths)]
            links[name] = [record[KEY] for record in read]
            files += [record["files"] for record in read]
        inputs = sha256_json(files)[:12]
        return stage_run(
            self.folder, self.experiment.name, stage, config_hash=config_hash, inputs=inputs, upstream=links, **more
        )


def finish(path: Path, result: dict, tracked: StageRun, config_hash: str, started: float) -> None:
    """Write a stage's JSON file, its last act, and keep a copy with its MLflow run."""
    provenance = {
        "config_hash": config_hash,
        "git_commit": git_commit(),
        KEY: tracked.key,
        "seconds_stage": round(time.time() - started, 2),
    }
    write_json(path, result | provenance)
    tracked.log_file(path)
