"""Plans: every job counted once, recorded times before estimates, schedules by hand, and the bound on their time."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import optimize, stats

from dvp.errors import DvpError
from dvp.experiment.base import CONFIG_NAMES
from dvp.experiment.config import Experiment
from dvp.experiment.jobs import Job
from dvp.experiment.loading import load_experiment, parse_experiment
from dvp.experiment.training import KEEP_CHECKPOINTS
from dvp.files import write_json
from dvp.planning.costs import DEVICES
from dvp.planning.estimate import Estimate
from dvp.planning.plan import Costed, make_plan, wall_seconds
from dvp.planning.text import render
from hashes import hash_of

ROOT = Path(__file__).parents[2]
PAPER = ("paper_8b", "paper_8b_ablations", "paper_14b", "paper_14b_tools", "paper_otb", "paper_otb_tools")
GPU = tuple(sorted(file.stem for file in (ROOT / "config/experiments").rglob("qwen3_*.yaml")))
NOWHERE = Path("no-results-here")


def experiment(name: str = "tiny", **changes) -> Experiment:
    """An experiment with changes by dotted key (`training__steps=12`)."""
    loaded = load_experiment(name, ROOT / "config")
    value = loaded.model_dump(mode="json")
    for key, change in changes.items():
        *parents, last = key.split("__")
        part = value
        for parent in parents:
            part = part[parent]
        part[last] = change
    return parse_experiment(value, Path("test.yaml"))


def first_run(loaded: Experiment) -> Job:
    return loaded.job("train", loaded.runs[0].path)


def stage(plan: dict, name: str) -> dict:
    return next(row for row in plan["stages"] if row["stage"] == name)


# --- the schedule ---


def schedule(*jobs: tuple[float, set[int], int]) -> list[Costed]:
    """Of each job the seconds, the places of those that it waits for, and the GPUs."""
    return [
        Costed(Job("train", str(place), tuple(("train", str(other)) for other in after)), gpus, seconds, "estimated")
        for place, (seconds, after, gpus) in enumerate(jobs)
    ]


@pytest.mark.parametrize(
    ("jobs", "gpus", "seconds"),
    [
        ([(2, {}, 1), (3, {0}, 1), (4, {1}, 1)], 8, 9),  # a chain
        ([(2, {}, 1), (3, {}, 1), (4, {}, 1)], 3, 4),  # side by side
        ([(2, {}, 1), (3, {}, 1), (4, {}, 1)], 2, 6),  # the third follows the first
        ([(5, {}, 2), (1, {}, 2), (1, {}, 1)], 3, 6),  # the third fits beside the first, the second after it
        ([(4, {}, 0), (4, {}, 0), (4, {}, 1)], 1, 4),  # without a GPU, no waiting
    ],
)
def test_wall_time_by_hand(jobs, gpus, seconds):
    assert wall_seconds(schedule(*jobs), gpus) == seconds


@given(st.data())
def test_wall_time_lies_between_its_bounds(data):
    jobs = []
    for index in range(data.draw(st.integers(1, 12))):
        after = data.draw(st.sets(st.integers(0, index - 1), max_size=3)) if index else set()
        jobs.append((data.draw(st.integers(1, 9)), after, data.draw(st.integers(0, 4))))
    gpus = data.draw(st.integers(4, 9))
    wall, longest = (wall_seconds(schedule(*jobs), number) for number in (gpus, float("inf")))
    ends = []
    for seconds, after, _ in jobs:
        ends.append(seconds + max((ends[index] for index in after), default=0))
    assert longest == max(ends)
    work = sum(seconds * taken for seconds, _, taken in jobs)
    assert max(longest, work / gpus) <= wall <= sum(seconds for seconds, _, _ in jobs)


# --- what is counted ---


@pytest.mark.parametrize(
    ("name", "jobs"),
    [
        ("tiny", (1, 1, 10, 10, 11, 1)),
        ("paper_8b", (1, 1, 1, 15, 15, 16, 1)),
        ("paper_8b_ablations", (1, 1, 2, 6, 6, 7, 1)),
        ("paper_14b", (1, 1, 1, 15, 15, 16, 1)),
        ("paper_14b_tools", (1, 1, 1, 15, 15, 16, 1)),
        # Each run is scored six times.
        ("paper_otb", (1, 1, 2, 18, 6 * 18, 1 + 6 * 18, 1)),
        ("paper_otb_tools", (1, 1, 3, 24, 6 * 24, 1 + 6 * 24, 1)),
    ],
)
def test_jobs_by_stage(name, jobs):
    """By hand, from the grids in the files."""
    plan = make_plan(experiment(name), NOWHERE)
    assert tuple(row["jobs"] for row in plan["stages"]) == jobs
    assert plan["total"]["jobs"] == sum(jobs)


@pytest.mark.parametrize("name", ["tiny", *PAPER, *GPU])
def test_stages_and_methods_add_up_to_the_same_total(name):
    plan = make_plan(experiment(name), NOWHERE, price=2.5)
    for rows in (plan["stages"], [*plan["methods"], plan["shared"]]):
        for key in ("jobs", "gpu_hours", "disk", "money"):
            assert sum(row[key] for row in rows) == pytest.approx(plan["total"][key])
    assert plan["total"]["money"] == pytest.approx(2.5 * plan["total"]["gpu_hours"])
    assert sum(row["runs"] for row in plan["methods"]) == len(experiment(name).runs)
    assert make_plan(experiment(name), NOWHERE)["total"]["money"] is None


def test_gpu_hours_of_the_8b_experiment_by_hand():
    """The formulas of dvp.planning.costs, written out once with the numbers of this experiment on an H200."""
    parameters = 36 * (2 * 4096 * (4096 + 1024) + 2 * 128 + 3 * 4096 * 12288 + 2 * 4096) + 4096 + 2 * 151936 * 4096
    multiplying = parameters - 151936 * 4096
    # Responses uniform on [0, 8192] after prompts of 150 tokens.
    mean, squared = 4096, 8192**2 / 3
    sequence_squared = 150**2 + 2 * 150 * mean + squared
    forward = 2 * multiplying * (150 + mean) + 2 * 36 * 4096 * sequence_squared
    update = 128 * (1 + 0.6 * 4) * forward / (0.4 * 989e12)  # 128 responses on each of 4 GPUs, 60 % of them trained on
    prefill = 16 * (2 * multiplying * 150 + 2 * 36 * 4096 * 150**2) / (0.4 * 989e12)
    # Reading takes longest: the weights once a step, keys and values of all tokens before once a token.
    attended = 150 * mean + squared / 2
    rollout = prefill + (8192 * 2 * multiplying + 128 * attended * 144 * 1024) / (0.6 * 4.8e12)
    step = rollout + update + parameters * 4 / 450e9
    # Five checkpoints of 12 bytes a parameter, and one restart, with one written, one read, and a start.
    saved = 12 * parameters / 5e8
    assert 24 < 500 * step / 3600 < 48
    hours = 4 * (180 + 500 * step + 5 * saved + 180 + 2 * saved) / 3600
    assert 105 < hours < 120
    hours *= 1.3  # the middle of the range, 1 to 1.6
    plan = make_plan(experiment("paper_8b"), NOWHERE, gpu="h200")
    rloo = next(row for row in plan["methods"] if (row["method"], row["engine"]) == ("rloo", "bf16"))
    evaluated = rloo["gpu_hours"] - 3 * hours
    assert 0 < evaluated < 0.03 * rloo["gpu_hours"]
    training = stage(plan, "train")
    assert training["hours_each"][0] * 4 == pytest.approx(hours)
    # Weights in fp32 and two moments in a checkpoint; a model in fp32; what was downloaded in bf16.
    assert training["disk"] == 15 * KEEP_CHECKPOINTS * 12 * parameters
    assert stage(plan, "convert")["disk"] == 15 * 4 * parameters
    assert stage(plan, "base")["disk"] == 2 * parameters


def test_the_range_is_that_of_estimates_alone(loaded, tmp_path):
    """From the formula to 1.6 times as long, its middle in all tables; what was recorded has no range."""
    plan = make_plan(experiment("paper_8b"), NOWHERE, price=2)
    low, high = plan["total"]["gpu_hours_range"]
    assert (low + high) / 2 == pytest.approx(plan["total"]["gpu_hours"])
    assert high / low == pytest.approx(1.6)
    assert plan["hours_wall_range"] == pytest.approx([plan["hours_wall"] * of / 1.3 for of in (1, 1.6)])
    assert plan["total"]["gpu_hours"] <= 2500
    head = " ".join(render(plan).partition("\n\n")[0].split())
    assert f"{plan['total']['gpu_hours']:,.0f} GPU-hours ({low:,.0f} to {high:,.0f})" in head
    assert f"{2 * plan['total']['gpu_hours']:,.0f} ({2 * low:,.0f} to {2 * high:,.0f}) at 2 each" in head
    assert "NeMo-RL 0.4, Llama-3.1-8B on 16 H100: 97.7 s a step, 61.6 s by the formula" in " ".join(
        render(plan).split()
    )
    assert "responses of 4,096 tokens (half of the longest is assumed)" in head
    assert "responses of 2,048 tokens (as given)" in render(
        make_plan(experiment("paper_8b"), NOWHERE, response_tokens=2048)
    )
    # On a CPU no calibration is published; a recorded run is as long as it was.
    Recorded(loaded, tmp_path).trained(of(loaded, "rloo", "coarse"), 30.0)
    for folder in (NOWHERE, tmp_path):
        plan = make_plan(loaded, folder)
        assert plan["total"]["gpu_hours_range"] == pytest.approx([plan["total"]["gpu_hours"]] * 2)
        assert "NeMo" not in render(plan)
    run = Costed(Job("train"), 8, 3600.0, "recorded")
    assert run.scaled(0) == run.scaled(1) == run


@pytest.mark.parametrize(
    ("name", "gpu", "runs"),
    [
        ("qwen3_0.6b", "rtx4090", 15),
        ("qwen3_0.6b_wide", "rtx4090", 25),
        ("qwen3_0.6b_long", "l40s", 15),
        ("qwen3_1.7b", "h100", 15),
    ],
)
def test_one_gpu_trains_a_grid_within_thirty_hours(name, gpu, runs):
    """On the card that its page names; the wide form too."""
    plan = make_plan(experiment(name), NOWHERE, gpu=gpu)
    assert stage(plan, "train")["jobs"] == runs
    assert plan["gpus"] == 1
    assert plan["hours_wall"] <= 30
    assert "may not fit" not in render(plan)
    assert max(map(len, render(plan).splitlines())) <= 120


def test_the_power_in_the_one_gpu_files_is_that_of_a_paired_t_test():
    """Of two sides at 5 %, by the non-central t distribution: the difference that 80 % of experiments see."""
    page = (ROOT / "docs/one_gpu.md").read_text(encoding="utf-8")

    def smallest(seeds: int, deviation: float) -> str:
        critical, scale = stats.t.ppf(0.975, seeds - 1), math.sqrt(seeds) / deviation
        missed = optimize.brentq(lambda effect: stats.nct.sf(critical, seeds - 1, effect * scale) - 0.8, 0.1, 20)
        return f"{missed:.1f}"

    for seeds in (3, 5):
        seen = [smallest(seeds, deviation) for deviation in (1.4, 1.8)]
        assert f"| {seeds} | {seen[0]} pp | {seen[1]} pp |" in page
        declared = " ".join(" ".join(experiment(name).report.declarations) for name in GPU)
        assert all(f"{pp} pp" in declared for pp in seen)


def test_measurements_are_jobs_with_records_of_their_own(tmp_path):
    loaded = load_experiment("smoke_evidence", ROOT / "config")
    plan = make_plan(loaded, tmp_path)
    assert [stage(plan, name)["jobs"] for name in ("mismatch", "bias", "report")] == [1, 1, 1]
    assert all(stage(plan, name)["gpu_hours"] > 0 for name in ("mismatch", "bias"))
    [measurement] = loaded.measurements("bias")
    record = {"config_hash": loaded.config_hash("bias", measurement.path), "seconds_stage": 36.0}
    write_json(tmp_path / "bias" / measurement.path / "bias.json", record)
    assert stage(make_plan(loaded, tmp_path), "bias")["gpu_hours"] == pytest.approx(0.01)
    assert [row["stage"] for row in make_plan(experiment("smoke"), NOWHERE)["stages"]] == [
        *("prepare", "base", "train", "convert", "evaluate", "report")
    ]


def test_shorter_responses_and_more_gpus_take_less_time():
    loaded = experiment("paper_8b")
    hours = [make_plan(loaded, NOWHERE, response_tokens=mean)["total"]["gpu_hours"] for mean in (1000, 4096, 8000)]
    assert hours == sorted(hours)
    walls = [make_plan(loaded, NOWHERE, gpus=gpus)["hours_wall"] for gpus in (8, 64, 240, 10_000)]
    assert walls == sorted(walls, reverse=True)
    assert walls[-1] == pytest.approx(make_plan(loaded, NOWHERE)["hours_longest_chain"])


def test_a_plan_that_cannot_be_made_is_refused():
    with pytest.raises(DvpError, match=r"^--gpus 15: a job of stage 'preflight' takes 16 at once$"):
        make_plan(experiment("paper_14b", training__nodes=2), NOWHERE, gpus=15)
    with pytest.raises(DvpError, match=r"base\.architecture: a plan needs sizes of Qwen/Qwen3-8B-Base"):
        make_plan(experiment("paper_8b", base__architecture=None), NOWHERE)


def test_a_local_model_says_its_sizes_itself(tmp_path):
    sizes = load_experiment("paper_8b", ROOT / "config").base.architecture
    stated = {CONFIG_NAMES.get(key, key): value for key, value in sizes.model_dump().items()}
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "qwen3"} | stated), encoding="utf-8")
    local = {"kind": "local", "path": str(tmp_path)}
    told = make_plan(experiment("paper_8b", base=local | {"architecture": sizes.model_dump()}), NOWHERE)
    assert make_plan(experiment("paper_8b", base=local), NOWHERE) == told
    file.write_text(json.dumps({"model_type": "gpt2"}), encoding="utf-8")
    with pytest.raises(DvpError, match=r"base\.architecture: a plan needs intermediate_size of /"):
        make_plan(experiment("paper_8b", base=local), NOWHERE)


def test_problems_are_counted_where_the_source_does_not_say(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"q": f"{n}?", "a": "1"}) + "\n" for n in (1, 2, 3, 3)), encoding="utf-8")
    own = {"kind": "file", "path": str(file), "columns": {"problem": "q", "answer": "a"}}
    changed = experiment(
        "paper_8b",
        sources__aime24=own,
        data__evaluation=["aime24"],
        evaluation__samples_per_problem={"aime24": 32},
        report__task="aime24",
    )
    mean = 4096 * 4
    assert stage(make_plan(changed, NOWHERE), "evaluate")["disk"] == 16 * 3 * 32 * mean
    hub = load_experiment("paper_8b", ROOT / "config").sources["aime25"].model_dump(mode="json") | {"problems": None}
    with pytest.raises(DvpError, match=r"^sources\.aime25\.problems: a plan needs their number until dvp prepare has"):
        make_plan(experiment("paper_8b", sources__aime25=hub), NOWHERE)


# --- recorded times ---


class Recorded:
    """Writes what finished stages of an experiment leave, with made-up times."""

    def __init__(self, of: Experiment, folder: Path):
        self.of, self.folder = of, folder
        self.write("data/manifest.json", "prepare", counts={"train": 9, "evaluation": {"held_out": 200}})
        self.write("base/manifest.json", "base")

    def write(self, file: str, stage: str, run=None, task=None, seconds: float = 7.0, **more) -> None:
        config_hash = hash_of(self.of, stage, run, task)
        write_json(self.folder / file, {"config_hash": config_hash, "seconds_stage": seconds, **more})

    def trained(self, run, seconds: float, **more) -> None:
        self.write(f"runs/{run.path}/train.json", "train", run, seconds=seconds, **more)


def of(loaded: Experiment, method: str, engine: str, rho: str | None = None, seed: int = 0):
    return next(
        run for run in loaded.runs if (run.method, run.engine, run.rho, run.seed) == (method, engine, rho, seed)
    )


@pytest.fixture
def loaded() -> Experiment:
    return experiment("tiny")


def sources(plan: dict, name: str) -> list[int]:
    return list(stage(plan, name)["from"].values())


def test_a_runs_own_time_counts_and_then_those_of_its_method_and_engine(loaded, tmp_path):
    """Of training that was continued its steps' seconds: the job is the end alone."""
    record = Recorded(loaded, tmp_path)
    record.trained(of(loaded, "rloo", "coarse"), 30.0)
    record.trained(of(loaded, "rloo_mis", "coarse"), 5.0, seconds_training=50.0)
    plan = make_plan(loaded, tmp_path)
    # The others of the method, and of the engine, follow; the exact engine's runs are estimated.
    assert sources(plan, "train") == [2, 6, 2]
    assert sources(plan, "prepare") == sources(plan, "base") == [1, 0, 0]
    estimate = Estimate(loaded, DEVICES["cpu"])
    exact = estimate.train_seconds(sum(estimate.step("fp32").values()))
    expected = 2 * 30 + 2 * 50 + 4 * 40 + 2 * exact
    assert stage(plan, "train")["gpu_hours"] * 3600 == pytest.approx(expected)


