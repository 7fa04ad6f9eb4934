import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import jinja2
import pandas as pd
import pytest
from docutils.core import publish_parts
from made_up_results import CLAIMS, Results, make_experiment

from dvp.analysis.load import evaluation_path
from dvp.analysis.report import make, print_table, provenance, record, write
from dvp.errors import DvpError
from dvp.experiment.grid import GridPoint
from dvp.files import sha256_file, write_json

pytestmark = pytest.mark.slow

CAPTIONS = Path(__file__).parents[2] / "workflow" / "report"
FIGURES = ("learning_curves", "mismatch_curves", "scores", "gradient_norm")
TABLES = ("main_table", "mismatch_table")
NAIVE = GridPoint(method="rloo", engine="coarse", rho=None).run(0)


@pytest.fixture(scope="module")
def written(experiment, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    results = Results(experiment, folder / "results")
    for name in ("a", "b"):
        part = make(experiment, results.folder, "training", CLAIMS)
        write(part, folder / name)
        write_json(folder / name / "report" / "training.json", record(part))
        write_json(folder / name / "provenance.json", provenance(experiment, part))
    return results, folder / "a", folder / "b"


def test_every_file_is_there_and_the_same_twice(written):
    _, first, second = written
    expected = {f"figures/{name}.{suffix}" for name in FIGURES for suffix in ("svg", "png")}
    expected |= {f"tables/{name}.{suffix}" for name in TABLES for suffix in ("csv", "md", "tex", "html")}
    expected |= {"provenance.json", "report/training.json"}
    for folder in (first, second):
        assert {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()} == expected
    for name in expected:
        assert (first / name).read_bytes() == (second / name).read_bytes(), name


def test_provenance_covers_every_cell(experiment, written):
    results, folder, _ = written
    provenance = json.loads((folder / "provenance.json").read_text())
    part = make(experiment, results.folder, "training", CLAIMS)
    defined = {"point", "label", "method", "engine", "rho", "role", "policies", "seeds", "k"}
    for name, table in part.tables.items():
        assert list(provenance["tables"][name]) == list(table.rows)
        for point, row in table.rows.items():
            cells = provenance["tables"][name][point]
            assert list(cells) == [column.key for column in table.columns]
            for column, files in cells.items():
                blank = column in defined or row.get(column) is None
                blank |= column == "collapsed_at" and point == "base"
                assert bool(files) != blank, (name, point, column)
                assert all(file in provenance["files"] for file in files)
    ours = "method~dvp_mis/engine~coarse/rho~0.01"
    cells = provenance["tables"]["main_table"][ours]
    runs = {provenance["files"][file]["tracking_key"] for file in cells["score"]}
    assert runs == {f"evaluate {ours}/seed~{seed}" for seed in (0, 1)}
    reference = {provenance["files"][file]["run"] for file in cells["change_percent"]}
    assert reference >= {NAIVE.path, f"{ours}/seed~0"}
    partner = {provenance["files"][file]["run"] for file in cells["over_unpruned"]}
    assert partner == {
        f"{point}/seed~{seed}" for point in (ours, "method~rloo_mis/engine~coarse/rho~none") for seed in (0, 1)
    }
    for name, origin in provenance["files"].items():
        if origin["stage"]:
            assert (results.folder / name).is_file()
            assert origin["git_commit"] == "c" * 40
            assert origin["config_hash"]
            for file, digest in origin["files"].items():
                assert sha256_file((results.folder / name).with_name(file)) == digest


def test_terminal_table(written):
    text = print_table(written[1])
    assert max(map(len, text.splitlines())) <= 110
    assert len([line for line in text.splitlines() if line.startswith(("base", "RLOO", "DVP"))]) == 8


MAIN_TABLE = {"title": "t", "headings": ["method", "score"], "rows": [["RLOO", "1"]], "notes": ["a note"]}


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ([], "tables: expected an object, found []"),
        ({}, "tables.main_table: expected an object, found nothing"),
        ({"main_table": {"title": "t"}}, "tables.main_table.headings: expected a list, found nothing"),
        *(
            ({"main_table": MAIN_TABLE | {key: value}}, f"tables.main_table.{message}")
            for key, value, message in (
                ("headings", [], "headings: expected one at least, found []"),
                ("headings", ["method", 3], "headings.1: expected a text, found 3"),
                ("notes", ["a note", None], "notes.1: expected a text, found null"),
                ("rows", [["RLOO", "1"], "DVP"], "rows.1: expected a list, found 'DVP'"),
                ("rows", [["RLOO", "1"], ["DVP"]], "rows.1: expected 2 cells, found 1"),
                ("rows", [["RLOO", "1", "2"]], "rows.0: expected 2 cells, found 3"),
                ("rows", [["RLOO", 1.5]], "rows.0.1: expected a text, found 1.5"),
            )
        ),
    ],
)
def test_a_terminal_table_that_is_none_is_refused(tmp_path, tables, message):
    path = tmp_path / "report/training.json"
    write_json(path, {"tables": tables})
    with pytest.raises(DvpError) as error:
        print_table(tmp_path)
    assert str(error.value) == f"{path}: {message}"


def change(path: Path, **keys) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


def test_stale_training_is_refused(results):
    other = make_experiment(training__steps=12, training__learning_rate=1e-3)
    with pytest.raises(DvpError, match=r"method~rloo/engine~fp32/rho~none/seed~0/train.json: stale") as error:
        make(other, results.folder, "training", CLAIMS)
    assert "\n" not in str(error.value)


