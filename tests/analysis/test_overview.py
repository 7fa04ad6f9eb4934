"""A method in a row: each number by hand, and the three sentences that say what the table shows."""

import re

import numpy as np
import pytest
from made_up_results import Results, make_experiment, measured_of

from dvp.experiment.grid import GridPoint, Sampler

ALSO = [{"engine": "training"}, {"engine": "training", "rho": "own"}]
RHO = "0.01"
NAIVE, MIS = (GridPoint(method=method, engine="coarse") for method in ("rloo", "rloo_mis"))
DVP = GridPoint(method="dvp", engine="coarse", rho=RHO)
CONTROL = GridPoint(method="rloo", engine="fp32")
PROBLEMS = 12


@pytest.fixture
def table(tmp_path):
    """Of NAIVE and DVP the same problems are right for every seed, of all others nobody's."""
    asked = make_experiment(
        seeds=[0, 1, 2], training__steps=12, evaluation__bootstrap_resamples=200, evaluation__also=ALSO
    )
    written = Results(asked, tmp_path, problems=PROBLEMS)
    k = asked.evaluation.samples_per_problem["held_out"]
    right = {(NAIVE, "fp32", None): 3, (DVP, "fp32", None): 5, (NAIVE, "coarse", None): 8, (DVP, "coarse", RHO): 6}
    right[NAIVE, "coarse", RHO] = 10
    for (point, engine, rho), count in right.items():
        sampler = Sampler(engine=engine, rho=rho)
        for seed in asked.seeds:
            correct = np.repeat(np.arange(PROBLEMS) < count, k).reshape(PROBLEMS, k)
            written.write_evaluation(point.run(seed), correct, None if sampler == asked.sampler else sampler)
    for seed in asked.seeds:
        rows = written.metrics(DVP.run(seed), np.random.default_rng(seed))
        for row in rows:
            late = row["step"] > 2
            row["masked_fraction"] = 0.25 + 0.05 * seed if late else 0.9
            row["k3"] = 10.0 ** -(2 + seed) if late else 1.0
            row["unpruned_k3"] = 3 * row["k3"]
            row["seconds"] = 1.5 * 2.0**seed if late else 60.0
        written.write_training(DVP.run(seed), rows, collapsed_at=9 if seed == 2 else None)
    return measured_of(asked, tmp_path, "training", "matrix").tables["overview_table"], asked


def test_a_row_by_hand(table):
    table, _ = table
    row = table.rows[DVP.path]
    assert row["exact"].value == pytest.approx(5 / PROBLEMS)
    assert row["exact_over_reference"].value == pytest.approx((5 - 3) / PROBLEMS)
    assert row["served"].value == pytest.approx(6 / PROBLEMS)
    assert row["served"].where["evaluated_rho"] == RHO
    assert row["served_over_reference"].value == pytest.approx((6 - 8) / PROBLEMS)
    # What naive RLOO has when it is sampled at ρ is no gain of DVP's.
    assert row["over_evaluation_only"].value == pytest.approx((6 - 10) / PROBLEMS)
    assert row["over_evaluation_only"].where["evaluated_rho"] == RHO
    assert row["collapsed"].value == "1 / 3"
    assert row["k3"].value == pytest.approx(1e-3)  # the geometric mean of 1e-2, 1e-3 and 1e-4
    assert row["k3_full"].value == pytest.approx(3e-3)
    assert table.rows[MIS.path]["k3_full"].value == table.rows[MIS.path]["k3"].value
    # 0.75, 0.70 and 0.65: a standard error of 0.05 / sqrt(3), and t of two degrees of freedom.
    assert row["kept"].value == pytest.approx(0.70)
    odds = 0.70 / 0.30 * np.exp(4.302653 * 0.05 / 3**0.5 / (0.70 * 0.30))  # on the logit scale
    assert row["kept"].high == pytest.approx(odds / (1 + odds), rel=1e-5)
    assert row["seconds_per_step"].value == pytest.approx(3.0)  # the geometric mean of 1.5, 3 and 6
    frame = table.frame().set_index("point")
    assert frame.loc[DVP.path, "kept"] == pytest.approx(0.70)


def test_the_reference_and_the_control_are_compared_with_nothing_they_cannot_be(table):
    rows = table[0].rows
    assert rows[NAIVE.path]["exact_over_reference"] is None
    assert rows[NAIVE.path]["served_over_reference"] is None
    assert rows[CONTROL.path]["served_over_reference"] is None  # trained on another engine
    assert rows[CONTROL.path]["exact_over_reference"] is not None
    assert rows[MIS.path]["served"].where["evaluated_on"] == "coarse"


def test_three_sentences_say_who_differs_from_the_reference(table):
    table, asked = table
    exact, served, collapsed, *_ = table.notes
    others = [point for point in asked.points if point != NAIVE]
    for sentence, key in ((exact, "exact_over_reference"), (served, "served_over_reference")):
        told = {"above": 0, "below": 0, "not": 0}
        for point in others:
            each = table.rows[point.path][key]
            if each is not None:
                told["above" if each.low > 0 else "below" if each.high < 0 else "not"] += 1
        start, above, below, rest = re.fullmatch(
            r"(.*): above it (.*?), below it (.*?), inconclusive (\d+)\.", sentence.split(" With a ρ")[0]
        ).groups()
        assert start.endswith("compared with RLOO (naive), coarse")
        for text, side in ((above, "above"), (below, "below")):
            assert text == "none" or text.startswith(f"{told[side]} (")
            assert (0 if text == "none" else len(text.split("; "))) == told[side]
        assert int(rest) == told["not"]
    only = table.rows[DVP.path]["over_evaluation_only"]
    says = "above it 1 (DVP, ρ = 0.01)" if only.low > 0 else "below it 1 (DVP, ρ = 0.01)"
    assert says in served.split("the same method without a safe vocabulary")[1]
    assert collapsed == f"1 of {3 * len(asked.points)} runs collapsed: of DVP, coarse, ρ = 0.01."
