"""Which GPUs a job takes: where nobody hands them out, every job of a machine would take the first ones.

A lock for each GPU, which goes when the process ends, however it ends.
"""

import os
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from filelock import FileLock, Timeout

from dvp.errors import DvpError

DEVICES = Path("/dev")
VISIBLE = "CUDA_VISIBLE_DEVICES"
CLAIMED = "DVP_CLAIMED_GPUS"
PAUSE = 1.0
_held: list[FileLock] = []


def claim(count: int) -> None:
    """Have this process, and those that it starts, see `count` GPUs that no other job of this user has, once there are.

    Nothing happens on a machine without NVIDIA's devices, in an allocation of Slurm's with just as many GPUs, and in a
    process that was started by one that has claimed. An allocation with more of them is a machine of its own.
    To be called before anything asks CUDA for its devices: it would not look again.

    Raises DvpError where there are fewer GPUs, or no lock can be written.
    """
    visible = _visible()
    if not visible or CLAIMED in os.environ:
        return
    if len(visible) < count:
        raise DvpError(f"expected {count} GPUs, found {len(visible)} ({VISIBLE}, or nvidia0, nvidia1, … in {DEVICES})")
    allocation = os.environ.get("SLURM_JOB_ID")
    if allocation and len(visible) == count:
        return
    # Within an allocation the first GPU is called 0, whichever it is.
    folder = Path(tempfile.gettempdir()) / f"dvp-gpus-{os.getuid()}" / (allocation or "machine")
    told = False
    while not (taken := _take(visible, count, folder)):
        if not told:
            print(f"waiting for {count} of the GPUs {', '.join(visible)}: other jobs have them", flush=True)
            told = True
        time.sleep(PAUSE)
    _held.extend(taken.values())
    os.environ[CLAIMED] = ",".join(taken)
    if count < len(visible):
        os.environ[VISIBLE] = os.environ[CLAIMED]


def _visible() -> list[str]:
    """What CUDA_VISIBLE_DEVICES may name here; found without CUDA."""
    if not (DEVICES / "nvidiactl").exists():
        return []
    if VISIBLE in os.environ:
        return [name.strip() for name in os.environ[VISIBLE].split(",") if name.strip()]
    return [str(index) for index, _ in enumerate(DEVICES.glob("nvidia[0-9]*"))]


def _take(visible: list[str], count: int, folder: Path) -> dict[str, FileLock]:
    """The first `count` free ones, each with its lock; none where there are fewer."""
    taken: dict[str, FileLock] = {}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / "taking.lock"):  # two jobs that try at once would each see what the other gives back
            for name in visible:
                lock = FileLock(folder / f"{name.replace('/', '-')}.lock")
                with suppress(Timeout):
                    lock.acquire(blocking=False)
                    taken[name] = lock
                if len(taken) == count:
                    return taken
            for lock in taken.values():
                lock.release()
    except OSError as error:
        raise DvpError(f"{folder}: GPUs cannot be locked there ({error.strerror})") from None
    return {}
