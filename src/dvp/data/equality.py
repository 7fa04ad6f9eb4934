"""Whether two mathematical expressions are equal, asked of math-verify in a process of its own.

math-verify evaluates what a model wrote, and models write 9^{9^{9^9}}. Its own time limits use alarms, which
need the main thread and do not reach into a big-integer power. So a helper process does the work; the kernel
kills it when one question has cost CPU_SECONDS. That is CPU time: a busy machine does not change a grade.
"""

import atexit
import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
from functools import lru_cache

CPU_SECONDS = 3.0
MEMORY_BYTES = 8 << 30

EQUAL, UNEQUAL, UNPARSED, TOO_HARD = "equal", "unequal", "unparsed", "too hard"


@lru_cache(maxsize=10_000)
def compare(reference: str, answer: str) -> str:
    """EQUAL or UNEQUAL; UNPARSED if the reference is no expression, TOO_HARD if it cost too much."""
    return _helper.ask(reference, answer)


class _Helper:
    """The process, started when first needed and again after it was killed."""

    # -P: this folder's modules must not shadow others.
    command = (sys.executable, "-P", __file__)

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
                    from dvp.errors import DvpError  # not at the top: the helper runs this file without dvp

                    raise DvpError(f"math-verify does not start: run `{shlex.join(self.command)}` to see why")
                if status == -signal.SIGPROF:
                    break  # its own timer; anything else, such as a stack overflow, is tried once more
            return TOO_HARD

    def _running(self) -> subprocess.Popen:
        if self.process is None or self.owner != os.getpid() or self.process.poll() is not None:
            pipe, null = subprocess.PIPE, subprocess.DEVNULL
            self.process = subprocess.Popen(self.command, stdin=pipe, stdout=pipe, stderr=null, encoding="utf-8")
            self.owner = os.getpid()
        return self.process

    def close(self) -> None:
        if self.process is not None and self.owner == os.getpid():
            self.process.kill()
            self.process.communicate()


_helper = _Helper()
atexit.register(_helper.close)


def _serve() -> None:
    """Answer one JSON line [reference, answer] with one word, until standard input ends."""
    import resource

    from math_verify import parse, verify

    # A polite stop is its parent's to handle; the helper goes when the pipe closes.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))

    def parsed(text: str) -> list:
        return parse(f"\\boxed{{{text}}}", parsing_timeout=None)

    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
        reference, answer = json.loads(line)
        try:
            gold = parsed(reference)
            if all(isinstance(expression, str) for expression in gold):
                word = UNPARSED
            else:
                word = EQUAL if verify(gold, parsed(answer), timeout_seconds=None) else UNEQUAL
        except Exception:
            word = UNEQUAL
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(word, flush=True)


if __name__ == "__main__":
    _serve()
