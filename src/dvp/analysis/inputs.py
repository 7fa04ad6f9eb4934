"""What the report reads: metrics of runs and scores of models, checked against the experiment.

`results` is the experiment's own folder (results/E). A file that another version of the experiment wrote is
refused: a table must not mix settings.
"""

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa

from dvp.errors import DvpError
from dvp.experiment.config import Experiment
from dvp.experiment.grid import GridPoint, Run
from dvp.files import read_json, verify_checksums

BASE = "base"
# What the tables and figures use of a metrics row; the file holds more.
MEASURED = (
    "reward",
    "k1",
    "k3",
    "ess",
    "max_abs_log_ratio",
    "outside_safe_fraction",
    "masked_fraction",
    "gradient_norm",
    "tokens_per_second",
)


def arms(experiment: Experiment) -> list[GridPoint]:
    """The grid points in the order of the file."""
    return list(dict.fromkeys(GridPoint(method=run.method, engine=run.engine, rho=run.rho) for run in experiment.runs))


def is_control(experiment: Experiment, arm: GridPoint) -> bool:
    """Whether the arm, unlike others, is trained on the evaluation's engine: without the mismatch."""
    exact = experiment.evaluation.engine
    return arm.engine == exact and any(other.engine != exact for other in arms(experiment))


def unpruned(experiment: Experiment, method: str, among: Iterable[str]) -> str | None:
    """Of `among` the method without safe vocabulary that is like `method` in all else, if that has one."""
    own = experiment.methods[method]
    if own.safe_vocabulary is None:
        return None
    for name in among:
        other = experiment.methods[name]
        same = (other.advantage, other.importance, other.loss) == (own.advantage, own.importance, own.loss)
        if other.safe_vocabulary is None and same:
            return name
    return None


def unpruned_arm(experiment: Experiment, arm: GridPoint) -> GridPoint | None:
    """The arm on the same engine that differs in having no safe vocabulary; None without one, or if it has none."""
    here = [one for one in arms(experiment) if one.engine == arm.engine and one.rho is None]
    name = unpruned(experiment, arm.method, (one.method for one in here))
    return next((one for one in here if one.method == name), None)


def reference_arm(experiment: Experiment) -> GridPoint:
    """The arm that the others are set against.

    It is an arm of the method report.reference. Controls are left out unless there is nothing else; of the
    rest the one whose engine most arms of the grid share. Raises DvpError if there is none, or if that does
    not decide.
    """
    method = experiment.report.reference
    candidates = [arm for arm in arms(experiment) if arm.method == method]
    candidates = [arm for arm in candidates if not is_control(experiment, arm)] or candidates
    if not candidates:
        raise DvpError(f"experiment '{experiment.name}': report.reference: method '{method}' is not in the grid")
    engines = [arm.engine for arm in arms(experiment)]
    most = max(engines.count(arm.engine) for arm in candidates)
    chosen = [arm for arm in candidates if engines.count(arm.engine) == most]
    if len(chosen) > 1:
        raise DvpError(
            f"experiment '{experiment.name}': report.reference: '{method}' is ambiguous, it could be "
            + " or ".join(arm.path for arm in chosen)
        )
    return chosen[0]


# --- training -----------------------------------------------------------------------------------------------


