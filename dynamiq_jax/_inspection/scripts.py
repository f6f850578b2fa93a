"""Train step of any script: the script runs until that step is compiled."""

import contextlib
import runpy
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.extend.backend import get_backend

from dynamiq_jax._core import MistakeError
from dynamiq_jax._inspection.collectives import collectives_of
from dynamiq_jax._inspection.devices import Devices
from dynamiq_jax._plan.recording import Records, recording

_COMPILED = "/jax/core/compile/backend_compile_duration"


class TrainStepOfScript(NamedTuple):
    """Train step of a script."""

    text: str | None  # of the program; None if there is none
    records: Records  # of collectives that were traced before
    mistake: MistakeError | None  # that the script raised


class _CompiledError(BaseException):  # scripts catch exceptions of other kinds
    """End of a script: its argument is the text of the train step."""


def train_step(script: Path, arguments: Sequence[str], least: float) -> TrainStepOfScript:
    """Run a script until it compiles a program whose devices send at least some bytes.

    That program is not run. A script that names this package goes on until one of its collectives
    is in such a program: it may train exactly before, for comparison. Of a script without any, the
    program that sends the most counts.

    Args:
      script: path of a Python file, which runs as `__main__`.
      least: bytes that each device sends.
    """

    compresses = b"dynamiq_jax" in script.read_bytes()
    most, largest = least, None

    def stop_at_the_step(event: str, duration_secs: float, **_: Any) -> None:
        nonlocal most, largest
        del duration_secs
        if event == _COMPILED:
            # The newest is first.
            text = get_backend().live_executables()[0].hlo_modules()[0].to_string()
            sent = sum(one.bytes for one in collectives_of(text, Devices({}, None)))
            if sent >= least and (records or not compresses):
                raise _CompiledError(text)
            if sent >= most:
                most, largest = sent, text

    with recording() as records, _command_line(script, arguments):
        jax.monitoring.register_event_duration_secs_listener(stop_at_the_step)
        try:
            runpy.run_path(str(script), run_name="__main__")
        except _CompiledError as stopped:
            return TrainStepOfScript(stopped.args[0], records, None)
        except MistakeError as mistake:
            return TrainStepOfScript(None, records, mistake)
        except SystemExit as ended:
            if ended.code:
                raise
        finally:
            jax.monitoring.unregister_event_duration_listener(stop_at_the_step)
    return TrainStepOfScript(largest, records, None)


@contextlib.contextmanager
def _command_line(script: Path, arguments: Sequence[str]) -> Iterator[None]:
    """Set the command line of a script, and its folder as the first to import from."""
    argv, path = sys.argv, list(sys.path)
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.absolute().parent))
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, path
