"""Signals that ask a command to end, as an exception, so that it removes what it made."""

import contextlib
import signal
from collections.abc import Iterator
from typing import Any

_STOP = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopped(BaseException):
    """Signal that asked this command to end."""

    def __init__(self, number: int):
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.number = number


@contextlib.contextmanager
def stopping_cleanly() -> Iterator[None]:
    """Raise `Stopped` at the first SIGINT, SIGTERM or SIGHUP, and ignore later ones.

    Those would disturb the removal of what was made.
    """

    def stop(number: int, _: Any) -> None:
        for each in _STOP:
            signal.signal(each, signal.SIG_IGN)
        raise Stopped(number)

    before = {number: signal.signal(number, stop) for number in _STOP}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
