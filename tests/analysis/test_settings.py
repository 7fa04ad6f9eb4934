"""Tables, statistics and figures of a grid whose points differ in training settings."""

import math

import pytest
from made_up_results import Results, main_table, make_experiment, training_part

from dvp.analysis import training_figures as figures
from dvp.analysis.axes import span
from dvp.analysis.claims import Condition
from dvp.analysis.declared_figures import scores
from dvp.analysis.figures import method_colors
from dvp.analysis.load import Reader
from dvp.analysis.points import partner, policy_label
from dvp.analysis.report import make

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
            f"The rows differ in training settings: G, steps. Equal in all of them: prompts a step ({prompts}). Not "
            f"equal: responses a step ({4 * prompts} to {16 * prompts}), steps (12 to 48), responses of a run "
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
        "Equal in all of them: responses a step (128), steps (12), responses of a run (1,536), sampled tokens of a run "
        "(62,976, within 5 %). Not equal: prompts a step (8 to 32)." in note
        for note in notes
    )


def test_without_axes_there_is_no_column_and_no_note(tmp_path):
    plain = make_experiment(training__steps=12, evaluation__bootstrap_resamples=200)
    statistics, tables = training_part(plain, Results(plain, tmp_path).folder)
    for table in tables.values():
        assert not {"G", "steps"} & set(table.formatted().headings)
        assert not any("differ in training settings" in note for note in table.notes)
    assert {len(statistic.where) for statistic in statistics} == {3}


def test_every_run_has_the_steps_of_its_own_settings(experiment, results):
    loaded = Reader(experiment, results.folder)
    assert loaded.metrics.groupby("point")["step"].max().to_dict() == {
        point.path: experiment.training_of(point).steps for point in experiment.points
    }
    statistics, _ = training_part(experiment, results.folder)
    of = {
        (statistic.where["group_size"], statistic.where["steps"], statistic.name): statistic
        for statistic in statistics
        if statistic.where["method"] == "rloo"
    }
    # 12 steps are too few to tell growth, 48 are not; the end is that of each run.
    assert ("4", "12", "k3_growth") not in of
    assert math.isfinite(of["4", "48", "k3_growth"].value)
    own = loaded.metrics[loaded.metrics["point"] == LONGER]
    assert of["4", "48", "final_reward"].value == pytest.approx(own[own["step"] > 38]["reward"].mean())


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
    colors = method_colors(experiment)
    assert colors["rloo_length_decay"] != colors["rloo"]


def test_curves_have_a_panel_for_each_setting_and_a_legend_entry_for_each_method(experiment, results):
    metrics = Reader(experiment, results.folder).metrics
    titles = [title for title, _ in figures.panels(experiment)]
    assert titles == [
        "engine coarse, G 4, steps 12, ρ = 0.01",
        "engine coarse, G 16, steps 12, ρ = 0.01",
        "engine coarse, G 4, steps 48",
    ]
    figure = figures.learning_curves(experiment, metrics)
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels[:2] == ["RLOO (naive)", "DVP, ρ = 0.01"]
    lengths = [max(len(line.get_xdata()) for line in axes.get_lines()) for axes in figure.axes]
    assert lengths == [12, 12, 48]


def test_a_control_is_drawn_beside_its_own_settings(tmp_path):
    both = grid({"method": ["rloo"], "engine": ["fp32", "coarse"], "training": SETTINGS})
    assert [[point.path.split("/", 1)[1] for point in points] for _, points in figures.panels(both)] == [
        [f"engine~{engine}/rho~none/group_size~{size}" for engine in ("fp32", "coarse")] for size in (4, 16)
    ]
    other = grid(
        {"method": ["rloo"], "engine": ["fp32"], "training": {"group_size": 32}},
        {"method": ["rloo"], "engine": ["coarse"], "training": SETTINGS},
    )
    assert [len(points) for _, points in figures.panels(other)] == [2, 2]
    metrics = Reader(other, Results(other, tmp_path).folder).metrics
    labels = [text.get_text() for text in figures.learning_curves(other, metrics).legends[0].get_texts()]
    assert labels[:2] == ["RLOO (naive)\n(control: engine fp32), G 32", "RLOO (naive)"]


def test_scores_are_labelled_with_what_differs(experiment, results):
    table = main_table(experiment, results.folder)
    labels = [text.get_text() for text in scores(experiment, table).axes[0].get_yticklabels()]
    assert labels == [
        *("RLOO (naive)\nG 4, steps 12", "RLOO (naive)\nG 16, steps 12 (ref.)"),
        *("DVP, ρ = 0.01\nG 4, steps 12", "DVP, ρ = 0.01\nG 16, steps 12", "RLOO (naive)\nG 4, steps 48"),
    ]


def test_the_gradient_norm_has_a_line_for_each_clipping(tmp_path):
    both = grid(
        {"method": ["rloo"], "engine": ["coarse"], "training": {"group_size": [4, 16], "gradient_clipping": 0.5}},
        {"method": ["rloo_mis"], "engine": ["coarse"], "training": {"group_size": 4}},
    )
    figure = figures.gradient_norm(both, Reader(both, Results(both, tmp_path).folder).metrics)
    assert {text.get_text() for text in figure.axes[0].texts} == {"clipped at 0.5", "clipped at 1"}


def test_the_whole_part_is_made_without_claims(experiment, results, tmp_path, monkeypatch):
    """Where there is no config/claims.yaml."""
    monkeypatch.chdir(tmp_path)
    part = make(experiment, results.folder, "training")
    assert set(part.tables) == {"main_table", "mismatch_table"}
    assert set(part.figures) == {"learning_curves", "mismatch_curves", "scores", "gradient_norm"}


def test_a_claim_asks_for_a_point_by_its_settings():
    asked = Condition(
        says="x",
        experiment="otb",
        statistic="score",
        where={"method": "otb", "group_size": 4, "learning_rate": 1e-6, "gradient_checkpointing": True},
        above=0,
    )
    assert asked.where == {
        **{"method": "otb", "group_size": "4", "learning_rate": "1e-06"},
        "gradient_checkpointing": "true",
    }


def test_a_measured_policy_is_called_by_what_differs():
    measured = {"policies": [], "engines": ["fp32"], "problems": 2, "responses": 2, "rhos": ["0.1"], "margins": [0.1]}
    policy = {"method": "rloo", "engine": "coarse", "training": {"group_size": 4}}
    both = grid(
        {"method": ["rloo"], "engine": ["coarse"], "training": SETTINGS},
        mismatch=measured | {"policies": [policy]},
    )
    assert policy_label(both, G4) == "after RLOO (naive), coarse, G 4"


def test_span():
    assert [span([12, 12]), span([4, 16]), span([62976.2, 251_904])] == ["12", "4 to 16", "62,976 to 252,000"]
