"""Detect when a run collapsed (docs/method.md, "Diagnostics", the last item)."""

import math
from collections import deque
from statistics import fmean

FALL, PATIENCE = 0.5, 8


class CollapseDetector:
    """A detector of the first step at which the mean reward falls far below its best.

    That is: the mean of `PATIENCE` steps is below `FALL` times the highest such mean before. It sees only the metrics
    of finished steps, so a resumed run that replays the same rows reaches the same state.
    """

    def __init__(self) -> None:
        self.collapsed_at: int | None = None
        self.reason: str | None = None
        self._rewards = deque(maxlen=PATIENCE)
        self._highest = -math.inf

    def observe(self, step: int, row: dict) -> None:
        """Take in the metrics row of a finished step. After a collapse nothing changes any more."""
        self._rewards.append(row["reward"])
        if self.collapsed_at is not None or len(self._rewards) < PATIENCE:
            return
        mean, highest = fmean(self._rewards), self._highest
        if mean < FALL * highest:
            self.collapsed_at = step
            self.reason = f"the mean reward of {PATIENCE} steps is {mean:.3g}, and was {highest:.3g}"
        self._highest = max(mean, highest)