def read_training(experiment: Experiment, results: Path, run: Run) -> tuple[dict, pd.DataFrame]:
    """A run's train.json and its metrics, a row a step (`step`, `skipped` and MEASURED; null becomes NaN).

    Raises DvpError, naming the file, for a missing, stale, unfinished, altered or malformed one.
    """
    folder = results / "runs" / run.path
    record_path, metrics_path = folder / "train.json", folder / "metrics.jsonl"
    record = read_json(
        record_path,
        "config_hash",
        "run",
        "steps",
        "skipped_steps",
        "collapsed_at",
        "collapse_reason",
        "git_commit",
        "tracking_key",
        "files",
    )
    check_fresh(record_path, record, experiment.config_hash("train", run))
    if record["run"] != run.path:
        raise DvpError(f"{record_path}: run: expected '{run.path}', found {record['run']!r}")
    if not metrics_path.is_file():
        raise DvpError(f"{metrics_path}: no such file, although {record_path.name} stands beside it")
    metrics = _read_metrics(metrics_path)
    steps = experiment.training.steps
    if not len(metrics) == record["steps"] == steps:
        raise DvpError(f"{metrics_path}: expected {steps} steps, found {len(metrics)} ({record['steps']} recorded)")
    if record["skipped_steps"] != metrics["skipped"].sum():
        raise DvpError(
            f"{record_path}: skipped_steps: {record['skipped_steps']}, but {metrics_path.name} has "
            f"{metrics['skipped'].sum()} of them"
        )
    collapsed_at = record["collapsed_at"]
    if collapsed_at is not None and not (type(collapsed_at) is int and 1 <= collapsed_at <= steps):
        raise DvpError(f"{record_path}: collapsed_at: expected a step or null, found {collapsed_at!r}")
    verify_checksums(folder, {name: digest for name, digest in record["files"].items() if name == metrics_path.name})
    return record, metrics


def read_metrics(experiment: Experiment, results: Path) -> pd.DataFrame:
    """The metrics of all runs: `arm` (its path), `seed`, the columns of `read_training`. Raises DvpError."""
    frames = []
    for arm in arms(experiment):
        for seed in experiment.seeds:
            _, metrics = read_training(experiment, results, arm.run(seed))
            frames.append(metrics.assign(arm=arm.path, seed=seed))
    return pd.concat(frames, ignore_index=True)


def read_collapses(experiment: Experiment, results: Path, arm: GridPoint) -> list[int | None]:
    """The step at which each seed's run collapsed, None where it did not. Raises DvpError."""
    return [read_training(experiment, results, arm.run(seed))[0]["collapsed_at"] for seed in experiment.seeds]


def _read_metrics(path: Path) -> pd.DataFrame:
    rows = []
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            where = f"{path}: line {number}"
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise DvpError(f"{where}: not valid JSON ({error})") from None
            if not isinstance(row, dict):
                raise DvpError(f"{where}: expected a JSON object, found {type(row).__name__}")
            for key in ("step", "skipped", *MEASURED):
                if key not in row:
                    raise DvpError(f"{where}: key '{key}' is missing")
            if type(row["skipped"]) is not bool:
                raise DvpError(f"{where}: skipped: expected true or false, found {row['skipped']!r}")
            if row["step"] != number:
                raise DvpError(f"{where}: step: expected {number}, found {row['step']!r}")
            for key in MEASURED:
                unmeasured = key == "gradient_norm" and row["skipped"] and row[key] is None
                if not unmeasured and not _is_number(row[key]):
                    raise DvpError(f"{where}: {key}: expected a finite number, found {row[key]!r}")
            rows.append({key: row[key] for key in ("step", "skipped", *MEASURED)})
    frame = pd.DataFrame(rows, columns=["step", "skipped", *MEASURED])
    return frame.astype({"step": int, "skipped": bool} | dict.fromkeys(MEASURED, float))


# --- evaluation ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Evaluation:
    """A model's scores on one task, as fractions, and the samples that they come from."""

    record: dict
    """scores.json"""
    metrics: dict[str, float]
    """avg@k, pass@1, pass@k, maj@k, with k the number of samples per problem."""
    problems: list[str]
    """Sorted; every evaluation of the task has the same."""
    correct_PK: np.ndarray
    """bool; P problems, K samples of each"""


def evaluation_folder(results: Path, run: Run | None, task: str) -> Path:
    return results / "evals" / (run.path if run else BASE) / task


