"""The stage `convert`."""

from pathlib import Path

import torch

from dvp.conversion.convert import convert as convert_checkpoint
from dvp.errors import DvpError
from dvp.experiment.folder import ExperimentDir
from dvp.experiment.grid import whole_run
from dvp.files import read_json
from dvp.stage import run_stage
from dvp.training.weights import PROBE


def convert(config: Path, path: str, threads: int) -> None:
    """The weights that a run had after a step, or at its end → models/RUN/ with conversion.json, the proof.

    path : of the run, or of the run after a step: RUN/step~16.
    """
    torch.set_num_threads(threads)
    directory = ExperimentDir(config)
    job = directory.experiment.job("convert", path)
    trained, result = directory.result("train", whole_run(path)), directory.result("convert", path)
    inputs = {"train": trained, "base": directory.result("base")}
    config_hash = directory.experiment.config_hash("convert", path)
    with run_stage("convert", directory, result, config_hash, inputs, run=path) as stage:
        if stage.reuse():
            return
        checkpoint, probe = _trained(trained, job.run.step)
        proof = convert_checkpoint(
            checkpoint,
            directory.base,
            probe,
            result.parent,
            directory.experiment.training_of(job.run).temperature,
        )
        stage.tracked.log_result({key: proof[key] for key in ("identical_weights", "max_abs_delta_log_prob")})
        stage.tracked.log_model(result.parent)
        stage.finish({"run": path, **proof})


def _trained(result: Path, step: int | None) -> tuple[Path, Path]:
    """The weights that a training run kept of a step, None for the last, and their probe. Raises DvpError."""
    record = read_json(result, "steps", "kept")
    step, kept = step or record["steps"], record["kept"]
    if str(step) not in kept:
        raise DvpError(f"{result}: the weights after step {step} were not kept; `dvp train` writes the last ones")
    folder = result.parent / kept[str(step)]
    return folder, folder / PROBE
