"""Whether two mathematical expressions are equal, asked of SymPy in a process of its own (dvp.answers.expressions).

SymPy evaluates what a model wrote, and models write 9^{9^{9^9}}. No alarm reaches into a big-integer power, so a
helper process does the work; the kernel kills it when one question has cost its CPU_SECONDS. That is CPU time: a busy
machine does not change a grade.
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
    """EQUAL or UNEQUAL; UNPARSED if the reference is no expression, TOO_HARD if it cost too much."""
    return _helper.ask(reference, answer)


class _Helper:
    """The process, started when first needed and again after it was killed; it ends with its last asker's pipe."""

    # A file, so that nothing else of dvp is imported. -P: this folder's modules must not shadow others.
    command = (sys.executable, "-P", str(Path(__file__).with_name("expressions.py")))

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.process: subprocess.Popen | None = None
        self.owner = 0  # A fork must not talk through its parent's pipe.

    def ask(self, reference: str, answer: str) -> str:
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
