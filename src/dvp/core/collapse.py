"""When did a run collapse? (docs/method.md, "Diagnostics", the last item)."""

import math
from collections import deque
from statistics import fmean

MONITORED = ("k3", "gradient_norm")


class CollapseDetector:
    """Remembers the first step that shows a collapse.

    It sees nothing but the metrics of finished steps, so a resumed run that feeds it the same rows again stands
    where it stood. A collapse is

    - a fall: the mean reward of the last `patience` steps below `reward_fall` times the highest such mean so far;
    - or a reward below `reward_below` for `patience` steps in a row;
    - or one of MONITORED that is infinite.

    A value that is None or NaN (a skipped step has no gradient norm) is no value: it joins no history and breaks a run
    of low ones.
    """

    def __init__(self, *, reward_fall: float | None = 0.5, reward_below: float | None = None, patience: int = 8):
        """A detector that has seen nothing; None: there is no such collapse."""
        self.collapsed_at: int | None = None
        self.reason: str | None = None
        self._reward_fall, self._reward_below, self._patience = reward_fall, reward_below, patience
        self._rewards = deque(maxlen=patience)
        self._highest = -math.inf
        self._low_steps = 0

    def observe(self, step: int, row: dict) -> None:
        """Take in the metrics row of a finished step. After a collapse nothing changes any more."""
        if self.collapsed_at is None:
            reasons = [f"{name} is {row[name]}" for name in MONITORED if math.isinf(row[name] or 0.0)]
            missing = row["reward"] is None or math.isnan(row["reward"])
            reasons += self._reasons(None if missing else row["reward"])
            if reasons:
                self.collapsed_at, self.reason = step, "; ".join(reasons)

    def _reasons(self, reward: float | None) -> list[str]:
        reasons = []
        if reward is not None:
            self._rewards.append(reward)
        if reward is not None and len(self._rewards) == self._patience:
            mean, highest = fmean(self._rewards), self._highest
            self._highest = max(mean, highest)
            if self._reward_fall is not None and mean < self._reward_fall * highest:
                reasons.append(f"the mean reward of {self._patience} steps is {mean:.3g}, and was {highest:.3g}")
        low = reward is not None and self._reward_below is not None and reward < self._reward_below
        self._low_steps = self._low_steps + 1 if low else 0
        if self._low_steps >= self._patience:
            reasons.append(f"reward was below {self._reward_below:g} for {self._patience} steps")
        return reasons
