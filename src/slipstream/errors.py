"""The one exception that reaches a user as a sentence instead of a traceback."""


class SlipstreamError(ValueError):
    """Bad input: the message names the thing and the remedy in one or two lines.

    The command line prints it and exits with status 2. Broken invariants use ``assert`` instead.
    """
