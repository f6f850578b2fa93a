"""The command `dynamiq-jax`: options and tables of its subcommands, each in a file.

The library imports neither this package nor the packages that only it needs.
"""

import importlib.util
import sys
from collections.abc import Callable
from typing import Any

import dynamiq_jax
from dynamiq_jax._console.pipes import ending_with_reader

_NEEDED = ("tyro", "rich")

_DESCRIPTION = """Measures compressed gradient all-reduce on your hardware, or on a slow network
emulated on one machine; predicts what it would bring; compares methods.

examples:

  dynamiq-jax verify                                 are the kernels right and fast here?
  dynamiq-jax bench                                  on the devices of this process
  dynamiq-jax bench --cpu-devices 4 --sizes 1Mi 8Mi  on virtual CPU devices
  dynamiq-jax network --hosts 4 --rate 200mbit       over emulated links (root)
  dynamiq-jax advise --link 25gbit --size 7G         should I compress? (runs nothing)
  dynamiq-jax compare --workers 8 16                 every method on the same gradients
  dynamiq-jax drop-compute --workers 200             should uneven workers stop early? (simulated)
  dynamiq-jax doctor train.py                        does my train step compress what it should?
  dynamiq-jax tune-buckets my_training:make_step     which buckets make my step fastest?
  dynamiq-jax bench --settings psum bf16:ring dynamiq:5:ring dynamiq:4:ring

A setting is METHOD[:BITS][:TOPOLOGY]; `psum` is jax.lax.psum. `dynamiq-jax COMMAND --help` explains
each command, `dynamiq-jax --version` prints the version."""


def main() -> None:
    """Run the command."""
    with ending_with_reader():
        _main()


def _main() -> None:
    if sys.argv[1:] == ["--version"]:
        print(f"dynamiq-jax {dynamiq_jax.__version__}")
        return
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(
            f"dynamiq-jax: {' and '.join(missing)} not installed. "
            "Install what the command line needs: pip install 'dynamiq-jax[cli]'"
        )
    import tyro

    from dynamiq_jax._commands.advise import Advise
    from dynamiq_jax._commands.bench import Bench
    from dynamiq_jax._commands.compare import Compare
    from dynamiq_jax._commands.doctor import Doctor
    from dynamiq_jax._commands.drop_compute import DropCompute
    from dynamiq_jax._commands.network import Network
    from dynamiq_jax._commands.tune_buckets import TuneBuckets
    from dynamiq_jax._commands.verify import Verify
    from dynamiq_jax._console.errors import CommandError
    from dynamiq_jax._console.signals import Stopped, stopping_cleanly

    # A new command is a file with such a class, and a name here.
    commands: dict[str, Callable[..., Any]] = {
        "bench": Bench,
        "network": Network,
        "advise": Advise,
        "compare": Compare,
        "doctor": Doctor,
        "drop-compute": DropCompute,
        "tune-buckets": TuneBuckets,
        "verify": Verify,
    }
    command = tyro.extras.subcommand_cli_from_dict(
        commands, prog="dynamiq-jax", description=_DESCRIPTION
    )
    try:
        with stopping_cleanly():
            status = command.run()
    except CommandError as error:
        sys.exit(f"dynamiq-jax: {error}")
    except Stopped as stopped:
        print(f"dynamiq-jax: {stopped}; everything it made is removed.", file=sys.stderr)
        sys.exit(128 + stopped.number)
    sys.exit(status)
