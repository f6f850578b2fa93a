"""Error that ends the command with one line instead of a traceback."""


class RunError(ValueError):
    """An option or a file that keeps a run from starting or resuming.

    The message names it and says what to do.
    """
