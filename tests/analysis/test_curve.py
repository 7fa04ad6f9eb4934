"""Scores along training: known answers of peak, mean and tokens to a score, and the part of the report."""

import math

import numpy as np
import pandas as pd
import pytest
from made_up_results import Results, make_experiment, measured_of

from dvp.analysis import curve
from dvp.analysis.curve import mean_weights, peak, tokens_to
from dvp.analysis.formats import tokens_text
from dvp.analysis.load import Reader

pytestmark = pytest.mark.slow

POINT = "method~rloo/engine~coarse/rho~none"


# --- known answers ---


@pytest.mark.parametrize(
    ("scores", "score", "tokens"),
    [
        ([0.2, 0.4, 0.6, 0.8], 0.5, 150),  # between two evaluations, on a straight line
        ([0.2, 0.4, 0.6, 0.8], 0.6, 200),
        ([0.2, 0.4, 0.6, 0.8], 0.81, math.inf),
        ([0.2, 0.4, 0.6, 0.8], 0.1, 0),  # the base model has it
        ([0.2, 0.8, 0.4, 0.7], 0.65, 200 + 100 * 0.5),  # the lucky 0.8 is pooled with the 0.4 after it
        ([0.2, 0.9, 0.1, 0.2], 0.5, math.inf),  # what is lost again is not reached
        ([0.2, 0.6, 0.6, 0.6], 0.6, 100),
    ],
)
def test_tokens_to_a_score_by_hand(scores, score, tokens):
    assert tokens_to(score, np.array([0.0, 100, 200, 300]), np.array(scores)) == pytest.approx(tokens)


def test_the_mean_over_tokens_is_the_integral_of_the_line():
    tokens_N, score_N = np.array([0.0, 100, 400, 500]), np.array([0.1, 0.5, 0.3, 0.9])
    for until in (30.0, 100.0, 250.0, 500.0):
        weight_N = mean_weights(tokens_N, until)
        grid = (np.arange(200_000) + 0.5) / 200_000 * until
        assert weight_N @ score_N == pytest.approx(np.interp(grid, tokens_N, score_N).mean(), abs=1e-6)
        assert weight_N.sum() == pytest.approx(1)
    with pytest.raises(ValueError, match="until"):
        mean_weights(tokens_N, 501)


def test_a_peak_is_chosen_by_one_half_and_read_from_the_other():
    odd_SNP = np.array([[[0.9, 0.9], [0.2, 0.2], [0.6, 0.4]], [[0.0, 0.0], [0.5, 0.7], [0.5, 0.5]]])
    even_SNP = np.array([[[1.0, 1.0], [0.9, 0.9], [0.3, 0.1]], [[0.0, 0.0], [0.4, 0.2], [1.0, 1.0]]])
    every = np.ones((1, 2, 2))
    # The first run's best is its third evaluation (its first is the base model), the second run's its second.
    value_R, place_RS = peak(every, odd_SNP, even_SNP)
    assert place_RS.tolist() == [[2, 1]]
    assert value_R == pytest.approx([(0.2 + 0.3) / 2])
    # A replicate with the first seed twice, and of its problems the first one twice.
    value_R, place_RS = peak(np.array([[[4.0, 0.0], [0.0, 0.0]]]), odd_SNP, even_SNP)
    assert place_RS[0, 0] == 2
    assert value_R == pytest.approx([0.3])


# --- the part ---


@pytest.fixture(scope="module")
def asked():
    grid = [
        {"method": "rloo", "engine": "fp32"},
        {"method": ["rloo", "rloo_mis"], "engine": "coarse", "training": {"group_size": [4, 8]}},
    ]
    return make_experiment(
        training__steps=12,
        seeds=[0, 1, 2],
        evaluation__bootstrap_resamples=400,
        evaluation__at=[4, 8],
        grid=grid,
        report__reference_training={"group_size": 8},
    )


@pytest.fixture
def written(asked, tmp_path):
    return Results(asked, tmp_path / "results", problems=8)


def given_scores(written, asked, scores):
    """Give runs these scores at steps 4, 8 and 12: that many samples of each problem are right."""
    k = asked.evaluation.samples_per_problem["held_out"]
    for run in [*asked.snapshots, *asked.runs]:
        share = scores(run)[{4: 0, 8: 1, None: 2}[run.step]]
        written.write_evaluation(run, np.tile(np.arange(k) < round(share * k), (written.problems, 1)))


def test_the_curve_is_what_the_files_say(written, asked):
    groups = curve.groups(Reader(asked, written.folder))
    assert [group.point for group in groups] == asked.points
    [group] = [group for group in groups if group.point.path == f"{POINT}/group_size~4"]
    assert group.steps == [0, 4, 8, 12]
    prompts = asked.training.prompts_per_step
    assert group.tokens_SN.tolist() == [[0.0, *(steps * 4 * prompts * 41.0 for steps in (4, 8, 12))]] * 3
    for seed in asked.seeds:
        for n, step in enumerate(["", "/step~4", "/step~8", None]):
            policy = f"{group.point.path}/seed~{seed}{step or ''}" if n else "base"
            samples = pd.read_parquet(written.folder / f"evals/{policy}/held_out/samples.parquet")
            assert group.score_SN[seed, n] == pytest.approx(samples["correct"].mean())
    assert group.until == 12 * 4 * prompts * 41
    # The end of the curve is the score of the main table, interval and all.
    score = next(
        s
        for s in measured_of(asked, written.folder, "training").statistics
        if s.name == "score" and s.where == {"method": "rloo", "engine": "coarse", "rho": "none", "group_size": "4"}
    )
    assert group.draws.estimate(group.score["final"].value_R, "share") == pytest.approx(
        (score.value, score.low, score.high)
    )