def rehearsed(loaded: Experiment, folder: Path, engine: str, **changes) -> None:
    """Write what a preflight leaves of what a plan reads, with made-up figures."""
    record = {
        "config_hash": loaded.config_hash("preflight", engine),
        "seconds": {"rollout_token": 2e-4, "update_token": 3e-4, "synchronise": 0.5},
        "device": "cpu",
        "gpus": loaded.training.gpus,
        "nodes": loaded.training.nodes,
        "seconds_stage": 60.0,
    }
    write_json(folder / f"preflight/engine~{engine}/preflight.json", record | changes)


def test_before_any_step_a_preflight_tells_what_a_step_takes(loaded, tmp_path):
    """With the same settings and GPUs; a rollout lasts as long as its longest response."""
    rehearsed(loaded, tmp_path, "coarse")
    rehearsed(loaded, tmp_path, "fp32", gpus=2)
    plan = make_plan(loaded, tmp_path)
    assert sources(plan, "train") == [0, 8, 2]
    # 128 responses of up to 64 tokens, 32 on average.
    estimate = Estimate(loaded, DEVICES["cpu"])
    saved = 2 * estimate.checkpoint_bytes / 5e8
    seconds = 20 + 32 * (128 * (64 * 2e-4 + 32 * 3e-4) + 0.5) + saved
    exact = 20 + 32 * sum(estimate.step("fp32").values()) + saved
    assert stage(plan, "train")["gpu_hours"] * 3600 == pytest.approx(8 * seconds + 2 * exact)
    text = " ".join(render(plan).split())
    assert "the same, by its preflight on cpu: rollout 1.64 s, update 1.23 s, weights to the engine 0.5 s - " in text
    other = experiment("tiny", training__learning_rate=1.0)
    assert sources(make_plan(other, tmp_path), "train") == [0, 0, 10]


