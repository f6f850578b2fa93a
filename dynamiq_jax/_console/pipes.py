"""Standard output whose reader, such as `head`, may end first."""

import contextlib
import os
import select
import signal
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def ending_with_reader() -> Iterator[None]:
    """End the process as SIGPIPE would, without a traceback, if nobody reads what it prints.

    Other broken pipes are errors.
    """
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        if not _is_broken(sys.stdout.fileno()):
            raise
        # The interpreter flushes once more when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)


def _is_broken(descriptor: int) -> bool:
    """Return whether nobody reads a pipe any more."""
    poll = select.poll()
    poll.register(descriptor, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
