"""What `make` shows of its jobs: records as Snakemake sends them, lines as a person reads them."""

import io
import logging
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from snakemake_interface_logger_plugins.common import LogEvent

from dvp.experiment.loading import load_experiment
from dvp.planning.plan import seconds_by_stage
from dvp.progress import duration, readable
from snakemake_logger_plugin_dvp import LogHandler
from snakemake_logger_plugin_dvp.estimate import Estimate, recorded_seconds

pytestmark = pytest.mark.slow

RUN = "method~dvp_mis/engine~coarse/rho~exp-13/seed~0"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"training {RUN}", "training DVP + MIS · coarse · ρ e⁻¹³ · seed 0"),
        (
            "training method~rloo/engine~fp32/rho~none/seed~1: step 3/32",
            "training rloo · fp32 · seed 1: step 3/32",
        ),
        (
            "evaluating method~dvp/engine~coarse/rho~0.01/seed~0 on aime25",
            "evaluating dvp · coarse · ρ 0.01 · seed 0 on aime25",
        ),
        ("comparing base/by~coarser/seed~2", "comparing base · by coarser · seed 2"),
        ("comparing base/by~coarser/on~aime25/seed~2", "comparing base · by coarser · on aime25 · seed 2"),
        ("preparing problems", "preparing problems"),
    ],
)
def test_paths_are_written_as_a_person_would(text, expected):
    assert readable(text, {"dvp_mis": "DVP + MIS"}) == expected


@pytest.mark.parametrize(
    ("seconds", "exact", "rough"),
    [(0, "1 s", "1 s"), (59.4, "59 s", "59 s"), (130, "2 min 10 s", "2 min"), (11100, "3 h 05 min", "3 h 05 min")],
)
def test_durations(seconds, exact, rough):
    assert duration(seconds) == exact
    assert duration(seconds, rough=True) == rough


class Screen:
    """A handler and what it has written."""

    def __init__(self, monkeypatch, **settings):
        self.stream = io.StringIO()
        monkeypatch.setattr(sys, "stderr", self.stream)
        common = {"nocolor": True, "quiet": None, "show_failed_logs": True, "dryrun": False, "verbose": False}
        self.handler = LogHandler(SimpleNamespace(stdout=False, **(common | settings)), None)

    def say(self, event: LogEvent | None, at: float = 0.0, message: str | None = None, **fields) -> list[str]:
        """Send a record; the lines that it made."""
        before = len(self.stream.getvalue())
        record = logging.LogRecord("snakemake", logging.INFO, "", 0, message, None, None)
        record.__dict__ |= {"event": event, "created": at} | fields
        self.handler.emit(record)
        return self.stream.getvalue()[before:].splitlines()

    def start(self, jobid: int, rule: str, message: str | None, at: float, **fields) -> list[str]:
        fields = {"benchmark": None, "wildcards": {}, "threads": 1, "resources": {}} | fields
        return self.say(LogEvent.JOB_INFO, at, jobid=jobid, rule_name=rule, rule_msg=message, **fields)


@pytest.fixture
def screen(monkeypatch) -> Screen:
    return Screen(monkeypatch)


def test_a_workflow_from_its_first_job_to_its_last(screen):
    assert screen.say(None, message="Building DAG of jobs...") == []
    assert screen.say(LogEvent.RESOURCES_INFO, cores=2, message="Provided cores: 2") == []
    stats = {"all": 1, "base": 1, "train": 3, "total": 5}
    assert screen.say(LogEvent.RUN_INFO, stats=stats, message="Job stats: …") == ["[0/4] 4 jobs: 1 base, 3 train"]
    # Nothing is known of any job yet.
    assert screen.start(0, "base", "making the base model", 0.0, threads=2) == [
        "[0/4] making the base model    1 running"
    ]
    # Of a training still nothing is known.
    assert screen.say(LogEvent.JOB_FINISHED, 80.0, job_id=0) == [
        "[1/4] done in 1 min 20 s: making the base model    0 running"
    ]
    assert screen.say(LogEvent.PROGRESS, 80.0, done=1, total=5) == []
    (line,) = screen.start(1, "train", f"training {RUN}", 80.0)
    assert line == "[1/4] training dvp_mis · coarse · ρ e⁻¹³ · seed 0    1 running"
    screen.start(2, "train", "training b", 80.0)
    # A training took 200 s; the one beside it is late, and another one is waiting.
    (line,) = screen.say(LogEvent.JOB_FINISHED, 280.0, job_id=1)
    assert line.endswith("1 running, about 2 min left")
    (line,) = screen.start(3, "train", "training c", 280.0)
    assert line == "[2/4] training c    2 running, about 3 min left"
    screen.say(LogEvent.JOB_FINISHED, 281.0, job_id=2)
    assert screen.say(LogEvent.JOB_FINISHED, 480.0, job_id=3) == ["[4/4] done in 3 min 20 s: training c"]
    assert screen.start(4, "all", None, 480.0) == []
    assert screen.say(LogEvent.JOB_FINISHED, 480.0, job_id=4) == []


