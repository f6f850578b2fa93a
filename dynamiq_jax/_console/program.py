"""A program of one command or of several, from its options to its exit status.

This module imports only what the library needs: a program can report what is not installed.
"""

import contextlib
import functools
import importlib.util
import inspect
import operator
import os
import select
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, NoReturn

from dynamiq_jax._console.errors import CommandError, install_extra

_NEEDED = ("tyro", "rich")


def run(name: str, commands: Callable[[], Any], description: str | None = None) -> None:
    """Parse the options of the process, run the command, and exit with its status.

    `commands` imports and returns the command, or several by name. A command is a dataclass: its
    fields are the options, and `run()` returns the exit status.
    """
    missing = [each for each in _NEEDED if importlib.util.find_spec(each) is None]
    if missing:
        sys.exit(
            f"{name}: {' and '.join(missing)} not installed. "
            f"Install what the command line needs: {install_extra('cli')}"
        )
    import tyro

    with ending_with_reader():
        given = commands()
        if not isinstance(given, Mapping):
            command = tyro.cli(given, prog=name, description=description)
        elif sys.argv[1:] and sys.argv[1] in given:
            chosen = sys.argv[1]
            command = tyro.cli(given[chosen], prog=f"{name} {chosen}", args=sys.argv[2:])
        else:
            command = tyro.cli(_listed(given), prog=name, description=description)
        finish(name, command.run)


def finish(name: str, call: Callable[[], int | None]) -> NoReturn:
    """Make a call, and exit with the status that it returns, or with its error as one line."""
    try:
        sys.exit(call())
    except CommandError as error:
        sys.exit(f"{name}: {error}")
    except KeyboardInterrupt:
        print(f"{name}: stopped by SIGINT.", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)


@contextlib.contextmanager
def ending_with_reader() -> Iterator[None]:
    """End as SIGPIPE would, without a traceback, if a reader such as `head` has ended before.

    Other broken pipes are errors.
    """
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
        if not any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0)):
            raise
        # The interpreter flushes once more when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)


def _listed(commands: Mapping[str, Any]) -> Any:
    """Return the type of one of several commands, which shows the first line of each docstring."""
    import tyro

    def listed(name: str, command: Any) -> Any:
        summary = (inspect.getdoc(command) or "").partition("\n")[0]
        return Annotated[Any, tyro.conf.subcommand(name, constructor=command, description=summary)]

    return functools.reduce(operator.or_, (listed(*each) for each in commands.items()))
