"""The exceptions that a user sees as a single line."""

import signal

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class DvpError(Exception):
    """A problem in the user's input or environment.

    The message is one line that names the file, key or row at fault and says what was expected.
    `dvp` prints it without a traceback and exits with status 2.
    """


class Stopped(SystemExit):
    """Work that a stop signal cut short. `dvp` prints the message and exits with 128 + the signal's number.

    A SystemExit, so that no `except Exception` holds it up.
    """

    def __init__(self, message: str, number: int):
        super().__init__(128 + number)
        self.message = message

    def __str__(self) -> str:
        return self.message
