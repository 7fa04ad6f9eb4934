"""Training settings as axes of the grid: what an entry may say, what a run is then called, and what it depends on."""

from pathlib import Path

import pytest
import yaml

from dvp.errors import DvpError
from dvp.experiment.config import Experiment
from dvp.experiment.grid import NO_AXES, GridPoint, Settings, setting_as_written, settings_as_read
from dvp.experiment.loading import dump_experiment, load_experiment, parse_experiment, read_resolved, write_resolved
from dvp.experiment.training import TrainingConfig
from dvp.progress import readable
from dvp.tracking.names import policy_params, policy_title

ROOT = Path(__file__).parents[2]
RLOO = {"method": "rloo", "engine": "fp32"}
OTB = {"method": "otb", "engine": "fp32"}


def experiment(*grid: dict, name: str = "smoke", **changes) -> Experiment:
    """An experiment with this grid, and changes by dotted key (`training__steps=12`)."""
    value = load_experiment(name, ROOT / "config").model_dump(mode="json")
    for key, change in {"grid": list(grid), **changes}.items():
        *parents, last = key.split("__")
        part = value
        for parent in parents:
            part = part[parent]
        part[last] = change
    return parse_experiment(value, Path("test.yaml"))


def refused(*grid: dict, **changes) -> str:
    with pytest.raises(DvpError) as error:
        experiment(*grid, **changes)
    line = str(error.value)
    assert line.splitlines() == [line]
    return line.removeprefix("test.yaml: ")


def test_every_combination_is_a_point_with_a_path_in_a_fixed_order():
    made = experiment(
        {"method": "rloo", "engine": "fp32"},
        {"method": "otb", "engine": ["fp32", "coarse"], "training": {"steps": [2, 5], "group_size": 2}},
        {"method": "dvp", "engine": "coarse", "rho": "exp(-13)", "training": {"learning_rate": [1e-6, 0.01]}},
        seeds=[0, 3],
    )
    assert [point.path for point in made.points] == [
        "method~rloo/engine~fp32/rho~none",
        "method~otb/engine~fp32/rho~none/group_size~2/steps~2",
        "method~otb/engine~fp32/rho~none/group_size~2/steps~5",
        "method~otb/engine~coarse/rho~none/group_size~2/steps~2",
        "method~otb/engine~coarse/rho~none/group_size~2/steps~5",
        "method~dvp/engine~coarse/rho~exp-13/learning_rate~1e-06",
        "method~dvp/engine~coarse/rho~exp-13/learning_rate~0.01",
    ]
    assert [run.path for run in made.runs[2:4]] == [
        f"method~otb/engine~fp32/rho~none/group_size~2/steps~2/seed~{seed}" for seed in (0, 3)
    ]
    for run in made.runs:
        assert made.run(run.path) == run
    first, short, *_ = made.points
    assert made.training_of(first) == made.training
    assert made.training_of(short.run(3)) == made.training.changed(group_size=2, steps=2)


def test_every_number_text_and_switch_of_training_may_be_an_axis():
    training = load_experiment("smoke", ROOT / "config").training
    plain = {name: getattr(training, name) for name in type(training).model_fields if name not in NO_AXES}
    assert set(plain) == set(Settings.__origin__.__annotations__)
    assert all(value is None or isinstance(value, bool | int | float | str) for value in plain.values())
    made = experiment(
        RLOO | {"training": {key: value for key, value in plain.items() if key != "steps"} | {"steps": 2}}
    )
    assert made.training_of(made.points[0]) == made.training.changed(steps=2)


def test_a_setting_in_a_path_needs_no_quotes_in_a_shell():
    values = (4, 1e-6, 2.5e20, 0.5, True, False, None, "float32")
    assert [setting_as_written(value) for value in values] == [
        *("4", "1e-06", "2.5e+20", "0.5", "true", "false", "none", "float32"),
    ]


def test_a_number_is_the_same_setting_however_it_is_written():
    made = experiment(RLOO | {"training": {"temperature": 1}})
    assert made.points[0].path.endswith("/temperature~1.0")
    assert hash(made.points[0]) == hash(GridPoint(**RLOO, training={"temperature": 1.0}))


