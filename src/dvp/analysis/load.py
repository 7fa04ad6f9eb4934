"""The one place where the report reads files: what the stages wrote, as tidy data frames.

A file that is missing, altered or written under other settings is refused in one line that names it: a table must not
mix settings. What a checksum vouches for is as its stage wrote it, and is not checked again.

Columns that all frames share: `point`, the path of a grid point, or `base`; `seed`, −1 of the base model; `source`, the
stage's JSON file, relative to the experiment's folder `results` (results/E).
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
from tokenizers import Tokenizer

from dvp.analysis.points import BASE
from dvp.errors import DvpError
from dvp.experiment.config import Experiment
from dvp.experiment.grid import GridPoint, Measurement, Run, Sampler
from dvp.files import read_json, sha256_file, verify_checksums
from dvp.measurement.files import TABLES
from dvp.tracking.record import read_rows

ORIGIN = ("config_hash", "git_commit", "tracking_key")
_ANSWERS = ("response", "reference", "stated_answer")

Origins = dict[str, dict[str, Any]]
"""Origin of every stage's JSON file, with the checksums of the files that it vouches for, by path."""


@dataclass
class Scored:
    """Runs of the grid, and scores on report.task of their models and of the base model."""

    runs: pd.DataFrame
    """A row a run: point, seed, skipped_steps, collapsed_at (a step or None), source."""
    metrics: pd.DataFrame
    """A row a step: point, seed, and what metrics.jsonl has; `gradient_norm` is NaN in a skipped step."""
    scores: pd.DataFrame
    """A row a model, or a model and sampler, the base model first: point, seed, avg, pass, maj (fractions, of k
    samples), source. With samplers `point`, here and in samples, is a `cell_name`."""
    samples: pd.DataFrame
    """A row a response: point, seed, problem, sample, correct, and if asked for response, reference (texts) and
    stated_answer (a text or None); the same problems in the same order of each model."""
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
    """Values without a batch: of `sample` (engine or reference) and `batch`, dvp.analysis.bias.CHANGES."""
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


def load_training(experiment: Experiment, results: Path) -> Scored:
    """Every run, and every model as all are sampled. Raises DvpError."""
    cells = [(point.path if point else BASE, run, None) for point, run in _models(experiment)]
    return _scored(experiment, results, cells)


def load_matrix(experiment: Experiment, results: Path, *, answers: bool = False) -> Scored:
    """Every run, and every model with all that samples it, with `answers` what they say. Raises DvpError."""
    own = experiment.sampler
    cells = [
        (cell_name(point, sampler), run, None if sampler == own else sampler)
        for point, run in _models(experiment)
        for sampler in [own, *experiment.samplers(point)]
    ]
    return _scored(experiment, results, cells, _ANSWERS if answers else ())


def load_tokenizer(experiment: Experiment, results: Path) -> tuple[Tokenizer, Origins]:
    """The base model's tokenizer, which all models have. Raises DvpError."""
    reader, name = _Reader(experiment, results), "tokenizer.json"
    reader.record("base", f"{BASE}/manifest.json", BASE, None, experiment.config_hash("base"), [name])
    return Tokenizer.from_file(str(results / BASE / name)), reader.files


def load_curve(experiment: Experiment, results: Path) -> Curve:
    """Every run, and its evaluations at all steps at which it has some. Raises DvpError."""
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
                scores.append(_by_problem(samples).assign(step=step, task=task, **key))
                sources.append(key | {"step": step, "task": task, "source": row["source"]})
    return Curve(pd.DataFrame(tokens), _joined(scores), pd.DataFrame(sources), pd.DataFrame(runs), reader.files)


def load_mismatch(experiment: Experiment, results: Path) -> Mismatch:
    """Every measurement of the stage `mismatch`. Raises DvpError."""
    reader = _Reader(experiment, results)
    frames: dict[str, list[pd.DataFrame]] = {name: [] for name in TABLES}
    for measurement in experiment.measurements("mismatch"):
        _, read = reader.measurement("mismatch", measurement, TABLES)
        first = experiment.seeds.index(measurement.seed) * experiment.mismatch.problems
        unit = {name: first + place for place, name in enumerate(dict.fromkeys(read["noise"]["problem"]))}
        for name, table in read.items():
            frames[name].append(table.assign(unit=table["problem"].map(unit)))
    return Mismatch({name: _joined(parts) for name, parts in frames.items()}, reader.files)


def load_bias(experiment: Experiment, results: Path) -> Bias:
    """Every measurement of the stage `bias`. Raises DvpError."""
    reader = _Reader(experiment, results)
    estimators, jackknife = [], []
    for measurement in experiment.measurements("bias"):
        record, read = reader.measurement("bias", measurement, ("estimators", "jackknife"))
        reference = record["reference"]
        estimators.append(
            read["estimators"].assign(
                squared_norm=reference["squared_norm"],
                response_tokens=reference["response_tokens_mean"],
                reference_reward=reference["reward"],
            )
        )
        jackknife.append(read["jackknife"])
    return Bias(_joined(estimators), _joined(jackknife), reader.files)


def load_variance(experiment: Experiment, results: Path) -> Variance:
    """What every measurement of the stage `bias` says of positions. Raises DvpError."""
    reader = _Reader(experiment, results)
    names = ("variance", "variance_jackknife", "proxy")
    measured = [reader.measurement("bias", measurement, names)[1] for measurement in experiment.measurements("bias")]
    return Variance(*(_joined([read[name] for read in measured]) for name in names), reader.files)


