"""The report of training and scores: figures, tables, and where each of their numbers comes from."""

from pathlib import Path

import pandas as pd

from dvp.analysis import figures, tables
from dvp.analysis.claims import CLAIMS, claim, load_claims
from dvp.analysis.formats import from_markdown, to_text
from dvp.analysis.inputs import (
    BASE,
    arms,
    evaluation_folder,
    read_metrics,
    reference_arm,
    unpruned_arm,
)
from dvp.analysis.output import write
from dvp.analysis.statistics import Measured
from dvp.analysis.training import statistics
from dvp.experiment.config import Experiment
from dvp.experiment.grid import Run
from dvp.files import read_json, sha256_file, write_json

KL_BOUND = "dvp_kl"
TRAINED, SCORED = "train.json", "scores.json"
# Columns that the experiment itself defines.
DEFINED = ("arm", "label", "engine", "rho", "role", "policies", "seeds", "k")
CHANGE = ("change_percent", "change_low", "change_high")


def report(experiment: Experiment, results: Path, folder: Path, claims: Path = CLAIMS) -> Measured:
    """Write figures and tables of training and scores, and last provenance.json, below `folder`.

    Everything is read, checked and drawn before the first file is written.

    Args:
        results: the experiment's own folder (results/E), with runs/ and evals/.
        claims: the published values.

    Returns:
        What was written, with its statistics.

    Raises:
        DvpError: an input is missing, malformed, or written by another version of the experiment.
    """
    published, bound = tables.published_gain(claims), claim(load_claims(claims), KL_BOUND, claims)
    metrics = read_metrics(experiment, results)
    main = tables.main_table(experiment, results, claims)
    mismatch = tables.mismatch_table(experiment, results)
    written = {
        "main_table": (main, tables.format_main(experiment, main, published)),
        "mismatch_table": (mismatch, tables.format_mismatch(experiment, mismatch)),
    }
    drawn = {
        "learning_curves": figures.learning_curves(experiment, metrics),
        "mismatch_curves": figures.mismatch_curves(experiment, metrics, bound),
        "scores": figures.scores(experiment, main),
        "gradient_norm": figures.gradient_norm(experiment, metrics),
    }
    provenance = _provenance(experiment, results, claims, main=main, mismatch=mismatch, drawn=list(drawn))
    measured = Measured(
        statistics=statistics(experiment, results, main),
        tables=written,
        figures=drawn,
        sources=tuple(name for name in provenance["files"] if name.endswith((TRAINED, SCORED))),
    )
    write(measured, folder)
    write_json(folder / "provenance.json", provenance)
    return measured


def print_table(folder: Path) -> str:
    """The main table in `folder` as text for a terminal of 110 columns. Raises DvpError."""
    return to_text(from_markdown(folder / "tables" / "main_table.md"))


def _provenance(
    experiment: Experiment,
    results: Path,
    claims: Path,
    *,
    main: pd.DataFrame,
    mismatch: pd.DataFrame,
    drawn: list[str],
) -> dict:
    """For each cell of the tables, and each figure, the files it comes from; for each file its origin.

    Paths of results are relative to the experiment's folder. tables.TABLE.ARM.COLUMN and figures.FIGURE.ARM
    are lists of keys of `files`.
    """
    task = experiment.report.task
    files: dict[str, dict] = {str(claims): {"stage": None, "sha256": sha256_file(claims)}}
    evaluated: dict[str, list[str]] = {BASE: _evaluation_files(results, None, task, files)}
    trained: dict[str, list[str]] = {}
    for arm in arms(experiment):
        runs = [arm.run(seed) for seed in experiment.seeds]
        evaluated[arm.path] = [name for run in runs for name in _evaluation_files(results, run, task, files)]
        trained[arm.path] = [name for run in runs for name in _training_files(results, run, files)]
    reference = reference_arm(experiment).path
    partners = {arm.path: without.path for arm in arms(experiment) if (without := unpruned_arm(experiment, arm))}

    def main_cell(name: str, column: str, value: object) -> list[str]:
        if column == "published_percent":
            return [] if pd.isna(value) else [str(claims)]
        if column == "collapsed_at":
            return trained.get(name, [])
        if column.startswith("over_unpruned"):
            return [] if pd.isna(value) else list(dict.fromkeys(evaluated[name] + evaluated[partners[name]]))
        if column in CHANGE:
            return list(dict.fromkeys(evaluated[name] + evaluated[reference]))
        return evaluated[name]

    return {
        "experiment": experiment.name,
        "config_hash": experiment.config_hash("report"),
        "reference": reference,
        "defined_by_the_experiment": list(DEFINED),
        "tables": {
            "main_table": {
                row["arm"]: {column: main_cell(row["arm"], column, value) for column, value in row.items()}
                for row in main.to_dict("records")
            },
            "mismatch_table": {
                row["arm"]: dict.fromkeys(row, trained[row["arm"]]) for row in mismatch.to_dict("records")
            },
        },
        "figures": {
            name: evaluated
            if name == "scores"
            else trained | {"published": [str(claims)]}
            if name == "mismatch_curves"
            else trained
            for name in drawn
        },
        "files": files,
    }


def _evaluation_files(results: Path, run: Run | None, task: str, files: dict[str, dict]) -> list[str]:
    folder = evaluation_folder(results, run, task)
    origin = _origin("evaluate", run, read_json(folder / SCORED))
    return _enter(files, results, [folder / SCORED, folder / "samples.parquet"], origin)


def _training_files(results: Path, run: Run, files: dict[str, dict]) -> list[str]:
    folder = results / "runs" / run.path
    origin = _origin("train", run, read_json(folder / TRAINED))
    return _enter(files, results, [folder / TRAINED, folder / "metrics.jsonl"], origin)


def _origin(stage: str, run: Run | None, record: dict) -> dict:
    return {
        "stage": stage,
        "run": run.path if run else BASE,
        "seed": run.seed if run else None,
        **{key: record[key] for key in ("config_hash", "git_commit", "tracking_key")},
    }


def _enter(files: dict[str, dict], results: Path, paths: list[Path], origin: dict) -> list[str]:
    names = [path.relative_to(results).as_posix() for path in paths]
    for name, path in zip(names, paths, strict=True):
        files[name] = origin | {"sha256": sha256_file(path)}
    return names
