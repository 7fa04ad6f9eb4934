"""The grid: ρ, settings as axes, evaluated steps, samplers; what each is called, and what it means."""

import math
import re
from pathlib import Path

import pytest
from changed import CONFIG, EXPERIMENTS, RLOO, experiment, refused
from hypothesis import given
from hypothesis import strategies as st

from dvp.errors import DvpError
from dvp.experiment.grid import NO_AXES, GridPoint, Rho, Settings, rho_in_path, setting_as_written, settings_as_read
from dvp.experiment.loading import load_experiment, parse_experiment
from dvp.progress import readable, rho_as_read
from dvp.tracking.names import policy_params, policy_title

OTB = {"method": "otb", "engine": "fp32"}
PATH = "method~rloo/engine~fp32/rho~none/seed~0"

# --- ρ ---


@given(st.floats(min_value=0, max_value=1, exclude_min=True, exclude_max=True))
def test_rho_is_read_back_from_every_way_to_write_it(rho):
    assert {Rho(rho).value, Rho(repr(rho)).value, Rho(f"{rho:.17e}").value, Rho(Rho(rho)).value} == {rho}


@given(st.decimals(min_value="0.001", max_value=700, places=3))
def test_rho_of_an_exponent(exponent):
    assert Rho(f"exp(-{exponent})").value == pytest.approx(math.exp(-float(exponent)), rel=1e-12)


@given(st.one_of(st.text(), st.floats(), st.integers(), st.booleans(), st.none()))
def test_rho_is_a_number_within_0_and_1_or_refused(written):
    try:
        rho = Rho(written)
    except ValueError:
        return
    assert 0 < rho.value < 1
    assert re.fullmatch(r"[0-9a-zE.+-]+", rho_in_path(rho))  # a shell takes it without quotes


def test_rho_is_kept_as_exp_or_as_a_plain_number():
    written = ["exp(-13)", "exp(-0.5)", "1e-2", "0.010", 0.01, 0.123456789]
    assert [Rho(rho) for rho in written] == ["exp(-13)", "exp(-0.5)", "0.01", "0.01", "0.01", "0.123456789"]
    assert [rho_in_path(rho) for rho in written[:3]] == ["exp-13", "exp-0.5", "0.01"]
    assert [rho_as_read(rho) for rho in written[:3]] == ["e⁻¹³", "e⁻⁰·⁵", "1e-2"]
    assert GridPoint(method="dvp", engine="coarse", rho="1e-2").path == "method~dvp/engine~coarse/rho~0.01"


# --- runs ---


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_a_runs_path_says_what_it_is_and_finds_it(name):
    made = load_experiment(name, CONFIG)
    made = load_experiment(made.of_bases[0], CONFIG) if made.bases else made
    for run in made.runs:
        match = re.fullmatch(r"method~([^/]+)/engine~([^/]+)/rho~([^/]+)((?:/[a-z_]+~[^/]+)*)/seed~([0-9]+)", run.path)
        method, engine, rho, _, seed = match.groups()
        assert (method, engine, int(seed)) == (run.method, run.engine, run.seed)
        assert rho == rho_in_path(run.rho)
        assert made.job("train", run.path).run == run
        assert (run.rho_value is not None) == made.methods[run.method].takes_rho
    assert len({run.path for run in made.runs}) == len(made.runs)


# --- training settings as axes ---


