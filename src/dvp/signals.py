"""Stop signals whose exception Python drops, sent again until it gets through.

What a signal's handler raises within a callback for an object that goes (of a weak reference, or __del__) does not get
through: Python hands it to sys.unraisablehook, which prints a traceback, and the process goes on as if nobody had told
it to stop.
"""

import signal
import threading

PAUSE = 0.01
sending = threading.RLock()  # a handler may interrupt `heard`


class Dropped:
    """The signal of this process whose exception was dropped last, until a handler can raise it."""

    def __init__(self) -> None:
        self._within_hook = False
        self._heard = threading.Event()

    def may_raise(self) -> bool:
        """For a handler: whether what it raises may get through; if not, the signal comes again."""
        if self._within_hook:
            return False
        self.heard()
        return True

    def send_again(self, number: int) -> None:
        """For a hook: send the signal to the main thread until a handler `may_raise`, or `heard` is called."""
        self._within_hook = True
        try:
            # Not the event of an earlier one, whose thread may still wait for it.
            self._heard = threading.Event()
            threading.Thread(target=_send, args=(number, self._heard), daemon=True).start()
        finally:
            self._within_hook = False

    def heard(self) -> None:
        """Send nothing any more."""
        with sending:
            self._heard.set()


def _send(number: int, heard: threading.Event) -> None:
    while not heard.wait(PAUSE):
        with sending:  # else it could be heard just before one more is sent, which would come out of the blue
            if not heard.is_set():
                signal.pthread_kill(threading.main_thread().ident, number)


dropped = Dropped()
"""The process's own: a process has one main thread, which signals interrupt."""
