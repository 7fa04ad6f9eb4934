"""The one place where the report reads files: what the stages wrote, checked, as tidy data frames.

A file that is missing, altered, of another version of the experiment or of another form is refused in one line that
names it: a table must not mix settings. Every part of the report starts from one of `load_training`, `load_matrix`,
`load_curve`, `load_mismatch`, `load_bias` and `load_variance`, and reads nothing else but what `load_tokenizer` does.

Columns that all frames share: `point`, the path of a grid point, or `base`; `seed`, −1 of the base model; `source`, the
stage's JSON file, relative to the experiment's folder `results` (results/E).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pandera.pandas as pa
import pyarrow
from pandera.errors import SchemaError, SchemaErrorReason, SchemaErrors
from tokenizers import Tokenizer

from dvp.analysis.points import BASE
from dvp.errors import DvpError
from dvp.experiment.config import Experiment
from dvp.experiment.grid import WHOLE, GridPoint, Measurement, Run, Sampler
from dvp.files import expect, expect_keys, read_json, sha256_file, verify_checksums
from dvp.measurement.mismatch_files import TABLES
from dvp.tracking.record import read_rows

ORIGIN = ("config_hash", "git_commit", "tracking_key")
# What tables and figures use of a metrics row; the file holds more.
MEASURED = (
    *("reward", "k1", "k3", "ess", "max_abs_log_ratio", "outside_safe_fraction", "pruned_mass_mean", "masked_fraction"),
    *("gradient_norm", "tokens_per_second", "response_tokens_mean", "seconds"),
)
REPORTED = ("unpruned_k3", "set_overlap_mean", "sets_bytes")  # of a run whose engine reports its sets
# Of an estimator: its statistics, what else is known of it, and those whose change by DVP is told.
ESTIMATED = ("squared_bias", "cosine", "variance", "mse")
KEPT = ("kept_fraction", "mean_weight", "outside_safe_fraction", "reward")
CHANGES = ("squared_bias", "variance")
# Of the sequence weights behind a paired bias.
WEIGHTS = ("weight_ess", "weight_largest_share", "weight_mean")


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


# What a value has to be before pandera brings a column to one type. That is needed: files store whole numbers as
# floats, floats that happen to be whole as integers, and what is missing throughout as objects. But it would also make
# a number of the text 1.5 or of true, a text of a number, and 1 of 1.5.
_IS: dict[type, tuple[str, Callable[[Any], bool]]] = {
    str: ("a text", lambda value: isinstance(value, str)),
    float: ("a number", _is_number),
    # A float beyond 2**53 need not be the number that was meant, and one beyond 2**63 has no place in a column of them.
    int: ("a whole number", lambda value: _is_number(value) and value % 1 == 0 and abs(value) <= 2**53),
    bool: ("true or false", lambda value: isinstance(value, bool | np.bool_)),
}


def _columns(
    kind: type, names: str, *checks: pa.Check, nullable: bool = False, required: bool = True
) -> dict[str, pa.Column]:
    options = {"nullable": nullable, "required": required, "coerce": True, "metadata": {"kind": kind}}
    return {name: pa.Column(kind, list(checks), **options) for name in names.split()}


def _schema(*columns: dict[str, pa.Column]) -> pa.DataFrameSchema:
    """Of all the columns that a file has, those that are used."""
    return pa.DataFrameSchema({name: column for part in columns for name, column in part.items()}, strict="filter")


_finite = pa.Check(lambda values: np.isfinite(values.astype(float)), error="a finite number")
_METRICS = _schema(
    _columns(int, "step"),
    _columns(bool, "skipped"),
    _columns(float, " ".join(MEASURED), _finite),
    _columns(float, "gradient_norm", _finite, nullable=True),  # of a skipped step
    _columns(float, " ".join(REPORTED), _finite, required=False),
)
_SAMPLES = _schema(
    _columns(str, "problem_id"),
    _columns(int, "sample"),
    {"correct": pa.Column(checks=pa.Check.isin([0, 1], error="true or false"))},
)
_ANSWERS = _schema(_SAMPLES.columns, _columns(str, "response reference"), _columns(str, "stated_answer", nullable=True))
_ESTIMATORS = _schema(
    _columns(str, "method rho label"),
    _columns(float, "squared_bias squared_bias_se variance variance_se mse mse_se", _finite),
    _columns(float, "cosine cosine_se", nullable=True),  # may be undefined
    _columns(float, "paired_squared_bias paired_squared_bias_se weight_ess weight_largest_share weight_mean", _finite),
    _columns(float, "paired_squared_bias_pruned paired_squared_bias_pruned_se", nullable=True),  # of a safe vocabulary
    _columns(float, "weight_ess_pruned weight_largest_share_pruned weight_mean_pruned", nullable=True),
    _columns(int, "batches empty_batches"),
    _columns(float, " ".join(KEPT), nullable=True),
)
_JACKKNIFE = _schema(
    _columns(str, "method rho sample"), _columns(int, "batch"), _columns(float, " ".join(CHANGES), nullable=True)
)
_VARIANCE = _schema(
    _columns(str, "method rho position"),
    _columns(float, "variance variance_se signal signal_se", _finite),
    _columns(float, "variance_over_signal variance_over_signal_se", nullable=True),  # may be undefined
)
_VARIANCE_JACKKNIFE = _schema(
    _columns(str, "method rho position sample"),
    _columns(int, "batch"),
    _columns(float, "variance variance_over_signal", nullable=True),
)
_PROXY = _schema(
    _columns(str, "position"),
    _columns(float, "rank_correlation rank_correlation_se", nullable=True),
    _columns(int, "tokens"),
)
# Of a mismatch measurement: sums over pairs or positions, by problem.
_BY_SOURCE = _columns(str, "problem source")
_MISMATCH = {
    "histogram": _schema(
        _BY_SOURCE,
        _columns(float, "p_low p_high d_low d_high pairs abs_d"),
        *(_columns(float, f"{w} {w}_squared {w}_d {w}_abs_d") for w in ("infer", "train")),
    ),
    "gaps": _schema(_BY_SOURCE, _columns(float, "gap_low gap_high pairs abs_d infer infer_abs_d")),
    "bounds": _schema(
        _BY_SOURCE,
        _columns(float, "rest_low rest_high pairs scaled max_scaled_above max_scaled_below"),
        _columns(float, "literal_violations sharp_violations max_over_literal"),
    ),
    "safe_sets": _schema(
        _columns(str, "problem rho side"),
        _columns(int, "response"),
        _columns(float, "reward margin tokens safe_size_train safe_size_infer pruned_mass pruned_mass_sum jaccard"),
        _columns(float, "infer_in_train train_in_infer outside_train tokens_outside_train tokens_inside_infer"),
        _columns(float, "log_ratio pruned_log_ratio"),
        _columns(float, "kl kl_outside squared_score squared_score_outside", nullable=True),  # without a margin alone
    ),
    "prefixes": _schema(
        _columns(str, "problem"), _columns(int, "response length"), _columns(float, "kl log_ratio kept")
    ),
    "noise": _schema(
        _BY_SOURCE,
        _columns(float, "tokens kl k3 ratio_outside d_positive epsilon_variance max_epsilon max_abs_log_ratio"),
    ),
}
Origins = dict[str, dict[str, Any]]
"""Origin of every stage's JSON file, with the checksums of the files that it vouches for, by path."""


