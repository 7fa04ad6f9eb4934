"""Reward a response: by the verifier, which asks whether it states the right answer, or by a function of the user's.

The function is Python code of the user's, `def NAME(response: str, reference: str) -> float`. It runs with all that the
process may do, in training and in evaluation alike; each rank loads it from a file whose SHA-256 the experiment knows.
"""

import math
import reprlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from numbers import Real
from pathlib import Path
from types import ModuleType

import numpy as np

from dvp.data.verifier import grade
from dvp.errors import DvpError, Stopped
from dvp.experiment.data import RewardFunction
from dvp.files import sha256_file

CORRECT = 1.0
"""The least reward of a response that scores (avg@k, pass@k) count as correct."""


@dataclass(frozen=True)
class Grader:
    """A grader of responses: the verifier, or the user's function.

    thinking: argument of the verifier, see `dvp.data.prompts.before_response`.
    own: the user's function, which replaces the verifier. It is loaded at once; raises DvpError if it cannot be.
    """

    thinking: str | None = None
    own: RewardFunction | None = None

    def __post_init__(self) -> None:
        if self.own is not None:
            _load(self.own)

    def reward(self, response: str, reference: str, *, truncated: bool) -> float:
        """Return the reward of a response; the verifier's is 1 for the right answer, else 0.

        truncated: whether the response was cut off at its length limit; only the verifier uses it.
        Raises DvpError if the user's function fails, or returns anything but a finite number.
        """
        if self.own is None:
            return float(grade(response, reference, truncated=truncated, thinking=self.thinking))
        name = f"{self.own.file}: {self.own.function}"
        function = _load(self.own)
        try:
            value = function(str(response), reference)
        except Stopped:
            raise
        except (Exception, SystemExit) as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            raise DvpError(f"{name}: failed on the response {str(response)[:60]!r} ({reason})") from error
        try:
            reward = float(value) if isinstance(value, Real | np.bool_) else math.nan
        except OverflowError:  # an integer, perhaps of more digits than Python prints
            value = reward = math.inf
        if math.isfinite(reward):
            return reward
        found = " ".join(reprlib.repr(value).split())[:60]
        raise DvpError(f"{name}: expected a finite number, found {found} for the response {str(response)[:60]!r}")


VERIFIER = Grader()


@cache
def _load(own: RewardFunction) -> Callable[[str, str], float]:
    if not own.file.is_file():
        raise DvpError(
            f"data.reward.file: {own.file}: no such file; run this in the folder that the path is relative to"
        )
    if own.sha256 is not None and sha256_file(own.file) != own.sha256:
        raise DvpError(f"{own.file}: has changed since the experiment was resolved; run snakemake again")
    module = ModuleType(f"dvp_reward_{Path(own.file).stem}")
    module.__file__ = str(own.file)
    sys.modules[module.__name__] = module  # where dataclasses and pickle look for it
    try:
        exec(compile(own.file.read_bytes(), module.__file__, "exec", dont_inherit=True), vars(module))
    except Stopped:
        raise
    except (Exception, SystemExit) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise DvpError(f"{own.file}: cannot be loaded ({reason})") from error
    function = getattr(module, own.function, None)
    if not callable(function):
        raise DvpError(f"{own.file}: expected a function {own.function}(response, reference), found none")
    return function
