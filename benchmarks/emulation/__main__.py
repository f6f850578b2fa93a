"""All-reduces over hosts that are emulated on this machine.

python -m benchmarks.emulation --hosts 4 --rate 200mbit
"""

from typing import Any

from benchmarks.harness.signals import stopping_cleanly
from dynamiq_jax._console import program

_NAME = "python -m benchmarks.emulation"


def _command() -> Any:
    from benchmarks.emulation.command import Emulation

    return Emulation


if __name__ == "__main__":
    with stopping_cleanly(_NAME, "; everything it made is removed"):
        program.run(_NAME, _command)