def test_records_of_other_data_or_another_base_count_for_nothing(loaded, tmp_path):
    record = Recorded(experiment("tiny", data__held_out=199), tmp_path)
    for run in loaded.runs:
        record.trained(run, 15.0)
    assert make_plan(loaded, tmp_path) == make_plan(loaded, NOWHERE)


# --- scores along training ---


def test_evaluated_steps_are_conversions_and_evaluations_of_their_runs():
    curve, plain = experiment("smoke_curve"), experiment("smoke_curve", evaluation__at=None)
    plan = make_plan(curve, NOWHERE)
    assert {row["stage"]: row["jobs"] for row in plan["stages"]} | {"report": 0} == {
        **{"prepare": 1, "base": 1, "train": 2, "convert": 2 * 3, "evaluate": 1 + 2 * 3, "report": 0},
    }
    assert [(row["runs"], row["jobs"]) for row in plan["methods"]] == [(1, 7)] * 2
    assert sum(row["jobs"] for row in [*plan["methods"], plan["shared"]]) == plan["total"]["jobs"]
    # A step's weights take their space once: a run keeps them, and its model is the same file.
    estimate = Estimate(curve, DEVICES["cpu"])
    whole = 4 * estimate.model.parameters
    without = 2 * (Estimate(plain, DEVICES["cpu"]).job(first_run(plain), {})[1] + whole)
    assert stage(plan, "train")["disk"] + stage(plan, "convert")["disk"] == pytest.approx(without + 2 * 2 * whole)


