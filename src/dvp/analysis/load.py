"""Read what the stages wrote as tidy data frames: the only place where the report reads files, each of them once.

A file that is missing, altered or written under other settings is refused in one line that names it: a table must not
mix settings. A file with the right checksum is as its stage wrote it, and its contents are not checked again.

Columns that all frames share: `point`, the path of a grid point; `seed`; `source`, the stage's JSON file, relative to
the experiment's folder (results/E).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from math import nan
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from dvp.analysis.parts import several_solutions
from dvp.analysis.points import BASE, where_of
from dvp.errors import DvpError
from dvp.experiment.config import Experiment
from dvp.experiment.grid import GridPoint, Measurement, Run, Sampler
from dvp.files import read_json, sha256_file, verify_checksums
from dvp.measurement.files import TABLES
from dvp.tracking.record import read_rows

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PROBLEMS = "report/problems.parquet"  # in an experiment's folder
ORIGIN = ("config_hash", "git_commit", "tracking_key")
_ANSWERS = ("response", "reference", "stated_answer")

Origins = dict[str, dict[str, Any]]
"""Origin of every stage's JSON file by its path, with the checksums of the files that belong to it."""


@dataclass(frozen=True, eq=False)
class Scored:
    """Evaluations of a grid point's models, one per seed, or of the base model, all on the same P problems."""

    scores: pd.DataFrame
    """One row per model: seed, avg, pass, maj (fractions, of k samples; maj NaN with data.reward), source."""
    share_SP: dict[str, np.ndarray]
    """Share of correct samples of each seed (one row for the base model) and problem, in their order: of `all`, of
    those of `odd` and those of `even` number (NaN where there are none)."""
    by_problem: pd.DataFrame
    """One row per model and problem: seed (−1 of the base model), problem, correct, samples (numbers of responses)."""
    answers: pd.DataFrame | None
    """One row per response if problems can have several solutions, else None: seed, problem, correct, response,
    reference (texts) and stated_answer (a text or None)."""

    @property
    def sources(self) -> tuple[str, ...]:
        """Return the paths of the models' scores.json."""
        return tuple(self.scores["source"])


