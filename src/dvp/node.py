"""What a process has of its node: memory, and in a job of Slurm's cores and a disk for what compilers keep."""

import ctypes
import os
import tempfile
from pathlib import Path

from dvp import gpus
from dvp.errors import DvpError

CACHES = ("VLLM_CACHE_ROOT", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")


def is_rank() -> bool:
    """Whether this process is one of the ranks that torchrun started (dvp.training.launch)."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def cores(asked: int) -> int:
    """CPU threads of a process: of a job of Slurm's on a node with GPUs, all cores that it may use; else those `asked`.

    On GPUs Snakemake's threads count GPUs (slurm/config.yaml). Without one, the number of threads is part of a result:
    it decides the order of sums. A rank is told its share.
    """
    if "SLURM_JOB_ID" in os.environ and not is_rank() and any(gpus.DEVICES.glob("nvidia[0-9]*")):
        return len(os.sched_getaffinity(0))
    return asked


def keep_caches_here() -> None:
    """Have a job of Slurm's keep what it compiles on the node, where the user has not said where.

    The default is the home directory: often NFS, with a quota, and all ranks of all jobs write there at once.
    Raises DvpError for a folder of somebody else's, as code in it would be run.
    """
    if "SLURM_JOB_ID" not in os.environ:
        return
    if "SLURM_TMPDIR" in os.environ:
        os.environ.setdefault("TMPDIR", os.environ["SLURM_TMPDIR"])
    folder = Path(os.environ.get("TMPDIR") or tempfile.gettempdir()) / f"dvp-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.lstat().st_uid != os.getuid():
        raise DvpError(f"{folder}: belongs to another user; expected one of yours: set TMPDIR")
    for name in CACHES:
        os.environ.setdefault(name, str(folder / name.partition("_")[0].lower()))


def return_freed_memory() -> None:
    """Give the kernel every whole page that was freed, wherever glibc keeps it.

    Without, training a model of 135 M parameters held 3 GB of tensors and 8.5 after six steps, 11.7 after 22: updates
    have other shapes each.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
