import json
import math

import numpy as np
import pandas as pd
import pytest
from made_up_bias import bias_experiment, write_cell
from made_up_results import measured_of

from dvp.analysis.estimates import pooled
from dvp.analysis.tables import estimators_table
from dvp.files import sha256_file, write_json

pytestmark = pytest.mark.slow

TRAINED = "method~rloo/engine~fp32/rho~none"


@pytest.fixture(scope="module")
def experiment():
    return bias_experiment()


@pytest.fixture(scope="module")
def folder(experiment, tmp_path_factory):
    results = tmp_path_factory.mktemp("results")
    for measurement in experiment.measurements("bias"):
        write_cell(experiment, results, measurement)
    return results


@pytest.fixture(scope="module")
def measured(experiment, folder):
    return measured_of(experiment, folder, "bias")


def found(measured, name, **where):
    """The one statistic of this name and place."""
    (one,) = [s for s in measured.statistics if s.name == name and all(s.where[k] == v for k, v in where.items())]
    return one


def test_every_estimator_has_its_statistics_at_every_policy_and_engine(experiment, measured):
    for name in ("squared_bias", "cosine", "variance", "mse"):
        of_name = [one for one in measured.statistics if one.name == name]
        assert len(of_name) == 2 * 2 * len(experiment.estimators)
        assert all(one.how and len(one.sources) == 3 for one in of_name)
        # The interval of a cosine is not defined where a jackknife replicate's is not.
        bounded = [one for one in of_name if name != "cosine" or "seq_is" not in one.where["method"]]
        assert all(one.low < one.value < one.high for one in bounded)
    assert {one.where["policy"] for one in measured.statistics} == {"base", TRAINED}
    naive = found(measured, "squared_bias", policy="base", engine="coarse", method="rloo")
    assert naive.where["rho"] == "none"
    assert naive.unit == "of |g|²"
    assert naive.sources[0] == "bias/base/by~coarse/seed~0/bias.json"
    assert len(measured.files) == 2 * 2 * 3


def test_pooling_by_hand(experiment, folder, measured):
    """Mean over seeds, and t with two degrees of freedom on the spread of their values."""
    measurements = [
        pd.read_parquet(folder / "bias" / "base" / "by~coarse" / f"seed~{seed}" / "estimators.parquet")
        for seed in range(3)
    ]
    rows = [table[(table["method"] == "dvp_mis") & (table["rho"] == "0.01")].iloc[0] for table in measurements]
    for name in ("squared_bias", "cosine", "variance", "mse"):
        values = [row[name] for row in rows]
        between = sum((value - sum(values) / 3) ** 2 for value in values) / 2
        half = 4.302653 * math.sqrt(between / 3)
        one = found(measured, name, policy="base", engine="coarse", method="dvp_mis", rho="0.01")
        assert one.value == pytest.approx(sum(values) / 3)
        if name in ("variance", "mse"):  # above 0 by what they are, and so is the interval
            expected = one.value * math.exp(-half / one.value), one.value * math.exp(half / one.value)
        else:
            expected = one.value - half, one.value + half
        assert (one.low, one.high) == pytest.approx(expected)


@pytest.mark.parametrize("count", [1, 2])
def test_of_fewer_than_three_seeds_the_interval_is_that_of_their_own_noise(count):
    half = 1.959964 * 0.1 / math.sqrt(count)
    mean = (count - 1) / 2
    assert pooled(range(count), [0.1] * count) == pytest.approx((mean, mean - half, mean + half))
    assert np.isnan(pooled(range(count), [math.nan] * count)[1:]).all()


def test_changes_are_paired_with_the_same_correction_without_safe_vocabulary(experiment, measured):
    changes = [one for one in measured.statistics if one.name == "variance_change"]
    assert len(changes) == 2 * 2 * sum(rho is not None for _, rho in experiment.estimators)
    where = {"policy": "base", "engine": "coarse", "method": "dvp_mis", "rho": "0.01"}
    change, own = found(measured, "variance_change", **where), found(measured, "variance", **where)
    partner = found(measured, "variance", **where | {"method": "rloo_mis", "rho": "none"})
    assert change.value == pytest.approx(own.value - partner.value)
    assert "rloo_mis" in change.how
    assert change.high < 0  # 2.0 → 1.2, which unpaired intervals would just tell
    unpaired = math.hypot(own.high - own.low, partner.high - partner.low)
    assert change.high - change.low < 0.8 * unpaired


