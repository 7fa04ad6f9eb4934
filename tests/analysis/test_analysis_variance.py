"""Variance by position and the proxy's rank correlation: statistics of planted gradients, tables and figures."""

import json
import math

import numpy as np
import pandas as pd
import pytest
from made_up_bias import bias_experiment, write_cell
from test_analysis_bias import found, rewrite

from dvp.analysis.declared_figures import variance_by_position
from dvp.analysis.figures import method_colors
from dvp.analysis.parts import parts
from dvp.analysis.points import counterpart, estimator_counterpart
from dvp.analysis.report import make, record, write
from dvp.files import dump_json

pytestmark = pytest.mark.slow

ESTIMATORS = [
    {"method": ["rloo", "rloo_mis", "otb", "otb_mis", "otb_oracle"]},
    {"method": ["dvp", "dvp_mis", "dvp_otb", "dvp_otb_mis"], "rho": "0.01"},
]
ASKED = {"policies": ["base"], "position_bins": [8, 16], "norm_responses": 4, "estimators": ESTIMATORS}


@pytest.fixture(scope="module")
def experiment():
    return bias_experiment(**ASKED)


@pytest.fixture(scope="module")
def folder(experiment, tmp_path_factory):
    results = tmp_path_factory.mktemp("results")
    for measurement in experiment.measurements("bias"):
        write_cell(experiment, results, measurement)
    return results


@pytest.fixture(scope="module")
def measured(experiment, folder):
    return make(experiment, folder, "variance")


def cell(folder, seed, name):
    return pd.read_parquet(folder / "bias" / "base" / "by~coarse" / f"seed~{seed}" / f"{name}.parquet")


def test_it_is_a_part_where_positions_are_asked_for(experiment):
    assert parts(experiment) == ["training", "bias", "variance"]
    assert parts(bias_experiment()) == ["training", "bias"]


def test_the_counterpart_has_rloos_baseline_and_differs_in_nothing_else(experiment):
    expected = {"rloo": None, "dvp": None, "rloo_mis": None, "otb": "rloo", "otb_oracle": "rloo", "otb_mis": "rloo_mis"}
    expected |= {"dvp_otb": "dvp", "dvp_otb_mis": "dvp_mis"}
    assert {method: estimator_counterpart(experiment, method, "rloo") for method in expected} == expected


def test_the_oracle_is_neither_otbs_counterpart_nor_of_its_colour(experiment):
    colors = method_colors(experiment)
    assert colors["otb_oracle"] != colors["otb"]
    assert counterpart(experiment, "dvp_otb", ["otb_oracle", "otb"], "unpruned") == "otb"


def test_every_estimator_has_its_variance_at_every_position(experiment, measured):
    for name in ("gradient_variance", "gradient_signal"):
        of_name = [one for one in measured.statistics if one.name == name]
        assert len(of_name) == 2 * 9 * 4
        assert {one.where["position"] for one in of_name} == {"all", "1-8", "9-16", "17-64"}
        assert all(one.low < one.value < one.high and one.unit == "of |g|²" for one in of_name)
    # The whole signal lies in the first bin, as it was planted.
    ratios = {one.where["position"] for one in measured.statistics if one.name == "variance_over_signal"}
    assert {"all", "1-8"} <= ratios
    where = {"engine": "fp32", "method": "rloo"}
    whole, first = (found(measured, "gradient_variance", position=position, **where) for position in ("all", "1-8"))
    assert first.value == pytest.approx(whole.value / 3, rel=0.2)
    assert whole.low < 6.0 < whole.high


