"""A program of one command or of several, from its options to its exit status.

This module imports only what the library needs: a program can report what is not installed.
"""

import functools
import importlib.util
import inspect
import operator
import sys
from collections.abc import Callable, Mapping
from typing import Annotated, Any

from dynamiq_jax._console.errors import CommandError, install_extra
from dynamiq_jax._console.pipes import ending_with_reader
from dynamiq_jax._console.signals import Stopped, stopping_cleanly

_NEEDED = ("tyro", "rich")


def run(name: str, commands: Callable[[], Any], description: str | None = None) -> None:
    """Parse the options of the process, run the command, and exit with its status.

    Args:
      name: name of the program, for its help and its errors.
      commands: function that imports and returns the command, or a mapping of several by name. A
        command is a dataclass: its fields are the options, and `run()` returns the exit status.
      description: text of the help; None for the docstring of the command.
    """
    with ending_with_reader():
        _run(name, commands, description)


def _run(name: str, commands: Callable[[], Any], description: str | None) -> None:
    missing = [each for each in _NEEDED if importlib.util.find_spec(each) is None]
    if missing:
        sys.exit(
            f"{name}: {' and '.join(missing)} not installed. "
            f"Install what the command line needs: {install_extra('cli')}"
        )
    import tyro

    given = commands()
    if not isinstance(given, Mapping):
        command = tyro.cli(given, prog=name, description=description)
    elif sys.argv[1:] and sys.argv[1] in given:
        chosen = sys.argv[1]
        command = tyro.cli(given[chosen], prog=f"{name} {chosen}", args=sys.argv[2:])
    else:
        command = tyro.cli(_listed(given), prog=name, description=description)
    try:
        with stopping_cleanly():
            status = command.run()
    except CommandError as error:
        sys.exit(f"{name}: {error}")
    except Stopped as stopped:
        print(f"{name}: {stopped}; everything it made is removed.", file=sys.stderr)
        sys.exit(128 + stopped.number)
    sys.exit(status)


def _listed(commands: Mapping[str, Any]) -> Any:
    """Return the type of one of several commands, which shows the first line of each docstring."""
    import tyro

    def listed(name: str, command: Any) -> Any:
        summary = (inspect.getdoc(command) or "").partition("\n")[0]
        return Annotated[Any, tyro.conf.subcommand(name, constructor=command, description=summary)]

    return functools.reduce(operator.or_, (listed(*each) for each in commands.items()))