def test_an_experiment_with_axes_survives_being_resolved(tmp_path):
    policies = [{"method": "otb", "engine": "fp32", "training": {"group_size": 2}}, "base"]
    measured = {"policies": policies, "engines": "coarse", "problems": 2, "responses": 2, "rhos": [0.1], "margins": [1]}
    made = experiment(RLOO, OTB | {"training": {"group_size": [2, 8]}}, mismatch=measured)
    write_resolved(made, tmp_path)
    again = read_resolved(tmp_path / "config.yaml")
    assert again == made.used
    assert [run.path for run in again.runs] == [run.path for run in made.runs]
    assert again.config_hash("report") == made.config_hash("report")
    assert made.measurements("mismatch")[0].path == ("method~otb/engine~fp32/rho~none/group_size~2/by~coarse/seed~0")
    assert made.measurements("mismatch")[0].run == made.runs[1]


# --- what exists stays what it is ---


@pytest.mark.parametrize("name", ["smoke", "training_grid", "paper_8b"])
def test_a_grid_without_axes_is_written_without_them(name):
    written = yaml.safe_load(dump_experiment(load_experiment(name, ROOT / "config")))
    assert all(set(entry) == {"method", "engine", "rho"} for entry in written["grid"])
    assert set(written["report"]) == {"task", "reference", "declarations"}


# --- identity ---


def test_a_run_depends_on_its_own_settings_wherever_they_are_written():
    given = experiment(RLOO, OTB | {"training": {"group_size": [2, 8], "steps": [7]}})
    section = experiment(RLOO, OTB, training__group_size=8, training__steps=7)
    run, same = given.runs[2], section.runs[1]
    assert run.path != same.path
    for stage in ("train", "convert", "evaluate"):
        task = "held_out"
        assert given.config_hash(stage, run, task) == section.config_hash(stage, same, task)
        assert given.config_hash(stage, given.runs[1], task) != given.config_hash(stage, run, task)
    # What it does not share with the section concerns it not, and the other runs it does.
    other = experiment(RLOO, OTB | {"training": {"group_size": [2, 8], "steps": [7]}}, training__steps=9)
    assert other.config_hash("train", run) == given.config_hash("train", run)
    assert other.config_hash("train", other.runs[0]) != given.config_hash("train", given.runs[0])
    other = experiment(RLOO, OTB | {"training": {"group_size": [2, 8], "steps": [7]}}, training__learning_rate=0.1)
    assert other.config_hash("train", run) != given.config_hash("train", run)


def test_a_preflight_is_of_an_engine_and_the_settings_that_the_grid_gives():
    grid = (RLOO, OTB, {"method": ["otb", "opo"], "engine": "coarse", "training": {"group_size": [2, 8]}})
    made = experiment(*grid, preflight="always")
    assert made.preflights == ["fp32", "coarse/group_size~2", "coarse/group_size~8"]
    small, large = (made.waiting_for(path) for path in made.preflights[1:])
    assert (small.training.group_size, large.training.group_size) == (2, 8)
    assert [(point.method, point.engine, point.training) for point in small.points] == [
        ("otb", "coarse", {}),
        ("opo", "coarse", {}),
    ]
    hashes = [made.config_hash("preflight", engine=path) for path in made.preflights]
    assert len(set(hashes)) == 3
    alone = experiment(RLOO | {"engine": "coarse"}, preflight="always", training__group_size=2)
    assert alone.config_hash("preflight", engine="coarse") == hashes[1]
    with pytest.raises(DvpError, match=r"no run has engine 'coarse'; those of the grid are fp32, coarse/group_size~2"):
        made.waiting_for("coarse")


# --- names ---


def test_a_label_says_what_differs_and_nothing_else():
    made = experiment(RLOO, OTB | {"training": {"group_size": [2, 8], "learning_rate": 1.5e-4, "prompts_per_step": 8}})
    assert made.axes == ["group_size", "prompts_per_step"]  # the learning rate is the section's
    first, _, large = made.runs
    assert settings_as_read(made.settings_of(first)) == ["G 4", "prompts per step 4"]
    assert policy_title(made, large).endswith(" · fp32 · G 8 · prompts per step 8 · seed 0")
    params = policy_params(made, large)
    assert (params["group_size"], params["prompts_per_step"]) == ("8", "8")
    assert "learning_rate" not in params
    plain = experiment(RLOO, OTB)
    assert plain.axes == []
    assert policy_title(plain, plain.runs[1]).endswith(" · fp32 · seed 0")
    assert set(policy_params(plain, plain.runs[0])) == {"method", "label", "engine", "rho", "rho_text", "seed"}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (
            "training method~otb/engine~fp32/rho~none/group_size~4/learning_rate~1e-06/seed~1: step 3/32",
            "training OTB · fp32 · G 4 · learning rate 1e-06 · seed 1: step 3/32",
        ),
        (
            "comparing method~dvp/engine~coarse/rho~exp-13/group_size~4/by~coarse/seed~2",
            "comparing dvp · coarse · ρ e⁻¹³ · G 4 · by coarse · seed 2",
        ),
        ("rehearsing a run with engine coarse/group_size~4", "rehearsing a run with engine coarse · G 4"),
    ],
)
def test_a_path_is_shown_as_a_person_would_write_it(text, shown):
    assert readable(text, {"otb": "OTB"}) == shown