def test_a_job_that_failed_is_named_with_its_log_and_counts_again_when_it_is_tried_again(screen, tmp_path):
    log = tmp_path / "train.log"
    log.write_text("dvp train: the reason\n")
    screen.say(LogEvent.RUN_INFO, stats={"train": 1, "total": 1})
    screen.start(1, "train", "training a", 0.0)
    error = {"rule_name": "train", "msg": None, "rule_msg": None, "jobid": 1, "input": [], "output": [], "aux": {}}
    error |= {"log": [str(log)], "conda_env": None, "shellcmd": "dvp train"}
    lines = screen.say(LogEvent.JOB_ERROR, 5.0, **error)
    assert lines[0] == "[0/1] failed: training a"
    assert "dvp train: the reason" in lines
    screen.start(1, "train", "training a", 6.0)
    assert screen.say(LogEvent.JOB_FINISHED, 9.0, job_id=1) == ["[1/1] done in 3 s: training a"]


def test_what_snakemake_says_besides_is_passed_on(screen):
    assert screen.say(None, message="Nothing to be done (all requested files are present and up to date).") == [
        "Nothing to be done (all requested files are present and up to date)."
    ]
    assert screen.say(LogEvent.ERROR, message="no such file") == ["no such file"]


def test_a_dry_run_looks_as_snakemakes_own(monkeypatch):
    screen = Screen(monkeypatch, dryrun=True)
    assert screen.say(LogEvent.RUN_INFO, message="Job stats:\ntrain 3") == ["Job stats:", "train 3"]


def test_earlier_benchmarks_count_until_this_run_knows_better(tmp_path):
    file = tmp_path / "benchmarks/train/method~dvp/seed~0.tsv"
    file.parent.mkdir(parents=True)
    file.write_text("s\th:m:s\n100.0\t0:01:40\n")
    (tmp_path / "benchmarks/prepare.tsv").write_text("s\th:m:s\n4.0\t0:00:04\n")
    (file.parent / "seed~1.tsv").write_text("")  # its job was killed
    seconds = recorded_seconds(tmp_path / "benchmarks")
    assert seconds == {"prepare": [4.0], "train": [100.0]}
    estimate = Estimate()
    estimate.cores = 2
    estimate.planned({"train": 4})
    assert estimate.left(0.0) is None
    estimate.expect(seconds, {})
    assert estimate.left(0.0) == pytest.approx(200)
    estimate.begun(1, "train", 0.0)
    estimate.begun(2, "train", 0.0)
    assert estimate.left(50.0) == pytest.approx(150)
    estimate.ended(1, 60.0)
    assert estimate.left(60.0) == pytest.approx((2 * 60 + 6) / 2)  # the other one is late, and near its end


def test_what_has_not_run_yet_takes_as_long_as_planned_at_the_pace_of_what_has():
    estimate = Estimate()
    estimate.cores = 1
    estimate.planned({"resolve": 1, "base": 1, "train": 2, "report_training": 1})
    estimate.expect({}, {"base": 3000.0, "train": 600.0, "report": 60.0})
    assert estimate.left(0.0) == pytest.approx(3000 + 2 * 600 + 60)
    estimate.begun(1, "resolve", 0.0)
    estimate.ended(1, 0.0)
    estimate.begun(2, "base", 0.0)
    assert estimate.left(1000.0) == pytest.approx(2000 + 2 * 600 + 60)
    # Twice as long as by plan, which counts for 300 s of its own.
    estimate.ended(2, 6000.0)
    pace = (6000 + 300) / (3000 + 300)
    assert estimate.left(6000.0) == pytest.approx(pace * (2 * 600 + 60))
    # What short jobs took says little of what long ones will.
    short = Estimate()
    short.planned({"prepare": 1, "train": 1})
    short.expect({}, {"prepare": 30.0, "train": 6000.0})
    short.begun(1, "prepare", 0.0)
    short.ended(1, 3.0)
    assert short.left(3.0) == pytest.approx(6000 * (3 + 300) / (30 + 300))


