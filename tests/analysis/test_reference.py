"""What results/reference keeps is what its estimates say: `make reference` would change nothing."""

import json
import os
from pathlib import Path

import pytest

from dvp.analysis.evidence import answer, render
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


def test_the_page_of_claims_is_that_of_the_estimates(monkeypatch):
    monkeypatch.chdir(ROOT)
    reference = Path(os.path.relpath(REFERENCE))
    keys = read_yaml(ROOT / "config/config.yaml")["evidence"]
    answered = answer([f"{key}={reference / name}" for key, name in keys.items() if (reference / name).is_dir()])
    page = render(answered, reference)["claims.md"]
    assert page == (REFERENCE / "claims.md").read_text(), "run `make reference`"
    assert answered["not_run"] == []
