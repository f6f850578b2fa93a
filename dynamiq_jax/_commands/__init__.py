"""The command `dynamiq-jax`: options and tables of its subcommands, each in a file.

The library imports neither this package nor the packages that only it needs.
"""

import sys
from typing import Any

import dynamiq_jax
from dynamiq_jax._console import program

_DESCRIPTION = """Compressed gradient all-reduce for JAX: should you use it, does your step use it,
and what does it bring on your hardware?

In a program, one line wraps a train step: step = dq.compress(step, "data")

examples:

  dynamiq-jax advise --link 25gbit --size 7G         should I compress? (runs nothing)
  dynamiq-jax doctor train.py                        does my train step compress what it should?
  dynamiq-jax compare --workers 8 16                 every method on the same gradients
  dynamiq-jax verify                                 are the kernels right here?
  dynamiq-jax bench                                  on the devices of this process
  dynamiq-jax bench --cpu-devices 4 --sizes 1Mi 8Mi  on virtual CPU devices
  dynamiq-jax islands /shared/run-1                  who takes part in a run of islands?

`dynamiq-jax COMMAND --help` explains a command, `dynamiq-jax --version` prints the version. A
setting is `psum`, which is jax.lax.psum, or
[ef+|gc+|ef21m+]METHOD[:BITS][:TOPOLOGY][:FIELD=VALUE]..."""


def main() -> None:
    """Run the command."""
    if sys.argv[1:] == ["--version"]:
        with program.ending_with_reader():
            print(f"dynamiq-jax {dynamiq_jax.__version__}")
        return
    program.run("dynamiq-jax", _commands, _DESCRIPTION)


def _commands() -> dict[str, Any]:
    from dynamiq_jax._commands.advise import Advise
    from dynamiq_jax._commands.bench import Bench
    from dynamiq_jax._commands.compare import Compare
    from dynamiq_jax._commands.doctor import Doctor
    from dynamiq_jax._commands.islands import ShowIslands
    from dynamiq_jax._commands.verify import Verify

    # A new command is a file with such a class, and a name here.
    return {
        "advise": Advise,
        "doctor": Doctor,
        "compare": Compare,
        "verify": Verify,
        "bench": Bench,
        "islands": ShowIslands,
    }