@dataclass
class Training:
    """Runs of the grid and scores on report.task."""

    runs: pd.DataFrame
    """A row a run: point, seed, skipped_steps, collapsed_at (a step or None), source."""
    metrics: pd.DataFrame
    """A row a step: point, seed, step, skipped, MEASURED (null becomes NaN), and REPORTED if a run has them."""
    scores: pd.DataFrame
    """A row a model, the base model first: point, seed, avg, pass, maj (fractions, of k samples), source."""
    samples: pd.DataFrame
    """A row a response: point, seed, problem, sample, correct; the same problems in the same order of each model."""
    files: Origins


@dataclass
class Matrix:
    """Runs of the grid and scores on report.task of all models with all that samples them."""

    runs: pd.DataFrame
    metrics: pd.DataFrame
    """Both as of Training."""
    scores: pd.DataFrame
    """A row a model and sampler, the base model first: point, seed, avg, pass, maj (of k samples), source. `point`,
    here and in samples, is POINT/by~ENGINE/min_p~RHO."""
    samples: pd.DataFrame
    """A row a response: point, seed, problem, sample, correct, and if asked for response, reference (texts) and
    stated_answer (a text or None); the same problems in the same order everywhere."""
    files: Origins


@dataclass
class Curve:
    """Scores along training, on every task; step 0 is the base model, for every run."""

    tokens: pd.DataFrame
    """A row a run and evaluated step: point, seed, step, tokens (sampled until then)."""
    scores: pd.DataFrame
    """A row a run, evaluated step, task and problem: point, seed, step, task, problem; all, odd, even: the share of
    correct samples among all, those of odd and those of even number (NaN where there are none)."""
    sources: pd.DataFrame
    """A row a run, evaluated step and task: point, seed, step, task, source."""
    runs: pd.DataFrame
    """A row a run: point, seed, source."""
    files: Origins


