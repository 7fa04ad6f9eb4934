"""Experiments that differ in the base model, reported together."""

import json
import math
from statistics import fmean, stdev

import pandas as pd
import pytest
from made_up_results import Results, make_experiment

import dvp.analysis.responses
from dvp.analysis.replicates import across
from dvp.analysis.statistics import Statistic, lookup
from dvp.cli import main
from dvp.experiment.loading import dump_experiment
from dvp.files import sha256_file, write_text

MIS = {"method": "rloo_mis", "engine": "coarse", "rho": "none"}
GAINS = [0.01, 0.04, 0.025]
T_2 = 4.302653  # 97.5 %, two degrees of freedom


@pytest.fixture
def over_three():
    return make_experiment(replicates=["one", "two", "three"], seeds=[0, 1, 2])


def measured(gain: float, *, more: str = "score") -> list[Statistic]:
    def one(name: str, value: float, where: dict[str, str] = MIS) -> Statistic:
        return Statistic(name, where, value, value - 1, value + 1, "fraction", "over its seeds", ("evals/x.json",))

    return [one("score", 0.5 + gain), one("score_over_reference", gain), one("last_k3", 1.0), one(more, 1.0, {})]


def test_the_mean_of_base_models_has_their_t_interval(over_three):
    found = lookup(across(over_three, list(map(measured, GAINS))))("score_over_reference", MIS)
    reach = T_2 * stdev(GAINS) / math.sqrt(3)
    expected = (fmean(GAINS), fmean(GAINS) - reach, fmean(GAINS) + reach)
    assert (found.value, found.low, found.high) == pytest.approx(expected)
    assert found.how == "t interval over 3 base models"
    assert found.sources == tuple(f"../{name}/evals/x.json" for name in over_three.replicates)


def test_what_one_base_model_lacks_has_no_mean(over_three):
    each = [measured(0.0), measured(0.0), measured(0.0, more="other")]
    assert {(one.name, bool(one.where)) for one in across(over_three, each) if "seed" not in one.where} == {
        ("score", True),
        ("score_over_reference", True),
    }


@pytest.mark.slow
def test_the_stage_reads_the_reports_of_the_replicates(tmp_path, monkeypatch, capsys):
    """By the verb: of two base models with made-up runs, then of both together; one that has changed is refused."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.setattr(dvp.analysis.responses, "write_page", lambda experiment, folder, page: page.touch())
    scores = {}
    for name, problems in (("one", 4), ("two", 8)):
        experiment = make_experiment(name=name, training__steps=12, evaluation__bootstrap_resamples=100)
        folder = Results(experiment, tmp_path / name, problems=problems).folder
        write_text(folder / "config.yaml", dump_experiment(experiment))
        assert main(["report", "--config", str(folder / "config.yaml")]) == 0
        table = pd.read_csv(folder / "tables/main_table.csv").set_index("point")
        scores[name] = table["score"]
    both = make_experiment(name="both", replicates=["one", "two"], seeds=[0, 1], training__steps=12)
    folder = tmp_path / "both"
    write_text(folder / "config.yaml", dump_experiment(both))
    assert main(["report", "--config", str(folder / "config.yaml")]) == 0
    found = pd.read_csv(folder / "tables/main_table.csv").set_index("point")["score"]
    pd.testing.assert_series_equal(found, (scores["one"] + scores["two"]) / 2)
    assert "one/report/responses.html" in (folder / "report/responses.html").read_text()
    manifest = json.loads((folder / "report/manifest.json").read_text())
    assert "../two/evals/base/held_out/scores.json" in manifest["origins"]
    assert manifest["files"]["estimates.parquet"] == sha256_file(folder / "report/estimates.parquet")
    assert (folder / "figures/differences.svg").is_file()
    (tmp_path / "two/report/estimates.parquet").write_bytes(b"")
    assert main(["report", "--config", str(folder / "config.yaml")]) == 2
    assert "two/report/estimates.parquet" in capsys.readouterr().err
