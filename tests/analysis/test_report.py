import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jinja2
import pytest
from docutils.core import publish_parts
from made_up_results import Results, make_experiment

from dvp.analysis.load import evaluation_path
from dvp.analysis.report import make, print_table, provenance, record, write
from dvp.errors import DvpError
from dvp.experiment.grid import GridPoint
from dvp.experiment.loading import dump_experiment
from dvp.files import sha256_file, write_json, write_text

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
CAPTIONS = ROOT / "workflow" / "report"
FIGURES = ("learning_curves", "mismatch_curves", "scores", "gradient_norm")
TABLES = ("main_table", "mismatch_table")
NAIVE = GridPoint(method="rloo", engine="coarse", rho=None).run(0)


@pytest.fixture(scope="module")
def written(experiment, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    results = Results(experiment, folder / "results")
    for name in ("a", "b"):
        part = make(experiment, results.folder, "training")
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
    part = make(experiment, results.folder, "training")
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
        assert (results.folder / name).is_file()
        assert origin["git_commit"] == "c" * 40
        assert origin["config_hash"]
        for file, digest in origin["files"].items():
            assert sha256_file((results.folder / name).with_name(file)) == digest


def test_a_report_loads_no_torch(experiment, results, tmp_path):
    """What `dvp report --part training` does, in a process of its own: torch is seconds and most of the memory."""
    write_text(tmp_path / "config.yaml", dump_experiment(experiment))
    code = f"""
import sys
from pathlib import Path
import dvp.analysis.stage, dvp.analysis.responses
from dvp.analysis.report import make, write
from dvp.experiment.folder import ExperimentDir
experiment = ExperimentDir(Path({str(tmp_path / "config.yaml")!r})).experiment
write(make(experiment, Path({str(results.folder)!r}), "training"), Path({str(tmp_path / "report")!r}))
print(sorted({{"torch", "transformers"}} & set(sys.modules)))
"""
    run = subprocess.run([sys.executable, "-c", code], check=False, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout == "[]\n"
    assert len(list((tmp_path / "report" / "figures").iterdir())) == 2 * len(FIGURES)


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
        make(other, results.folder, "training")
    assert "\n" not in str(error.value)


def test_stale_base_evaluation_is_refused(experiment, results):
    path = results.folder / evaluation_path(None, "held_out") / "scores.json"
    change(path, config_hash="0" * 12)
    with pytest.raises(DvpError, match=r"evals/base/held_out/scores.json: stale, .* expected "):
        make(experiment, results.folder, "training")


def test_what_is_missing_or_altered_is_refused(experiment, results):
    """In one line that names the file."""
    scores = results.folder / evaluation_path(NAIVE, "held_out")
    run = results.folder / "runs" / NAIVE.path

    def refused(message: str) -> None:
        with pytest.raises(DvpError) as error:
            make(experiment, results.folder, "training")
        assert re.fullmatch(message, str(error.value))

    with open(scores / "samples.parquet", "ab") as file:
        file.write(b"x")
    refused(rf"{scores}/samples\.parquet: altered since it was written .*")
    (scores / "samples.parquet").unlink()
    refused(rf"{scores}/samples\.parquet: missing, although its manifest lists it")
    (scores / "scores.json").unlink()
    refused(rf"{scores}/scores\.json: no such file; the stage that writes it has not finished")
    with open(run / "metrics.jsonl", "a") as file:
        file.write("{}\n")
    refused(rf"{run}/metrics\.jsonl: altered since it was written .*")
    shutil.rmtree(run)
    refused(rf"{run}/train\.json: no such file; .*")


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
