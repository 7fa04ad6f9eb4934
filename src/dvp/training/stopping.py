"""Leave in time when a stage is told to stop.

Slurm sends SIGTERM at a time limit, at scancel and at a preemption, and SIGKILL some seconds later; a warning before
the limit may be SIGTERM too, or SIGUSR1. Training must not lose the steps since its last checkpoint to it.
"""

import math
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from dvp import signals
from dvp.errors import STOP_SIGNALS, Stopped
from dvp.training import ranks


class Abandoned(BaseException):
    """The abandonment of a step before it changed anything. Not an Exception, so that no library swallows it."""


class Lost(Abandoned):
    """The abandonment of a step that has changed the weights, so that they belong to no step that is known."""


class StopRequest:
    """A context in which a stop signal is remembered instead of ending the process; only abandonable blocks end early.

    More signals of the kind change nothing: one event may send several, and SIGKILL follows anyway.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self.seconds = 0
        """Seconds from a scheduler's warning to the end of the job; 0 if unknown."""
        self.seconds_save = 0.0
        """Seconds that the slowest checkpoint has taken."""
        self._abandonable = False
        self._enough: bool | None = None

    def __enter__(self) -> "StopRequest":
        self._previous = {number: signal.signal(number, self._receive) for number in STOP_SIGNALS}
        self._previous_hook = sys.unraisablehook
        sys.unraisablehook = self._dropped
        return self

    def __exit__(self, *_: object) -> None:
        signals.heard()
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        sys.unraisablehook = self._previous_hook

    def _dropped(self, unraisable: Any) -> None:
        if isinstance(unraisable.exc_value, Abandoned):
            self._abandonable = True
            signals.send_again(self.signal)
        else:
            self._previous_hook(unraisable)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.signal = signal.Signals(number)
        signals.heard()
        if self._abandonable:
            self._abandonable = False
            raise Abandoned

    @contextmanager
    def abandonable(self, alone: bool = True) -> Iterator[None]:
        """End this block at once on a stop signal if it runs `alone`, waiting for no other rank. It changes no weights.

        Raises Abandoned at the end of the block, on every rank, if any of them was told to stop.
        """
        try:
            try:
                self._abandonable = alone
                if alone and self.signal is not None:
                    raise Abandoned
                yield
            finally:
                self._abandonable = False
        except Abandoned:
            pass
        except Exception:
            # An engine's own processes get the same signal and die of it, which may raise anything here.
            if self.signal is None:
                raise
        if self.requested():
            raise Abandoned

    def requested(self) -> bool:
        """Return whether a rank was told to stop; all ranks ask at the same place, as they must leave together."""
        signals = [received for received in ranks.gather(self.signal) if received is not None]
        if signals and self.signal is None:
            self.signal = signals[0]
        return bool(signals)

    def saved(self, seconds: float, seconds_step: float) -> None:
        """Print whether there is time for a stop, when that is first known and whenever it changes.

        seconds : what the checkpoint took that was just written.
        seconds_step : the longest that a stop has to wait for a step that cannot be abandoned.
        """
        self.seconds_save = max(self.seconds_save, seconds)
        if not self.seconds or not ranks.is_main():
            return
        needed = seconds_step + self.seconds_save
        if (enough := needed <= self.seconds) == self._enough:
            return
        self._enough = enough
        line = (
            f"finishing a step takes up to {seconds_step:.0f} s and a checkpoint {self.seconds_save:.0f} s; "
            f"{self.seconds} s lie between the scheduler's warning and the end"
        )
        if not enough:
            ask = 60 * math.ceil(1.2 * needed / 60)  # full minutes, with a fifth to spare
            line = f"warning: {line}: a stop costs the steps since the last checkpoint; ask for stop_seconds: {ask}"
        print(line, file=sys.stderr)

    def leave(self, after: int, saved: int) -> None:
        """Raise Stopped: the run has `after` steps, of which a checkpoint holds `saved`."""
        rest = "" if saved == after else f" from step {saved}"
        raise Stopped(f"stopped by {self.signal.name} after step {after}; run again to continue{rest}", self.signal)
