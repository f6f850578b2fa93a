"""Errors that a command shows instead of a traceback."""


class CommandError(Exception):
    """Reason why a command cannot go on: the message names what is wrong and what to do."""


def install_extra(extra: str) -> str:
    """Write the commands that install the packages of an extra, here or in a checkout."""
    return f"pip install 'dynamiq-jax[{extra}]', or in a checkout: pip install '.[{extra}]'"