# --- what is refused ---


MEASURED = {"policies": ["base"], "engines": ["coarse"], "problems": 2}
MISMATCH = MEASURED | {"responses": 2, "rhos": ["1e-2"], "margins": [0.1]}
BIAS = MEASURED | {"batches": 4, "reference_batches": 4, "estimators": [{"method": "dvp", "rho": "1e-2"}]}


def test_a_group_of_one_is_refused_where_it_could_teach_nothing():
    grpo = {"method": ["otb", "grpo"], "engine": "fp32", "training": {"group_size": [4, 1]}}
    line = refused(RLOO, grpo)
    assert line.startswith("grid[1]: method 'grpo' learns nothing with group_size 1, as its advantage grpo compares ")
    assert len(experiment(RLOO, grpo | {"method": ["otb", "otb_leave_one_out"]}).points) == 5


@pytest.mark.parametrize("rho", ["1e-2", "0.010", "1E-02", 0.01])
def test_a_rho_in_quotes_is_the_same_number(rho):
    made = experiment(RLOO, {"method": "dvp", "engine": "coarse", "rho": rho}, mismatch=MISMATCH, bias=BIAS)
    assert made.points[1].path == "method~dvp/engine~coarse/rho~0.01"
    assert made.mismatch.rhos == ["0.01"]
    assert made.estimators == [("dvp", "0.01")]
    assert GridPoint(method="dvp", engine="coarse", rho=rho).path == made.points[1].path


def test_a_rho_in_quotes_and_without_is_given_twice():
    twice = ["1e-2", 0.01]
    assert refused(RLOO, {"method": "dvp", "engine": "coarse", "rho": twice}) == "grid.1.rho: ρ 0.01 is listed twice"
    assert refused(RLOO, mismatch=MISMATCH | {"rhos": twice}) == "mismatch.rhos: ρ 0.01 is listed twice"
    bias = BIAS | {"estimators": [{"method": "dvp", "rho": twice}]}
    assert refused(RLOO, bias=bias) == "bias.estimators.0.rho: ρ 0.01 is listed twice"


@pytest.mark.parametrize(
    ("training", "line"),
    [
        ({"groupsize": 4}, "grid.0.training.groupsize: unknown key; did you mean group_size?"),
        ({"gpus": 2}, "grid.0.training: gpus is the same for the whole grid; set it in `training`"),
        ({"deepspeed": ["zero1", "zero2"]}, "grid.0.training: deepspeed is the same for the whole grid; set it in"),
        ({"collapse": {"patience": 9}}, "grid.0.training: collapse is the same for the whole grid; set it in"),
        ({"group_size": 0}, "grid.0.training.group_size.0: Input should be greater than or equal to 1, found 0"),
        ({"group_size": [4, "8"]}, "grid.0.training.group_size.1: Input should be a valid integer, found '8'"),
        ({"group_size": 4.0}, "grid.0.training.group_size.0: Input should be a valid integer, found 4.0"),
        ({"group_size": True}, "grid.0.training.group_size.0: Input should be a valid integer, found True"),
        ({"group_size": []}, "grid.0.training.group_size: expected at least 1 of them, found 0"),
        ({"learning_rate": "inf"}, "grid.0.training.learning_rate.0: Input should be a valid number"),
        ({"head_dtype": "bf16"}, "grid.0.training.head_dtype.0: Input should be 'auto' or 'float32', found 'bf16'"),
        ([4], "grid.0.training: Input should be a valid dictionary, found [4]"),
        # Combinations, which name all of what the entry gives.
        (
            {"group_size": 4, "minibatches": [2, 3]},
            "grid[0].training: group_size 4, minibatches 3: minibatches (3) must divide prompts_per_step (4)",
        ),
        (
            {"synchronise_every": [1, 3]},
            "grid[0].training: synchronise_every 3: checkpoint_every (2) must be a multiple of synchronise_every (3)",
        ),
        (
            {"max_response_tokens": [48, 1000]},
            "grid[0].training: max_response_tokens 1000: tokens_per_micro_batch (768) must be at least",
        ),
        (
            {"max_response_tokens": [48, 2048], "tokens_per_micro_batch": 4096},
            "grid[0].training.max_response_tokens: a prompt of 1 and a response of 2048 tokens are longer than the",
        ),
        # The same point twice.
        ({"group_size": [8, 8]}, "grid: run method~rloo/engine~fp32/rho~none/group_size~8/seed~0 is listed twice"),
        (
            {"group_size": [8, 4]},
            "grid: method~rloo/engine~fp32/rho~none and method~rloo/engine~fp32/rho~none/group_size~4 have the same "
            "settings; remove one of them",
        ),
        (
            {"group_size": [8, 2]},
            "report.reference_training: expected the settings that are meant, of method~rloo/engine~fp32/rho~none/"
            "group_size~8 or method~rloo/engine~fp32/rho~none/group_size~2 or method~rloo/engine~fp32/rho~none",
        ),
    ],
)
def test_what_is_impossible_is_refused_in_one_line_that_names_entry_and_key(training, line):
    assert refused(RLOO | {"training": training}, RLOO).startswith(line)


