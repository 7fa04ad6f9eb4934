import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jinja2
import pandas as pd
import pytest
from docutils.core import publish_parts
from made_up_results import Results, make_experiment

from dvp.analysis.load import evaluation_path
from dvp.analysis.report import Part, draw, make, provenance, write
from dvp.analysis.series import SERIES
from dvp.analysis.statistics import ESTIMATES, read_statistics
from dvp.analysis.tables import make_tables
from dvp.errors import DvpError
from dvp.experiment.grid import GridPoint
from dvp.experiment.loading import dump_experiment
from dvp.files import sha256_file, write_json, write_text

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
CAPTIONS = ROOT / "workflow" / "report"
NAIVE = GridPoint(method="rloo", engine="coarse", rho=None).run(0)


@pytest.fixture(scope="module")
def written(experiment, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    results = Results(experiment, folder / "results")
    for name in ("a", "b"):
        part = make(experiment, results.folder)
        write(experiment, part, folder / name)
        write_json(folder / name / "provenance.json", provenance(experiment, part))
    return results, folder / "a", folder / "b"


def test_a_report_is_the_same_twice(written):
    files = [{path.relative_to(folder): path for path in folder.rglob("*.*")} for folder in written[1:]]
    assert files[0].keys() == files[1].keys()
    for name, first in files[0].items():
        assert first.read_bytes() == files[1][name].read_bytes(), name
    suffixes = ("csv", "md", "tex", "html")
    tables = {f"{name}.{suffix}" for name in ("main_table", "mismatch_table") for suffix in suffixes}
    assert {path.name for path in files[0] if path.parts[0] == "tables"} == tables


def test_a_report_is_redrawn_from_its_archive_alone(experiment, written, tmp_path):
    """Without a run: estimates and series are what is kept of an experiment."""
    statistics, curves = read_statistics(written[1] / ESTIMATES), pd.read_parquet(written[1] / SERIES)
    draw(experiment, Part(statistics, make_tables(experiment, statistics), {}, curves), tmp_path)
    again = [file.relative_to(tmp_path) for file in tmp_path.rglob("*.*")]
    assert len(again) == 2 * 4 + 2 * 5
    assert all((tmp_path / name).read_bytes() == (written[1] / name).read_bytes() for name in again)


def test_provenance_covers_every_cell(experiment, written):
    results, folder, _ = written
    provenance = json.loads((folder / "provenance.json").read_text())
    defined = {"point", "label", "method", "engine", "rho", "role", "policies", "seeds", "k"}
    for name, table in make(experiment, results.folder).tables.items():
        assert list(provenance["tables"][name]) == list(table.rows)
        for point, row in table.rows.items():
            for column, files in provenance["tables"][name][point].items():
                blank = column in defined or not row[column]
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
    """What `dvp report` does, in a process of its own: torch is seconds and most of the memory."""
    write_text(tmp_path / "config.yaml", dump_experiment(experiment))
    code = f"""
import sys
from pathlib import Path
import dvp.analysis.stage, dvp.analysis.responses
from dvp.analysis.report import make, write
from dvp.experiment.folder import ExperimentDir
experiment = ExperimentDir(Path({str(tmp_path / "config.yaml")!r})).experiment
write(experiment, make(experiment, Path({str(results.folder)!r})), Path({str(tmp_path / "report")!r}))
print(sorted({{"torch", "transformers"}} & set(sys.modules)))
"""
    run = subprocess.run([sys.executable, "-c", code], check=False, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout == "[]\n"


def test_what_is_stale_altered_or_missing_is_refused(experiment, results):
    """In one line that names the file."""
    scores = results.folder / evaluation_path(NAIVE, "held_out")
    run = results.folder / "runs" / NAIVE.path

    def refused(message: str, asked=experiment) -> None:
        with pytest.raises(DvpError) as error:
            make(asked, results.folder)
        assert re.fullmatch(message, str(error.value))

    other = make_experiment(training__steps=12, training__learning_rate=1e-3)
    refused(r".*/scores\.json: stale, written by another version .*", other)
    for place, name, manifest in ((scores, "samples.parquet", "scores.json"), (run, "metrics.jsonl", "train.json")):
        whole = (place / name).read_bytes()
        (place / name).write_bytes(whole + b"{}")
        refused(rf"{place}/{name}: altered since it was written .*")
        (place / name).unlink()
        refused(rf"{place}/{name}: missing, although its manifest lists it")
        (place / name).write_bytes(whole)
        (place / manifest).rename(place / "away")
        refused(rf"{place}/{manifest}: no such file; the stage that writes it has not finished")
        (place / "away").rename(place / manifest)


def test_the_first_page_shows_the_main_table_and_the_main_figure(written, tmp_path, monkeypatch):
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "tiny").symlink_to(written[1])
    monkeypatch.chdir(tmp_path)
    template = jinja2.Environment().from_string((CAPTIONS / "workflow.rst").read_text())
    config = {"experiment": "tiny", "results": "results", "evidence": {"remedies": "remedies"}}
    text = template.render(
        snakemake=SimpleNamespace(config=config),
        files=[SimpleNamespace(path=Path("results/tiny/tables/main_table.html"))],
    )
    html = publish_parts(text, writer="html", settings_overrides={"halt_level": 2})["body"]
    assert "DVP + MIS" in html
    assert html.count("<table>") == html.count("<svg") == 1
