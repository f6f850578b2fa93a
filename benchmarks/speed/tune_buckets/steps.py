"""Training steps with buckets of some size, made by a function of a user, and a plot of times."""

import importlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks.speed.tune_buckets.tuner import BucketTrial
from dynamiq_jax._console.errors import CommandError

MakeStep = Callable[[int], Callable[[], Any]]  # bucket size in bytes to a function of one step
_EXAMPLE = "Give MODULE:FUNCTION, such as my_training:make_step"


def find_factory(text: str) -> MakeStep:
    """Import a function by the names of its module and itself, also from the working directory.

    Raises:
      CommandError: there is no such module or function.
    """
    module_name, _, name = text.partition(":")
    if not module_name or not name:
        raise CommandError(f"{text!r} names no function. {_EXAMPLE}.")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # something that the module itself imports
        raise CommandError(
            f"{text!r}: no module {error.name!r} here or in the environment. {_EXAMPLE}."
        ) from None
    factory = getattr(module, name, None)
    if not callable(factory):
        raise CommandError(f"{text!r}: {module_name} has no function {name!r}. {_EXAMPLE}.")
    return factory


def make_step(factory: MakeStep, bucket_bytes: int) -> Callable[[], Any]:
    """Make the function of one step.

    Raises:
      CommandError: the factory returned something else.
    """
    step = factory(bucket_bytes)
    if not callable(step):
        raise CommandError(
            f"The function returned a {type(step).__name__} for buckets of {bucket_bytes} bytes. "
            "Return a function without arguments that takes one training step."
        )
    return step


def save_plot(path: Path, trials: Sequence[BucketTrial]) -> None:
    """Draw the time of a step against the bucket size.

    Args:
      path: the file.
      trials: the fastest first.
    """
    figure = Figure(layout="tight")
    axis = figure.subplots()
    ordered = sorted(trials)
    axis.plot(
        [trial.bucket_bytes / 2**20 for trial in ordered],
        [1e3 * trial.seconds for trial in ordered],
        "o-",
        color="#1864ab",
    )
    best = trials[0].bucket_bytes / 2**20, 1e3 * trials[0].seconds
    axis.plot(*best, "o", ms=12, mfc="none", mec="red")
    axis.annotate(
        f"{best[0]:.3g} MiB", best, (0, -16), color="red", textcoords="offset points", ha="center"
    )
    axis.set_xscale("log", base=2)
    axis.margins(y=0.2)
    axis.set(xlabel="bucket size (MiB)", ylabel="time of a step (ms)")
    axis.set_title("Time of a step against the bucket size")
    figure.savefig(path, dpi=150)
