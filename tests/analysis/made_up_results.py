"""A small results folder, made up but whole."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from tokenizers import Tokenizer, models

from dvp.analysis import tables
from dvp.analysis.columns import Table
from dvp.analysis.load import Reader, evaluation_path
from dvp.analysis.points import BASE
from dvp.analysis.report import MEASURES, Part
from dvp.analysis.statistics import Statistic
from dvp.data.puzzles import Puzzle
from dvp.evaluation.metrics import summarise
from dvp.experiment.config import Experiment
from dvp.experiment.grid import Run, Sampler
from dvp.experiment.loading import load_experiment, parse_experiment
from dvp.files import sha256_file, write_json

CONFIG = Path(__file__).parents[2] / "config"
CLAIMS = CONFIG / "claims.yaml"


def make_experiment(**changes) -> Experiment:
    """The experiment `tiny` at two ρ, with changes by dotted key (`training__steps=12`)."""
    value = load_experiment("tiny", CONFIG).model_dump(mode="json")
    value["grid"][-1]["rho"] = ["exp(-13)", "0.01"]
    for key, change in changes.items():
        *parents, last = key.split("__")
        part = value
        for parent in parents:
            part = part[parent]
        part[last] = change
    return parse_experiment(value, Path("test.yaml"))


def measured_of(experiment: Experiment, folder: Path, *parts: str) -> Part:
    """Statistics, tables and files of some parts of a report, of what is in the folder; no figure."""
    reader = Reader(experiment, folder)
    wanted = [*(["matrix"] if "diversity" in parts else []), *parts]
    statistics = [one for part in wanted for one in MEASURES[part](experiment, reader)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tables, "parts", lambda experiment: parts)
        return Part(statistics, tables.make_tables(experiment, statistics), reader.files)


def training_part(experiment: Experiment, folder: Path) -> tuple[list[Statistic], dict[str, Table]]:
    """Statistics and tables of training and scores, of what is in the folder."""
    part = measured_of(experiment, folder, "training")
    return part.statistics, part.tables


def main_table(experiment: Experiment, folder: Path) -> Table:
    return training_part(experiment, folder)[1]["main_table"]


class Results:
    """Writes what the stages train and evaluate would write for every run of an experiment."""

    def __init__(self, experiment: Experiment, folder: Path, problems: int = 12):
        self.experiment, self.folder, self.problems = experiment, folder, problems
        rng = np.random.default_rng(0)
        self.difficulty_P = rng.uniform(-0.25, 0.25, problems)
        k = experiment.evaluation.samples_per_problem["held_out"]
        for run in [None, *experiment.runs]:
            level = 0.45 if run is None else 0.85 if run.engine == "fp32" else 0.7 + 0.02 * (run.rho is not None)
            self.write_evaluation(run, rng.random((problems, k)) < (level + self.difficulty_P)[:, None])
        for run in experiment.runs:
            self.write_training(run, self.metrics(run, rng))
        for run in experiment.snapshots:
            level = 0.45 + 0.25 * run.step / experiment.training_of(run).steps
            self.write_evaluation(run, rng.random((problems, k)) < (level + self.difficulty_P)[:, None])
        self.write_tokenizer()
        for run, sampler in experiment.further_evaluations:
            level = 0.5 if run is None else 0.6 + 0.1 * (sampler.rho is not None) + 0.05 * (run.rho is not None)
            self.write_evaluation(run, rng.random((problems, k)) < (level + self.difficulty_P)[:, None], sampler)

    def write_tokenizer(self) -> None:
        """Of the base model: a token for each letter, digit and space."""
        folder = self.folder / BASE
        folder.mkdir(parents=True, exist_ok=True)
        characters = {character: number for number, character in enumerate("Answer: 0123456789")}
        Tokenizer(models.BPE(vocab=characters, merges=[])).save(str(folder / "tokenizer.json"))
        record = {
            "config_hash": self.experiment.config_hash("base"),
            "git_commit": "c" * 40,
            "tracking_key": "base",
            "files": {"tokenizer.json": sha256_file(folder / "tokenizer.json")},
        }
        write_json(folder / "manifest.json", record)

    def metrics(self, run: Run, rng: np.random.Generator) -> list[dict]:
        exact, pruned = run.engine == "fp32", run.rho is not None
        rows = []
        for step in range(1, self.experiment.training_of(run).steps + 1):
            skipped = run.method == "rloo_mis" and step == 7
            gain = (0.45 if exact else 0.3 + 0.04 * (run.method == "dvp_mis")) * (1 - np.exp(-step / 18))
            k3 = 1e-2 * (1 + step / 40) * (0.05 if run.rho == "0.01" else 0.8 if pruned else 1) * rng.uniform(0.7, 1.4)
            growth = 0.25 * np.exp(step / 40) if run.method == "rloo" and not exact else 0.2
            rows.append(
                {
                    "step": step,
                    "reward": float(np.clip(0.42 + gain + rng.normal(0, 0.05), 0, 1)),
                    "k1": float(rng.normal(0, 1e-14) if exact else k3 * rng.uniform(0.8, 1.2)),
                    "k3": float(rng.normal(0, 1e-13) if exact else k3),
                    "chi2": 0.0 if exact else float(2 * k3),
                    "ess": 1.0 if exact else float(rng.uniform(0.3, 0.5)),
                    "max_abs_log_ratio": 3e-6 if exact else float(rng.uniform(2, 5)),
                    "entropy": 0.3,
                    "pruned_mass_mean": 0.001,
                    "outside_safe_fraction": 2e-4 if pruned else 0.0,
                    "ratio_below_1e-4_fraction": 0.0,
                    "masked_fraction": 0.3 if "mis" in run.method else 0.0,
                    "gradient_norm": None if skipped else float(growth * rng.uniform(0.8, 1.3)),
                    "skipped": skipped,
                    "response_tokens_mean": 41.0,
                    "truncated_fraction": 0.0,
                    "tokens_per_second": float(rng.uniform(3000, 4000)),
                    "seconds": 1.3,
                }
            )
        return rows

    def write_training(self, run: Run, rows: list[dict], collapsed_at: int | None = None) -> None:
        folder = self.folder / "runs" / run.path
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "metrics.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        record = {
            "run": run.path,
            "config_hash": self.experiment.config_hash("train", run.path),
            "git_commit": "c" * 40,
            "steps": len(rows),
            "skipped_steps": sum(row["skipped"] for row in rows),
            "collapsed_at": collapsed_at,
            "collapse_reason": None if collapsed_at is None else "k3 was above 1",
            "seconds": 66.0,
            "tracking_key": f"train {run.path}",
            "files": {path.name: sha256_file(path)},
        }
        write_json(folder / "train.json", record)

    def write_evaluation(
        self,
        run: Run | None,
        correct_PK: np.ndarray,
        sampler: Sampler | None = None,
        answers_PK: np.ndarray | None = None,
    ) -> None:
        """`sampler`: of evaluation.also; None is what samples all models. `answers_PK`: what the samples state."""
        folder = self.folder / evaluation_path(run, "held_out", sampler)
        folder.mkdir(parents=True, exist_ok=True)
        problems, k = correct_PK.shape
        if answers_PK is None:  # one of three right ones, or a wrong one
            answers_PK = np.where(correct_PK, np.arange(correct_PK.size).reshape(correct_PK.shape) * 7 % 3, 9)
        answers = answers_PK.astype(str).tolist()
        rows = [
            {
                "task": "held_out",
                "problem_id": f"p{p:03}",
                "sample": s,
                "correct": bool(correct_PK[p, s]),
                "stated_answer": answers[p][s],
                "response": f"Answer: {answers[p][s]}",
                "reference": Puzzle("shortest_path", "1", {"matrix": []}).reference(),
            }
            for p in range(problems)
            for s in range(k)
        ]
        pd.DataFrame(rows).sample(frac=1, random_state=0).to_parquet(folder / "samples.parquet")
        average, majority = float(correct_PK.mean()), float((correct_PK.mean(axis=1) > 0.5).mean())
        values = {"pass@1": average, f"pass@{k}": float(correct_PK.any(axis=1).mean()), f"maj@{k}": majority}
        settings = self.experiment.evaluation
        measured = summarise(correct_PK, answers, resamples=settings.bootstrap_resamples, seed=settings.seed)
        metrics = {name: {"value": value, "low": value, "high": value} for name, value in values.items()}
        record = {
            "task": "held_out",
            "problems": problems,
            "samples_per_problem": k,
            "samples": problems * k,
            "metrics": metrics | {f"avg@{k}": measured[f"avg@{k}"]},
            "config_hash": self.experiment.config_hash("evaluate", str(folder.relative_to(self.folder / "evals"))),
            "git_commit": "c" * 40,
            "tracking_key": " ".join(["evaluate", run.path if run else BASE, *([sampler.path] if sampler else [])]),
            **(sampler.model_dump() if sampler else {}),
            "files": {"samples.parquet": sha256_file(folder / "samples.parquet")},
        }
        write_json(folder / "scores.json", record)