# --- training settings as axes ---


def test_each_point_counts_with_its_own_settings():
    axes = experiment("smoke_axes")
    plan = make_plan(axes, NOWHERE)
    assert [(row["label"], *row["settings"].values()) for row in plan["methods"]] == [
        *(("RLOO (naive)", 2, 4, 3), ("RLOO (naive)", 4, 4, 3), ("OTB", 2, 4, 3), ("OTB", 4, 4, 3), ("OTB", 2, 8, 2)),
    ]
    seconds = []
    for point in axes.points:
        alone = experiment(
            "smoke",
            training=axes.training_of(point).model_dump(),
            grid=[{"method": [point.method], "engine": ["fp32"]}],
            report__reference=point.method,
        )
        seconds.append(Estimate(alone, DEVICES["cpu"]).job(first_run(alone), {})[0])
    assert seconds[0] < seconds[1]
    assert stage(plan, "train")["gpu_hours"] * 3600 == pytest.approx(sum(seconds))
    assert list(plan["step"]) == [
        "fp32, G 2, prompts per step 4, steps 3",
        "fp32, G 4, prompts per step 4, steps 3",
        "fp32, G 2, prompts per step 8, steps 2",
    ]


def test_a_run_of_other_settings_tells_nothing(tmp_path):
    axes = experiment("smoke_axes")
    record = Recorded(axes, tmp_path)
    small, large, *_ = axes.runs
    record.trained(small, 10.0)
    record.trained(large, 60.0)
    plan = make_plan(axes, tmp_path)
    # OTB with groups of 2 and of 4 follows RLOO; with other steps it is estimated.
    assert sources(plan, "train") == [2, 2, 1]
    assert sum(row["from"]["estimated"] for row in plan["methods"] if row["settings"]["steps"] == 2) >= 1


