import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import jinja2
import numpy as np
import pandas as pd
import pytest
from docutils.core import publish_parts
from made_up_results import CLAIMS, Results, make_experiment

from dvp.analysis import tables
from dvp.analysis.inputs import evaluation_folder
from dvp.analysis.report import print_table, report
from dvp.errors import DvpError
from dvp.experiment.grid import GridPoint
from dvp.files import sha256_file

CAPTIONS = Path(__file__).parents[2] / "workflow" / "report"
FIGURES = ("learning_curves", "mismatch_curves", "scores", "gradient_norm")
TABLES = ("main_table", "mismatch_table")
NAIVE = GridPoint(method="rloo", engine="coarse", rho=None).run(0)


@pytest.fixture(scope="module")
def written(experiment, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    results = Results(experiment, folder / "results")
    report(experiment, results.folder, folder / "a", CLAIMS)
    report(experiment, results.folder, folder / "b", CLAIMS)
    return results, folder / "a", folder / "b"


def test_every_file_is_there_and_the_same_twice(written):
    _, first, second = written
    expected = {f"figures/{name}.{suffix}" for name in FIGURES for suffix in ("svg", "png")}
    expected |= {f"tables/{name}.{suffix}" for name in TABLES for suffix in ("csv", "md", "tex")}
    expected |= {"provenance.json"}
    for folder in (first, second):
        assert {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()} == expected
    for name in expected:
        assert (first / name).read_bytes() == (second / name).read_bytes(), name


def test_provenance_covers_every_cell(experiment, written):
    results, folder, _ = written
    provenance = json.loads((folder / "provenance.json").read_text())
    frames = {
        "main_table": tables.main_table(experiment, results.folder, CLAIMS),
        "mismatch_table": tables.mismatch_table(experiment, results.folder),
    }
    for name, frame in frames.items():
        assert list(provenance["tables"][name]) == list(frame["arm"])
        for row in frame.to_dict("records"):
            cells = provenance["tables"][name][row["arm"]]
            assert list(cells) == list(frame.columns)
            for column, files in cells.items():
                blank = column == "published_percent" and np.isnan(row[column])
                blank |= column == "collapsed_at" and row["arm"] == "base"
                blank |= column.startswith("over_unpruned") and np.isnan(row[column])
                assert bool(files) != blank
                assert all(file in provenance["files"] for file in files)
    ours = "method~dvp_mis/engine~coarse/rho~0.01"
    cells = provenance["tables"]["main_table"][ours]
    runs = {provenance["files"][file]["tracking_key"] for file in cells["score"]}
    assert runs == {f"evaluate {ours}/seed~{seed}" for seed in (0, 1)}
    reference = {provenance["files"][file]["run"] for file in cells["change_percent"]}
    assert reference >= {NAIVE.path, f"{ours}/seed~0"}
    partner = {provenance["files"][file]["run"] for file in cells["over_unpruned"]}
    assert partner == {
        f"{arm}/seed~{seed}" for arm in (ours, "method~rloo_mis/engine~coarse/rho~none") for seed in (0, 1)
    }
    for name, origin in provenance["files"].items():
        if origin["stage"]:
            assert (results.folder / name).is_file()
            assert origin["git_commit"] == "c" * 40
            assert origin["config_hash"]
    assert set(provenance["figures"]) == set(FIGURES)


def test_terminal_table(written):
    text = print_table(written[1])
    assert max(map(len, text.splitlines())) <= 110
    assert len([line for line in text.splitlines() if line.startswith(("base", "RLOO", "DVP"))]) == 8


def change(path: Path, **keys) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


def test_stale_training_is_refused(results, tmp_path):
    other = make_experiment(training__steps=12, training__learning_rate=1e-3)
    with pytest.raises(DvpError, match=r"method~rloo/engine~fp32/rho~none/seed~0/train.json: stale") as error:
        report(other, results.folder, tmp_path / "report", CLAIMS)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "report").exists()


