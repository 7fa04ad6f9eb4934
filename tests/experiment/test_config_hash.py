"""What each stage's config_hash depends on, and what not: another label trains nothing again."""

import re

import pytest
from changed import BIAS, ESTIMATORS, MISMATCH, RLOO, TOOLS, experiment

from dvp.analysis.parts import parts
from dvp.experiment.config import Experiment
from dvp.experiment.config_hash import settings_of_job
from dvp.experiment.grid import Run
from dvp.experiment.loading import load_experiment
from hashes import hash_of

RUN = Run(method="rloo", engine="coarse", rho=None, seed=0)
BEFORE = {"prepare", "base", "evaluate base"}
OF_RUN = {"train", "convert", "evaluate"}
ALL = BEFORE | OF_RUN
GRID = (RLOO | {"engine": ["fp32", "coarse"]}, {"method": "dvp_mis", "engine": "coarse", "rho": "0.01"})


def config_hashes(asked: Experiment) -> dict[str, str]:
    hashes = {stage: hash_of(asked, stage, RUN) for stage in OF_RUN}
    hashes |= {stage: asked.config_hash(stage) for stage in ("prepare", "base")}
    return hashes | {"evaluate base": hash_of(asked, "evaluate")}


def differ(before: Experiment, after: Experiment) -> set[str]:
    one, other = config_hashes(before), config_hashes(after)
    return {stage for stage in one if one[stage] != other[stage]}


@pytest.mark.parametrize(
    ("changes", "changed"),
    [
        # How results are shown concerns no stage before the report; nor do the other runs.
        ({"scale": "x", "methods.rloo.label": "x", "report.declarations": ["x"], "report.reference": "dvp_mis"}, set()),
        ({"seeds": [0, 1], "engines.bf16.dtype": "float16", "methods.dvp_mis.importance.upper": 3.0}, set()),
        ({"sources.stories.seed": 7, "evaluation.also": [{"engine": "training"}]}, set()),
        # Over how many GPUs a run is spread changes it by rounding; its engine has no sets to report.
        ({"training.gpus": 2, "training.report_sets": True}, set()),
        # Its own engine and method.
        ({"engines.coarse.weight_rounding": "int3"}, OF_RUN),
        ({"methods.rloo.importance.level": "token"}, OF_RUN),
        ({"training.learning_rate": 2e-4}, OF_RUN),
        ({"training.deepspeed": "zero1"}, OF_RUN),
        ({"evaluation.at": [1]}, {"train"}),
        # Evaluation.
        ({"evaluation.samples_per_problem.held_out": 3}, {"evaluate", "evaluate base"}),
        ({"evaluation.engine": "bf16"}, {"evaluate", "evaluate base"}),
        ({"engines.fp32.kv_cache_dtype": "fp8"}, {"evaluate", "evaluate base"}),
        # Upstream.
        ({"base.warm_start.steps": 31}, ALL - {"prepare"}),
        ({"base.source": "stories"}, ALL - {"prepare"}),
        ({"sources.stories_small.seed": 1}, ALL),
        ({"data.held_out": 23}, ALL),
        # A base model that is trained here learns how a call is written.
        ({"tools": TOOLS}, ALL - {"prepare"}),
    ],
)
def test_a_stage_depends_on_its_own_parts_and_no_other(changes, changed):
    assert differ(experiment(*GRID), experiment(*GRID, **changes)) == changed


def test_the_base_models_source_counts_where_no_run_trains_on_it():
    other = {"base.source": "stories"}
    assert differ(experiment(*GRID, **other), experiment(*GRID, **other, sources__stories__seed=7)) == ALL - {"prepare"}


def test_a_base_model_depends_on_a_tools_delimiters_only():
    before = experiment(*GRID, tools=TOOLS)
    assert differ(before, experiment(*GRID, tools=TOOLS | {"max_turns": 3})) == {"evaluate base"} | OF_RUN
    assert differ(before, experiment(*GRID, tools=TOOLS | {"call": ["<<", ">>"]})) == ALL - {"prepare"}


def test_what_only_a_plan_uses_concerns_no_stage():
    before = load_experiment("paper_8b")
    changes = {"base.architecture": None, "sources.aime25.problems": 31, "sources.dapo_math_17k.problems": None}
    after = experiment(name="paper_8b", **changes)
    for stage in ("prepare", "base", *OF_RUN):
        assert hash_of(before, stage, before.runs[0], "aime25") == hash_of(after, stage, before.runs[0], "aime25")


def test_any_change_concerns_the_report():
    config_hash = experiment().config_hash("report")
    assert re.fullmatch("[0-9a-f]{12}", config_hash)
    for changes in ({"methods.rloo.label": "x"}, {"scale": "x"}, {"evaluation.seed": 1}, {"evaluation.at": [1]}):
        assert experiment(**changes).config_hash("report") != config_hash


def test_runs_tasks_steps_and_samplers_have_hashes_of_their_own():
    made = load_experiment("tiny")
    for stage in OF_RUN:
        assert len({hash_of(made, stage, run, "held_out") for run in made.runs}) == 10
    samples = {"data.evaluation": ["aime25"], "evaluation.samples_per_problem.aime25": 4}
    made = experiment(*GRID, **samples, evaluation__at=[1, 2], evaluation__also=[{"rho": "own"}])
    assert hash_of(made, "evaluate", RUN, "aime25") != hash_of(made, "evaluate", RUN, "held_out")
    assert len({hash_of(made, "evaluate", RUN.after(step), "aime25") for step in (1, 2, None)}) == 3
    [sampler] = made.samplers(RUN.point)
    sampled = made.config_hash("evaluate", f"{RUN.path}/{sampler.path}/aime25")
    assert sampled != hash_of(made, "evaluate", RUN, "aime25")
    more = experiment(*GRID, **samples | {"evaluation.samples_per_problem.aime25": 8})
    assert config_hashes(more) == config_hashes(experiment(*GRID, **samples))
    assert hash_of(more, "evaluate", RUN, "aime25") != hash_of(made, "evaluate", RUN, "aime25")


