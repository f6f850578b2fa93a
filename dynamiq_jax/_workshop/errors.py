"""What a command tells its user instead of a traceback."""


class CommandError(Exception):
    """The command cannot go on; the message names what is wrong and what to do."""