def test_the_text_has_a_column_for_each_setting_that_differs():
    text = render(make_plan(experiment("smoke_axes"), NOWHERE))
    [head] = [line for line in text.splitlines() if line.startswith("method ")]
    assert head.split()[:8] == ["method", "engine", "G", "prompts", "per", "step", "steps", "runs"]
    [row] = [line.split() for line in text.splitlines() if line.startswith("OTB") and " 8 " in line]
    assert row[:6] == ["OTB", "fp32", "2", "8", "2", "1"]
    assert "a training step with engine fp32, G 4, prompts per step 4, steps 3, estimated" in " ".join(text.split())


def test_all_tasks_of_a_model_are_one_job_that_starts_once():
    several = experiment("paper_8b")
    plan = stage(make_plan(several, NOWHERE), "evaluate")
    estimate, problems = (
        Estimate(several, DEVICES["h200"]),
        {task: several.sources[task].problems for task in several.data.tasks},
    )
    alone = [estimate.job(several.job("evaluate", f"base/{task}"), problems)[0] for task in several.data.tasks]
    middle = (1 + DEVICES["h200"].slowest) / 2
    assert plan["jobs"] == 16
    assert plan["from"]["estimated"] == 16
    assert plan["hours_each"][0] * 3600 == pytest.approx(middle * (sum(alone) - 3 * DEVICES["h200"].startup))


