"""Several base models, reported together."""

import json
import math
from statistics import fmean, stdev

import pandas as pd
import pytest
from made_up_results import Results, make_experiment
from scipy import stats

import dvp.analysis.responses
from dvp.analysis.bases import BaseModels
from dvp.analysis.estimates import mean, score
from dvp.analysis.load import Reader
from dvp.analysis.statistics import Statistic, lookup
from dvp.cli import main
from dvp.experiment.config import Experiment
from dvp.experiment.loading import dump_experiment
from dvp.files import sha256_file, write_text

REFERENCE = {"method": "rloo", "engine": "coarse", "rho": "none"}
MIS = REFERENCE | {"method": "rloo_mis"}
DVP_MIS = REFERENCE | {"method": "dvp_mis", "rho": "exp(-13)"}
EXACT = REFERENCE | {"engine": "fp32"}
GAINS = [0.01, 0.04, 0.025]
T_2 = 4.302653  # 97.5 %, two degrees of freedom
PRIMARY = [
    {"method": "rloo", "engine": "fp32"},
    {"method": "rloo_mis", "engine": "coarse"},
]


@pytest.fixture
def over_three() -> Experiment:
    return make_experiment(
        name="all", bases=[5, 6, 7], seeds=[0, 1], report__primary=PRIMARY, report__equivalent_within=2.0
    )


def measured(gain: float, *, more: str = "score") -> list[Statistic]:
    """Scores of one base model: MIS gains over the reference, the fp32 engine twice as much, DVP on MIS little."""

    def one(name: str, value: float, where: dict[str, str] = MIS) -> Statistic:
        return Statistic(name, where, value, value - 1, value + 1, "fraction", "over its seeds", ("evals/x.json",))

    return [
        one("score", 0.5, REFERENCE),
        one("score", 0.5 + gain),
        one("score", 0.5 + 2 * gain, EXACT),
        one("score", 0.501 + 0.9 * gain, DVP_MIS),
        one("score_over_reference", gain),
        one("score_over_unpruned", 0.001 - 0.1 * gain, DVP_MIS),
        one("last_k3", 1.0),
        one(more, 1.0, {}),
    ]


def over(experiment: Experiment, each: list[list[Statistic]]) -> list[Statistic]:
    models = BaseModels(experiment, each)
    return [*models.means(), *models.tests()]


@pytest.fixture
def found(over_three):
    return lookup(over(over_three, list(map(measured, GAINS))))


def logit(share: float) -> float:
    return math.log(share / (1 - share))


def test_the_mean_of_base_models_has_their_t_interval(found):
    one = found("score_over_reference", MIS)
    reach = T_2 * stdev(GAINS) / math.sqrt(3)
    expected = (fmean(GAINS), fmean(GAINS) - reach, fmean(GAINS) + reach)
    assert (one.value, one.low, one.high) == pytest.approx(expected)
    assert one.how == "t interval over 3 base models"
    assert one.sources == tuple(f"../all~{base}/evals/x.json" for base in (5, 6, 7))
    assert [found("seed_score_over_reference", MIS | {"seed": base}).value for base in "567"] == GAINS


def test_what_one_base_model_lacks_has_no_mean(over_three):
    each = [measured(0.0), measured(0.0), measured(0.0, more="other")]
    names = {one.name for one in over(over_three, each) if one.where == {}}
    assert not names


def test_differences_are_tested_on_the_scale_of_log_odds(found):
    values = [logit(0.5 + gain) for gain in GAINS]
    one = found("log_odds_over_reference", MIS)
    assert one.value == pytest.approx(fmean(values), rel=1e-12)
    assert one.high - one.value == pytest.approx(T_2 * stdev(values) / math.sqrt(3), rel=1e-6)
    assert found("p_over_reference", MIS).value == pytest.approx(stats.ttest_1samp(values, 0).pvalue, rel=1e-12)


def test_primary_differences_alone_are_adjusted_together(found):
    p = {name: found("p_over_reference", where).value for name, where in (("mis", MIS), ("exact", EXACT))}
    smaller, larger = sorted(p.values())
    adjusted = {
        name: found("adjusted_p_over_reference", where).value for name, where in (("mis", MIS), ("exact", EXACT))
    }
    assert sorted(adjusted.values()) == pytest.approx([2 * smaller, max(2 * smaller, larger)])
    assert found("p_over_reference", DVP_MIS) is not None
    assert found("adjusted_p_over_reference", DVP_MIS) is None