def test_stale_base_evaluation_is_refused(experiment, results, tmp_path):
    path = evaluation_folder(results.folder, None, "held_out") / "scores.json"
    change(path, config_hash="0" * 12)
    with pytest.raises(DvpError, match=r"evals/base/held_out/scores.json: stale, .* expected "):
        report(experiment, results.folder, tmp_path / "report", CLAIMS)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda lines: [*lines[:4], "{oops", *lines[5:]], r"metrics.jsonl: line 5: not valid JSON"),
        (lambda lines: [*lines[:4], "[1]", *lines[5:]], r"line 5: expected a JSON object, found list"),
        (
            lambda lines: [*lines[:2], lines[2].replace('"k3"', '"k4"'), *lines[3:]],
            r"line 3: key 'k3' is missing",
        ),
        (lambda lines: [*lines[:2], *lines[3:]], r"line 3: step: expected 3, found 4"),
        (lambda lines: lines[:-1], r"expected 12 steps, found 11"),
        (
            lambda lines: [lines[0].replace('"ess": 0.', '"ess": 10.'), *lines[1:]],
            r"altered since it was written",
        ),
        (
            lambda lines: [json.dumps(json.loads(lines[0]) | {"k1": float("nan")}), *lines[1:]],
            r"line 1: k1: expected a finite number, found nan",
        ),
    ],
)
def test_malformed_metrics_are_refused(experiment, results, tmp_path, edit, message):
    path = results.folder / "runs" / NAIVE.path / "metrics.jsonl"
    path.write_text("\n".join(edit(path.read_text().splitlines())) + "\n")
    with pytest.raises(DvpError, match=message) as error:
        report(experiment, results.folder, tmp_path / "report", CLAIMS)
    assert str(path) in str(error.value)


def test_missing_and_malformed_scores_are_refused(experiment, results, tmp_path):
    folder = evaluation_folder(results.folder, NAIVE, "held_out")
    kept = (folder / "scores.json").read_text()

    def refused(message: str) -> None:
        with pytest.raises(DvpError, match=message) as error:
            report(experiment, results.folder, tmp_path / "report", CLAIMS)
        assert str(folder) in str(error.value)
        assert "\n" not in str(error.value)
        (folder / "scores.json").write_text(kept)

    change(folder / "scores.json", metrics={})
    refused(r"key 'metrics.avg@8.value' is missing")
    change(folder / "scores.json", metrics=json.loads(kept)["metrics"] | {"avg@8": {"value": 0.123}})
    refused(r"0.123, but the samples in samples.parquet have the mean")
    (folder / "scores.json").unlink()
    refused(r"scores.json: no such file")
    samples = pd.read_parquet(folder / "samples.parquet")

    def replace(table) -> None:
        """Other samples, listed as if they were the stage's own."""
        table.to_parquet(folder / "samples.parquet")
        change(folder / "scores.json", files={"samples.parquet": sha256_file(folder / "samples.parquet")})

    replace(samples.iloc[1:])
    refused(r"expected 8 different samples of every problem")
    replace(samples.drop(columns="correct"))
    refused(r"no parquet file with problem_id, sample, correct")
    replace(samples.assign(problem_id="x" + samples["problem_id"]))
    refused(r"not the problems on which the base model was evaluated")
    samples.iloc[1:].to_parquet(folder / "samples.parquet")
    refused(r"samples.parquet: altered since it was written")
    (folder / "samples.parquet").unlink()
    refused(r"samples.parquet: missing")
    shutil.rmtree(results.folder / "runs" / NAIVE.path)
    with pytest.raises(DvpError, match=r"train.json: no such file"):
        report(experiment, results.folder, tmp_path / "report", CLAIMS)


@pytest.mark.parametrize("name", sorted(file.stem for file in CAPTIONS.glob("*.rst")))
def test_captions_render(name):
    """As Snakemake renders them; docutils stops at the first warning."""
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined)
    template = environment.from_string((CAPTIONS / f"{name}.rst").read_text())
    text = template.render(
        snakemake=SimpleNamespace(config={"experiment": "tiny"}, wildcards=SimpleNamespace(experiment="tiny"))
    )
    html = publish_parts(text, writer="html", settings_overrides={"halt_level": 2})["body"]
    assert ("tiny" in html) == (name not in ("workflow", "claims"))  # those are about several experiments
