"""When did a run collapse? (docs/method.md, "Diagnostics", the last item)."""

import math
from collections import deque
from statistics import fmean

from dvp.errors import DvpError

# A spread below these is rounding, not variation: of the mean, and in the metric's own unit.
RELATIVE_SPREAD = 1e-6
SMALLEST_SPREAD = 1e-8


class CollapseDetector:
    """Remembers the first step that shows a collapse.

    It sees nothing but the metrics of finished steps, so a resumed run that feeds it the same rows again stands
    where it stood. A collapse is

    - a fall: the mean reward of the last `patience` steps below `reward_fall` times the highest such mean so far;
    - or a spike: a monitored metric above mean + `sigmas` · σ of its last `window` values, once there are `warmup`. Off
      unless asked for: in long runs that learn well the gradient's norm spikes, too;
    - or k3 above `kl_above`;
    - or entropy below `entropy_below`, or reward below `reward_below`, for `patience` steps in a row.

    A value that is None or NaN (a skipped step has no gradient norm) is no value: it joins no history and breaks a run
    of low ones. An infinite value of a monitored metric is a collapse at once.
    """

    def __init__(
        self,
        *,
        monitored: tuple[str, ...] = ("k3", "gradient_norm"),
        window: int = 128,
        sigmas: float | None = None,
        warmup: int = 32,
        reward_fall: float | None = 0.5,
        kl_above: float | None = None,
        entropy_below: float | None = None,
        reward_below: float | None = None,
        patience: int = 8,
    ):
        """A detector that has seen nothing.

        Args:
            monitored: metrics that may not spike.
            window: values that mean and σ are taken over, those before the one that is judged.
            sigmas: how many σ above the mean a spike is, None for none.
            warmup: values that a metric needs before it can spike.
            reward_fall: share of the highest mean reward, None for none.
            kl_above: k3 (nats), None for no level; so are the next two.
            entropy_below: nats.
            reward_below: mean reward of a step.
            patience: steps in a row that entropy or reward must be low, and that mean rewards are over.

        Raises:
            DvpError: not 2 ≤ warmup ≤ window, or sigmas, reward_fall or patience out of range.
        """
        if not 2 <= warmup <= window:
            raise DvpError(f"collapse: expected 2 ≤ warmup ≤ window, got warmup {warmup} and window {window}")
        if sigmas is not None and not 0.0 < sigmas < math.inf:
            raise DvpError(f"collapse.sigmas: expected a finite number above 0, got {sigmas}")
        if reward_fall is not None and not 0.0 < reward_fall < 1.0:
            raise DvpError(f"collapse.reward_fall: expected a share between 0 and 1, got {reward_fall}")
        if patience < 1:
            raise DvpError(f"collapse.patience: expected at least 1 step, got {patience}")
        self.collapsed_at: int | None = None
        self.reason: str | None = None
        self._sigmas = sigmas
        self._warmup = warmup
        self._reward_fall = reward_fall
        self._rewards = deque(maxlen=patience)
        self._highest_reward = -math.inf
        self._kl_above = kl_above
        self._patience = patience
        self._histories = {name: deque(maxlen=window) for name in monitored}
        lowest = {"entropy": entropy_below, "reward": reward_below}
        self._lowest = {name: level for name, level in lowest.items() if level is not None}
        self._low_steps = dict.fromkeys(self._lowest, 0)

    def observe(self, step: int, row: dict) -> None:
        """Take in the metrics row of a finished step. After a collapse nothing changes any more.

        Raises:
            DvpError: the row lacks a metric that is watched.
        """
        if self.collapsed_at is None:
            self.reason = self._reason(step, row)
            if self.reason is not None:
                self.collapsed_at = step

    def _reason(self, step: int, row: dict) -> str | None:
        reasons = [self._spike(name, _value(step, row, name)) for name in self._histories]
        if self._reward_fall is not None:
            reasons.append(self._fall(_value(step, row, "reward")))
        if self._kl_above is not None:
            k3 = _value(step, row, "k3")
            if k3 is not None and k3 > self._kl_above:
                reasons.append(f"k3 {k3:.3g} is above {self._kl_above:g}")
        for name, level in self._lowest.items():
            value = _value(step, row, name)
            self._low_steps[name] = self._low_steps[name] + 1 if value is not None and value < level else 0
            if self._low_steps[name] >= self._patience:
                reasons.append(f"{name} was below {level:g} for {self._patience} steps")
        return "; ".join(reason for reason in reasons if reason is not None) or None

    def _fall(self, reward: float | None) -> str | None:
        """Judge the mean of the last rewards by the highest such mean before it."""
        if reward is None:
            return None
        self._rewards.append(reward)
        if len(self._rewards) < self._patience:
            return None
        mean, highest = fmean(self._rewards), self._highest_reward
        self._highest_reward = max(mean, highest)
        if mean < self._reward_fall * highest:
            return f"the mean reward of {self._patience} steps is {mean:.3g}, and was {highest:.3g}"
        return None

    def _spike(self, name: str, value: float | None) -> str | None:
        """Judge a value by those before it, then add it to them."""
        if value is None:
            return None
        if math.isinf(value):
            return f"{name} is {value}"
        history = self._histories[name]
        reason = None
        count = len(history)
        if self._sigmas is not None and count >= self._warmup:
            # Nothing here is squared: a k3 may be as large as e^700.
            mean = sum(past / count for past in history)
            sigma = math.hypot(*(past - mean for past in history)) / math.sqrt(count)
            sigma = max(sigma, RELATIVE_SPREAD * abs(mean), SMALLEST_SPREAD)
            if value > mean + self._sigmas * sigma:
                reason = (
                    f"{name} {value:.3g} is {(value - mean) / sigma:.1f} σ above its mean {mean:.3g} over {count} steps"
                )
        history.append(value)
        return reason


def _value(step: int, row: dict, name: str) -> float | None:
    if name not in row:
        raise DvpError(f"collapse: the metrics of step {step} have no '{name}'")
    value = row[name]
    return None if value is None or math.isnan(value) else value