def test_what_a_seed_leaves_undefined_is_not_pooled_over_the_others(tmp_path):
    """A pandas mean would skip it, and count it all the same."""
    experiment = bias_experiment(**ASKED | {"engines": ["coarse"]})
    for measurement in experiment.measurements("bias"):
        write_cell(experiment, tmp_path, measurement)
    folder = tmp_path / "bias" / "base" / "by~coarse" / "seed~1"
    rewrite(folder, "variance.parquet", lambda table: table.assign(variance_over_signal=math.nan))
    rewrite(folder, "estimators.parquet", lambda table: table.assign(cosine=math.nan))
    assert "cosine" not in {one.name for one in make(experiment, tmp_path, "bias").statistics}
    named = {one.name for one in make(experiment, tmp_path, "variance").statistics}
    assert named == {"gradient_variance", "gradient_signal", "variance_ratio", "proxy_rank_correlation"}


def test_ratios_by_hand(folder, measured):
    """The geometric mean over seeds; the t interval of its logarithm."""
    for name, column in (("variance_ratio", "variance"), ("variance_over_signal_ratio", "variance_over_signal")):
        logs = []
        for seed in range(3):
            table = cell(folder, seed, "variance")
            table = table[table["position"] == "all"].set_index("method")
            logs.append(math.log(table.loc["otb", column] / table.loc["rloo", column]))
        half = 4.302653 * math.sqrt(np.var(logs, ddof=1) / 3)
        one = found(measured, name, engine="coarse", method="otb", position="all")
        assert one.value == pytest.approx(math.exp(np.mean(logs)))
        assert (one.low, one.high) == pytest.approx((math.exp(np.mean(logs) - half), math.exp(np.mean(logs) + half)))
        assert "over rloo from the same responses" in one.how


def test_a_planted_ratio_is_in_its_interval(measured):
    """Both estimators have the same variance here: the ratio is 1, and as they are paired its interval is narrow."""
    one = found(measured, "variance_ratio", engine="fp32", method="dvp_otb", position="all")
    assert one.low < 1.0 < one.high
    assert one.high / one.low < 2
    assert not [
        each for each in measured.statistics if each.name == "variance_ratio" and each.where["method"] == "rloo"
    ]


def test_the_proxys_correlation_is_pooled_over_seeds_of_one_engine(measured):
    of_name = [one for one in measured.statistics if one.name == "proxy_rank_correlation"]
    assert [one.where for one in of_name] == [
        {"policy": "base", "position": position} for position in ("all", "1-8", "9-16", "17-64")
    ]
    assert of_name[1].value == pytest.approx(0.81)
    assert of_name[1].high - of_name[1].value == pytest.approx(4.302653 * 0.01 / math.sqrt(3))
    assert list(measured.tables["proxy_table"].frame()["tokens"]) == [300] * 4


def test_tables_figures_and_files(experiment, measured, tmp_path):
    table = measured.tables["variance_table"]
    assert len(table.formatted().rows) == 2 * 9 * 4
    row = table.frame().set_index(["engine", "method", "position"]).loc[("coarse", "otb_mis", "all")]
    assert row["over"] == "rloo_mis"
    assert row["variance_over_signal_low"] < row["variance_over_signal"] < row["variance_over_signal_high"]
    assert "shrinks" in " ".join(table.notes)
    for name, labels in (("variance_by_baseline", 2), ("variance_by_position", 9)):
        figure = measured.figures[name]
        assert [axes.get_title() for axes in figure.axes] == [
            "engine fp32, base model",
            "engine coarse, base model",
        ]
        assert len(figure.legends[0].get_texts()) == labels
    write(measured, tmp_path)
    assert json.loads(dump_json(record(measured)))["tables"].keys() == {"variance_table", "proxy_table"}
    assert {file.stem for file in tmp_path.rglob("*.png")} == {"variance_by_baseline", "variance_by_position"}


def test_a_figure_without_a_value_says_why(experiment, measured):
    undefined = [one for one in measured.statistics if one.name != "variance_over_signal"]
    for axes in variance_by_position(experiment, undefined).axes:
        assert [text.get_text() for text in axes.texts] == ["in no bin is each signal distinguishable from 0"]
    assert not [text for axes in measured.figures["variance_by_position"].axes for text in axes.texts]