def test_conversions_and_evaluations_are_inferred_from_those_that_ran(loaded, tmp_path):
    record = Recorded(loaded, tmp_path)
    first, second = loaded.runs[:2]
    for run, seconds in ((first, 10.0), (second, 20.0)):
        record.write(f"models/{run.path}/conversion.json", "convert", run, seconds=seconds)
    record.write(f"evals/{first.path}/held_out/scores.json", "evaluate", first, "held_out", seconds=30.0)
    record.write("evals/base/held_out/scores.json", "evaluate", None, "held_out", seconds=40.0)
    record.write("report/manifest.json", "report", seconds=50.0)
    plan = make_plan(loaded, tmp_path)
    assert sources(plan, "convert") == [2, 8, 0]
    assert sources(plan, "evaluate") == [2, 9, 0]
    assert sources(plan, "report") == [1, 0, 0]
    assert stage(plan, "convert")["gpu_hours"] * 3600 == pytest.approx(10 * 15)
    assert stage(plan, "evaluate")["gpu_hours"] * 3600 == pytest.approx(11 * 35)
    assert stage(plan, "report")["gpu_hours"] * 3600 == pytest.approx(50)


def test_benchmarks_have_the_whole_job(loaded, tmp_path):
    """Snakemake times the process from its start; a copied stage keeps the seconds of the work itself."""
    record = Recorded(loaded, tmp_path)
    first, second = loaded.runs[:2]
    record.write(f"models/{first.path}/conversion.json", "convert", first, seconds=10.0)
    record.write(f"models/{second.path}/conversion.json", "convert", second, seconds=20.0)
    for run, seconds in ((first, 15.0), (second, 2.0)):
        file = tmp_path / f"benchmarks/convert/{run.path}.tsv"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"s\th:m:s\n{seconds}\t0:00:15\n", encoding="utf-8")
    converted = stage(make_plan(loaded, tmp_path), "convert")
    assert converted["gpu_hours"] * 3600 == pytest.approx(10 * (15 + 20) / 2)
    file.write_bytes(b"of a job that was killed\n")
    assert stage(make_plan(loaded, tmp_path), "convert")["gpu_hours"] * 3600 == pytest.approx(10 * (15 + 20) / 2)