def test_on_a_cluster_as_many_jobs_run_at_once_as_were_seen_to():
    estimate = Estimate()
    estimate.planned({"train": 10})
    estimate.expect({}, {"train": 50.0})
    for job in range(3):
        estimate.begun(job, "train", 0.0, threads=8)
    estimate.ended(0, 90.0)
    assert estimate.left(90.0) == pytest.approx((7 * 90 + 2 * 9) / 3)


def test_jobs_wait_for_gpus_where_those_are_fewer_than_cores():
    estimate = Estimate()
    estimate.cores, estimate.gpus = 16, 2
    estimate.planned({"train": 8, "convert": 16})
    estimate.expect({}, {"train": 1000.0, "convert": 100.0})
    estimate.begun(1, "convert", 0.0)
    estimate.begun(2, "train", 0.0, gpus=1)
    assert estimate.left(0.0) == pytest.approx(16 * 100 / 16 + 8 * 1000 / 2)


def test_the_first_line_of_a_long_experiment_says_hours(screen, monkeypatch):
    """By the shares of a tiny one it said minutes until the first training had ended."""
    monkeypatch.chdir(Path(__file__).parents[1])
    screen.say(LogEvent.RESOURCES_INFO, cores=2, message="Provided cores: 2")
    stats = {"prepare": 1, "base": 1, "train": 40, "convert": 40, "evaluate": 161, "mismatch": 10, "report_training": 1}
    screen.say(LogEvent.RUN_INFO, stats=stats | {"total": sum(stats.values())})
    fields = {"benchmark": "nowhere/natural_tail/benchmarks/prepare.tsv", "wildcards": {"experiment": "natural_tail"}}
    (line,) = screen.start(1, "prepare", "preparing problems", 0.0, **fields)
    hours, minutes = re.search(r"1 running, about (\d+) h (\d+) min left$", line).groups()
    planned = seconds_by_stage(load_experiment("natural_tail"), Path("nowhere/natural_tail"))
    assert planned.keys() == {"prepare", "base", "train", "convert", "evaluate", "mismatch", "report"}
    expected = sum(count * planned[rule.split("_")[0]] for rule, count in stats.items()) / 2
    assert int(hours) * 60 + int(minutes) == pytest.approx(expected / 60, abs=1)
    assert 3 < expected / 3600 < 8


def test_without_the_sizes_of_a_model_nothing_is_said_of_the_time(screen, monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[1])
    experiment = load_experiment("paper_8b")
    base = experiment.base.model_copy(update={"architecture": None})
    monkeypatch.setattr(
        "dvp.experiment.loading.load_experiment", lambda name: experiment.model_copy(update={"base": base})
    )
    screen.say(LogEvent.RUN_INFO, stats={"prepare": 1, "train": 30, "total": 31})
    fields = {"benchmark": "nowhere/nameless/benchmarks/prepare.tsv", "wildcards": {"experiment": "nameless"}}
    assert screen.start(1, "prepare", "preparing problems", 0.0, **fields) == ["[0/31] preparing problems    1 running"]


def test_snakemake_finds_the_plugin_and_counts_its_jobs(tmp_path):
    (tmp_path / "Snakefile").write_text(
        "rule all:\n    input: 'a', 'b'\n"
        "rule touch:\n    output: '{name}'\n    wildcard_constraints: name='[ab]'\n"
        "    message: 'touching {wildcards.name}'\n    shell: 'touch {output}'\n"
    )
    command = [sys.executable, "-m", "snakemake", "--cores", "1", "--logger", "dvp"]
    done = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True, timeout=300)
    lines = done.stderr.splitlines()
    assert "[0/2] 2 jobs: 2 touch" in lines
    assert [line.split("    ")[0] for line in lines if "touching" in line and "done" not in line] in (
        ["[0/2] touching a", "[1/2] touching b"],
        ["[0/2] touching b", "[1/2] touching a"],
    )
    assert [line for line in lines if re.match(r"\[2/2\] done in \d+ s: touching", line)]
