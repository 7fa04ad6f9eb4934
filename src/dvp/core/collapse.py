"""When did a run collapse? (docs/method.md, "Diagnostics", the last item)."""

import math
from collections import deque
from statistics import fmean

MONITORED = ("k3", "gradient_norm")
FALL, PATIENCE = 0.5, 8


class CollapseDetector:
    """Remembers the first step that shows a collapse.

    It sees nothing but the metrics of finished steps, so a resumed run that feeds it the same rows again stands
    where it stood. A collapse is

    - a fall: the mean reward of the last `PATIENCE` steps below `FALL` times the highest such mean so far;
    - or one of MONITORED that is infinite.

    A value that is None or NaN (a skipped step has no gradient norm) is no value: it joins no history.
    """

    def __init__(self) -> None:
        """A detector that has seen nothing."""
        self.collapsed_at: int | None = None
        self.reason: str | None = None
        self._rewards = deque(maxlen=PATIENCE)
        self._highest = -math.inf

    def observe(self, step: int, row: dict) -> None:
        """Take in the metrics row of a finished step. After a collapse nothing changes any more."""
        if self.collapsed_at is None:
            reasons = [f"{name} is {row[name]}" for name in MONITORED if math.isinf(row[name] or 0.0)]
            missing = row["reward"] is None or math.isnan(row["reward"])
            reasons += self._reasons(None if missing else row["reward"])
            if reasons:
                self.collapsed_at, self.reason = step, "; ".join(reasons)

    def _reasons(self, reward: float | None) -> list[str]:
        if reward is not None:
            self._rewards.append(reward)
            if len(self._rewards) == PATIENCE:
                mean, highest = fmean(self._rewards), self._highest
                self._highest = max(mean, highest)
                if mean < FALL * highest:
                    return [f"the mean reward of {PATIENCE} steps is {mean:.3g}, and was {highest:.3g}"]
        return []
