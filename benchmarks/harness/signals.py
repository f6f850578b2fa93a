"""Signals that ask a benchmark to end."""

import contextlib
import signal
import sys
from collections.abc import Iterator
from typing import Any

_STOP = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class _Stopped(BaseException):
    """Signal that asked this benchmark to end, by its number."""


@contextlib.contextmanager
def stopping_cleanly(name: str, when_stopped: str = "") -> Iterator[None]:
    """Raise an exception at the first SIGINT, SIGTERM or SIGHUP, and ignore later ones.

    So a benchmark removes what it made, and nothing disturbs it. Then the process says in one line
    what stopped it, and exits as the signal would end it.
    """

    def stop(number: int, _: Any) -> None:
        for each in _STOP:
            signal.signal(each, signal.SIG_IGN)
        raise _Stopped(number)

    before = {number: signal.signal(number, stop) for number in _STOP}
    try:
        yield
    except _Stopped as stopped:
        (number,) = stopped.args
        print(f"{name}: stopped by {signal.Signals(number).name}{when_stopped}.", file=sys.stderr)
        sys.exit(128 + number)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
