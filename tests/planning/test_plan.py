"""Plans: every job counted once, the formulas by hand, the longest chain."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from scipy import optimize, stats

from dvp.errors import DvpError
from dvp.experiment.base import CONFIG_NAMES
from dvp.experiment.config import Experiment
from dvp.experiment.jobs import Job
from dvp.experiment.loading import load_experiment, parse_experiment
from dvp.experiment.training import KEEP_CHECKPOINTS
from dvp.planning.costs import DEVICES
from dvp.planning.estimate import Estimate
from dvp.planning.plan import make_plan
from dvp.planning.text import render

ROOT = Path(__file__).parents[2]
PAPER = ("paper_8b", "paper_8b_ablations", "paper_14b", "paper_14b_tools", "paper_otb", "paper_otb_tools")
GPU = tuple(sorted(file.stem for file in (ROOT / "config/experiments").rglob("qwen3_*.yaml")))


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
    plan = make_plan(experiment(name))
    assert tuple(row["jobs"] for row in plan["stages"]) == jobs
    assert plan["total"]["jobs"] == sum(jobs)


@pytest.mark.parametrize("name", ["tiny", *PAPER, *GPU])
def test_stages_add_up_to_the_total(name):
    plan = make_plan(experiment(name), price=2.5)
    for key in ("jobs", "gpu_hours", "disk", "money"):
        assert sum(row[key] for row in plan["stages"]) == pytest.approx(plan["total"][key])
    assert plan["total"]["money"] == pytest.approx(2.5 * plan["total"]["gpu_hours"])
    assert make_plan(experiment(name))["total"]["money"] is None


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
    plan = make_plan(experiment("paper_8b"), gpu="h200")
    assert 0 < stage(plan, "evaluate")["gpu_hours"] < 0.03 * stage(plan, "train")["gpu_hours"]
    training = stage(plan, "train")
    assert training["hours_each"][0] * 4 == pytest.approx(hours)
    # Weights in fp32 and two moments in a checkpoint; a model in fp32; what was downloaded in bf16.
    assert training["disk"] == 15 * KEEP_CHECKPOINTS * 12 * parameters
    assert stage(plan, "convert")["disk"] == 15 * 4 * parameters
    assert stage(plan, "base")["disk"] == 2 * parameters


def test_the_range_is_that_of_the_best_published_system():
    """From the formula to 1.6 times as long, its middle in the table."""
    plan = make_plan(experiment("paper_8b"), price=2)
    low, high = plan["total"]["gpu_hours_range"]
    assert (low + high) / 2 == pytest.approx(plan["total"]["gpu_hours"])
    assert high / low == pytest.approx(1.6)
    assert plan["hours_least_range"] == pytest.approx([plan["hours_least"] * of / 1.3 for of in (1, 1.6)])
    assert plan["total"]["gpu_hours"] <= 2500
    head = " ".join(render(plan).partition("\n\n")[0].split())
    assert f"{plan['total']['gpu_hours']:,.0f} GPU-hours ({low:,.0f} to {high:,.0f})" in head
    assert f"{2 * plan['total']['gpu_hours']:,.0f} ({2 * low:,.0f} to {2 * high:,.0f}) at 2 each" in head
    assert "NeMo-RL 0.4, Llama-3.1-8B on 16 H100: 97.7 s a step, 61.6 s by the formula" in " ".join(
        render(plan).split()
    )
    assert "responses of 4,096 tokens (half of the longest is assumed)" in head
    assert "responses of 2,048 tokens (as given)" in render(make_plan(experiment("paper_8b"), response_tokens=2048))
    # On a CPU no calibration is published.
    plan = make_plan(experiment("tiny"))
    assert plan["total"]["gpu_hours_range"] == pytest.approx([plan["total"]["gpu_hours"]] * 2)
    assert "NeMo" not in render(plan)


def test_the_longest_chain_is_that_of_one_run():
    """Problems, base model, preflight, training, conversion, evaluation, report, one after the other."""
    plan = make_plan(experiment("paper_8b"))
    assert plan["hours_longest_chain"] == pytest.approx(sum(row["hours_each"][1] for row in plan["stages"]))


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
    plan = make_plan(experiment(name), gpu=gpu)
    assert stage(plan, "train")["jobs"] == runs
    assert plan["gpus"] == 1
    assert plan["hours_least"] <= 30
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


def test_measurements_are_jobs():
    plan = make_plan(load_experiment("smoke_evidence", ROOT / "config"))
    assert [stage(plan, name)["jobs"] for name in ("mismatch", "bias", "report")] == [1, 1, 1]
    assert all(stage(plan, name)["gpu_hours"] > 0 for name in ("mismatch", "bias"))
    assert [row["stage"] for row in make_plan(experiment("smoke"))["stages"]] == [
        *("prepare", "base", "train", "convert", "evaluate", "report")
    ]


def test_shorter_responses_and_more_gpus_take_less_time():
    loaded = experiment("paper_8b")
    hours = [make_plan(loaded, response_tokens=mean)["total"]["gpu_hours"] for mean in (1000, 4096, 8000)]
    assert hours == sorted(hours)
    plans = [make_plan(loaded, gpus=gpus) for gpus in (8, 64, 240, 10_000)]
    least = [plan["hours_least"] for plan in plans]
    assert least[0] == pytest.approx(plans[0]["total"]["gpu_hours"] / 8)
    assert least == sorted(least, reverse=True)
    assert least[-1] == pytest.approx(plans[-1]["hours_longest_chain"])


def test_a_plan_that_cannot_be_made_is_refused():
    with pytest.raises(DvpError, match=r"^--gpus 15: a job of stage 'preflight' takes 16 at once$"):
        make_plan(experiment("paper_14b", training__nodes=2), gpus=15)
    with pytest.raises(DvpError, match=r"base\.architecture: a plan needs sizes of Qwen/Qwen3-8B-Base"):
        make_plan(experiment("paper_8b", base__architecture=None))


def test_a_local_model_says_its_sizes_itself(tmp_path):
    sizes = load_experiment("paper_8b", ROOT / "config").base.architecture
    stated = {CONFIG_NAMES.get(key, key): value for key, value in sizes.model_dump().items()}
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "qwen3"} | stated), encoding="utf-8")
    local = {"kind": "local", "path": str(tmp_path)}
    told = make_plan(experiment("paper_8b", base=local | {"architecture": sizes.model_dump()}))
    assert make_plan(experiment("paper_8b", base=local)) == told
    file.write_text(json.dumps({"model_type": "gpt2"}), encoding="utf-8")
    with pytest.raises(DvpError, match=r"base\.architecture: a plan needs intermediate_size of /"):
        make_plan(experiment("paper_8b", base=local))


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
    assert stage(make_plan(changed), "evaluate")["disk"] == 16 * 3 * 32 * mean
    hub = load_experiment("paper_8b", ROOT / "config").sources["aime25"].model_dump(mode="json") | {"problems": None}
    with pytest.raises(DvpError, match=r"^sources\.aime25\.problems: a plan needs their number$"):
        make_plan(experiment("paper_8b", sources__aime25=hub))


# --- scores along training ---


def test_evaluated_steps_are_conversions_and_evaluations_of_their_runs():
    curve, plain = experiment("smoke_curve"), experiment("smoke_curve", evaluation__at=None)
    plan = make_plan(curve)
    assert {row["stage"]: row["jobs"] for row in plan["stages"]} | {"report": 0} == {
        **{"prepare": 1, "base": 1, "train": 2, "convert": 2 * 3, "evaluate": 1 + 2 * 3, "report": 0},
    }
    # A step's weights take their space once: a run keeps them, and its model is the same file.
    estimate = Estimate(curve, DEVICES["cpu"])
    whole = 4 * estimate.model.parameters
    without = 2 * (Estimate(plain, DEVICES["cpu"]).job(first_run(plain), {})[1] + whole)
    assert stage(plan, "train")["disk"] + stage(plan, "convert")["disk"] == pytest.approx(without + 2 * 2 * whole)


# --- training settings as axes ---


def test_each_point_counts_with_its_own_settings():
    axes = experiment("smoke_axes")
    plan = make_plan(axes)
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
    assert "a training step with engine fp32, G 4, prompts per step 4, steps 3: " in " ".join(render(plan).split())


def test_all_tasks_of_a_model_are_one_job_that_starts_once():
    several = experiment("paper_8b")
    plan = stage(make_plan(several), "evaluate")
    estimate, problems = (
        Estimate(several, DEVICES["h200"]),
        {task: several.sources[task].problems for task in several.data.tasks},
    )
    alone = [estimate.job(several.job("evaluate", f"base/{task}"), problems)[0] for task in several.data.tasks]
    middle = (1 + DEVICES["h200"].slowest) / 2
    assert plan["jobs"] == 16
    assert plan["hours_each"][0] * 3600 == pytest.approx(middle * (sum(alone) - 3 * DEVICES["h200"].startup))


# --- as text ---


def test_the_text_shows_every_stage_and_what_it_rests_on():
    plan = make_plan(experiment("paper_8b"), gpus=64, price=2.5)
    text = render(plan)
    assert text.startswith("paper_8b on H200 141 GB (SXM): ")
    assert " with 64 GPUs at once; " in " ".join(text.partition("\n\n")[0].split())
    for row in plan["stages"]:
        assert f"\n{row['stage']} " in text
    joined = " ".join(text.split())
    for sentence in plan["assumptions"]:
        assert f"assumed: {sentence}" in joined
    assert max(map(len, text.splitlines())) <= 120
    assert "money" in text
    assert "money" not in render(make_plan(experiment("paper_8b")))
    assert json.loads(json.dumps(plan, allow_nan=False)) == plan
    small = experiment("paper_8b", training__tokens_per_micro_batch=9216, training__gpus=8)  # as its file says
    assert "may not fit" not in render(make_plan(small, gpu="h100"))
    assert "may not fit" in render(make_plan(experiment("paper_8b"), gpu="h100"))


# --- as docs/cluster.md has it ---


CARDS = {"qwen3_0.6b": "rtx4090", "qwen3_0.6b_wide": "rtx4090", "qwen3_0.6b_long": "l40s", "qwen3_1.7b": "h100"}


def plans() -> str:
    """The table of docs/cluster.md."""
    rows = [["experiment", "card", "runs × GPUs", "GPU-hours"], ["---", "---", "---:", "---:"]]
    for name in (*PAPER, *CARDS):
        plan = make_plan(experiment(name), gpu=CARDS.get(name, "h200"))
        train, total = stage(plan, "train"), plan["total"]
        low, high = (f"{hours:,.0f}" for hours in total["gpu_hours_range"])
        card, gpus = plan["device"].split(" (")[0], f"{train['jobs']} × {train['gpus_each']}"
        rows.append([f"`{name}`", card, gpus, f"{total['gpu_hours']:,.0f} ({low} to {high})"])
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
    plan = make_plan(experiment("paper_8b"))
    prose = " ".join((ROOT / "docs/cluster.md").read_text(encoding="utf-8").split())
    short = make_plan(experiment("paper_8b"), response_tokens=2048)["total"]["gpu_hours"]
    assert f"at 2,048 tokens `paper_8b` takes {short:,.0f} GPU-hours" in prose
    both = [make_plan(experiment(name))["total"] for name in PAPER[:2]]
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
    assert json.loads(done.stdout) == make_plan(load_experiment("paper_8b", ROOT / "config"))
