"""Ask SymPy whether two mathematical expressions are equal, in a process of its own (dvp.answers.expressions).

SymPy evaluates what a model wrote, and models write 9^{9^{9^9}}. No alarm interrupts a big-integer power, so a helper
process does the work; the kernel kills it when one question has cost its CPU_SECONDS. That is CPU time: a busy machine
does not change a grade.
"""

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
from functools import lru_cache
from pathlib import Path

from dvp.errors import DvpError

EQUAL, UNEQUAL, UNPARSED, TOO_HARD = "equal", "unequal", "unparsed", "too hard"


@lru_cache(maxsize=10_000)
def compare(reference: str, answer: str) -> str:
    """Return EQUAL or UNEQUAL; UNPARSED if the reference is no expression, TOO_HARD if it cost too much.

    Raises DvpError if the helper process cannot start.
    """
    return _helper.ask(reference, answer)


class _Helper:
    """The helper process, started when first needed and again after it was killed.

    It ends when the pipe of the last process that uses it closes.
    """

    # A file, so that nothing else of dvp is imported. -P: this folder's modules must not shadow others.
    command = (sys.executable, "-P", str(Path(__file__).with_name("expressions.py")))

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.process: subprocess.Popen | None = None
        self.owner = 0  # Process id: a fork must not use its parent's pipe.

    def ask(self, reference: str, answer: str) -> str:
        """Return the helper's word for two expressions, or TOO_HARD if they used up its CPU time or ended it twice."""
        with self.lock:
            for _ in range(2):
                process = self._running()
                reply = ""
                with contextlib.suppress(OSError):
                    process.stdin.write(json.dumps([reference, answer]) + "\n")
                    process.stdin.flush()
                    reply = process.stdout.readline().strip()
                if reply:
                    return reply
                status = process.wait()
                if status > 0:
                    command = shlex.join(self.command)
                    raise DvpError(f"the helper that compares answers does not start: run `{command}` to see why")
                if status == -signal.SIGPROF:
                    break  # its own timer; anything else, such as a stack overflow, is tried once more
            return TOO_HARD

    def _running(self) -> subprocess.Popen:
        if self.process is None or self.owner != os.getpid() or self.process.poll() is not None:
            pipe, null = subprocess.PIPE, subprocess.DEVNULL
            self.process = subprocess.Popen(self.command, stdin=pipe, stdout=pipe, stderr=null, encoding="utf-8")
            self.owner = os.getpid()
        return self.process


_helper = _Helper()