def test_equivalence_is_tested_on_the_scale_of_scores(found):
    values = [0.001 - 0.1 * gain for gain in GAINS]
    above = stats.ttest_1samp(values, -0.02, alternative="greater").pvalue
    below = stats.ttest_1samp(values, 0.02, alternative="less").pvalue
    assert found("equivalence_p_over_unpruned", DVP_MIS).value == pytest.approx(max(above, below), rel=1e-9)
    assert found("equivalence_p_over_unpruned", MIS) is None


def test_a_base_model_without_an_error_leaves_no_interval(over_three):
    found = lookup(over(over_three, list(map(measured, [0.01, 0.02, 0.25]))))
    assert math.isnan(found("log_odds_over_reference", EXACT).value)
    assert math.isnan(found("adjusted_p_over_reference", EXACT).value)
    assert math.isfinite(found("log_odds_over_reference", MIS).value)


def test_intervals_over_problems_can_be_rebuilt_from_what_is_kept(tmp_path):
    experiment = make_experiment(training__steps=12, evaluation__bootstrap_resamples=100)
    reader = Reader(experiment, Results(experiment, tmp_path).folder)
    kept = reader.problems.query("method == 'dvp_mis' and rho == '0.01'")
    share_SP = kept.assign(share=kept["correct"] / kept["samples"]).pivot(
        index="seed", columns="problem", values="share"
    )
    point = next(point for point in experiment.points if (point.method, point.rho) == ("dvp_mis", "0.01"))
    rebuilt, made = mean(experiment, share_SP.to_numpy(), ()), score(reader, point)
    assert rebuilt.draws.estimate(rebuilt.value_R, "share") == made.draws.estimate(made.value_R, "share")


@pytest.mark.slow
def test_the_stage_reads_the_reports_of_the_base_models(tmp_path, monkeypatch, capsys):
    """By the verb: of two base models with made-up runs, then of both together; one that has changed is refused."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.setattr(dvp.analysis.responses, "write_page", lambda experiment, folder, page: page.touch())
    also = {"training__steps": 12, "evaluation__also": [{"rho": "own"}], "evaluation__bootstrap_resamples": 100}
    scores, problems = {}, {}
    for base, count in ((0, 4), (1, 8)):
        experiment = make_experiment(name=f"both~{base}", **also)
        folder = Results(experiment, tmp_path / experiment.name, problems=count).folder
        write_text(folder / "config.yaml", dump_experiment(experiment))
        assert main(["report", "--config", str(folder / "config.yaml")]) == 0
        table = pd.read_csv(folder / "tables/main_table.csv").set_index("point")
        scores[base], problems[base] = table["score"], pd.read_parquet(folder / "report/problems.parquet")
        of_point = problems[base].query("method == 'rloo_mis' and evaluated_rho == 'none'")
        rate = of_point["correct"].sum() / of_point["samples"].sum()
        assert rate == pytest.approx(table["score"]["method~rloo_mis/engine~coarse/rho~none"])
        assert of_point.groupby("seed")["problem"].nunique().tolist() == [count, count]
    both = make_experiment(name="both", bases=[0, 1], report__primary=PRIMARY, **also)
    folder = tmp_path / "both"
    write_text(folder / "config.yaml", dump_experiment(both))
    assert main(["report", "--config", str(folder / "config.yaml")]) == 0
    found = pd.read_csv(folder / "tables/main_table.csv").set_index("point")["score"]
    pd.testing.assert_series_equal(found, (scores[0] + scores[1]) / 2)
    assert "both~0/report/responses.html" in (folder / "report/responses.html").read_text()
    manifest = json.loads((folder / "report/manifest.json").read_text())
    assert "../both~1/evals/base/held_out/scores.json" in manifest["origins"]
    assert manifest["files"]["estimates.parquet"] == sha256_file(folder / "report/estimates.parquet")
    assert (folder / "figures/differences.svg").is_file()
    kept = pd.read_parquet(folder / "report/problems.parquet").groupby("base").size()
    assert dict(kept) == {str(base): len(frame) for base, frame in problems.items()}
    tested = pd.read_csv(folder / "tables/tests_table.csv").set_index("point")
    assert tested["adjusted_p_over_reference"].count() == 2
    (tmp_path / "both~1/report/estimates.parquet").write_bytes(b"")
    assert main(["report", "--config", str(folder / "config.yaml")]) == 2
    assert "both~1/report/estimates.parquet" in capsys.readouterr().err
