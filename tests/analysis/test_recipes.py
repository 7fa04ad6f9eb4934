"""The recipes of docs/extend.md for a figure, a table and a claim: one function or entry each."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from made_up_results import Results, make_experiment

from dvp.experiment.loading import dump_experiment
from dvp.files import write_text
from recipes import show

pytestmark = pytest.mark.slow
PROGRAM = """
import sys
import dvp.analysis.responses as responses
from dvp.cli import main
responses.write_page = lambda experiment, folder, page: page.touch()  # the made-up runs kept no response
sys.exit(main(sys.argv[1:]))
"""
ROOT = Path(__file__).parents[2]


def test_a_figure_a_table_and_a_claim_are_one_addition_each(tmp_path):
    for name in ("src", "config"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    show(tmp_path)
    experiment = make_experiment(training__steps=24)
    folder = Results(experiment, tmp_path / "results/mine", problems=4).folder
    write_text(folder / "config.yaml", dump_experiment(experiment))
    env = os.environ | {"PYTHONPATH": str(tmp_path / "src")}
    env |= {"MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/mlflow.db"}
    for verb in (
        ["report", "--config", "results/mine/config.yaml"],
        ["evidence", "--experiments", "mine=results/mine", "--output", "page"],
    ):
        call = [sys.executable, "-c", PROGRAM, *verb]
        done = subprocess.run(call, cwd=tmp_path, env=env, capture_output=True, text=True, check=False, timeout=300)
        assert done.returncode == 0, done.stderr
    assert (folder / "figures/kl_growth.png").read_bytes().startswith(b"\x89PNG")
    table = pd.read_csv(folder / "tables/kl_growth_table.csv")
    assert list(table["point"]) == [point.path for point in experiment.points]
    known = table.dropna(subset="k3_growth")  # of the exact engine it is not defined
    assert len(known) == len(table) - 1
    assert (known["k3_growth_low"] <= known["k3_growth"]).all()
    [row] = [line for line in (tmp_path / "page/claims.md").read_text().splitlines() if "larger at the end" in line]
    assert "not measured" not in row
    assert "(../results/mine/figures/kl_growth.png)" in (tmp_path / "page/claims.md").read_text()
