"""The one exception a user sees as a single line."""


class DvpError(Exception):
    """A problem in the user's input or environment.

    The message is one line that names the file, key or row at fault and says what was expected.
    `dvp` prints it without a traceback and exits with status 2.
    """
