"""What can be run and set is listed, each in a line."""

from pathlib import Path

import pytest

from dvp.errors import DvpError
from dvp.experiment.listing import experiments, keys

ROOT = Path(__file__).parents[2]


def test_every_experiment_has_its_runs_report_and_question(monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    (tmp_path / "smoke/report").mkdir(parents=True)
    (tmp_path / "smoke/report/manifest.json").touch()
    lines = experiments(tmp_path).splitlines()
    assert sum(": " in line for line in lines) == len(list((ROOT / "config/experiments").rglob("*.yaml")))
    assert lines[lines.index("config/experiments/start/") + 1].split()[2] == "smoke:"
    assert any(line.startswith("  10  kept    tiny: Naive RLOO, RLOO + MIS, DVP") for line in lines)
    assert any(" here    smoke: " in line for line in lines)
    assert any(" -       paper_8b: " in line for line in lines)


def test_a_key_is_told_with_its_group():
    assert keys("rho").splitlines()[0].startswith("GridEntry: | `rho` |")
    assert keys("GridEntry").startswith("Every combination of its lists")
    assert "TrainingConfig: " in keys(None)
    assert keys("training.gpus").startswith("TrainingConfig: | `gpus` |")
    with pytest.raises(DvpError, match=r"no key 'evaluation\.gpus'"):
        keys("evaluation.gpus")
    with pytest.raises(DvpError, match="no key 'group_sise'; did you mean group_size"):
        keys("group_sise")