def rewrite(folder, name, change):
    """Alter a table and its checksum."""
    change(pd.read_parquet(folder / name)).to_parquet(folder / name)
    record = json.loads((folder / "bias.json").read_text())
    record["files"][name] = sha256_file(folder / name)
    write_json(folder / "bias.json", record)


def test_the_paired_bias_is_given_where_the_weights_allow(experiment, measured):
    """The exact engine's, with and without DVP; on the coarse one only of the pruned objective, as its weights say."""
    of_name = [each for each in measured.statistics if each.name == "paired_squared_bias"]
    assert {each.where["engine"] for each in of_name} == {"fp32"}
    assert len(of_name) == 2 * len(experiment.estimators)
    pruned = [each for each in measured.statistics if each.name == "paired_squared_bias_pruned"]
    assert len(pruned) == 2 * 2 * sum(rho is not None for _, rho in experiment.estimators)
    where = {"policy": "base", "engine": "coarse", "method": "dvp", "rho": "0.01"}
    paired = found(measured, "paired_squared_bias_pruned", **where)
    assert "3 seeds" in paired.how
    assert paired.low < 0.5 < paired.high  # what it was made with
    separate = found(measured, "squared_bias", **where)
    assert paired.high - paired.low < 0.5 * (separate.high - separate.low)


def test_the_mean_weight_is_given_where_the_weights_can_be_used(experiment, measured):
    """It lacks what the engine does not reach; the paired bias of these weights' own estimator is always 0."""
    of_name = [each for each in measured.statistics if each.name == "weight_mean"]
    assert {each.where["engine"] for each in of_name} == {"fp32"}
    one = found(measured, "weight_mean_pruned", policy="base", engine="coarse", method="dvp_seq_is", rho="0.01")
    half = 4.302653 * 0.02 / math.sqrt(3)
    assert (one.value, one.low, one.high) == pytest.approx((0.97, 0.97 - half, 0.97 + half))


def test_the_table_shows_the_paired_bias_and_says_where_the_weights_forbid_it(measured):
    table = measured.tables["bias_table"]
    formatted, frame = table.formatted(), table.frame()
    place = formatted.headings.index("paired bias² [95 %]")
    ess = formatted.headings.index("ESS of r (%)")
    for row, engine in zip(formatted.rows, frame["engine"], strict=True):
        assert (row[place] == "–") == (engine == "coarse")
        assert row[ess] == ("30" if engine == "coarse" else "95")
    assert list(frame["weight_ess"].unique()) == [0.95, 0.3]


def test_one_seed_gives_the_cell_itself_and_a_t_interval_over_batches(tmp_path):
    experiment = bias_experiment(engines=["fp32"], policies=["base"]).model_copy(update={"seeds": [0]})
    (measurement,) = experiment.measurements("bias")
    write_cell(experiment, tmp_path, measurement)
    own, measured = (
        pd.read_parquet(tmp_path / "bias" / measurement.path / "estimators.parquet"),
        measured_of(experiment, tmp_path, "bias"),
    )
    table = measured.tables["bias_table"]
    assert list(table.frame()["squared_bias_low"]) == pytest.approx(list(own["squared_bias_low"]))
    assert "one seed" in " ".join(table.notes)
    paired = found(measured, "paired_squared_bias", method="rloo")
    assert paired.sources == (f"bias/{measurement.path}/bias.json",)
    assert paired.high - paired.value == pytest.approx(2.068658 * own["paired_squared_bias_se"][0])  # 24 batches
    assert "batches" in paired.how


def test_a_single_measurement_says_its_paired_bias_or_why_not(folder):
    place = folder / "bias/base/by~coarse/seed~0"
    summary = json.loads((place / "bias.json").read_text())
    formatted = estimators_table(pd.read_parquet(place / "estimators.parquet"), summary, "one").formatted()
    assert {row[6] for row in formatted.rows} == {"–"}
    assert all((row[7] == "–") == (row[1] == "–") for row in formatted.rows)
    assert "ESS 30.0 %" in " ".join(formatted.notes)
