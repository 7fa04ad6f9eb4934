"""What can be run and set is listed, each in a line."""

import re
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


def test_the_list_is_the_same_anywhere(monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    here = experiments(tmp_path).splitlines()
    monkeypatch.chdir(tmp_path)
    there = experiments(tmp_path).splitlines()
    assert [line.split(maxsplit=2)[2:] for line in there if ": " in line] == [
        line.split(maxsplit=2)[2:] for line in here if ": " in line
    ]


def test_a_key_is_told_with_its_group():
    rho = "GridEntry.rho: One ρ or a list, for methods that take one: 0.01, 1e-2 or exp(-13)."
    assert keys("rho").splitlines()[:2] == [rho, "    list of number or text; default none"]
    assert keys("GridEntry").startswith("Every combination of its lists")
    assert rho in keys("GridEntry")
    assert "TrainingConfig: " in keys(None)
    assert keys("training.gpus").startswith("TrainingConfig.gpus: ")
    assert keys("mis").startswith("importance: mis: ")
    with pytest.raises(DvpError, match=r"no key 'evaluation\.gpus'"):
        keys("evaluation.gpus")
    with pytest.raises(DvpError, match="no key 'group_sise'; did you mean group_size"):
        keys("group_sise")


def test_a_key_may_be_in_capitals_and_is_told_in_plain_text():
    assert keys("RHO") == keys("rho")
    assert keys("gridentry") == keys("GridEntry")
    every = [keys(None), *(keys(line.partition(":")[0]) for line in keys(None).splitlines())]
    assert not re.search(r"`|\]\(|^\|", "\n".join(every), re.MULTILINE)
