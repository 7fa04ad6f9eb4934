"""What results/reference keeps is what its estimates say: `make reference` would change nothing."""

import json
import os
from pathlib import Path

import pytest

from dvp.analysis.answers import MARK, fill, pages, read
from dvp.analysis.evidence import MISSING, answer, render
from dvp.analysis.formats import to_markdown
from dvp.analysis.report import kept
from dvp.experiment.loading import read_resolved, read_yaml

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "results" / "reference"
FOLDERS = sorted(file.parent for file in REFERENCE.glob("*/config.yaml"))


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_the_tables_are_those_of_the_estimates(folder):
    tables = kept(read_resolved(folder / "config.yaml"), folder).tables
    assert {file.stem for file in (folder / "tables").glob("*.md")} == set(tables)
    for name, table in tables.items():
        assert (folder / f"tables/{name}.md").read_text() == to_markdown(table.formatted()), "run `make reference`"
    pictures = {file.stem for file in (folder / "figures").glob("*.png")}
    assert pictures <= set(json.loads((folder / "report/manifest.json").read_text())["figures"])


@pytest.fixture(scope="module")
def answered():
    """The claims, as what is kept answers them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        keys = read_yaml(ROOT / "config/config.yaml")["evidence"]
        reference = Path(os.path.relpath(REFERENCE))
        return answer([f"{key}={reference / name}" for key, name in keys.items() if (reference / name).is_dir()])


def test_the_page_of_claims_is_that_of_the_estimates(answered, monkeypatch):
    monkeypatch.chdir(ROOT)
    page = render(answered, Path(os.path.relpath(REFERENCE)))["claims.md"]
    assert page == (REFERENCE / "claims.md").read_text(), "run `make reference`"
    assert answered["not_run"] == []


def test_every_condition_of_a_claim_fits_an_estimate(answered):
    asked = [condition for claim in answered["claims"] for condition in claim["conditions"]]
    assert {one["experiment"] for one in asked if one["status"] == MISSING} <= {*answered["not_run"]}


def test_the_numbers_of_the_documentation_are_those_of_the_estimates(answered):
    answers = read(ROOT / "docs", REFERENCE, answered["claims"])
    stale = [str(page) for page in pages(ROOT) if fill(text := page.read_text(), answers) != text]
    assert not stale, "run `make reference`"
    asked = {mark["name"] for page in pages(ROOT) for mark in MARK.finditer(page.read_text())}
    declared = {*answers.declared["numbers"], *answers.declared["tables"]}
    assert declared <= asked, "declared, and shown nowhere"
