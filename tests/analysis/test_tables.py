import json
import math

import numpy as np
import pandas as pd
import pytest
from made_up_results import Results, main_table, make_experiment, training_part

from dvp.analysis.columns import written
from dvp.analysis.load import evaluation_path
from dvp.analysis.points import point_name, where_of
from dvp.experiment.grid import GridPoint

REFERENCE = "method~rloo/engine~coarse/rho~none"


@pytest.fixture
def table(experiment, results):
    return main_table(experiment, results.folder)


@pytest.fixture
def frame(table) -> pd.DataFrame:
    return table.frame()


def test_values_by_hand(experiment, results):
    """Scores 3/8 and 5/8 for DVP + MIS, 1/4 and 3/4 for naive RLOO: the same mean, no change; and so on."""

    def fill(run, correct):
        array = np.zeros((4, 8), dtype=bool)
        array.flat[:correct] = True
        results.write_evaluation(run, array)

    fill(None, 4)
    for run in experiment.runs:
        fill(run, 10)
    for seed, ours, naive in ((0, 12, 8), (1, 20, 24)):
        fill(GridPoint(method="dvp_mis", engine="coarse", rho="0.01").run(seed), ours)
        fill(GridPoint(method="dvp", engine="coarse", rho="0.01").run(seed), ours + 4)
        fill(GridPoint(method="rloo", engine="coarse", rho=None).run(seed), naive)
    rows = main_table(experiment, results.folder).frame().set_index("point")
    ours, dvp, base = (
        rows.loc[name]
        for name in ("method~dvp_mis/engine~coarse/rho~0.01", "method~dvp/engine~coarse/rho~0.01", "base")
    )
    assert ours["score"] == 0.5
    assert ours["seed_scores"] == f"{12 / 32} {20 / 32}"
    assert ours["change_percent"] == pytest.approx(0)
    assert dvp["change_percent"] == pytest.approx(25)
    assert base["change_percent"] == pytest.approx(-75)
    # Against RLOO + MIS, 10 of 32, and naive RLOO: what pruning itself adds.
    assert ours["over_unpruned"] == pytest.approx((16 - 10) / 32)
    assert ours["over_unpruned_low"] < ours["over_unpruned"] < ours["over_unpruned_high"]
    assert dvp["over_unpruned"] == pytest.approx((20 - 16) / 32)
    assert rows.loc[["base", REFERENCE, "method~rloo_mis/engine~coarse/rho~none"], "over_unpruned"].isna().all()
    assert ours["pass_at_k"] == pytest.approx((2 / 4 + 3 / 4) / 2)
    assert ours["maj_at_k"] == pytest.approx((1 / 4 + 2 / 4) / 2)


def test_a_reward_of_ones_own_has_no_majority(experiment, results):
    for run in (None, *experiment.runs):
        results.write_evaluation(run, np.eye(4, 8, dtype=bool))
    for file in results.folder.glob("evals/**/scores.json"):
        scores = json.loads(file.read_text())
        del scores["metrics"]["maj@8"]
        file.write_text(json.dumps(scores))
    table = main_table(experiment, results.folder)
    assert (table.frame()["score"] == 1 / 8).all()
    assert "maj" not in table.frame().to_csv() + " ".join(table.formatted().headings)


def test_paired_interval_is_narrower_than_an_unpaired_one(frame):
    """Problems differ in difficulty, which the change does not feel."""
    row, reference = frame.iloc[-1], frame.set_index("point").loc[REFERENCE]
    spread = math.hypot(
        (row["score_high"] - row["score_low"]) / row["score"],
        (reference["score_high"] - reference["score_low"]) / reference["score"],
    )
    assert row["change_percent_high"] - row["change_percent_low"] < 0.95 * 100 * spread


def test_change_against_a_score_of_zero_is_undefined(experiment, results):
    for seed in experiment.seeds:
        results.write_evaluation(
            GridPoint(method="rloo", engine="coarse", rho=None).run(seed), np.zeros((12, 8), dtype=bool)
        )
    table = main_table(experiment, results.folder)
    frame = table.frame()
    assert frame[["change_percent", "change_percent_low", "change_percent_high"]].isna().all(axis=None)
    assert {row[6] for row in table.formatted().rows} == {"–", "reference"}


def test_a_run_that_learned_nothing_is_named(experiment, results):
    point = GridPoint(method="rloo", engine="fp32", rho=None)
    for seed in experiment.seeds:
        rows = results.metrics(point.run(seed), np.random.default_rng(0))
        results.write_training(point.run(seed), [row | {"skipped": True} for row in rows])
    notes = [note for note in main_table(experiment, results.folder).notes if note.startswith("No signal")]
    assert notes == [
        f"No signal: every step of {point_name(experiment, point)} was skipped (all rewards of each group were "
        "equal, or every other response was rejected). The weights did not change: these are scores of the base model."
    ]


def test_mismatch_by_hand(experiment, results):
    run = GridPoint(method="rloo_mis", engine="coarse", rho=None).run(0)
    rows = results.metrics(run, np.random.default_rng(0))
    for row in rows:
        # Of 12 steps the first two do not count.
        row |= {"k1": float(row["step"]), "max_abs_log_ratio": float(row["step"]), "tokens_per_second": 10.0}
    results.write_training(run, rows)
    other = GridPoint(method="rloo_mis", engine="coarse", rho=None).run(1)
    for row in rows:
        row |= {"k1": 0.5, "max_abs_log_ratio": 2.0}
    results.write_training(other, rows)
    table = training_part(experiment, results.folder)[1]["mismatch_table"].frame().set_index("point")
    row = table.loc["method~rloo_mis/engine~coarse/rho~none"]
    assert row[["k1", "k1_min", "k1_max"]].tolist() == [4.0, 0.5, 7.5]
    assert row[["max_abs_log_ratio", "max_abs_log_ratio_min", "max_abs_log_ratio_max"]].tolist() == [7, 2, 12]
    assert row[["skipped_steps", "steps", "tokens_per_second"]].tolist() == [2, 24, 10]
    assert math.isnan(row["outside_safe_fraction"])
    assert table["policies"].tolist() == ["full"] * 3 + ["pruned"] * 4
    assert table["outside_safe_fraction"].iloc[-1] == pytest.approx(2e-4)
    assert math.isnan(row["pruned_mass_mean"])
    assert table["pruned_mass_mean"].iloc[-1] == pytest.approx(0.001)


def test_a_score_has_the_interval_of_scores_json(tmp_path):
    experiment = make_experiment(seeds=[0], evaluation__bootstrap_resamples=200)
    results = Results(experiment, tmp_path)
    statistics, _ = training_part(experiment, results.folder)
    for point in (None, *experiment.points):
        run = point.run(0) if point else None
        scores = json.loads((results.folder / evaluation_path(run, "held_out") / "scores.json").read_text())
        quoted = [scores["metrics"]["avg@8"][key] for key in ("value", "low", "high")]
        assert quoted[1] < quoted[0] < quoted[2]
        [listed] = [one for one in statistics if one.name == "score" and one.where == where_of(experiment, point)]
        assert [listed.value, listed.low, listed.high] == pytest.approx(quoted, abs=1e-12)


@pytest.mark.parametrize(
    ("spec", "value", "text"),
    [
        ("+.1f", -0.04, "+0.0"),
        (".1f", -0.04, "0.0"),
        ("+.1f", -0.06, "-0.1"),
        ("+digits", -0.0, "0"),
        (".1e", -1e-9, "-1.0e-9"),
    ],
)
def test_what_is_rounded_to_zero_has_no_minus(spec, value, text):
    assert written(value, spec) == text