def cell_name(point: GridPoint | None, sampler: Sampler) -> str:
    """A model and its sampler: POINT/by~ENGINE/min_p~RHO."""
    return f"{point.path if point else BASE}/{sampler.path}"


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
        source, config_hash = f"runs/{run.path}/train.json", self.experiment.config_hash("train", run)
        record = self.record("train", source, run.path, run.seed, config_hash, ["metrics.jsonl"])
        metrics = pd.DataFrame(read_rows((self.results / source).with_name("metrics.jsonl")))
        # It has no type where all steps were skipped.
        metrics = metrics.astype({"gradient_norm": float})
        return {key: record[key] for key in ("skipped_steps", "collapsed_at")} | {"source": source}, metrics

    def evaluation(
        self, run: Run | None, task: str, sampler: Sampler | None = None, columns: Iterable[str] = ()
    ) -> tuple[dict[str, Any], pd.DataFrame]:
        """Scores, and of each response problem, sample, correct and `columns`."""
        source = f"{evaluation_path(run, task, sampler)}/scores.json"
        config_hash = self.experiment.config_hash("evaluate", run, task, sampler=sampler)
        name, seed = (run.path, run.seed) if run else (BASE, None)
        metrics = self.record("evaluate", source, name, seed, config_hash, ["samples.parquet"])["metrics"]
        k = self.experiment.evaluation.samples_per_problem[task]
        row = {key: float(metrics[f"{key}@{k}"]["value"]) for key in ("avg", "pass", "maj")} | {"source": source}
        path, columns = (
            (self.results / source).with_name("samples.parquet"),
            ["problem_id", "sample", "correct", *columns],
        )
        samples = pd.read_parquet(path, columns=columns).rename(columns={"problem_id": "problem"})
        # The order in which the bootstrap draws problems.
        return row, samples.sort_values(["problem", "sample"], ignore_index=True)

    def measurement(
        self, stage: str, measurement: Measurement, names: Iterable[str]
    ) -> tuple[dict[str, Any], dict[str, pd.DataFrame]]:
        """Its JSON file, and its tables with source, policy, engine, task if any, and seed."""
        source = f"{stage}/{measurement.path}/{stage}.json"
        config_hash = self.experiment.config_hash(stage, measurement=measurement)
        files = [f"{name}.parquet" for name in names]
        record = self.record(stage, source, measurement.path, measurement.seed, config_hash, files)
        task = {} if measurement.task is None else {"task": measurement.task}
        place = {"policy": measurement.policy_path, "engine": measurement.engine} | task | {"seed": measurement.seed}
        tables = {}
        for name, file in zip(names, files, strict=True):
            table = pd.read_parquet((self.results / source).with_name(file))
            if "rho" in table:  # null of a method that takes none
                table["rho"] = table["rho"].astype(object).where(table["rho"].notna(), "none")
            # A number that is missing throughout, as without a safe vocabulary, has no type in the file.
            missing = [column for column in table if table[column].isna().all()]
            # In the mismatch's tables `source` is whose distribution q is.
            own = {} if "source" in table else {"source": source}
            tables[name] = table.astype(dict.fromkeys(missing, float)).assign(**own, **place)
        return record, tables

    def record(
        self, stage: str, source: str, run: str, seed: int | None, config_hash: str, names: list[str]
    ) -> dict[str, Any]:
        """A stage's JSON file, if it is fresh and its files `names` are unaltered."""
        path = self.results / source
        record = read_json(path, *ORIGIN, "files")
        check_fresh(path, record, config_hash)
        used = {name: record["files"].get(name, "") for name in names}
        verify_checksums(path.parent, used)
        origin = {"stage": stage, "run": run, "seed": seed} | {key: record[key] for key in ORIGIN}
        self.files[source] = origin | {"sha256": sha256_file(path), "files": used}
        return record


def _models(experiment: Experiment) -> Iterator[tuple[GridPoint | None, Run | None]]:
    """The base model, and of every point every seed."""
    return [(None, None), *((point, point.run(seed)) for point in experiment.points for seed in experiment.seeds)]


def _scored(
    experiment: Experiment,
    results: Path,
    cells: list[tuple[str, Run | None, Sampler | None]],
    columns: Iterable[str] = (),
) -> Scored:
    """`cells`: of each evaluation what it is called, its run, and its sampler where that is not what samples all."""
    reader = _Reader(experiment, results)
    runs, metrics, scores, samples = [], [], [], []
    for run in experiment.runs:
        key = {"point": run.point.path, "seed": run.seed}
        row, frame = reader.training(run)
        runs.append(key | row)
        metrics.append(frame.assign(**key))
    for name, run, sampler in cells:
        key = {"point": name, "seed": run.seed if run else -1}
        row, frame = reader.evaluation(run, experiment.report.task, sampler, columns)
        scores.append(key | row)
        samples.append(frame.assign(**key))
    frames = pd.DataFrame(runs, dtype=object), _joined(metrics), pd.DataFrame(scores), _joined(samples)
    return Scored(*frames, reader.files)


def _by_problem(samples: pd.DataFrame) -> pd.DataFrame:
    """The share of correct samples of each problem, in the order of the problems: of all, odd and even samples."""
    odd = samples["sample"] % 2 == 1
    parts = {"all": samples, "odd": samples[odd], "even": samples[~odd]}
    shares = {name: part.groupby("problem")["correct"].mean() for name, part in parts.items()}
    return pd.DataFrame(shares).astype(float).rename_axis("problem").reset_index()


def _joined(frames: list[pd.DataFrame]) -> pd.DataFrame:
    return pd.concat(frames, ignore_index=True)
