"""What a job takes of its node: a node of Slurm's with GPUs is made up."""

import os

import pytest

from dvp import gpus, node
from dvp.errors import DvpError


@pytest.fixture
def job(tmp_path, monkeypatch):
    """A job of Slurm's with 64 cores, on a node with a GPU and a disk; its environment has nothing else of ours."""
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr(gpus, "DEVICES", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(64)))
    for name in (*node.CACHES, "TMPDIR", "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, "of before")  # so that it is put back
        monkeypatch.delenv(name)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_TMPDIR", str(tmp_path / "disk"))
    (tmp_path / "disk").mkdir()
    return monkeypatch


def test_a_job_with_gpus_uses_all_of_its_cores(job):
    assert node.cores(8) == 64


@pytest.mark.parametrize("lacks", ["a GPU", "Slurm", "a launcher"])
def test_other_processes_use_the_threads_asked_for(job, tmp_path, lacks):
    """On a CPU the number of threads is part of a result; and a rank is told its share."""
    if lacks == "a GPU":
        (tmp_path / "nvidia0").unlink()
    elif lacks == "Slurm":
        job.delenv("SLURM_JOB_ID")
    else:
        job.setenv("TORCHELASTIC_RUN_ID", "none")
    assert node.cores(8) == 8


def test_what_is_compiled_in_a_job_stays_on_its_node(job, tmp_path):
    job.setenv("TRITON_CACHE_DIR", "mine")
    node.keep_caches_here()
    folder = tmp_path / "disk" / f"dvp-{os.getuid()}"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert os.environ["TMPDIR"] == str(folder.parent)
    assert [os.environ[name] for name in node.CACHES] == [f"{folder}/vllm", "mine", f"{folder}/torchinductor"]


def test_caches_are_not_kept_in_another_users_folder(job):
    """Anybody could have made it in /tmp, with code that would be run."""
    job.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(DvpError, match=r"dvp-12345: belongs to another user; expected one of yours: set TMPDIR$"):
        node.keep_caches_here()


def test_outside_slurm_caches_stay_where_they_are(job):
    job.delenv("SLURM_JOB_ID")
    node.keep_caches_here()
    assert not {*node.CACHES, "TMPDIR"} & os.environ.keys()
