"""Which GPUs a job takes: where nobody hands them out, every job of a machine would take the first ones.

A lock for each GPU, which goes when the job's process has ended, and those that `held` was passed on to.
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
"""For subprocess.Popen's `pass_fds`: a process of a job that outlives this one keeps the GPUs as well."""


def claim(count: int) -> None:
    """Have this process, and those that it starts, see `count` GPUs that no other job of this user has, once there are.

    Nothing happens where torch cannot use GPUs or is shown none, in an allocation of Slurm's with just as many, and in
    a process that was started by one that has claimed. An allocation with more of them is a machine of its own.
    To be called before anything asks CUDA for its devices: it would not look again.

    Raises DvpError where there are fewer GPUs, CUDA cannot use them, or no lock can be written.
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
    # Within an allocation the first GPU is called 0, whichever it is.
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
    """What CUDA will show, as CUDA_VISIBLE_DEVICES names it; found without CUDA."""
    import torch

    devices = len(list(DEVICES.glob("nvidia[0-9]*"))) if torch.version.cuda else 0
    if VISIBLE not in os.environ:
        return [str(index) for index in range(devices)]
    names = [name.strip() for name in os.environ[VISIBLE].split(",")] if devices else []
    # CUDA shows what stands before the first name that it does not know.
    return list(takewhile(lambda name: name.startswith(("GPU-", "MIG-")) or name in map(str, range(devices)), names))


def _take(visible: list[str], count: int, folder: Path) -> dict[str, int]:
    """The first `count` free ones, each with its lock's descriptor; none where there are fewer."""
    taken: dict[str, int] = {}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Of two jobs that try at once, each would see as taken what the other gives back.
        with FileLock(folder / "trying.lock"):
            for name in visible:
                # Not filelock's, as its descriptor cannot be passed on.
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
