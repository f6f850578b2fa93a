"""A program of one command or of several, from its options to its exit status.

This module imports only what the library needs: a program can report what is not installed.
"""

import importlib.util
import sys
from collections.abc import Callable, Mapping
from typing import Any

from dynamiq_jax._console.errors import CommandError
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
            "Install what the command line needs: pip install 'dynamiq-jax[cli]'"
        )
    import tyro

    given = commands()
    if isinstance(given, Mapping):
        command = tyro.extras.subcommand_cli_from_dict(
            dict(given), prog=name, description=description
        )
    else:
        command = tyro.cli(given, prog=name, description=description)
    try:
        with stopping_cleanly():
            status = command.run()
    except CommandError as error:
        sys.exit(f"{name}: {error}")
    except Stopped as stopped:
        print(f"{name}: {stopped}; everything it made is removed.", file=sys.stderr)
        sys.exit(128 + stopped.number)
    sys.exit(status)