@dataclass
class Mismatch:
    """The tables of the stage `mismatch`, with policy, engine, seed and `unit`, the number of a problem of a seed."""

    tables: dict[str, pd.DataFrame]
    files: Origins


@dataclass
class Bias:
    """The stage `bias`, with policy, engine, task if any, and seed; rho is `none` where there is none."""

    estimators: pd.DataFrame
    """Also of the reference squared_norm, |g|², and the means response_tokens and reference_reward."""
    jackknife: pd.DataFrame
    """Values without a batch: of `sample` (engine or reference) and `batch`, CHANGES."""
    files: Origins


@dataclass
class Variance:
    """Of the stage `bias` what it says of positions in the response, with policy, engine and seed; rho is `none` where
    there is none, position `all` or a bin."""

    variance: pd.DataFrame
    jackknife: pd.DataFrame
    """Values without a batch: of `sample` (engine or reference) and `batch`, variance and variance_over_signal."""
    proxy: pd.DataFrame
    files: Origins


def load_training(experiment: Experiment, results: Path) -> Training:
    """train.json, metrics.jsonl, scores.json and samples.parquet of every run. Raises DvpError."""
    reader = _Reader(experiment, results)
    runs, metrics = _trained(reader)
    scores, samples = [], []
    trained = [(point.path, point.run(seed)) for point in experiment.points for seed in experiment.seeds]
    for point, run in [(BASE, None), *trained]:
        key = {"point": point, "seed": run.seed if run else -1}
        row, frame = reader.evaluation(run, experiment.report.task)
        if samples and list(frame["problem"]) != list(samples[0]["problem"]):
            path = (results / row["source"]).with_name("samples.parquet")
            raise DvpError(f"{path}: problem_id: not the problems of the base model's evaluation")
        scores.append(key | row)
        samples.append(frame.assign(**key))
    return Training(runs, metrics, pd.DataFrame(scores), _joined(samples), reader.files)


def load_matrix(experiment: Experiment, results: Path, *, answers: bool = False) -> Matrix:
    """train.json and metrics.jsonl of every run; scores.json and samples.parquet on report.task of every model and all
    that samples it, with `answers` what they say. Raises DvpError."""
    reader = _Reader(experiment, results)
    runs, metrics = _trained(reader)
    scores, samples = [], []
    models = [(None, None), *((point, point.run(seed)) for point in experiment.points for seed in experiment.seeds)]
    for point, run in models:
        for sampler in [experiment.sampler, *experiment.samplers(point)]:
            key = {"point": cell_name(point, sampler), "seed": run.seed if run else -1}
            further = None if sampler == experiment.sampler else sampler
            row, frame = reader.evaluation(run, experiment.report.task, further, _ANSWERS if answers else _SAMPLES)
            if samples and list(frame["problem"]) != list(samples[0]["problem"]):
                path = (results / row["source"]).with_name("samples.parquet")
                raise DvpError(f"{path}: problem_id: not the problems of the base model's evaluation")
            scores.append(key | row)
            samples.append(frame.assign(**key))
    return Matrix(runs, metrics, pd.DataFrame(scores), _joined(samples), reader.files)


