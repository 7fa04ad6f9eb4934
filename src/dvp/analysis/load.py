"""The one place where the report reads files: what the stages wrote, checked, as tidy data frames.

A file that is missing, altered, of another version of the experiment or of another form is refused in one line that
names it: a table must not mix settings. Every part of the report starts from one of `load_training`, `load_mismatch`
and `load_bias`, and reads nothing else.

Columns that all frames share: `point`, the path of a grid point, or `base`; `seed`, −1 of the base model; `source`, the
stage's JSON file, relative to the experiment's folder `results` (results/E).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pandera.pandas as pa
import pyarrow
from pandera.errors import SchemaError, SchemaErrorReason

from dvp.analysis.points import BASE, grid_points
from dvp.errors import DvpError
from dvp.experiment.config import Experiment
from dvp.experiment.grid import Measurement, Run
from dvp.files import read_json, sha256_file, verify_checksums
from dvp.measurement.mismatch_files import TABLES
from dvp.tracking.record import read_rows

ORIGIN = ("config_hash", "git_commit", "tracking_key")
# What tables and figures use of a metrics row; the file holds more.
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
# Of an estimator: its statistics, what else is known of it, and those whose change by DVP is told.
ESTIMATED = ("squared_bias", "cosine", "variance", "mse")
KEPT = ("kept_fraction", "mean_weight", "outside_safe_fraction", "reward")
CHANGES = ("squared_bias", "variance")


def _column(kind: type, *checks: pa.Check, nullable: bool = False) -> pa.Column:
    return pa.Column(kind, list(checks), nullable=nullable, coerce=kind is not bool)


def _schema(**columns: pa.Column) -> pa.DataFrameSchema:
    """Of all the columns that a file has, those that are used."""
    return pa.DataFrameSchema(columns, strict="filter")


def _sums(*names: str) -> dict[str, pa.Column]:
    return {name: _column(float) for name in names}


_finite = pa.Check(lambda values: np.isfinite(values.astype(float)), error="a finite number")
_numbers = {name: _column(float, _finite) for name in MEASURED}
_metrics = _schema(
    step=_column(int),
    skipped=_column(bool),
    **_numbers | {"gradient_norm": _column(float, _finite, nullable=True)},
)
_samples = _schema(
    problem_id=_column(str),
    sample=_column(int),
    correct=pa.Column(checks=pa.Check.isin([0, 1], error="true or false"), coerce=False),
)
_estimators = _schema(
    method=_column(str),
    rho=_column(str),
    label=_column(str),
    **{
        # A cosine may be undefined.
        name + end: _column(float, *([] if name == "cosine" else [_finite]), nullable=name == "cosine")
        for name in ESTIMATED
        for end in ("", "_se")
    },
    batches=_column(int),
    empty_batches=_column(int),
    **{name: _column(float, nullable=True) for name in KEPT},
)
_jackknife = _schema(
    method=_column(str),
    rho=_column(str),
    sample=_column(str),
    batch=_column(int),
    **{name: _column(float, nullable=True) for name in CHANGES},
)
# What each table of a mismatch measurement holds: sums over pairs or positions, by problem.
_MISMATCH = {
    "histogram": _schema(
        problem=_column(str),
        source=_column(str),
        **_sums("p_low", "p_high", "d_low", "d_high", "pairs", "abs_d"),
        **_sums(*(f"{weight}{end}" for weight in ("infer", "train") for end in ("", "_squared", "_d", "_abs_d"))),
    ),
    "gaps": _schema(
        problem=_column(str),
        source=_column(str),
        **_sums("gap_low", "gap_high", "pairs", "abs_d", "infer", "infer_abs_d"),
    ),
    "bounds": _schema(
        problem=_column(str),
        source=_column(str),
        **_sums("rest_low", "rest_high", "pairs", "scaled", "max_scaled_above", "max_scaled_below"),
        **_sums("literal_violations", "sharp_violations", "max_over_literal"),
    ),
    "safe_sets": _schema(
        problem=_column(str),
        response=_column(int),
        reward=_column(float),
        rho=_column(str),
        side=_column(str),
        **_sums("margin", "tokens", "safe_size_train", "safe_size_infer", "pruned_mass", "pruned_mass_sum"),
        **_sums("jaccard", "infer_in_train", "train_in_infer", "outside_train"),
        **_sums("tokens_outside_train", "tokens_inside_infer", "log_ratio", "pruned_log_ratio"),
    ),
    "noise": _schema(
        problem=_column(str),
        source=_column(str),
        **_sums("tokens", "kl", "k3", "ratio_outside", "d_positive", "epsilon_variance"),
        **_sums("max_epsilon", "max_abs_log_ratio"),
    ),
}


@dataclass
class Training:
    """Runs of the grid and scores on report.task."""

    runs: pd.DataFrame
    """A row a run: point, seed, skipped_steps, collapsed_at (a step or None), source."""
    metrics: pd.DataFrame
    """A row a step: point, seed, step, skipped, MEASURED (null becomes NaN)."""
    scores: pd.DataFrame
    """A row a model, the base model first: point, seed, avg, pass, maj (fractions, of k samples), source."""
    samples: pd.DataFrame
    """A row a response: point, seed, problem, sample, correct; the same problems in the same order of each model."""
    files: dict[str, dict[str, Any]]
    """Origin of every stage's JSON file, with the checksums of what it vouches for, by path."""


