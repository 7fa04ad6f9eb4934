"""Stages that log as the real ones do, and what an MLflow store then holds."""

import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient

from dvp.experiment.config import Experiment
from dvp.experiment.loading import dump_experiment, load_experiment
from dvp.files import write_json, write_text
from dvp.tracking.names import SCORES, metric_name
from dvp.tracking.stage import StageRun, stage_run
from dvp.tracking.store import store_uri

ROOT = Path(__file__).parents[2]
EXPERIMENT = "smoke"
RUN = "method~dvp/engine~coarse/rho~exp-13/seed~0"
NAMES = [f"metric_{index}" for index in range(20)]


def make_folder(results: Path) -> Path:
    """An experiment's folder below `results`, with its config.yaml."""
    experiment: Experiment = load_experiment(EXPERIMENT, ROOT / "config")
    write_text(results / EXPERIMENT / "config.yaml", dump_experiment(experiment))
    return results / EXPERIMENT


def made_up_row(step: int) -> dict:
    """A row of metrics.jsonl: 24 numbers of a step that took an eighth of a second, one of them missing at times."""
    return {
        "step": step,
        "reward": step / 7,
        "skipped": step % 5 == 0,
        "gradient_norm": None if step % 5 == 0 else 1 / step,
        "seconds": 0.125,
        **{name: math.sin(step * index) for index, name in enumerate(NAMES)},
    }


def train(
    folder: Path,
    steps: int,
    during: Callable[[int], None] = lambda step: None,
    *,
    upstream: dict[str, list[str]] | None = None,
    **more: str,
) -> StageRun:
    """A stage that logs `steps` steps as training does and calls `during` after each; flushes every step."""
    more = {"config_hash": "abc", "run": RUN} | more
    file = folder / "runs" / more["run"] / "metrics.jsonl"
    policy = {"title": title(more["run"]), "params": {"method": "dvp", "seed": 0, "rho": None}}
    with stage_run(folder, EXPERIMENT, "train", upstream=upstream, metrics=file, **policy, **more) as tracked:
        tracked.log_params({"training": {"steps": steps}})
        file.parent.mkdir(parents=True, exist_ok=True)
        with open(file, "w", encoding="utf-8") as metrics:
            for step in range(1, steps + 1):
                row = made_up_row(step)
                metrics.write(json.dumps(row) + "\n")
                metrics.flush()
                tracked.log_step(step, row)
                tracked.flush()
                during(step)
        tracked.log_file(file)
        tracked.log_model(file.parent / "checkpoints" / f"step-{steps}")
        write_json(file.parent / "train.json", {"steps": steps})
        tracked.log_file(file.parent / "train.json", "results")
    return tracked


def title(run: str) -> str:
    """A policy in words."""
    return "DVP · coarse · ρ e⁻¹³ · " + run.rpartition("/")[2].replace("~", " ")


def convert(folder: Path, trained: str) -> StageRun:
    """A stage that makes a model of a training run's."""
    policy = {"run": RUN, "upstream": {"train": [trained]}, "title": title(RUN)}
    with stage_run(folder, EXPERIMENT, "convert", config_hash="abc", **policy) as tracked:
        tracked.log_result({"max_abs_delta_log_prob": 0.0})
        tracked.log_model(folder / "models" / RUN)
    return tracked


def evaluate(folder: Path, upstream: dict[str, list[str]], value: float = 0.5) -> StageRun:
    """A stage that logs a result and a file."""
    policy = {"run": RUN, "task": "aime25", "upstream": upstream, "title": title(RUN), "params": {"method": "dvp"}}
    with stage_run(folder, EXPERIMENT, "evaluate", config_hash="def", **policy) as tracked:
        tracked.log_result({"avg@8": value})
        write_json(folder / "evals" / RUN / "aime25" / "scores.json", {"value": value})
        tracked.log_file(folder / "evals" / RUN / "aime25" / "scores.json")
    return tracked


def track(folder: Path) -> str:
    """`dvp track` in a process of its own; what it printed."""
    return subprocess.run(
        [sys.executable, "-m", "dvp.cli", "track", "--config", folder / "config.yaml"],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        timeout=300,
    ).stdout


def contents(folder: Path) -> dict[str, dict]:
    """Everything that the store of an experiment holds, by the runs' keys, without the ids that are the store's own."""
    client = MlflowClient(tracking_uri=store_uri(folder.parent))
    runs = client.search_runs([client.get_experiment_by_name(EXPERIMENT).experiment_id])
    keys = {run.info.run_id: run.data.tags["tracking_key"] for run in runs}
    assert len(set(keys.values())) == len(runs), "two runs have the same key"
    return {
        keys[run.info.run_id]: {
            "name": run.info.run_name,
            "status": run.info.status,
            "times": (run.info.start_time, run.info.end_time),
            "tags": run.data.tags | {"mlflow.parentRunId": keys.get(run.data.tags.get("mlflow.parentRunId"))},
            "params": run.data.params,
            "files": sorted(_files(client, run.info.run_id)),
            "metrics": {
                name: sorted(
                    (point.step, point.value, point.timestamp)
                    for point in client.get_metric_history(run.info.run_id, name)
                )
                for name in run.data.metrics
            },
        }
        for run in runs
    }


def _files(client: MlflowClient, run_id: str, folder: str | None = None) -> list[tuple[str, int]]:
    found = []
    for item in client.list_artifacts(run_id, folder):
        found += _files(client, run_id, item.path) if item.is_dir else [(item.path, item.file_size)]
    return found


def check_training(run: dict, steps: int) -> None:
    """A run in the store has every number of `steps` steps of `train`, each once, and is finished."""
    assert run["status"] == "FINISHED"
    expected: dict[str, list] = {}
    for step in range(1, steps + 1):
        for name, value in made_up_row(step).items():
            if name != "step" and value is not None:
                expected.setdefault(metric_name(name), []).append((step, float(value)))
    logged = {
        name: [point[:2] for point in points]
        for name, points in run["metrics"].items()
        if not name.startswith(("final/", SCORES))
    }
    assert logged == expected
    last = range(1, steps + 1)[-10:]
    assert run["metrics"]["final/reward"][0][1] == pytest.approx(sum(step / 7 for step in last) / len(last), rel=1e-3)
    assert run["metrics"]["final/collapsed"][0][1] == 0
    assert run["params"] == {"training.steps": str(steps), "seed": "0", "method": "dvp"}
    assert [name for name, _ in run["files"]] == ["metrics.jsonl", "results/train.json"]