def test_a_run_depends_on_its_settings_wherever_they_stand():
    axes = {"method": "otb", "engine": "fp32", "training": {"group_size": [2, 8], "steps": [7]}}
    given = experiment(RLOO, axes)
    section = experiment(RLOO, {"method": "otb", "engine": "fp32"}, training__group_size=8, training__steps=7)
    run, same = given.runs[2], section.runs[1]
    assert run.path != same.path
    for stage in OF_RUN:
        assert hash_of(given, stage, run, "held_out") == hash_of(section, stage, same, "held_out")
        assert hash_of(given, stage, run, "held_out") != hash_of(given, stage, given.runs[1], "held_out")
    # What it does not share with the section concerns it not, and the other runs it does.
    other = experiment(RLOO, axes, training__steps=9)
    assert hash_of(other, "train", run) == hash_of(given, "train", run)
    assert hash_of(other, "train", other.runs[0]) != hash_of(given, "train", given.runs[0])


def test_a_preflight_depends_on_nothing_that_training_does_not():
    """Training waits for it, and is made again where it is."""
    made = experiment(*GRID, preflight="always")
    for run in made.runs:
        of_run = settings_of_job(made, made.job("train", run.path))
        for name, part in settings_of_job(made, made.job("preflight", run.preflight)).items():
            assert of_run[name] == part
    assert made.config_hash("preflight", "fp32") != made.config_hash("preflight", "coarse")


@pytest.mark.parametrize(
    ("name", "preflight", "engines"),
    [
        *(("smoke", "auto", []), ("smoke", "always", ["fp32", "coarse"])),
        *(("paper_8b_ablations", "auto", ["fp32", "bf16"]), ("paper_8b", "never", [])),
    ],
)
def test_each_engine_has_a_preflight_where_it_is_asked_for(name, preflight, engines):
    assert load_experiment(name).model_copy(update={"preflight": preflight}).preflights == engines


def test_a_run_depends_on_reported_sets_where_they_are_asked_for():
    asked = load_experiment("remedies")
    plain = asked.model_copy(update={"training": asked.training.changed(report_sets=False)})
    others = {run.method for run in asked.runs if hash_of(asked, "train", run) != hash_of(plain, "train", run)}
    assert others == {"dvp", "dvp_mis"}  # and not mask replay, nor what has no safe vocabulary


def test_further_evaluations_train_and_score_nothing_again():
    matrix = load_experiment("remedies")
    grid = matrix.model_copy(update={"evaluation": matrix.evaluation.model_copy(update={"also": []})})
    for run in [None, *grid.runs[::7]]:
        for stage in ("prepare", "base", *OF_RUN) if run else ("evaluate",):
            assert hash_of(matrix, stage, run, "held_out") == hash_of(grid, stage, run, "held_out")
    assert matrix.config_hash("report") != grid.config_hash("report")
    assert grid.further_evaluations == []


# --- measurements ---


def test_a_task_is_measured_by_itself():
    stories = {"kind": "generated", "generator": "stories", "count": 50, "seed": 1, "steps": [3, 3]}
    shared = {"sources.long": stories, "data.evaluation": ["long"], "evaluation.samples_per_problem.long": 1}
    one, both = (experiment(**shared, bias=BIAS | {"tasks": tasks}) for tasks in (["held_out"], ["held_out", "long"]))
    paths = ["base/by~coarse/on~held_out/seed~0", "base/by~coarse/on~long/seed~0"]
    assert [each.path for each in both.measurements("bias")] == paths
    (first,), (again, other) = one.measurements("bias"), both.measurements("bias")
    assert one.config_hash("bias", first.path) == both.config_hash("bias", again.path)
    assert both.config_hash("bias", other.path) != both.config_hash("bias", again.path)
    assert [parts(each) for each in (one, both)] == [["training", "bias"], ["training", "bias", "bias_length"]]


BASE, POLICY, ESTIMATED = ("mismatch", "base"), ("mismatch", "method~rloo"), ("bias", "base")


@pytest.mark.parametrize(
    ("changes", "changed"),
    [
        ({"training.learning_rate": 0.5}, {POLICY}),
        ({"mismatch.problems": 3}, {BASE, POLICY}),
        ({"bias.estimators": ESTIMATORS[:1]}, {ESTIMATED}),
        ({"bias.engines": ["coarse", "fp32"], "report.declarations": ["Otherwise."]}, set()),
        ({"training.group_size": 8}, {POLICY, ESTIMATED}),
        ({"training.max_prompt_tokens": 50}, {BASE, POLICY, ESTIMATED}),  # longer prompts are not drawn
    ],
)
def test_a_measurement_depends_on_its_own_parts_and_no_other(changes, changed):
    sections = {"mismatch": MISMATCH | {"policies": ["base", RLOO]}, "bias": BIAS}
    first, second = experiment(**sections), experiment(**sections, **changes)
    found = set()
    for stage in ("mismatch", "bias"):
        for measurement in first.measurements(stage):
            if first.config_hash(stage, measurement.path) != second.config_hash(stage, measurement.path):
                found.add((stage, measurement.path.split("/by~")[0].split("/")[0]))
    assert found == changed
