"""Errors that a command shows instead of a traceback."""


class CommandError(Exception):
    """Reason why a command cannot go on: the message names what is wrong and what to do."""