class Reader:
    """A reader of what an experiment's stages wrote, which records the origin of every file.

    All reading raises DvpError for a file that is missing, altered or stale.
    """

    def __init__(self, experiment: Experiment, folder: Path):
        self.experiment, self.folder = experiment, folder
        self.files: Origins = {}
        self._scored: dict[tuple, Scored] = {}

    @cached_property
    def runs(self) -> pd.DataFrame:
        """Return one row per run: point, seed, collapsed_at (a step or None), source."""
        rows = []
        for run in self.experiment.runs:
            source, config_hash = f"runs/{run.path}/train.json", self.experiment.config_hash("train", run.path)
            record = self._record("train", source, run.path, run.seed, config_hash, ["metrics.jsonl"])
            rows.append((run.point.path, run.seed, record["collapsed_at"], source))
        return pd.DataFrame(rows, columns=["point", "seed", "collapsed_at", "source"], dtype=object)

    @cached_property
    def metrics(self) -> pd.DataFrame:
        """Return one row per step: point, seed, and the keys of metrics.jsonl; a skipped step has gradient_norm NaN."""
        frames = []
        for run in self.runs.itertuples():
            frame = pd.DataFrame(read_rows((self.folder / run.source).with_name("metrics.jsonl")))
            # Without this the column has no type if all steps were skipped.
            frames.append(frame.astype({"gradient_norm": float}).assign(point=run.point, seed=run.seed))
        return pd.concat(frames, ignore_index=True)

    def scored(
        self,
        point: GridPoint | None,
        sampler: Sampler | None = None,
        task: str | None = None,
        step: int | None = None,
    ) -> Scored:
        """Return the evaluations of a point's models, or of the base model without a point.

        sampler : the sampler of the evaluation; by default the one of all models.
        task : by default report.task.
        step : the step of training after which they were evaluated; None is the last.
        """
        sampler = None if sampler == self.experiment.sampler else sampler
        task = task or self.experiment.report.task
        key = (point and point.path, sampler and sampler.path, task, step)
        if key not in self._scored:
            runs = [point.run(seed).after(step) for seed in self.experiment.seeds] if point else [None]
            read = [self._evaluation(run, task, sampler) for run in runs]
            rows, samples = zip(*read, strict=True)
            parts = {"all": [0, 1], "odd": [1], "even": [0]}
            share_SP = {
                name: np.array([_by_problem(frame, frame["sample"].mod(2).isin(part)) for frame in samples])
                for name, part in parts.items()
            }
            answers = pd.concat(samples, ignore_index=True) if "response" in samples[0] else None
            count = {"correct": "sum", "samples": "size"}
            counted = [frame.groupby(["seed", "problem"])["correct"].agg(**count) for frame in samples]
            by_problem = pd.concat(counted).reset_index().astype({"correct": "uint32", "samples": "uint32"})
            self._scored[key] = Scored(pd.DataFrame(rows), share_SP, by_problem, answers)
        return self._scored[key]

    @property
    def problems(self) -> pd.DataFrame:
        """Return `by_problem` of every evaluation, with its task, step of training (−1: the last) and coordinates."""
        frames = []
        for job in self.experiment.jobs.values():
            if job.stage == "evaluate" and (job.run is None or job.run.seed == self.experiment.seeds[0]):
                point, step = (job.run.point, job.run.step) if job.run else (None, None)
                place = where_of(self.experiment, point, job.sampler)
                by_problem = self.scored(point, job.sampler, job.task, step).by_problem
                frames.append(by_problem.assign(task=job.task, step=-1 if step is None else step, **place))
        return pd.concat(frames, ignore_index=True)

    def _evaluation(self, run: Run | None, task: str, sampler: Sampler | None) -> tuple[dict[str, Any], pd.DataFrame]:
        source = f"{evaluation_path(run, task, sampler)}/scores.json"
        config_hash = self.experiment.config_hash("evaluate", str(Path(source).parent.relative_to("evals")))
        name, seed = (run.path, run.seed) if run else (BASE, None)
        metrics = self._record("evaluate", source, name, seed, config_hash, ["samples.parquet"])["metrics"]
        k = self.experiment.evaluation.samples_per_problem[task]
        row = {key: float(metrics.get(f"{key}@{k}", {"value": nan})["value"]) for key in ("avg", "pass", "maj")}
        answers = _ANSWERS if several_solutions(self.experiment) and task == self.experiment.report.task else ()
        columns = ["problem_id", "sample", "correct", *answers]
        samples = pd.read_parquet((self.folder / source).with_name("samples.parquet"), columns=columns)
        samples = samples.rename(columns={"problem_id": "problem"}).sort_values(["problem", "sample"])
        return {"seed": seed, "source": source} | row, samples.assign(seed=-1 if seed is None else seed)

    @cached_property
    def tokenizer(self) -> "Tokenizer":
        """Return the base model's tokenizer, which all models share."""
        from tokenizers import Tokenizer

        name, config_hash = "tokenizer.json", self.experiment.config_hash("base")
        self._record("base", f"{BASE}/manifest.json", BASE, None, config_hash, [name])
        return Tokenizer.from_file(str(self.folder / BASE / name))

    @cached_property
    def mismatch(self) -> dict[str, pd.DataFrame]:
        """Return the tables of the stage `mismatch`, with policy, engine, seed and `unit`.

        A unit is a problem of a seed; units are numbered over all seeds.
        """
        frames: dict[str, list[pd.DataFrame]] = {name: [] for name in TABLES}
        for measurement in self.experiment.measurements("mismatch"):
            _, read = self._measurement("mismatch", measurement, TABLES)
            first = self.experiment.seeds.index(measurement.seed) * self.experiment.mismatch.problems
            unit = {name: first + place for place, name in enumerate(dict.fromkeys(read["noise"]["problem"]))}
            for name, table in read.items():
                frames[name].append(table.assign(unit=table["problem"].map(unit)))
        return {name: pd.concat(parts, ignore_index=True) for name, parts in frames.items()}

    @cached_property
    def bias(self) -> dict[str, pd.DataFrame]:
        """Return the tables of the stage `bias`, with policy, engine, task if any, and seed; rho may be `none`.

        estimators, with squared_norm (|g|²), response_tokens and reference_reward (means) of the reference; jackknife,
        values with one batch left out, the `batch` of `sample` (engine or reference). If the experiment measures by
        position (`all`, or a bin), also variance, variance_jackknife and proxy.
        """
        names = ["estimators", "jackknife"]
        names += ["variance", "variance_jackknife", "proxy"] if self.experiment.positions else []
        frames: dict[str, list[pd.DataFrame]] = {name: [] for name in names}
        for measurement in self.experiment.measurements("bias"):
            record, read = self._measurement("bias", measurement, names)
            reference = {
                column: record["reference"][key]
                for column, key in (
                    ("squared_norm", "squared_norm"),
                    ("response_tokens", "response_tokens_mean"),
                    ("reference_reward", "reward"),
                )
            }
            for name, table in (read | {"estimators": read["estimators"].assign(**reference)}).items():
                frames[name].append(table)
        return {name: pd.concat(parts, ignore_index=True) for name, parts in frames.items()}

    def _measurement(
        self, stage: str, measurement: Measurement, names: Iterable[str]
    ) -> tuple[dict[str, Any], dict[str, pd.DataFrame]]:
        """Read a measurement's JSON file, and its tables with source, policy, engine, task if any, and seed."""
        source = f"{stage}/{measurement.path}/{stage}.json"
        config_hash = self.experiment.config_hash(stage, measurement.path)
        files = [f"{name}.parquet" for name in names]
        record = self._record(stage, source, measurement.path, measurement.seed, config_hash, files)
        task = {} if measurement.task is None else {"task": measurement.task}
        place = {"policy": measurement.policy_path, "engine": measurement.engine} | task | {"seed": measurement.seed}
        tables = {}
        for name, file in zip(names, files, strict=True):
            table = pd.read_parquet((self.folder / source).with_name(file))
            if "rho" in table:  # null for a method without ρ
                table["rho"] = table["rho"].astype(object).where(table["rho"].notna(), "none")
            # A number that is missing in every row, as without a safe vocabulary, has no type in the file.
            missing = [column for column in table if table[column].isna().all()]
            # In the tables of the mismatch `source` is already the distribution that stands for q.
            own = {} if "source" in table else {"source": source}
            tables[name] = table.astype(dict.fromkeys(missing, float)).assign(**own, **place)
        return record, tables

    def _record(
        self, stage: str, source: str, run: str, seed: int | None, config_hash: str, names: list[str]
    ) -> dict[str, Any]:
        """Read a stage's JSON file and record its origin, if it is fresh and its files `names` are unaltered."""
        path = self.folder / source
        record = read_json(path, *ORIGIN, "files")
        check_fresh(path, record, config_hash)
        used = {name: record["files"].get(name, "") for name in names}
        verify_checksums(path.parent, used)
        origin = {"stage": stage, "run": run, "seed": seed} | {key: record[key] for key in ORIGIN}
        self.files[source] = origin | {"sha256": sha256_file(path), "files": used}
        return record


def _by_problem(samples: pd.DataFrame, chosen: pd.Series) -> pd.Series:
    """Return each problem's share of correct samples among the chosen, in the order of the bootstrap's draws."""
    return samples["correct"].where(chosen).astype(float).groupby(samples["problem"]).mean()


def evaluation_path(run: Run | None, task: str, sampler: Sampler | None = None) -> str:
    """Return the folder of a run's evaluation, the base model's without a run, relative to the experiment's folder.

    sampler : the sampler, if it is not the one of all models.
    """
    return "/".join(["evals", run.path if run else BASE, *([sampler.path] if sampler else []), task])


def check_fresh(path: Path, record: dict[str, Any], expected: str) -> None:
    """Raise DvpError unless the stage that wrote `record` had this config_hash."""
    if record["config_hash"] != expected:
        raise DvpError(
            f"{path}: stale, written by another version of the experiment (config_hash {record['config_hash']}, "
            f"expected {expected}); run its stage again"
        )