def test_every_combination_is_a_point_in_a_fixed_order():
    made = experiment(
        RLOO,
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
    assert [run.path for run in made.runs[2:4]] == [f"{made.points[1].path}/seed~{seed}" for seed in (0, 3)]
    first, short, *_ = made.points
    assert made.training_of(first) == made.training
    assert made.training_of(short.run(3)) == made.training.changed(group_size=2, steps=2)
    assert parse_experiment(made.model_dump(mode="json"), Path("again.yaml")) == made


def test_every_number_text_and_switch_of_training_may_be_an_axis():
    training = load_experiment("smoke", CONFIG).training
    plain = {name: getattr(training, name) for name in type(training).model_fields if name not in NO_AXES}
    assert set(plain) == set(Settings.__origin__.__annotations__)
    assert all(value is None or isinstance(value, bool | int | float | str) for value in plain.values())
    made = experiment(RLOO | {"training": plain | {"steps": 2}})
    assert made.training_of(made.points[0]) == made.training.changed(steps=2)


def test_a_setting_is_the_same_text_however_it_is_written():
    values = (4, 1e-6, 2.5e20, 0.5, True, False, None, "float32")
    texts = ["4", "1e-06", "2.5e+20", "0.5", "true", "false", "none", "float32"]
    assert [setting_as_written(value) for value in values] == texts
    made = experiment(RLOO | {"training": {"temperature": 1}})
    assert made.points[0].path.endswith("/temperature~1.0")
    assert hash(made.points[0]) == hash(GridPoint(**RLOO, training={"temperature": 1.0}))


def test_a_label_says_what_differs_and_nothing_else():
    made = experiment(RLOO, OTB | {"training": {"group_size": [2, 8], "learning_rate": 1.5e-4, "prompts_per_step": 8}})
    assert made.axes == ["group_size", "prompts_per_step"]  # the learning rate is the section's
    first, _, large = made.runs
    assert settings_as_read(made.settings_of(first)) == ["G 4", "prompts per step 4"]
    assert policy_title(made, large).endswith(" · fp32 · G 8 · prompts per step 8 · seed 0")
    params = policy_params(made, large)
    assert (params["group_size"], params["prompts_per_step"]) == ("8", "8")
    assert "learning_rate" not in params
    assert experiment(RLOO, OTB).axes == []


def test_a_preflight_is_of_an_engine_and_the_grids_settings():
    grid = (RLOO, OTB, {"method": ["otb", "opo"], "engine": "coarse", "training": {"group_size": [2, 8]}})
    made = experiment(*grid, preflight="always")
    assert made.preflights == ["fp32", "coarse/group_size~2", "coarse/group_size~8"]
    small, large = (made.waiting_for(path) for path in made.preflights[1:])
    assert (small.training.group_size, large.training.group_size) == (2, 8)
    assert [(point.method, point.engine, point.training) for point in small.points] == [
        ("otb", "coarse", {}),
        ("opo", "coarse", {}),
    ]
    with pytest.raises(
        DvpError, match=r"preflight: 'coarse' is not in experiment 'smoke'; the nearest is 'coarse/group"
    ):
        made.job("preflight", "coarse")


# --- the reference ---


def test_a_reference_is_named_by_its_engine_and_its_settings():
    def reference(*grid, **report):
        return experiment(*grid, **{f"report__{key}": value for key, value in report.items()}).reference_point.path

    both = {"method": ["rloo", "otb"], "engine": ["fp32", "coarse"]}
    assert reference(both) == "method~rloo/engine~coarse/rho~none"  # fp32 is the control
    assert reference(both, reference_engine="fp32") == "method~rloo/engine~fp32/rho~none"
    sizes = RLOO | {"training": {"group_size": [2, 8]}}
    assert reference(sizes, reference_training={"group_size": 8}).endswith("/group_size~8")
    line = refused(RLOO, report__reference_engine="coarse")
    assert line.endswith("chosen by reference_engine and reference_training (such as {group_size: 8}), found none")
    rhos = {"method": "dvp", "engine": "coarse", "rho": [0.1, 0.01]}
    line = refused(RLOO, rhos, report__reference="dvp")
    assert line.endswith("found method~dvp/engine~coarse/rho~0.1 or method~dvp/engine~coarse/rho~0.01")


# --- steps that are evaluated ---

LONG = RLOO | {"training": {"steps": [12, 48]}}


def evaluated(at):
    return experiment(LONG, training__steps=48, report__reference_training={"steps": 12}, evaluation__at=at)


@pytest.mark.parametrize(
    ("at", "steps"),
    [
        ([10, 2], {12: [2, 10], 48: [2, 10]}),
        ([12], {12: [], 48: [12]}),
        ({"every": 5}, {12: [5, 10], 48: [5, 10, 15, 20, 25, 30, 35, 40, 45]}),
        ({"every": 12}, {12: [], 48: [12, 24, 36]}),
        ({"times": 5}, {12: [2, 5, 7, 10], 48: [10, 19, 29, 38]}),
        ({"times": 12}, {12: [*range(1, 12)], 48: [*range(4, 48, 4)]}),
    ],
)
def test_each_run_has_the_evaluated_steps_of_its_own_length(at, steps):
    made = evaluated(at)
    assert {made.training_of(point).steps: made.evaluated_steps(point) for point in made.points} == steps
    assert parse_experiment(made.model_dump(mode="json"), Path("again.yaml")) == made
    assert [run.step for run in made.snapshots] == [step for own in steps.values() for step in own]


@pytest.mark.parametrize(
    ("at", "message"),
    [
        ([2, 1, 2], "evaluation.at: 2 is listed twice"),
        (3, "evaluation.at: Input should be a valid dictionary or instance of Spread, found 3"),
        ({"every": 2, "times": 3}, "evaluation.at: expected {every: n} or {times: n}"),
        ([2, 13], "evaluation.at: step 13 is beyond the last, 12, of method~rloo/engine~fp32/rho~none/steps~12"),
        ({"times": 13}, "evaluation.at: 13 times are more than the steps, 12, of method~rloo/engine~fp32/rho~none/"),
        ({"every": 20}, "evaluation.at: step 20 is beyond the last, 12, of method~rloo/engine~fp32/rho~none/steps~12"),
    ],
)
def test_steps_that_cannot_be_evaluated_are_refused(at, message):
    with pytest.raises(DvpError, match=re.escape(message)):
        evaluated(at)


def test_a_step_of_a_run_has_a_path_of_its_own():
    made = experiment(RLOO, evaluation__at=[2])
    [run], [snapshot] = made.runs, made.snapshots
    assert snapshot.path == f"{PATH}/step~2"
    assert snapshot.after(None) == run == made.job("convert", PATH).run
    assert made.job("convert", f"{PATH}/step~2").run == snapshot
    assert readable(snapshot.path) == "rloo · fp32 · seed 0 · step 2"
    assert policy_title(made, snapshot) == policy_title(made, run) + " · step 2"
    assert policy_params(made, snapshot) == policy_params(made, run) | {"step": 2}
    with pytest.raises(DvpError, match=r"step~1' is not in experiment 'smoke'; the nearest is '.*/step~2'"):
        made.job("convert", f"{PATH}/step~1")


# --- with what else models are sampled ---

MATRIX = (
    {"method": "rloo", "engine": ["fp32", "coarse"]},
    {"method": "dvp", "engine": "coarse", "rho": ["0.01", "exp(-13)"]},
)
ALSO = [{"engine": "training"}, {"engine": "training", "rho": "own"}, {"rho": "own"}]


def test_each_model_is_scored_once_with_what_it_has():
    def paths(made, point):
        return [sampler.path for sampler in made.samplers(point)]

    made = experiment(*MATRIX, evaluation__also=ALSO)
    control, naive, dvp, _ = made.points
    coarse, fp32 = "by~coarse/min_p~", "by~fp32/min_p~"
    assert paths(made, control) == []  # trained on the evaluation's engine, where the grid has no ρ
    assert paths(made, dvp) == [f"{coarse}none", f"{coarse}0.01", f"{fp32}0.01"]
    every = [f"{coarse}none", f"{coarse}0.01", f"{coarse}exp-13", f"{fp32}0.01", f"{fp32}exp-13"]
    assert paths(made, naive) == every
    # With fp32 the grid trains at no ρ; that the base model is sampled there at every ρ is the last entry's doing.
    assert paths(made, None) == every
    assert paths(experiment(*MATRIX, evaluation__also=ALSO[:2]), None) == every[:3]
    assert paths(experiment(*MATRIX, evaluation__also=[{"engine": "bf16"}]), None) == ["by~bf16/min_p~none"]
    assert parse_experiment(made.model_dump(mode="json"), Path("again.yaml")) == made
    matrix = load_experiment("remedies", CONFIG)
    # Five seeds of 14 methods on coarse (the training engine, both engines at ρ) and of one on bf16_fp8kv; the base
    # by each of the four.
    assert len(matrix.further_evaluations) == 5 * (14 * 3 + 1) + 4


def test_an_evaluation_is_known_by_its_path():
    made = experiment(*MATRIX, evaluation__also=ALSO, evaluation__at=[1])
    run = made.points[3].run(0)
    known = {
        (run, sampler): f"{run.path if run else 'base'}/{sampler.path}" for run, sampler in made.further_evaluations
    }
    known |= {(None, made.sampler): "base", (run.after(1), made.sampler): f"{run.path}/step~1"}
    for (of, sampler), path in known.items():
        job = made.job("evaluate", f"{path}/held_out")
        assert (job.run, job.sampler) == (of, sampler)
    for other in ("base/by~bf16/min_p~none", f"{run.path}/by~coarse/min_p~0.01", f"{run.path}/step~1/by~coarse/x"):
        with pytest.raises(DvpError, match="is not in experiment 'smoke'; the nearest is "):
            made.job("evaluate", f"{other}/held_out")


@pytest.mark.parametrize(
    ("grid", "also", "message"),
    [
        (MATRIX, [{}], "evaluation.also[0]: expected another engine than fp32, or a ρ that the grid has; this is what"),
        (MATRIX, [ALSO[0], ALSO[0]], "evaluation.also: engine='training' rho=None is listed twice"),
        (
            (*MATRIX, {"method": "dvp_margin", "engine": "coarse", "rho": "0.01"}),
            ALSO,
            "evaluation.also[1].rho: expected methods with min-p at a fixed ρ, or none; found 'dvp_margin' with the ",
        ),
    ],
)
def test_an_entry_that_evaluates_nothing_is_refused(grid, also, message):
    assert refused(*grid, evaluation__also=also).startswith(message)