def load_tokenizer(experiment: Experiment, results: Path) -> tuple[Tokenizer, Origins]:
    """The base model's tokenizer, which all models have. Raises DvpError."""
    reader = _Reader(experiment, results)
    expected = {"config_hash": experiment.config_hash("base")}
    reader.record("base", f"{BASE}/manifest.json", BASE, None, expected, ["tokenizer.json"])
    path = results / BASE / "tokenizer.json"
    try:
        return Tokenizer.from_file(str(path)), reader.files
    except Exception as error:  # it has no class of its own
        raise DvpError(f"{path}: not a tokenizer ({str(error)[:100]})") from None


def _trained(reader: "_Reader") -> tuple[pd.DataFrame, pd.DataFrame]:
    """`runs` and `metrics` of Training."""
    runs, metrics = [], []
    for run in reader.experiment.runs:
        key = {"point": run.point.path, "seed": run.seed}
        row, frame = reader.training(run)
        runs.append(key | row)
        metrics.append(frame.assign(**key))
    return pd.DataFrame(runs, dtype=object), _joined(metrics)


def cell_name(point: GridPoint | None, sampler: Sampler) -> str:
    """Column `point` of a Matrix."""
    return f"{point.path if point else BASE}/{sampler.path}"


def load_curve(experiment: Experiment, results: Path) -> Curve:
    """metrics.jsonl of every run, and scores.json and samples.parquet of the steps at which it is evaluated.

    Raises DvpError.
    """
    reader = _Reader(experiment, results)
    runs, tokens, scores, sources = [], [], [], []
    base = {task: reader.evaluation(None, task) for task in experiment.data.tasks}
    for run in experiment.runs:
        key, training = {"point": run.point.path, "seed": run.seed}, experiment.training_of(run)
        row, metrics = reader.training(run)
        runs.append(key | {"source": row["source"]})
        responses = training.prompts_per_step * training.group_size
        sampled = [0.0, *(responses * metrics["response_tokens_mean"].cumsum())]
        for step in [0, *experiment.evaluated_steps(run), training.steps]:
            tokens.append(key | {"step": step, "tokens": sampled[step]})
            for task in experiment.data.tasks:
                policy = run.after(None if step == training.steps else step)
                row, samples = reader.evaluation(policy, task) if step else base[task]
                of_problems = _by_problem(samples)
                if list(of_problems["problem"]) != list(dict.fromkeys(base[task][1]["problem"])):
                    path = (results / row["source"]).with_name("samples.parquet")
                    raise DvpError(f"{path}: problem_id: not the problems of the base model's evaluation")
                scores.append(of_problems.assign(step=step, task=task, **key))
                sources.append(key | {"step": step, "task": task, "source": row["source"]})
    return Curve(pd.DataFrame(tokens), _joined(scores), pd.DataFrame(sources), pd.DataFrame(runs), reader.files)


def _by_problem(samples: pd.DataFrame) -> pd.DataFrame:
    """The share of correct samples of each problem, in the order of the problems: of all, odd and even samples."""
    odd = samples["sample"] % 2 == 1
    parts = {"all": samples, "odd": samples[odd], "even": samples[~odd]}
    shares = {name: part.groupby("problem")["correct"].mean() for name, part in parts.items()}
    return pd.DataFrame(shares).astype(float).rename_axis("problem").reset_index()


def load_mismatch(experiment: Experiment, results: Path) -> Mismatch:
    """Every measurement of the stage `mismatch`. Raises DvpError."""
    reader = _Reader(experiment, results)
    frames: dict[str, list[pd.DataFrame]] = {name: [] for name in TABLES}
    problems = experiment.mismatch.problems
    for measurement in experiment.measurements("mismatch"):
        key, path, read = reader.measurement("mismatch", measurement, _MISMATCH)
        names = list(dict.fromkeys(read["noise"]["problem"]))
        if len(names) != problems:
            where = path.with_name("noise.parquet")
            raise DvpError(f"{where}: problem: expected {problems} different ones, found {len(names)}")
        unit = {name: experiment.seeds.index(measurement.seed) * problems + i for i, name in enumerate(names)}
        for name, table in read.items():
            if table.empty:
                raise DvpError(f"{path.with_name(name)}.parquet: no rows")
            frames[name].append(table.assign(unit=table["problem"].map(unit), **key))
    return Mismatch({name: _joined(parts) for name, parts in frames.items()}, reader.files)


