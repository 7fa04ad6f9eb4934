"""What `make` shows of its jobs: records as Snakemake sends them, lines as a person reads them."""

import io
import logging
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
from snakemake_interface_logger_plugins.common import LogEvent

from dvp.progress import duration, readable
from snakemake_logger_plugin_dvp import LogHandler

pytestmark = pytest.mark.slow

RUN = "method~dvp_mis/engine~coarse/rho~exp-13/seed~0"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"training {RUN}", "training dvp_mis · coarse · ρ e⁻¹³ · seed 0"),
        (
            "training method~rloo/engine~fp32/rho~none/seed~1: step 3/32",
            "training rloo · fp32 · seed 1: step 3/32",
        ),
        ("comparing base/by~coarser/on~aime25/seed~2", "comparing base · by coarser · on aime25 · seed 2"),
        (
            "method~dvp/engine~coarse/rho~exp-13/group_size~4/learning_rate~1e-06/by~coarse/seed~2",
            "dvp · coarse · ρ e⁻¹³ · G 4 · learning rate 1e-06 · by coarse · seed 2",
        ),
        ("preflight of a run with engine coarse/group_size~4", "preflight of a run with engine coarse · G 4"),
    ],
)
def test_paths_are_written_as_a_person_would(text, expected):
    assert readable(text) == expected


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
        fields = {"wildcards": {}, "threads": 1, "resources": {}} | fields
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
    assert screen.say(LogEvent.JOB_FINISHED, 80.0, job_id=0) == [
        "[1/4] done in 1 min 20 s: making the base model    0 running"
    ]  # of a training still nothing is known
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


def test_a_job_killed_once_may_fail_otherwise_the_next_time(screen):
    screen.say(LogEvent.RUN_INFO, stats={"train": 1, "total": 1})
    error = {"rule_name": "train", "msg": None, "rule_msg": None, "jobid": 1, "input": [], "output": [], "aux": {}}
    error |= {"log": [], "conda_env": None, "shellcmd": "dvp train"}
    screen.start(1, "train", "training a", 0.0)
    screen.say(LogEvent.ERROR, message="Command 'dvp train' returned non-zero exit status 137.")
    assert screen.say(LogEvent.JOB_ERROR, 5.0, **error)[0].startswith("[0/1] killed: training a")
    screen.start(1, "train", "training a", 6.0)
    assert screen.say(LogEvent.JOB_ERROR, 7.0, **error)[0] == "[0/1] failed: training a"


def test_a_dry_run_looks_as_snakemakes_own(monkeypatch):
    screen = Screen(monkeypatch, dryrun=True)
    assert screen.say(LogEvent.ERROR, message="no such file") == ["no such file"]
    assert screen.say(LogEvent.RUN_INFO, message="Job stats:\ntrain 3") == ["Job stats:", "train 3"]


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


@pytest.mark.parametrize("shell", ["bash -c 'echo a: step 21/40 >&2; kill -9 $$' 2>&1 | tee {log}", "kill -9 $$"])
def test_a_job_killed_for_memory_says_how_to_go_on(tmp_path, shell):
    (tmp_path / "Snakefile").write_text(
        "shell.prefix('set -o pipefail; ')\nrule all:\n    input: 'a'\n"
        f"rule train:\n    output: 'a'\n    log: 'log'\n    message: 'training a'\n    shell: {shell!r}\n"
    )
    command = [sys.executable, "-m", "snakemake", "--cores", "1", "--logger", "dvp"]
    done = subprocess.run(command, check=False, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    (line,) = [line for line in done.stderr.splitlines() if "training a; " in line]
    assert line.startswith("[0/1] killed: training a; out of memory? ")
    assert ('It had reached "a: step 21/40". ' in line) == ("tee" in shell)
    assert "Run the same again to continue" in line
    assert "CalledProcessError" not in done.stderr
