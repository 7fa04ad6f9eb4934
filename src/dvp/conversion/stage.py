"""The stage `convert`."""

from pathlib import Path

import torch

from dvp.conversion.convert import convert as convert_checkpoint
from dvp.experiment.folder import ExperimentDir
from dvp.files import read_json
from dvp.stage import run_stage
from dvp.training.probe import PROBE


def convert(config: Path, path: str, threads: int) -> None:
    """A run's final checkpoint → models/RUN/ and conversion.json in it, with the proof."""
    torch.set_num_threads(threads)
    directory = ExperimentDir(config)
    run = directory.experiment.run(path)
    trained, result = directory.result("train", path), directory.result("convert", path)
    inputs = {"train": trained, "base": directory.result("base")}
    config_hash = directory.experiment.config_hash("convert", run)
    with run_stage("convert", directory, result, config_hash, inputs, run=path) as stage:
        if stage.reuse():
            return
        proof = convert_checkpoint(
            trained.parent / read_json(trained, "checkpoint")["checkpoint"],
            directory.base,
            trained.parent / PROBE,
            result.parent,
            directory.experiment.training_of(run).temperature,
        )
        stage.tracked.log_result({key: proof[key] for key in ("identical_weights", "max_abs_delta_log_prob")})
        stage.tracked.log_model(result.parent, "converted")
        stage.finish({"run": path, **proof})
