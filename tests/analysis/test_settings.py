"""A grid whose points differ in training settings."""

import pytest
from made_up_results import Results, main_table, make_experiment

from dvp.analysis.points import partner, policy_label

SETTINGS = {"group_size": [4, 16]}
RLOO = "method~rloo/engine~coarse/rho~none"


def grid(*entries: dict, **changes):
    return make_experiment(grid=list(entries), report__reference_training={"group_size": 16}, **changes)


def test_points_are_compared_with_their_like():
    experiment = grid(
        {"method": ["rloo"], "engine": ["coarse"], "training": SETTINGS},
        {"method": ["dvp"], "engine": ["coarse"], "rho": ["0.01"], "training": SETTINGS},
        {"method": ["rloo"], "engine": ["coarse"], "training": {"group_size": 4, "steps": 48}},
    )
    assert experiment.reference_point.path == f"{RLOO}/group_size~16"
    pruned = [point for point in experiment.points if point.method == "dvp"]
    like = [f"{RLOO}/group_size~{size}" for size in (4, 16)]
    assert [partner(experiment, point, "unpruned").path for point in pruned] == like


EQUAL = """Equal in all of them: responses per step (128), steps (12), responses of a run (1,536), sampled tokens of a
run (62,976, within 5 %). Not equal: prompts per step (8 to 32)."""
UNEQUAL = """Equal in all of them: prompts per step (8), steps (12). Not equal: responses per step (32 to 128),
responses of a run (384 to 1,536), sampled tokens of a run (15,744 to 62,976)."""


@pytest.mark.parametrize(("sizes", "note"), [([(4, 32), (16, 8)], EQUAL), ([(4, 8), (16, 8)], UNEQUAL)])
def test_which_sizes_are_equal_is_said(sizes, note, tmp_path):
    """41 tokens a response were made up."""
    rows = [{"group_size": size, "prompts_per_step": prompts} for size, prompts in sizes]
    entries = [{"method": ["rloo"], "engine": ["coarse"], "training": one} for one in rows]
    reference = {"report__reference_training": rows[1], "evaluation__bootstrap_resamples": 100}
    experiment = make_experiment(grid=entries, training__steps=12, **reference)
    assert note.replace("\n", " ") in " ".join(
        main_table(experiment, Results(experiment, tmp_path, problems=3).folder).notes
    )


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
    assert policy_label(both, f"{RLOO}/group_size~4") == "after RLOO (naive), coarse, G 4"