def read_evaluation(experiment: Experiment, results: Path, run: Run | None, task: str) -> Evaluation:
    """The evaluation of a run's model, or of the base model (None).

    Raises DvpError, naming the file, for a missing, stale or malformed one, and where the score is not the
    mean of the samples beside it.
    """
    folder = evaluation_folder(results, run, task)
    scores_path, samples_path = folder / "scores.json", folder / "samples.parquet"
    record = read_json(
        scores_path, "files", "task", "samples_per_problem", "metrics", "config_hash", "git_commit", "tracking_key"
    )
    check_fresh(scores_path, record, experiment.config_hash("evaluate", run, task))
    k = experiment.evaluation.samples_per_problem[task]
    for key, expected in (("task", task), ("samples_per_problem", k)):
        if record[key] != expected:
            raise DvpError(f"{scores_path}: {key}: expected {expected!r}, found {record[key]!r}")
    metrics = {}
    for name in (f"avg@{k}", "pass@1", f"pass@{k}", f"maj@{k}"):
        try:
            metrics[name] = record["metrics"][name]["value"]
        except (KeyError, TypeError):
            raise DvpError(f"{scores_path}: key 'metrics.{name}.value' is missing") from None
        if not (_is_number(metrics[name]) and 0 <= metrics[name] <= 1):
            raise DvpError(
                f"{scores_path}: metrics.{name}.value: expected a fraction in [0, 1], found {metrics[name]!r}"
            )
    verify_checksums(folder, record["files"])
    problems, correct_PK = _read_samples(samples_path, k)
    mean = float(correct_PK.mean())
    if not math.isclose(mean, metrics[f"avg@{k}"], abs_tol=1e-9):
        raise DvpError(
            f"{scores_path}: metrics.avg@{k}.value: {metrics[f'avg@{k}']}, but the samples in "
            f"{samples_path.name} have the mean {mean}"
        )
    return Evaluation(record, metrics, problems, correct_PK)


def read_evaluations(experiment: Experiment, results: Path) -> dict[str, Evaluation]:
    """The evaluations on report.task by `base` and run path, all of the same problems. Raises DvpError."""
    task = experiment.report.task
    found = {BASE: read_evaluation(experiment, results, None, task)}
    for arm in arms(experiment):
        for seed in experiment.seeds:
            run = arm.run(seed)
            found[run.path] = read_evaluation(experiment, results, run, task)
            if found[run.path].problems != found[BASE].problems:
                samples = evaluation_folder(results, run, task) / "samples.parquet"
                raise DvpError(f"{samples}: problem_id: not the problems on which the base model was evaluated")
    return found


def _read_samples(path: Path, k: int) -> tuple[list[str], np.ndarray]:
    if not path.is_file():
        raise DvpError(f"{path}: no such file, although scores.json stands beside it")
    try:
        samples = pd.read_parquet(path, columns=["problem_id", "sample", "correct"])
    except (OSError, ValueError, KeyError, pa.ArrowException) as error:
        raise DvpError(
            f"{path}: no parquet file with problem_id, sample, correct ({str(error).splitlines()[0]})"
        ) from None
    if not samples["correct"].isin([0, 1]).all():
        raise DvpError(f"{path}: correct: expected true or false in every row")
    samples = samples.astype({"problem_id": str}).sort_values(["problem_id", "sample"], ignore_index=True)
    sizes = samples.groupby("problem_id").size()
    if samples.empty or samples.duplicated(["problem_id", "sample"]).any() or (sizes != k).any():
        raise DvpError(f"{path}: sample: expected {k} different samples of every problem")
    return list(sizes.index), samples["correct"].to_numpy(dtype=bool).reshape(-1, k)


def check_fresh(path: Path, record: dict, expected: str) -> None:
    """Raise DvpError unless the stage that wrote `record` had this config_hash."""
    if record["config_hash"] != expected:
        raise DvpError(
            f"{path}: stale, written by another version of the experiment (config_hash {record['config_hash']}, "
            f"expected {expected}); run its stage again"
        )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