@dataclass
class Mismatch:
    """The tables of the stage `mismatch`, with policy, engine, seed and `unit`, the number of a problem of a seed."""

    tables: dict[str, pd.DataFrame]
    files: dict[str, dict[str, Any]] = field(default_factory=dict)


@dataclass
class Bias:
    """The stage `bias`, with policy, engine and seed; rho is `none` where there is none."""

    estimators: pd.DataFrame
    jackknife: pd.DataFrame
    """Values without a batch: of `sample` (engine or reference) and `batch`, CHANGES."""
    files: dict[str, dict[str, Any]]


def load_training(experiment: Experiment, results: Path) -> Training:
    """train.json, metrics.jsonl, scores.json and samples.parquet of every run. Raises DvpError."""
    files: dict[str, dict[str, Any]] = {}
    runs, metrics, scores, samples = [], [], [], []
    trained = [(point.path, point.run(seed)) for point in grid_points(experiment) for seed in experiment.seeds]
    for point, run in trained:
        key = {"point": point, "seed": run.seed}
        row, frame = _training(experiment, results, run, files)
        runs.append(key | row)
        metrics.append(frame.assign(**key))
    for point, run in [(BASE, None), *trained]:
        key = {"point": point, "seed": run.seed if run else -1}
        row, frame = _evaluation(experiment, results, run, files)
        if samples and list(frame["problem"]) != list(samples[0]["problem"]):
            where = results / evaluation_path(run, experiment.report.task)
            raise DvpError(f"{where}/samples.parquet: problem_id: not the problems of the base model's evaluation")
        scores.append(key | row)
        samples.append(frame.assign(**key))
    return Training(
        pd.DataFrame(runs, dtype=object),
        pd.concat(metrics, ignore_index=True),
        pd.DataFrame(scores),
        pd.concat(samples, ignore_index=True),
        files,
    )


def load_mismatch(experiment: Experiment, results: Path) -> Mismatch:
    """Every measurement of the stage `mismatch`. Raises DvpError."""
    files: dict[str, dict[str, Any]] = {}
    frames: dict[str, list[pd.DataFrame]] = {name: [] for name in TABLES}
    for measurement in experiment.measurements("mismatch"):
        path = f"mismatch/{measurement.path}/mismatch.json"
        key = _measured(
            experiment, results, "mismatch", measurement, path, files, [f"{name}.parquet" for name in TABLES]
        )
        folder = (results / path).parent
        read = {name: _parquet(folder / f"{name}.parquet", _MISMATCH[name]) for name in TABLES}
        names = list(dict.fromkeys(read["noise"]["problem"]))
        if len(names) != experiment.mismatch.problems:
            raise DvpError(
                f"{folder}/noise.parquet: problem: expected {experiment.mismatch.problems} different ones, "
                f"found {len(names)}"
            )
        first = experiment.seeds.index(measurement.seed) * len(names)
        unit = {name: first + index for index, name in enumerate(names)}
        for name, table in read.items():
            frames[name].append(table.assign(unit=table["problem"].map(unit), **key))
    return Mismatch({name: pd.concat(parts, ignore_index=True) for name, parts in frames.items()}, files)