def load_bias(experiment: Experiment, results: Path) -> Bias:
    """Every measurement of the stage `bias`. Raises DvpError."""
    reader = _Reader(experiment, results)
    frames: dict[str, list[pd.DataFrame]] = {"estimators": [], "jackknife": []}
    expected = [(method, rho or "none") for method, rho in experiment.estimators]
    for measurement in experiment.measurements("bias"):
        schemas = {"estimators": _ESTIMATORS, "jackknife": _JACKKNIFE}
        key, path, read = reader.measurement("bias", measurement, schemas)
        for name, frame in read.items():
            if list(dict.fromkeys(zip(frame["method"], frame["rho"], strict=True))) != expected:
                where = path.with_name(f"{name}.parquet")
                raise DvpError(f"{where}: method, rho: not the experiment's estimators in their order")
            frames[name].append(frame.assign(source=path.relative_to(results).as_posix(), **key))
        reference = read_json(path, "reference")["reference"]
        kinds = dict.fromkeys(("squared_norm", "response_tokens_mean", "reward"), "a finite number, 0 or more")
        expect_keys(reference, kinds, f"{path}: reference.")
        frames["estimators"][-1] = frames["estimators"][-1].assign(
            squared_norm=reference["squared_norm"],
            response_tokens=reference["response_tokens_mean"],
            reference_reward=reference["reward"],
        )
    return Bias(_joined(frames["estimators"]), _joined(frames["jackknife"]), reader.files)


def load_variance(experiment: Experiment, results: Path) -> Variance:
    """What every measurement of the stage `bias` says of positions. Raises DvpError."""
    reader = _Reader(experiment, results)
    schemas = {"variance": _VARIANCE, "variance_jackknife": _VARIANCE_JACKKNIFE, "proxy": _PROXY}
    frames: dict[str, list[pd.DataFrame]] = {name: [] for name in schemas}
    positions = [WHOLE, *experiment.positions]
    estimated = [(method, rho or "none", position) for method, rho in experiment.estimators for position in positions]
    for measurement in experiment.measurements("bias"):
        key, path, read = reader.measurement("bias", measurement, schemas)
        for name, frame in read.items():
            columns = ["position"] if name == "proxy" else ["method", "rho", "position"]
            rows = list(dict.fromkeys(frame[columns].itertuples(index=False, name=None)))
            if rows != ([(position,) for position in positions] if name == "proxy" else estimated):
                where = path.with_name(f"{name}.parquet")
                raise DvpError(f"{where}: {', '.join(columns)}: not those of the experiment in their order")
            frames[name].append(frame.assign(source=path.relative_to(results).as_posix(), **key))
    return Variance(*(_joined(parts) for parts in frames.values()), reader.files)


def evaluation_path(run: Run | None, task: str, sampler: Sampler | None = None) -> str:
    """Folder of a model's evaluation, the base model's without a run; relative to the experiment's.

    sampler : what samples it, where that is not what samples all models.
    """
    return "/".join(["evals", run.path if run else BASE, *([sampler.path] if sampler else []), task])


def check_fresh(path: Path, record: dict[str, Any], expected: str) -> None:
    """Raise DvpError unless the stage that wrote `record` had this config_hash."""
    if record["config_hash"] != expected:
        raise DvpError(
            f"{path}: stale, written by another version of the experiment (config_hash {record['config_hash']}, "
            f"expected {expected}); run its stage again"
        )


