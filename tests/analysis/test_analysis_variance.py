"""Variance by position and the proxy's rank correlation: statistics of planted gradients, tables and figures."""

import math

import numpy as np
import pandas as pd
import pytest
from made_up_bias import bias_experiment, write_cell
from made_up_results import measured_of
from test_analysis_bias import found, rewrite

from dvp.analysis.points import counterpart, estimator_counterpart

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
    return measured_of(experiment, folder, "variance")


def cell(folder, seed, name):
    return pd.read_parquet(folder / "bias" / "base" / "by~coarse" / f"seed~{seed}" / f"{name}.parquet")


def test_the_counterpart_has_rloos_baseline_and_differs_in_nothing_else(experiment):
    expected = {"rloo": None, "dvp": None, "rloo_mis": None, "otb": "rloo", "otb_oracle": "rloo", "otb_mis": "rloo_mis"}
    expected |= {"dvp_otb": "dvp", "dvp_otb_mis": "dvp_mis"}
    assert {method: estimator_counterpart(experiment, method, "rloo") for method in expected} == expected
    assert counterpart(experiment, "dvp_otb", ["otb_oracle", "otb"], "unpruned") == "otb"


def test_every_estimator_has_its_variance_at_every_position(experiment, measured):
    of_name = [one for one in measured.statistics if one.name == "gradient_variance"]
    assert len(of_name) == 2 * 9 * 4
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
    assert "cosine" not in {one.name for one in measured_of(experiment, tmp_path, "bias").statistics}
    named = {one.name for one in measured_of(experiment, tmp_path, "variance").statistics}
    assert named == {
        *("gradient_variance", "gradient_signal", "variance_ratio", "proxy_rank_correlation", "proxy_tokens")
    }


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


def test_the_proxys_correlation_is_pooled_over_seeds_of_one_engine(measured):
    of_name = [one for one in measured.statistics if one.name == "proxy_rank_correlation"]
    assert [one.where for one in of_name] == [
        {"policy": "base", "position": position} for position in ("all", "1-8", "9-16", "17-64")
    ]
    assert of_name[1].value == pytest.approx(0.81)
    assert of_name[1].high - of_name[1].value == pytest.approx(4.302653 * 0.01 / math.sqrt(3))
    assert list(measured.tables["proxy_table"].frame()["tokens"]) == [300] * 4
