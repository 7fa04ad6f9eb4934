"""Tables, statistics and figures of a grid whose points differ in training settings."""

import pytest
from made_up_results import Results, main_table, make_experiment, training_part

from dvp.analysis.points import partner, policy_label
from dvp.analysis.tables import span

pytestmark = pytest.mark.slow

SETTINGS = {"group_size": [4, 16]}
LONG = {"group_size": 4, "steps": 48}
RLOO = "method~rloo/engine~coarse/rho~none"
G4, G16, LONGER = f"{RLOO}/group_size~4", f"{RLOO}/group_size~16", f"{RLOO}/group_size~4/steps~48"


def grid(*entries: dict, **changes):
    return make_experiment(
        grid=list(entries),
        report__reference_training={"group_size": 16},
        training__steps=12,
        evaluation__bootstrap_resamples=200,
        **changes,
    )


@pytest.fixture(scope="module")
def experiment():
    return grid(
        {"method": ["rloo"], "engine": ["coarse"], "training": SETTINGS},
        {"method": ["dvp"], "engine": ["coarse"], "rho": ["0.01"], "training": SETTINGS},
        {"method": ["rloo"], "engine": ["coarse"], "training": LONG},
    )


@pytest.fixture
def results(experiment, tmp_path):
    return Results(experiment, tmp_path / "results")


def test_a_table_has_a_column_for_each_setting_that_differs_and_says_which_sizes_are_equal(experiment, results):
    statistics, tables = training_part(experiment, results.folder)
    for table in tables.values():
        text = table.formatted()
        start = text.headings.index("ρ") + 1
        assert text.headings[start : start + 2] == ["G", "steps"]
        shown = {row[0]: row[start : start + 2] for row in text.rows}
        assert shown.pop("base model", ["–", "–"]) == ["–", "–"]
        frame = table.frame().set_index("point").loc[[G4, G16, LONGER], ["training.group_size", "training.steps"]]
        assert frame.to_numpy().tolist() == [["4", "12"], ["16", "12"], ["4", "48"]]
        [note] = [note for note in text.notes if note.startswith("The rows differ")]
        # tiny: 8 prompts a step; 41 tokens a response were made up.
        prompts = experiment.training.prompts_per_step
        assert note == (
            f"The rows differ in training settings: G, steps. Equal in all of them: prompts per step ({prompts}). Not "
            f"equal: responses per step ({4 * prompts} to {16 * prompts}), steps (12 to 48), responses of a run "
            f"({48 * prompts:,} to {192 * prompts:,}), sampled tokens of a run ({span([48 * prompts * 41])} to "
            f"{span([192 * prompts * 41])})."
        )
    assert "(12 to 48 steps)" in tables["main_table"].notes[2]
    assert any(
        "relative to RLOO (naive), G 16, steps 12, on engine coarse (ref.)" in note
        for note in tables["main_table"].notes
    )
    [score] = [
        statistic for statistic in statistics if statistic.name == "score" and statistic.where.get("steps") == "48"
    ]
    assert score.where == {"method": "rloo", "engine": "coarse", "rho": "none", "group_size": "4", "steps": "48"}


def test_equal_responses_and_tokens_are_said(tmp_path):
    same = grid(
        {"method": ["rloo"], "engine": ["coarse"], "training": {"group_size": 4, "prompts_per_step": 32}},
        {"method": ["rloo"], "engine": ["coarse"], "training": {"group_size": 16, "prompts_per_step": 8}},
    )
    notes = main_table(same, Results(same, tmp_path).folder).notes
    assert any(
        "Equal in all of them: responses per step (128), steps (12), responses of a run (1,536), sampled tokens of a "
        "run (62,976, within 5 %). Not equal: prompts per step (8 to 32)." in note
        for note in notes
    )


def test_points_are_compared_with_their_like(experiment):
    assert experiment.reference_point.path == G16
    pruned = [point for point in experiment.points if point.method == "dvp"]
    assert [partner(experiment, point, "unpruned").path for point in pruned] == [G4, G16]


def test_a_decay_of_the_learning_rate_makes_another_method():
    grid = [
        {"method": ["rloo_length_decay", "rloo"], "engine": ["coarse"]},
        {"method": ["dvp"], "engine": ["coarse"], "rho": ["0.01"]},
    ]
    experiment = make_experiment(grid=grid)
    [pruned] = [point for point in experiment.points if point.method == "dvp"]
    assert partner(experiment, pruned, "unpruned").method == "rloo"


def test_a_measured_policy_is_called_by_what_differs():
    measured = {"policies": [], "engines": ["fp32"], "problems": 2, "responses": 2, "rhos": ["0.1"], "margins": [0.1]}
    policy = {"method": "rloo", "engine": "coarse", "training": {"group_size": 4}}
    both = grid(
        {"method": ["rloo"], "engine": ["coarse"], "training": SETTINGS},
        mismatch=measured | {"policies": [policy]},
    )
    assert policy_label(both, G4) == "after RLOO (naive), coarse, G 4"
