"""Claim GPUs for a job: without a scheduler, every job of a machine would use the first ones.

Each GPU has a lock, which is released when the job's process and all processes that were given `held` have ended.
"""

import fcntl
import os
import platform
import sys
import tempfile
import time
from itertools import takewhile
from pathlib import Path

from filelock import FileLock

from dvp.errors import DvpError

DEVICES = Path("/dev")
VISIBLE = "CUDA_VISIBLE_DEVICES"
CLAIMED = "DVP_CLAIMED_GPUS"
PAUSE = 1.0
held: list[int] = []
"""The locks' descriptors, for subprocess.Popen's `pass_fds`: a child that outlives this process keeps the GPUs."""


def claim(count: int) -> None:
    """Wait for `count` GPUs that no other job of this user has, and show only those to this process and its children.

    Does nothing where torch has no CUDA or no GPU is visible, or in a child of a process that has claimed. A Slurm
    allocation with exactly `count` GPUs is used as it is; one with more is treated as a machine of its own.
    Call this before anything asks CUDA for its devices: CUDA looks only once.

    Raises DvpError if there are fewer GPUs, if torch cannot use them, or if no lock can be written.
    """
    visible = [] if CLAIMED in os.environ else _visible()
    if not visible:
        return
    allocation = os.environ.get("SLURM_JOB_ID")
    if not allocation or len(visible) != count:
        _claim(visible, count, allocation)
    import torch

    if not torch.cuda.is_available():
        raise DvpError(
            f"torch for CUDA {torch.version.cuda} cannot use the GPUs that are here: expected NVIDIA's driver R580 or "
            "later, which nvidia-smi shows; without one, make install ENV=cpu"
        )


def _claim(visible: list[str], count: int, allocation: str | None) -> None:
    if len(visible) < count:
        raise DvpError(f"expected {count} GPUs, found {len(visible)} ({VISIBLE}, or nvidia0, nvidia1, … in {DEVICES})")
    # Each Slurm allocation numbers its GPUs from 0, so it has locks of its own.
    folder = Path(tempfile.gettempdir()) / f"dvp-gpus-{os.getuid()}" / (allocation or platform.node())
    told = False
    while not (taken := _take(visible, count, folder)):
        if not told:
            print(f"waiting for {count} of the GPUs {', '.join(visible)}: other jobs have them", file=sys.stderr)
            told = True
        time.sleep(PAUSE)
    held.extend(taken.values())
    os.environ[CLAIMED] = ",".join(taken)
    if count < len(visible):
        os.environ[VISIBLE] = os.environ[CLAIMED]


def _visible() -> list[str]:
    """Return the GPUs that CUDA will show, as CUDA_VISIBLE_DEVICES names them, without initialising CUDA."""
    import torch

    devices = len(list(DEVICES.glob("nvidia[0-9]*"))) if torch.version.cuda else 0
    if VISIBLE not in os.environ:
        return [str(index) for index in range(devices)]
    names = [name.strip() for name in os.environ[VISIBLE].split(",")] if devices else []
    # CUDA ignores every name from the first unknown one on.
    return list(takewhile(lambda name: name.startswith(("GPU-", "MIG-")) or name in map(str, range(devices)), names))


def _take(visible: list[str], count: int, folder: Path) -> dict[str, int]:
    """Lock the first `count` free GPUs; return each lock's descriptor by GPU, none if fewer are free.

    Raises DvpError if no lock can be written.
    """
    taken: dict[str, int] = {}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Two jobs that try at once could each see as taken what the other is about to give back.
        with FileLock(folder / "trying.lock"):
            for name in visible:
                # Not a FileLock, whose descriptor cannot be passed to a child process.
                lock = os.open(folder / f"{name.replace('/', '-')}.lock", os.O_RDWR | os.O_CREAT, 0o600)
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    os.close(lock)
                    continue
                taken[name] = lock
                if len(taken) == count:
                    return taken
            for lock in taken.values():
                os.close(lock)
    except OSError as error:
        raise DvpError(f"{folder}: GPUs cannot be locked there ({error.strerror})") from None
    return {}
