"""A stop signal whose exception Python drops comes again.

What a signal's handler raises within a callback for an object that goes (of a weak reference, or __del__) does not get
through: Python hands it to sys.unraisablehook, which prints a traceback, and the process goes on as if nobody had told
it to stop.
"""

import signal
import threading

PAUSE = 0.2
"""Seconds, after which the hook has ended: what is raised within it is dropped as well."""
_again: list[threading.Timer] = []


def send_again(number: int) -> None:
    """For a hook: send the signal to the main thread once more, in a moment, unless `heard` is called before."""
    heard()
    timer = threading.Timer(PAUSE, signal.pthread_kill, (threading.main_thread().ident, number))
    timer.daemon = True
    _again.append(timer)
    timer.start()


def heard() -> None:
    """Send nothing any more."""
    while _again:
        _again.pop().cancel()