def load_bias(experiment: Experiment, results: Path) -> Bias:
    """Every measurement of the stage `bias`. Raises DvpError."""
    files: dict[str, dict[str, Any]] = {}
    estimators, jackknife = [], []
    expected = [(method, rho or "none") for method, rho in experiment.estimators]
    for measurement in experiment.measurements("bias"):
        path = f"bias/{measurement.path}/bias.json"
        names = ["estimators.parquet", "jackknife.parquet"]
        key = _measured(experiment, results, "bias", measurement, path, files, names)
        of, without = (
            _parquet((results / path).with_name(name), schema, rho="none")
            for name, schema in zip(names, (_estimators, _jackknife), strict=True)
        )
        for name, frame in zip(names, (of, without), strict=True):
            if list(dict.fromkeys(zip(frame["method"], frame["rho"], strict=True))) != expected:
                where = (results / path).with_name(name)
                raise DvpError(f"{where}: method, rho: not the experiment's estimators in their order")
        estimators.append(of.assign(source=path, **key))
        jackknife.append(without.assign(**key))
    return Bias(pd.concat(estimators, ignore_index=True), pd.concat(jackknife, ignore_index=True), files)


def evaluation_path(run: Run | None, task: str) -> str:
    """Folder of a model's evaluation, the base model's without a run; relative to the experiment's."""
    return f"evals/{run.path if run else BASE}/{task}"


def check_fresh(path: Path, record: dict[str, Any], expected: str) -> None:
    """Raise DvpError unless the stage that wrote `record` had this config_hash."""
    if record["config_hash"] != expected:
        raise DvpError(
            f"{path}: stale, written by another version of the experiment (config_hash {record['config_hash']}, "
            f"expected {expected}); run its stage again"
        )


def _training(
    experiment: Experiment, results: Path, run: Run, files: dict[str, dict[str, Any]]
) -> tuple[dict[str, Any], pd.DataFrame]:
    source, steps = f"runs/{run.path}/train.json", experiment.training.steps
    path = results / source
    record = _record(
        results,
        source,
        {"stage": "train", "run": run.path, "seed": run.seed},
        experiment.config_hash("train", run),
        {"run": run.path, "steps": steps},
        ["metrics.jsonl"],
        files,
        "skipped_steps",
        "collapsed_at",
    )
    collapsed_at = record["collapsed_at"]
    if collapsed_at is not None and not (type(collapsed_at) is int and 1 <= collapsed_at <= steps):
        raise DvpError(f"{path}: collapsed_at: expected a step or null, found {collapsed_at!r}")
    metrics_path = path.with_name("metrics.jsonl")
    metrics = _validated(_metrics, pd.DataFrame(read_rows(metrics_path)), metrics_path)
    if list(metrics["step"]) != list(range(1, steps + 1)):
        raise DvpError(f"{metrics_path}: step: expected 1 to {steps}, each once and in order")
    unmeasured = metrics["gradient_norm"].isna() & ~metrics["skipped"]
    if unmeasured.any():
        raise DvpError(f"{metrics_path}: row {unmeasured.idxmax() + 1}: gradient_norm: expected a finite number")
    if record["skipped_steps"] != metrics["skipped"].sum():
        raise DvpError(
            f"{path}: skipped_steps: {record['skipped_steps']}, but {metrics_path.name} has {metrics['skipped'].sum()}"
        )
    row = {"skipped_steps": record["skipped_steps"], "collapsed_at": collapsed_at, "source": source}
    return row, metrics