def test_statistics_by_hand(written, asked):
    """With groups of 4 a step takes half the tokens, and the scores of the reference are those of later steps."""

    def scores(run):
        if run.training.get("group_size") == 8:
            return (0.5, 0.75, 0.875) if run.method == "rloo" else (0.75, 0.75, 0.5)
        return (0.75, 0.875, 0.875)

    given_scores(written, asked, scores)
    found = list(curve.statistics(asked, Reader(asked, written.folder)))

    def of(name, method, size):
        where = {"method": method, "engine": "coarse", "rho": "none", "task": "held_out", "group_size": str(size)}
        [statistic] = [one for one in found if (one.name, one.where) == (name, where)]
        return statistic

    unit = 4 * asked.training.prompts_per_step * 41  # a step with groups of 4
    reference = asked.reference_point
    assert reference.path == f"{POINT}/group_size~8"
    goal = of("target_score", "rloo", 8).value
    assert goal == pytest.approx(0.875 - 0.02)
    share = (goal - 0.75) / 0.125
    assert of("tokens_to_score", "rloo", 8).value == pytest.approx(2 * unit * (8 + 4 * share))
    assert of("tokens_to_score", "rloo", 4).value == pytest.approx(unit * (4 + 4 * share))
    saved = 100 * (1 - (4 + 4 * share) / (2 * (8 + 4 * share)))
    numbers = of("tokens_saved_percent", "rloo_mis", 4)
    assert [numbers.value, numbers.low, numbers.high] == pytest.approx([saved] * 3)
    assert of("tokens_saved_equal_settings_percent", "rloo_mis", 4).value == pytest.approx(0)
    # Never reached: said, not left out.
    assert of("reached_score", "rloo_mis", 8).value == 0
    assert of("reached_score", "rloo_mis", 4).value == 1
    assert math.isnan(of("tokens_to_score", "rloo_mis", 8).value)
    assert "not defined, as 3 of 3 never reach it" in of("tokens_to_score", "rloo_mis", 8).how
    assert math.isnan(of("tokens_saved_percent", "rloo_mis", 8).value)
    assert of("median_tokens_to_score", "rloo_mis", 8).value == math.inf
    assert not [
        s
        for s in found
        if s.name.startswith("tokens_saved")
        and s.where["method"] == "rloo"
        and s.where["group_size"] == "8"
        and s.where["engine"] == "coarse"
    ]
    # A collapse after the peak: the peak is that of the run, wherever it was.
    k = asked.evaluation.samples_per_problem["held_out"]
    read = np.mean([sample < round(0.75 * k) for sample in range(0, k, 2)])
    assert of("peak_score", "rloo_mis", 8).value == pytest.approx(read)
    assert of("mean_score", "rloo", 8).unit == "fraction"


def test_where_both_runs_come_there_before_they_are_evaluated_no_saving_is_told(written, asked):
    """A curve that rises twice as fast looks as fast: both are straight lines from the base model."""

    def scores(run):
        fast = run.method == "rloo_mis"
        return tuple(1 - math.exp(-step / (1 if fast else 2)) for step in (4, 8, 12))

    given_scores(written, asked, scores)
    groups = curve.groups(Reader(asked, written.folder))
    pair = [group for group in groups if group.point.engine == "coarse" and group.point.training["group_size"] == 4]
    slow, fast = sorted(pair, key=lambda group: group.point.method)
    curves = {group.point: group for group in groups}

    def saved(score):
        found = list(curve._tokens(asked, fast, curves, score))
        return next(one for one in found if one.name == "tokens_saved_equal_settings_percent")

    score = (slow.score_SN[0, 1] + slow.score_SN[0, 0]) / 2
    assert all(taken < slow.tokens_SN[0, 1] for group in pair for taken in group.tokens_taken(score))
    assert math.isnan(saved(score).value)
    assert "both before they are first evaluated" in saved(score).how
    # One of them was evaluated before it came there: by how much it is later can be told.
    assert saved((slow.score_SN[0, 1] + slow.score_SN[0, 2]) / 2).value > 0


def test_one_sample_a_problem_gives_no_peak(tmp_path):
    asked = make_experiment(training__steps=12, evaluation__at=[4], evaluation__samples_per_problem={"held_out": 1})
    written = Results(asked, tmp_path / "results", problems=8)
    made = measured_of(asked, written.folder, "curve")
    assert not [statistic for statistic in made.statistics if statistic.name.startswith("peak")]
    assert "Peak: not given" in " ".join(made.tables["curve_table"].notes)


@pytest.mark.parametrize(
    ("tokens", "text"), [(950, "950"), (12_345, "12.3 k"), (1_250_000, "1.25 M"), (999_900, "1.00 M")]
)
def test_tokens_as_text(tokens, text):
    assert tokens_text(tokens) == text