# --- as text ---


def test_the_text_shows_every_stage_and_method_and_what_it_rests_on():
    plan = make_plan(experiment("paper_8b"), NOWHERE, gpus=64, price=2.5)
    text = render(plan)
    assert text.startswith("paper_8b on H200 141 GB (SXM): ")
    assert " with 64 GPUs at once; " in " ".join(text.partition("\n\n")[0].split())
    for row in plan["stages"]:
        assert f"\n{row['stage']} " in text
    for row in plan["methods"]:
        assert f"\n{row['label']} " in text
    joined = " ".join(text.split())
    for sentence in plan["assumptions"]:
        assert f"estimated: {sentence}" in joined
    assert max(map(len, text.splitlines())) <= 120
    assert "money" in text
    assert "money" not in render(make_plan(experiment("paper_8b"), NOWHERE))
    assert json.loads(json.dumps(plan, allow_nan=False)) == plan
    small = experiment("paper_8b", training__tokens_per_micro_batch=9216, training__gpus=8)  # as its file says
    assert "may not fit" not in render(make_plan(small, NOWHERE, gpu="h100"))
    assert "may not fit" in render(make_plan(experiment("paper_8b"), NOWHERE, gpu="h100"))


# --- as docs/cluster.md has it ---


CARDS = {"qwen3_0.6b": "rtx4090", "qwen3_0.6b_wide": "rtx4090", "qwen3_0.6b_long": "l40s", "qwen3_1.7b": "h100"}