def test_a_reference_is_named_by_its_settings():
    grid = ({"method": ["rloo", "otb"], "engine": "fp32", "training": {"group_size": [2, 8]}},)
    made = experiment(*grid, report__reference_training={"group_size": 8})
    assert made.report.reference_training == {"group_size": 8}
    line = refused(*grid, report__reference_training={"group_size": 4})
    assert line == "report.reference_training: the grid has no 'rloo' with group_size 4"
    assert refused(*grid, report__reference_training={"group": 4}) == (
        "report.reference_training.group: unknown key; did you mean group_size?"
    )


def test_a_reference_is_named_by_its_engine():
    grid = ({"method": "rloo", "engine": ["fp32", "coarse"]}, {"method": "otb", "engine": "coarse"})
    assert experiment(*grid, report__reference_engine="fp32").report.reference_engine == "fp32"
    line = refused(*grid, report__reference_engine="bf16")
    assert line == "report.reference_engine: the grid has no 'rloo' with engine 'bf16'"
    assert refused({"method": ["rloo", "otb"], "engine": ["bf16", "coarse"]}) == (
        "report.reference_engine: expected the engine that is meant, of method~rloo/engine~bf16/rho~none or "
        "method~rloo/engine~coarse/rho~none"
    )


def test_one_rho_in_two_spellings_is_one_point():
    dvp = {"method": "dvp", "engine": "fp32"}
    assert refused(RLOO, dvp | {"rho": "exp(-13)"}, dvp | {"rho": "exp(-13.0)"}) == (
        "grid: method~dvp/engine~fp32/rho~exp-13.0 and method~dvp/engine~fp32/rho~exp-13 have the same settings; "
        "remove one of them"
    )


def test_no_key_tells_the_reference_of_one_rho_from_that_of_another():
    grid = ({"method": "rloo", "engine": "fp32"}, {"method": "dvp", "engine": "coarse", "rho": [0.1, 0.01]})
    assert refused(*grid, report__reference="dvp") == (
        "report.reference: expected a method with one ρ on its engine, found method~dvp/engine~coarse/rho~0.1 or "
        "method~dvp/engine~coarse/rho~0.01"
    )


def test_a_policy_that_is_measured_is_named_by_its_settings_and_sampled_as_it_was_trained():
    grid = (RLOO | {"training": {"temperature": [1.0, 0.7]}},)
    measured = {"engines": "coarse", "problems": 2, "responses": 2, "rhos": [0.1], "margins": [0.1]}

    def line(training: dict) -> str:
        policies = [RLOO | {"training": training}]
        return refused(
            *grid, mismatch=measured | {"policies": policies}, report__reference_training={"temperature": 1.0}
        )

    assert line({}) == ("mismatch.policies: method~rloo/engine~fp32/rho~none is not in the grid, which must train it")
    assert line({"temperature": 0.7}) == (
        "mismatch.policies: method~rloo/engine~fp32/rho~none/temperature~0.7 is trained at temperature 0.7, but would "
        "be measured at 1 (training.temperature)"
    )


def test_a_safe_vocabulary_that_follows_the_length_is_checked_at_each_length():
    length = {"max_response_tokens": [48, 64]}
    made = experiment({"method": "otb_mass", "engine": "coarse", "training": length}, RLOO)
    sides = [
        made.methods[point.method].sides(None, made.training_of(point).max_response_tokens) for point in made.points[:2]
    ]
    assert sides[0] != sides[1]
    assert isinstance(made.training_of(made.points[1]), TrainingConfig)