def test_stale_base_evaluation_is_refused(experiment, results):
    path = results.folder / evaluation_path(None, "held_out") / "scores.json"
    change(path, config_hash="0" * 12)
    with pytest.raises(DvpError, match=r"evals/base/held_out/scores.json: stale, .* expected "):
        make(experiment, results.folder, "training", CLAIMS)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda lines: [*lines[:4], "{oops", *lines[5:]], r"line 5: not valid JSON"),
        (lambda lines: [*lines[:4], "[1]", *lines[5:]], r"line 5: expected a JSON object"),
        (lambda lines: [line.replace('"k3"', '"k4"') for line in lines], r"column 'k3' is missing"),
        (lambda lines: [*lines[:2], lines[2].replace('"k3"', '"k4"'), *lines[3:]], r"k3: expected .* in row 3"),
        (lambda lines: [*lines[:2], *lines[3:]], r"step: expected 1 to 12, each once and in order"),
        (lambda lines: lines[:-1], r"step: expected 1 to 12"),
        (
            lambda lines: [json.dumps(json.loads(lines[0]) | {"k1": float("inf")}), *lines[1:]],
            r"k1: expected a finite number, found inf in row 1",
        ),
        (
            lambda lines: [json.dumps(json.loads(lines[0]) | {"gradient_norm": None}), *lines[1:]],
            r"gradient_norm: expected a finite number in row 1",
        ),
        (
            lambda lines: [json.dumps(json.loads(lines[0]) | {"skipped": "no"}), *lines[1:]],
            r"skipped: expected true or false, found 'no' in row 1",
        ),
        *(
            (
                lambda lines, value=value: [*lines[:1], json.dumps(json.loads(lines[1]) | {"k3": value}), *lines[2:]],
                rf"k3: expected {expected} in row 2$",
            )
            for value, expected in (
                ("x", "a number, found 'x'"),
                ("1.5", "a number, found '1.5'"),
                (True, "a number, found True"),
                (None, "a number, found nan"),
                (10**400, "float64, found 10{59}"),
            )
        ),
    ],
)
def test_malformed_metrics_are_refused(experiment, results, edit, message):
    path = results.folder / "runs" / NAIVE.path / "metrics.jsonl"
    path.write_text("\n".join(edit(path.read_text().splitlines())) + "\n")
    with pytest.raises(DvpError, match=r"metrics.jsonl: altered since it was written"):
        make(experiment, results.folder, "training", CLAIMS)
    change(path.with_name("train.json"), files={"metrics.jsonl": sha256_file(path)})
    with pytest.raises(DvpError, match=message) as error:
        make(experiment, results.folder, "training", CLAIMS)
    assert str(error.value).startswith(str(path))
    assert "\n" not in str(error.value)


def test_missing_and_malformed_scores_are_refused(experiment, results):
    folder = results.folder / evaluation_path(NAIVE, "held_out")
    kept = (folder / "scores.json").read_text()

    def refused(message: str) -> None:
        with pytest.raises(DvpError, match=message) as error:
            make(experiment, results.folder, "training", CLAIMS)
        assert str(folder) in str(error.value)
        assert "\n" not in str(error.value)
        (folder / "scores.json").write_text(kept)

    change(folder / "scores.json", metrics=None)
    refused(r"scores.json: metrics: expected an object, found null")
    change(folder / "scores.json", metrics={})
    refused(r"metrics.avg@8.value: expected a fraction")
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
    refused(r"samples.parquet: column 'correct' is missing")
    replace(samples.assign(correct=samples["correct"].astype(int) + 1))
    refused(r"samples.parquet: correct: expected true or false, found 2 in row")
    replace(samples.assign(problem_id="x" + samples["problem_id"]))
    refused(r"not the problems of the base model")
    samples.iloc[1:].to_parquet(folder / "samples.parquet")
    refused(r"samples.parquet: altered since it was written")
    (folder / "samples.parquet").unlink()
    refused(r"samples.parquet: missing")
    shutil.rmtree(results.folder / "runs" / NAIVE.path)
    with pytest.raises(DvpError, match=r"train.json: no such file"):
        make(experiment, results.folder, "training", CLAIMS)


@pytest.mark.parametrize("name", sorted(file.stem for file in CAPTIONS.glob("*.rst")))
def test_captions_render(name):
    """As Snakemake renders them; docutils stops at the first warning."""
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined)
    template = environment.from_string((CAPTIONS / f"{name}.rst").read_text())
    text = template.render(
        snakemake=SimpleNamespace(
            config={"experiment": "tiny", "results": "results", "evidence": {"training_grid": "training_grid"}},
            wildcards=SimpleNamespace(experiment="tiny"),
        ),
        files=[],
    )
    html = publish_parts(text, writer="html", settings_overrides={"halt_level": 2})["body"]
    assert ("tiny" in html) == (name not in ("workflow", "claims"))  # those are about several experiments


def test_the_first_page_shows_the_main_table_and_the_main_figure(written, tmp_path, monkeypatch):
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "tiny").symlink_to(written[1])
    monkeypatch.chdir(tmp_path)
    template = jinja2.Environment().from_string((CAPTIONS / "workflow.rst").read_text())
    config = {"experiment": "tiny", "results": "results", "evidence": {"training_grid": "training_grid"}}
    text = template.render(
        snakemake=SimpleNamespace(config=config),
        files=[SimpleNamespace(path=Path("results/tiny/tables/main_table.html"))],
    )
    html = publish_parts(text, writer="html", settings_overrides={"halt_level": 2})["body"]
    assert "DVP + MIS" in html
    assert html.count("<table>") == html.count("<svg") == 1