@dataclass
class _Reader:
    """Reads single results, and keeps where they come from."""

    experiment: Experiment
    results: Path
    files: Origins = field(default_factory=dict)

    def training(self, run: Run) -> tuple[dict[str, Any], pd.DataFrame]:
        source, steps = f"runs/{run.path}/train.json", self.experiment.training_of(run).steps
        path = self.results / source
        expected = {"config_hash": self.experiment.config_hash("train", run), "run": run.path, "steps": steps}
        record = self.record(
            "train", source, run.path, run.seed, expected, ["metrics.jsonl"], ("skipped_steps", "collapsed_at")
        )
        collapsed_at = record["collapsed_at"]
        if collapsed_at is not None and not (type(collapsed_at) is int and 1 <= collapsed_at <= steps):
            raise DvpError(f"{path}: collapsed_at: expected a step or null, found {collapsed_at!r}")
        where = path.with_name("metrics.jsonl")
        metrics = _validated(_METRICS, pd.DataFrame(read_rows(where)), where)
        if list(metrics["step"]) != list(range(1, steps + 1)):
            raise DvpError(f"{where}: step: expected 1 to {steps}, each once and in order")
        unmeasured = metrics["gradient_norm"].isna() & ~metrics["skipped"]
        if unmeasured.any():
            raise DvpError(f"{where}: gradient_norm: expected a finite number in row {unmeasured.idxmax() + 1}")
        if record["skipped_steps"] != metrics["skipped"].sum():
            counts = f"{record['skipped_steps']}, but {where.name} has {metrics['skipped'].sum()}"
            raise DvpError(f"{path}: skipped_steps: {counts}")
        return {"skipped_steps": record["skipped_steps"], "collapsed_at": collapsed_at, "source": source}, metrics

    def evaluation(
        self, run: Run | None, task: str, sampler: Sampler | None = None, schema: pa.DataFrameSchema = _SAMPLES
    ) -> tuple[dict[str, Any], pd.DataFrame]:
        k = self.experiment.evaluation.samples_per_problem[task]
        source = f"{evaluation_path(run, task, sampler)}/scores.json"
        path = self.results / source
        config_hash = self.experiment.config_hash("evaluate", run, task, sampler=sampler)
        # Without a sampler the hash alone says it: files from before there were others do not name it.
        expected = {"config_hash": config_hash, "task": task, "samples_per_problem": k}
        expected |= sampler.model_dump() if sampler else {}
        name, seed = (run.path, run.seed) if run else (BASE, None)
        record = self.record("evaluate", source, name, seed, expected, ["samples.parquet"], ("metrics",))
        expect("an object", record["metrics"], f"{path}: metrics")
        row: dict[str, Any] = {"source": source}
        for key, name in (("avg", f"avg@{k}"), ("pass", f"pass@{k}"), ("maj", f"maj@{k}")):
            entry = record["metrics"].get(name)
            value = entry.get("value") if isinstance(entry, dict) else None
            if not (isinstance(value, float | int) and 0 <= value <= 1):
                raise DvpError(f"{path}: metrics.{name}.value: expected a fraction in [0, 1], found {value!r}")
            row[key] = float(value)
        where = path.with_name("samples.parquet")
        samples = _parquet(where, schema).astype({"correct": bool}).rename(columns={"problem_id": "problem"})
        # The order in which the bootstrap draws problems.
        samples = samples.sort_values(["problem", "sample"], ignore_index=True)
        sizes = samples.groupby("problem").size()
        if samples.empty or samples.duplicated(["problem", "sample"]).any() or (sizes != k).any():
            raise DvpError(f"{where}: sample: expected {k} different samples of every problem")
        mean = samples["correct"].mean()
        if abs(mean - row["avg"]) > 1e-9:
            means = f"{row['avg']}, but the samples in {where.name} have the mean {mean}"
            raise DvpError(f"{path}: metrics.avg@{k}.value: {means}")
        return row, samples

    def measurement(
        self, stage: str, measurement: Measurement, schemas: dict[str, pa.DataFrameSchema]
    ) -> tuple[dict[str, Any], Path, dict[str, pd.DataFrame]]:
        """Which policy, engine, task if any, and seed it is of, its JSON file, and its tables."""
        source = f"{stage}/{measurement.path}/{stage}.json"
        path = self.results / source
        config_hash = self.experiment.config_hash(stage, measurement=measurement)
        expected = {"config_hash": config_hash, "measurement": measurement.path}
        names = [f"{name}.parquet" for name in schemas]
        self.record(stage, source, measurement.path, measurement.seed, expected, names)
        task = {} if measurement.task is None else {"task": measurement.task}
        key = {"policy": measurement.policy_path, "engine": measurement.engine} | task | {"seed": measurement.seed}
        return key, path, {name: _parquet(path.with_name(f"{name}.parquet"), schemas[name]) for name in schemas}

    def record(
        self,
        stage: str,
        source: str,
        run: str,
        seed: int | None,
        expected: dict[str, Any],
        names: list[str],
        keys: tuple[str, ...] = (),
    ) -> dict[str, Any]:
        """A stage's JSON file with these keys, as `expected`, fresh, and with unaltered files `names`."""
        path = self.results / source
        record = read_json(path, *ORIGIN, *expected, *keys, "files")
        check_fresh(path, record, expected["config_hash"])
        for key, value in expected.items():
            if record[key] != value:
                raise DvpError(f"{path}: {key}: expected {value!r}, found {record[key]!r}")
        for name in names:
            if name not in record["files"]:
                raise DvpError(f"{path}: files: '{name}' is missing")
        used = {name: record["files"][name] for name in names}
        verify_checksums(path.parent, used)
        origin = {"stage": stage, "run": run, "seed": seed} | {key: record[key] for key in ORIGIN}
        self.files[source] = origin | {"sha256": sha256_file(path), "files": used}
        return record


