"""Send a stop signal again after Python has dropped the exception of its handler.

An exception that a signal handler raises while a weak reference's callback or a `__del__` runs does not propagate:
Python hands it to sys.unraisablehook, which prints a traceback, and the process continues as if nobody had told it to
stop.
"""

import signal
import threading

PAUSE = 0.2
"""Seconds to wait until the hook has ended: an exception that is raised within it is dropped as well."""
_again: list[threading.Timer] = []


def send_again(number: int) -> None:
    """Send the signal to the main thread again in a moment, unless `heard` is called before; for use in a hook."""
    heard()
    timer = threading.Timer(PAUSE, signal.pthread_kill, (threading.main_thread().ident, number))
    timer.daemon = True
    _again.append(timer)
    timer.start()


def heard() -> None:
    """Cancel every signal that was to be sent again."""
    while _again:
        _again.pop().cancel()
