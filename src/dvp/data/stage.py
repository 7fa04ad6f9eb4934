"""Run the stage `prepare`."""

import sys
from pathlib import Path

from dvp.data.prepare import left_out
from dvp.data.prepare import prepare as prepare_data
from dvp.errors import DvpError
from dvp.experiment.folder import ExperimentDir
from dvp.stage import run_stage


def prepare(config: Path) -> None:
    """Write data/train.parquet, data/eval.parquet and data/manifest.json from the raw problems."""
    directory = ExperimentDir(config)
    experiment, result = directory.experiment, directory.result("prepare")
    with run_stage("prepare", directory, result, experiment.config_hash("prepare"), {}) as stage:
        manifest = prepare_data(experiment.data, experiment.sources, directory.data)
        counts = manifest["counts"]
        if missing := experiment.problems_missing({None: counts["train"]} | counts["evaluation"]):
            raise DvpError(f"experiment '{experiment.name}': {missing}")
        for line in left_out(manifest, experiment.data.evaluation):
            print(line, file=sys.stderr, flush=True)
        stage.tracked.describe(experiment.description)
        stage.tracked.log_params({"data": experiment.data.model_dump(mode="json")})
        stage.tracked.log_result(counts)
        stage.finish(manifest)
