"""Progress of long work as lines, which read the same on a terminal, in a log file, and from a cluster's job."""

import sys
import time


class Progress:
    """Prints `name: step 12/40  details  34 s left` at most every few seconds, and at the last step."""

    def __init__(self, name: str, steps: int, every_seconds: float = 10.0):
        self._name, self._steps, self._every = name, steps, every_seconds
        self._shown = time.monotonic()
        self._first: tuple[int, float] | None = None

    def step(self, step: int, details: str) -> bool:
        """Say that `step` (1-based) is done; whether a line was printed."""
        now = time.monotonic()
        if self._first is None:
            self._first = (step, now)
        if now - self._shown < self._every and step != self._steps:
            return False
        self._shown = now
        first, started = self._first
        left = f"  {(now - started) / (step - first) * (self._steps - step):.0f} s left" if step > first else ""
        print(f"{self._name}: step {step}/{self._steps}  {details}{left}", file=sys.stderr, flush=True)
        return True
