"""Define the exceptions that a user sees as a single line, and recognise a full or failing disk."""

import errno
import os
import re
import signal

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)

WRITING = "writing "  # begins an exception's note that names the file being written
_OF_A_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG, errno.EROFS, errno.ESTALE)
# Libraries wrap the system's error in their own: its message has the system's words, its number, or SQLite's words.
_SAID = {
    code: re.compile(rf"(?i){re.escape(os.strerror(code))}|\b(?:errno|os error)\W{{0,2}}{code}\b")
    for code in _OF_A_DISK
} | {-errno.ENOSPC: re.compile("database or disk is full"), -errno.EIO: re.compile("disk I/O error")}


class DvpError(Exception):
    """A problem in the user's input or environment.

    The message is one line that names the file, key or row at fault and says what was expected.
    `dvp` prints it without a traceback and exits with status 2.
    """


class Stopped(SystemExit):
    """The exit of work that a stop signal cut short. `dvp` prints the message and exits with 128 + the signal's number.

    It is a SystemExit, so that no `except Exception` catches it.
    """

    def __init__(self, message: str, number: int):
        super().__init__(128 + number)
        self.message = message

    def __str__(self) -> str:
        return self.message


def disk_trouble(error: BaseException) -> str | None:
    """Return what the disk refused, as `PATH: No space left on device`, if that caused the exception; else None.

    The chain of exceptions is searched, as libraries wrap the system's error. PATH is left out where it is not known.
    """
    chain = [error]
    while (earlier := chain[-1].__cause__ or chain[-1].__context__) is not None and earlier not in chain:
        chain.append(earlier)
    reason = next(filter(None, map(_refused, chain)), None)
    if reason is None:
        return None
    notes = [
        note.removeprefix(WRITING)
        for each in chain
        for note in getattr(each, "__notes__", ())
        if note.startswith(WRITING)
    ]
    files = [each.filename for each in chain if isinstance(each, OSError) and each.filename is not None]
    return ": ".join([*map(str, [*notes, *files][:1]), reason])


def _refused(error: BaseException) -> str | None:
    if isinstance(error, OSError) and error.errno in _OF_A_DISK:
        return os.strerror(error.errno)
    return next((os.strerror(abs(code)) for code, said in _SAID.items() if said.search(str(error))), None)