def plans() -> str:
    """The table of docs/cluster.md."""
    head = ["experiment", "card", "runs", "GPUs each", "hours each", "GPU-hours", "from", "to"]
    rows = [head, ["---", "---", *["---:"] * 6]]
    for name in (*PAPER, *CARDS):
        plan = make_plan(experiment(name), NOWHERE, gpu=CARDS.get(name, "h200"))
        train, total = stage(plan, "train"), plan["total"]
        hours = " to ".join(dict.fromkeys(f"{hours:.3g}" for hours in train["hours_each"]))
        numbers = [f"{number:,.0f}" for number in (total["gpu_hours"], *total["gpu_hours_range"])]
        each = [f"`{name}`", plan["device"].split(" (")[0], str(train["jobs"]), str(train["gpus_each"]), hours]
        rows.append([*each, *numbers])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def test_the_document_has_todays_plans():
    """After a change, `DVP_GOLDEN=make pytest tests/planning/test_plan.py` writes the table anew."""
    page = ROOT / "docs/cluster.md"
    before, mark, rest = page.read_text(encoding="utf-8").partition("<!--plans-->\n")
    written, end, after = rest.partition("\n<!--/plans-->")
    made = plans()
    if os.environ.get("DVP_GOLDEN") == "make":
        page.write_text(before + mark + made + end + after, encoding="utf-8")
        written = made
    assert written == made


def test_the_document_has_what_the_plan_of_the_8b_experiment_says():
    """Every number of its prose."""
    plan = make_plan(experiment("paper_8b"), NOWHERE)
    prose = " ".join((ROOT / "docs/cluster.md").read_text(encoding="utf-8").split())
    short = make_plan(experiment("paper_8b"), NOWHERE, response_tokens=2048)["total"]["gpu_hours"]
    assert f"at 2,048 tokens `paper_8b` takes {short:,.0f} GPU-hours" in prose
    both = [make_plan(experiment(name), NOWHERE)["total"] for name in PAPER[:2]]
    low, high = (sum(total["gpu_hours_range"][end] for total in both) for end in (0, 1))
    assert f"{(low + high) / 2:,.0f} GPU-hours ({low:,.0f} to {high:,.0f}), one run of which is in both" in prose
    times = dict.fromkeys(f"{60 * hours:.0f}" for hours in stage(plan, "preflight")["hours_each"])
    assert f"On 4 H200s the plan says {' to '.join(times)} minutes" in prose


# --- from outside ---

ALONE = """
import socket, sys
def refuse(*arguments, **options):
    raise OSError("a plan needs no network")
socket.socket.connect = socket.getaddrinfo = refuse
from dvp.cli import main
status = main(sys.argv[1:])
heavy = sorted({"torch", "vllm", "deepspeed", "transformers"} & set(sys.modules))
sys.exit(f"imported {heavy}" if heavy else status)
"""


@pytest.mark.slow
def test_a_plan_at_the_papers_scale_needs_neither_gpu_nor_network():
    done = subprocess.run(
        [sys.executable, "-c", ALONE, "plan", "--config", "experiment=paper_8b", "--json"],
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == make_plan(load_experiment("paper_8b", ROOT / "config"), ROOT / "results/paper_8b")