def _evaluation(
    experiment: Experiment, results: Path, run: Run | None, files: dict[str, dict[str, Any]]
) -> tuple[dict[str, Any], pd.DataFrame]:
    task = experiment.report.task
    k = experiment.evaluation.samples_per_problem[task]
    source = f"{evaluation_path(run, task)}/scores.json"
    path = results / source
    record = _record(
        results,
        source,
        {"stage": "evaluate", "run": run.path if run else BASE, "seed": run.seed if run else None},
        experiment.config_hash("evaluate", run, task),
        {"task": task, "samples_per_problem": k},
        ["samples.parquet"],
        files,
        "metrics",
    )
    row: dict[str, Any] = {"source": source}
    for key, name in (("avg", f"avg@{k}"), ("pass", f"pass@{k}"), ("maj", f"maj@{k}")):
        entry = record["metrics"].get(name)
        if not (isinstance(entry, dict) and isinstance(value := entry.get("value"), float | int) and 0 <= value <= 1):
            raise DvpError(f"{path}: metrics.{name}.value: expected a fraction in [0, 1]")
        row[key] = float(value)
    samples_path = path.with_name("samples.parquet")
    samples = _parquet(samples_path, _samples).astype({"correct": bool}).rename(columns={"problem_id": "problem"})
    # The order in which the bootstrap draws problems.
    samples = samples.sort_values(["problem", "sample"], ignore_index=True)
    sizes = samples.groupby("problem").size()
    if samples.empty or samples.duplicated(["problem", "sample"]).any() or (sizes != k).any():
        raise DvpError(f"{samples_path}: sample: expected {k} different samples of every problem")
    if abs(samples["correct"].mean() - row["avg"]) > 1e-9:
        raise DvpError(
            f"{path}: metrics.avg@{k}.value: {row['avg']}, but the samples in {samples_path.name} have the mean "
            f"{samples['correct'].mean()}"
        )
    return row, samples


def _measured(
    experiment: Experiment,
    results: Path,
    stage: str,
    measurement: Measurement,
    source: str,
    files: dict[str, dict[str, Any]],
    names: Sequence[str],
) -> dict[str, Any]:
    """Check a measurement's JSON file; which policy, engine and seed it is of."""
    _record(
        results,
        source,
        {"stage": stage, "run": measurement.path, "seed": measurement.seed},
        experiment.config_hash(stage, measurement=measurement),
        {"measurement": measurement.path},
        names,
        files,
    )
    policy = measurement.policy if measurement.policy == BASE else measurement.policy.path
    return {"policy": policy, "engine": measurement.engine, "seed": measurement.seed}


def _record(
    results: Path,
    source: str,
    origin: dict[str, Any],
    config_hash: str,
    expected: dict[str, Any],
    names: Sequence[str],
    files: dict[str, dict[str, Any]],
    *keys: str,
) -> dict[str, Any]:
    """A stage's JSON file, fresh, as `expected` and with unaltered files `names`; its origin goes into `files`."""
    path = results / source
    record = read_json(path, *ORIGIN, *expected, *keys, "files")
    check_fresh(path, record, config_hash)
    for key, value in expected.items():
        if record[key] != value:
            raise DvpError(f"{path}: {key}: expected {value!r}, found {record[key]!r}")
    for name in names:
        if name not in record["files"]:
            raise DvpError(f"{path}: files: '{name}' is missing")
    used = {name: record["files"][name] for name in names}
    verify_checksums(path.parent, used)
    files[source] = origin | {key: record[key] for key in ORIGIN} | {"sha256": sha256_file(path), "files": used}
    return record


def _parquet(path: Path, schema: pa.DataFrameSchema, **fill: str) -> pd.DataFrame:
    """The columns of the schema; `fill` says what stands for a null in a column."""
    try:
        frame = pd.read_parquet(path)
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        raise DvpError(f"{path}: not a parquet file ({str(error).splitlines()[0]})") from None
    for name, value in fill.items():
        if name in frame:
            frame[name] = frame[name].astype(object).where(frame[name].notna(), value)
    return _validated(schema, frame, path)


def _validated(schema: pa.DataFrameSchema, frame: pd.DataFrame, path: Path) -> pd.DataFrame:
    try:
        return schema.validate(frame)
    except SchemaError as error:
        if error.reason_code == SchemaErrorReason.COLUMN_NOT_IN_DATAFRAME:
            raise DvpError(f"{path}: column '{error.failure_cases}' is missing") from None
        column = getattr(error.schema, "name", None)
        cases, wanted = error.failure_cases, getattr(error.check, "error", None) or getattr(error.schema, "dtype", "")
        where = ""
        if isinstance(cases, pd.DataFrame) and len(cases):
            row, value = cases[["index", "failure_case"]].iloc[0]
            where = f", found {value!r}" if row is None or pd.isna(row) else f", found {value!r} in row {row + 1}"
        raise DvpError(f"{path}: {column}: expected {wanted}{where}") from None
