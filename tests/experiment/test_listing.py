"""What can be run is listed, each in a line."""

from pathlib import Path

from dvp.experiment.listing import experiments

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