def _joined(frames: list[pd.DataFrame]) -> pd.DataFrame:
    return pd.concat(frames, ignore_index=True)


def _parquet(path: Path, schema: pa.DataFrameSchema) -> pd.DataFrame:
    try:
        frame = pd.read_parquet(path)
    except (OSError, ValueError, OverflowError, pyarrow.ArrowException) as error:
        raise DvpError(f"{path}: not a parquet file ({str(error).splitlines()[0]})") from None
    if "rho" in frame:  # null of a method that takes none
        frame["rho"] = frame["rho"].astype(object).where(frame["rho"].notna(), "none")
    return _validated(schema, frame, path)


def _validated(schema: pa.DataFrameSchema, frame: pd.DataFrame, path: Path) -> pd.DataFrame:
    for name, column in schema.columns.items():
        if name in frame and column.metadata:  # else pandera says what is missing, or checks the values itself
            _check_kind(frame[name], column.metadata["kind"], column.nullable, path)
    try:
        return schema.validate(frame)
    except (SchemaError, SchemaErrors) as caught:
        error = caught.schema_errors[0] if isinstance(caught, SchemaErrors) else caught
        cases = error.failure_cases
        if error.reason_code == SchemaErrorReason.COLUMN_NOT_IN_DATAFRAME:
            raise DvpError(f"{path}: column '{cases}' is missing") from None
        wanted = getattr(error.check, "error", None) or getattr(error.schema, "dtype", "")
        place = ""
        if isinstance(cases, pd.DataFrame) and len(cases):
            row, value = cases[["index", "failure_case"]].iloc[0]
            place = f", found {repr(value)[:60]}" + ("" if pd.isna(row) else f" in row {int(row) + 1}")
        raise DvpError(f"{path}: {error.schema.name}: expected {wanted}{place}") from None


def _check_kind(values: pd.Series, kind: type, nullable: bool, path: Path) -> None:
    """Raise DvpError, naming column and row, for a value of another kind or one that is missing and must not be."""
    expected, fits = _IS[kind]
    missing = values.isna()
    texts = isinstance(values.dtype, pd.StringDtype)
    of_kind = texts if kind is str else values.dtype.kind in {float: "iuf", int: "iu", bool: "b"}[kind]
    if of_kind and (nullable or not missing.any()):
        return
    for row, (value, absent) in enumerate(zip(values, missing, strict=True), start=1):
        if not (nullable if absent else fits(value)):
            raise DvpError(f"{path}: {values.name}: expected {expected}, found {repr(value)[:60]} in row {row}")
