"""Jobs of one machine take different GPUs, and wait where there are none; its devices are made up."""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from dvp import gpus
from dvp.errors import DvpError

JOB = """
import os, subprocess, sys, types
from pathlib import Path
from dvp import gpus
# All that is asked of torch, which takes seconds to load.
cuda = types.SimpleNamespace(is_available=lambda: True)
sys.modules["torch"] = types.SimpleNamespace(version=types.SimpleNamespace(cuda="13.0"), cuda=cuda)
gpus.DEVICES, gpus.PAUSE = Path(sys.argv[1]), 0.05
gpus.claim(int(sys.argv[2]))
print("sees", os.environ.get("CUDA_VISIBLE_DEVICES"), flush=True)
if sys.argv[3:] == ["outlived"]:  # as by a process on ranks, when a job is killed
    outside = subprocess.DEVNULL
    print(subprocess.Popen(["sleep", "300"], pass_fds=gpus.held, stdout=outside, stderr=outside).pid, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine with three GPUs, and nothing claimed."""
    devices = tmp_path / "dev"
    devices.mkdir()
    for name in ("nvidiactl", "nvidia-uvm", "nvidia0", "nvidia1", "nvidia5"):
        (devices / name).touch()
    for name in (gpus.CLAIMED, gpus.VISIBLE, "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return devices


@pytest.fixture
def start(machine):
    """Starts a job that claims so many GPUs and holds them until its standard input is closed."""
    jobs = []

    def run(count, *more, **environment):
        jobs.append(
            subprocess.Popen(
                [sys.executable, "-c", JOB, str(machine), str(count), *more],
                **dict.fromkeys(("stdin", "stdout"), subprocess.PIPE),
                stderr=subprocess.STDOUT,
                text=True,
                env=os.environ | environment,
            )
        )
        return jobs[-1]

    yield run
    for job in jobs:
        job.kill()
        job.wait()
        job.stdout.close()


def sees(job):
    """The next line that a job says."""
    return job.stdout.readline().strip()


def test_jobs_take_different_gpus_and_one_too_many_waits(start):
    first = start(1)
    assert sees(first) == "sees 0"
    second = start(2)
    assert sees(second) == "sees 1,2"
    third = start(2)
    assert sees(third) == "waiting for 2 of the GPUs 0, 1, 2: other jobs have them"
    first.stdin.close()
    first.wait()
    time.sleep(0.3)
    assert third.poll() is None  # one is not enough, and it holds none while it waits
    assert sees(start(1)) == "sees 0"
    second.send_signal(signal.SIGKILL)
    second.wait()
    assert sees(third) == "sees 1,2"


def test_a_job_that_is_killed_has_its_gpus_until_its_processes_have_ended(start):
    job = start(3, "outlived")
    assert sees(job) == "sees None"
    outlives = int(sees(job))
    job.send_signal(signal.SIGKILL)
    job.wait()
    try:
        other = start(1)
        assert sees(other) == "waiting for 1 of the GPUs 0, 1, 2: other jobs have them"
    finally:
        os.kill(outlives, signal.SIGKILL)
    assert sees(other) == "sees 0"


def test_only_gpus_that_the_user_shows_are_taken(start):
    first = start(1, CUDA_VISIBLE_DEVICES="2, 1")
    assert sees(first) == "sees 2"
    second = start(1, CUDA_VISIBLE_DEVICES="2, 1")
    assert sees(second) == "sees 1"
    # Another way to say the same machine: what is left of it.
    assert sees(start(1)) == "sees 0"


def test_jobs_of_different_allocations_do_not_wait_for_each_other(start, machine):
    """Slurm calls the first GPU of each of its jobs 0."""
    jobs = [start(1, CUDA_VISIBLE_DEVICES="0", SLURM_JOB_ID=number) for number in ("7", "8")]
    assert [sees(job) for job in jobs] == ["sees 0", "sees 0"]
    assert not list(machine.parent.glob("dvp-gpus-*"))
    jobs = [start(1, CUDA_VISIBLE_DEVICES="0,1", SLURM_JOB_ID=number) for number in ("7", "8", "8")]
    assert sorted(sees(job) for job in jobs) == ["sees 0", "sees 0", "sees 1"]


@pytest.fixture
def here(machine, monkeypatch):
    """This process is on that machine."""
    monkeypatch.setattr(gpus, "DEVICES", machine)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    return machine


def test_more_than_there_are_is_refused(here, monkeypatch):
    with pytest.raises(DvpError, match=r"^expected 4 GPUs, found 3 \(CUDA_VISIBLE_DEVICES, or nvidia0"):
        gpus.claim(4)
    # CUDA looks no further than the first name that it does not know.
    for names in ("1", "0,-1,1", "2,3,1", "MIG-a,none"):
        monkeypatch.setenv(gpus.VISIBLE, names)
        with pytest.raises(DvpError, match=r"^expected 2 GPUs, found 1 "):
            gpus.claim(2)


@pytest.mark.parametrize("allocation", [None, "7"])
def test_a_driver_that_is_too_old_is_said(here, monkeypatch, allocation):
    """The path of a CPU would run under vLLM's build for CUDA."""
    if allocation:  # with just as many GPUs
        monkeypatch.setenv("SLURM_JOB_ID", allocation)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DvpError, match=r"^torch for CUDA 13\.0 cannot use the GPUs .* R580 or later"):
        gpus.claim(3)


def test_what_a_job_starts_has_the_jobs_gpus(here, monkeypatch):
    monkeypatch.setenv(gpus.CLAIMED, "0,1")
    gpus.claim(2)
    assert not list(here.parent.glob("dvp-gpus-*"))


@pytest.mark.parametrize("hidden", ["", "-1", "no devices", "no CUDA"])
def test_gpus_that_are_hidden_or_of_no_use_are_not_claimed(here, monkeypatch, hidden):
    """Many laptops have one, and the environment for CPUs: jobs would wait for a GPU that they do not use."""
    if hidden == "no CUDA":
        monkeypatch.setattr(torch.version, "cuda", None)
    elif hidden == "no devices":
        for device in here.glob("nvidia*"):
            device.unlink()
    else:
        monkeypatch.setenv(gpus.VISIBLE, hidden)
    gpus.claim(2)
    assert gpus.CLAIMED not in os.environ
    assert not list(here.parent.glob("dvp-gpus-*"))
