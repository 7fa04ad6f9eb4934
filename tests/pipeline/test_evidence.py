"""The page of claims from nothing, for real, at the size of a smoke test: measured, answered, traced, asked again."""

import json
import re
from itertools import pairwise

import pandas as pd
import pytest
import yaml
from mlflow.tracking import MlflowClient
from working_copy import Copy

from dvp.analysis.claims import load_file
from dvp.tracking.store import store_uri
from lineage import lineage

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]
NAME = "smoke_evidence"


@pytest.fixture(scope="module")
def copy(tmp_path_factory, root) -> Copy:
    copy = Copy(tmp_path_factory.mktemp("evidence"), root, "--configfile", "config/evidence_smoke.yaml")
    done = copy.make("evidence", "EVIDENCE=config/evidence_smoke.yaml")
    assert done.returncode == 0, done.stdout[-3000:]
    return copy


@pytest.fixture(scope="module")
def answered(copy) -> dict:
    return json.loads((copy.results / "evidence/claims.json").read_text())


def test_every_claim_is_listed_once_and_has_its_section_and_no_cell_is_empty(copy, root):
    page = (copy.results / "evidence/claims.md").read_text()
    _, *parts = re.split(r'^## <a id="(\w+)"></a>', page, flags=re.MULTILINE)
    sections = dict(zip(parts[::2], parts[1::2], strict=True))
    for claim in load_file(root / "config/claims.yaml").claims:
        assert page.count(f"](#{claim.id})") == 1
        assert len(table_rows(sections[claim.id])) == len(claim.conditions)
    for row in table_rows(page):
        assert all(cell.strip() for cell in row.strip("|").split(" | "))


def table_rows(text: str) -> list[str]:
    """The rows of all tables in Markdown, without their headings."""
    lines = [*text.splitlines(), ""]
    return [line for line, following in pairwise(lines) if line.startswith("| ") and not following.startswith("|--")]


def test_measured_conditions_come_with_intervals_and_runs_that_the_store_knows(copy, answered):
    experiment = MlflowClient(tracking_uri=store_uri(copy.results)).get_experiment_by_name(NAME)
    runs = MlflowClient(tracking_uri=store_uri(copy.results)).search_runs([experiment.experiment_id], max_results=500)
    known = {run.data.tags.get("tracking_key") for run in runs}
    origins = json.loads((copy.results / NAME / "report/manifest.json").read_text())["origins"]
    measured = {}
    for claim in answered["claims"]:
        files = [origins[file]["tracking_key"] for file in claim["files"].get(NAME, [])]
        assert set(files) <= known
        for condition in claim["conditions"]:
            if condition["status"] != "not measured":
                measured.setdefault(condition["statistic"], condition)
    # One condition of each experiment at least, on the one engine that is measured here.
    for name in ("score_over_small_rho", "squared_bias", "tail_mode", "sharp_bound_violations"):
        assert measured[name]["low"] <= measured[name]["value"] <= measured[name]["high"]
    assert measured["sharp_bound_violations"]["value"] == 0
    assert measured["sharp_bound_violations"]["status"] == "holds"


def test_the_page_is_tracked_with_its_verdicts_and_leads_to_every_stage(copy, answered):
    found = lineage(copy.results, answered["tracking_key"])
    assert set(found) == {
        *("prepare", "base", "train", "convert", "evaluate", "mismatch", "bias", "report", "evidence"),
    }
    [run_id] = found["evidence"]
    run = MlflowClient(tracking_uri=store_uri(copy.results)).get_run(run_id)
    assert run.info.status == "FINISHED"
    told = {name.removeprefix("claim."): value for name, value in run.data.tags.items() if name.startswith("claim.")}
    assert told == {claim["id"]: claim["verdict"] for claim in answered["claims"]}


def test_tables_and_figures_of_every_part_are_there_and_in_the_report(copy):
    folder = copy.results / NAME
    tables = (
        "main_table",
        "mismatch_table",
        "engines_table",
        "safe_sets_table",
        "lengths_table",
        "bias_table",
        "variance_table",
        "proxy_table",
    )
    for name in tables:
        assert len(pd.read_csv(folder / f"tables/{name}.csv")) > 0
    figures = (
        "bounds",
        "mismatch_distribution",
        "mismatch_by_probability",
        "safe_sets",
        "pruned_shares",
        "mismatch_by_length",
        "bias_variance",
        "rho_sweep",
    )
    figures += ("variance_by_baseline", "variance_by_position")
    for name in figures:
        assert (folder / f"figures/{name}.png").read_bytes().startswith(b"\x89PNG")
    report = (copy.results / "evidence/report.html").read_text()
    for text in (
        "Claims and verdicts",
        "Bias and variance",
        "Where the mismatch is",
        "Score, KL, bias and variance",
    ):
        assert text in report


def test_a_second_run_has_nothing_to_do(copy):
    assert "Nothing to be done" in copy.snakemake("evidence").stdout


@pytest.mark.nightly
def test_another_experiment_takes_over_what_is_the_same(copy):
    path = copy.folder / "config/experiments/mine.yaml"
    value = yaml.safe_load((copy.folder / f"config/experiments/tests/{NAME}.yaml").read_text())
    path.write_text(yaml.safe_dump(value | {"name": "mine"}, sort_keys=False))
    run = "method~rloo/engine~coarse/rho~none/seed~0"
    goal = f"results/mine/evals/{run}/manifest.json"
    done = copy.snakemake(goal)
    assert done.returncode == 0, done.stdout[-2000:]
    for file in (f"runs/{run}/train.json", f"models/{run}/conversion.json", f"evals/{run}/held_out/scores.json"):
        ours, theirs = (json.loads((copy.results / name / file).read_text()) for name in ("mine", NAME))
        assert ours["reused_from"] == f"{NAME} {theirs['tracking_key']}"
        assert ours["files"] == theirs["files"]
