"""All-reduces over hosts that are emulated on this machine.

python -m benchmarks.emulation --hosts 4 --rate 200mbit
"""

from typing import Any

from dynamiq_jax._console import program


def _command() -> Any:
    from benchmarks.emulation.command import Emulation

    return Emulation


if __name__ == "__main__":
    program.run("python -m benchmarks.emulation", _command)
