"""A learning rate that falls once responses grow longer (docs/method.md, "Learning-rate decay by length").

This remedy treats collapse as a problem of optimisation and not of numerics (arXiv 2602.01826), and a surge of the
response length as its early sign. We know only the abstract, which names the trigger but no numbers: what counts as a
surge, and how the rate falls, are our choices.
"""

from __future__ import annotations

from collections import deque
from statistics import fmean
from typing import Annotated

from pydantic import Field, model_validator

from dvp.strict import Positive, PositiveFloat, Strict


class LengthDecay(Strict):
    """Settings of `LearningRateShare`."""

    growth: PositiveFloat
    """A surge is a mean length of `patience` steps above 1 + this times the lowest such mean before."""
    patience: Positive
    """Steps that lengths are averaged over."""
    factor: Annotated[float, Field(gt=0, lt=1)]
    """What the learning rate is multiplied by at the surge, and again after every `every` steps."""
    every: Positive
    """Steps."""
    lowest: Annotated[float, Field(gt=0, lt=1)]
    """The share of training.learning_rate below which it does not fall; at most `factor`."""

    @model_validator(mode="after")
    def _falls(self) -> LengthDecay:
        if self.lowest > self.factor:
            raise ValueError(f"lowest ({self.lowest}) must not exceed factor ({self.factor})")
        return self


class LearningRateShare:
    """The share of its learning rate that a run's next step takes: `value`.

    It sees only the metrics of finished steps, so a resumed run that replays the same rows reaches the same state.
    Lengths count until the first surge; from then on the rate falls with the steps.
    """

    def __init__(self, settings: LengthDecay):
        self.value = 1.0
        self._settings = settings
        self._latest: deque[float] = deque(maxlen=settings.patience)
        self._shortest: float | None = None
        self._since: int | None = None

    def observe(self, metrics: dict) -> None:
        """Take in the metrics row of a finished step (response_tokens_mean)."""
        settings = self._settings
        if self._since is not None:
            self._since += 1
        else:
            self._latest.append(metrics["response_tokens_mean"])
            if len(self._latest) < settings.patience:
                return
            mean = fmean(self._latest)
            if self._shortest is None or mean <= (1 + settings.growth) * self._shortest:
                self._shortest = mean if self._shortest is None else min(self._shortest, mean)
                return
            self._since = 0
        self.value = max(settings.lowest, settings.factor ** (1 + self._since // settings.every))
