"""A stop at any moment of a job ends it: told as Slurm tells it, by a signal to every process of the job."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from working_copy import Copy

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
GOAL = "results/smoke/data/manifest.json"


@pytest.fixture(scope="module")
def copy(tmp_path_factory, root) -> Copy:
    return Copy(tmp_path_factory.mktemp("stops"), root)


def the_shell_exists(processes: list[psutil.Process]) -> bool:
    return any("dvp prepare" in " ".join(process.cmdline()) for process in processes)


def dvp_exists(processes: list[psutil.Process]) -> bool:
    return any(is_dvp(process) for process in processes)


def dvp_imports(processes: list[psutil.Process]) -> bool:
    """Its libraries, which takes most of the first second."""
    return any(is_dvp(process) and "/numpy" in Path(f"/proc/{process.pid}/maps").read_text() for process in processes)


def is_dvp(process: psutil.Process) -> bool:
    command = process.cmdline()
    return "prepare" in command and any(part.endswith("/dvp") for part in command)


@pytest.mark.parametrize("moment", [the_shell_exists, dvp_exists, dvp_imports])
def test_a_stop_in_a_jobs_first_second_ends_it(copy, moment):
    """Not one was heard before `dvp` had its handlers: it inherited signals that the shell ignored."""
    snakemake = [Path(sys.executable).parent / "snakemake", GOAL, "--config", "experiment=smoke"]
    with subprocess.Popen(
        snakemake,
        cwd=copy.folder,
        env={key: value for key, value in os.environ.items() if key != "MLFLOW_TRACKING_URI"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        job = wait_for(process, moment)
        os.killpg(process.pid, signal.SIGTERM)
        output = process.communicate(timeout=300)[0]
    assert process.returncode == 1, output
    assert not (copy.folder / GOAL).exists()
    assert "failed: preparing problems" in output
    assert not psutil.wait_procs(job, timeout=0)[1]
    if moment is dvp_imports:
        log = copy.folder / "results/smoke/logs/prepare.log"
        assert log.read_text() == "dvp prepare: stopped by SIGTERM; run again to go on\n"


def wait_for(snakemake: subprocess.Popen, moment: Callable[[list[psutil.Process]], bool]) -> list[psutil.Process]:
    """The job's processes, at the moment."""
    parent = psutil.Process(snakemake.pid)
    while snakemake.poll() is None:
        processes = parent.children(recursive=True)
        try:
            if moment(processes):
                return processes
        except (psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
            continue
        time.sleep(0.001)
    raise AssertionError(snakemake.communicate()[0])
