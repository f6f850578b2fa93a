"""Gradients of workers in files: an array for each parameter, whose first axis is the worker."""

import importlib.util
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from dynamiq_jax._console.errors import CommandError, install_extra
from dynamiq_jax._inputs.compression import Compression

Gradients = dict[str, NDArray[np.float32]]  # parameter to [workers, *shape]

_STEP = re.compile(r"(\d+)/(.+)")
_WRITERS = {".npz": "np.savez", ".safetensors": "safetensors.numpy.save_file"}
# Coordinates: training sums smaller parameters exactly, so that they have no error to measure.
LARGE = Compression().exact_below


def load(path: Path) -> dict[str, Gradients]:
    """Read the arrays [workers, *shape] of an .npz or .safetensors file.

    A name STEP/PARAMETER says of which training step an array is.

    Returns:
      Label of a step to its gradients; small parameters are left out.

    Raises:
      CommandError: the file cannot be read, or holds something else.
    """
    try:
        return _steps_of(_read(path))
    except ValueError as error:
        raise CommandError(f"--gradients {path}: {error}") from None


def _steps_of(arrays: Mapping[str, NDArray]) -> dict[str, Gradients]:
    steps: dict[str, Gradients] = {}
    for name, array in arrays.items():
        match = _STEP.fullmatch(name)
        step, parameter = match.groups() if match else ("", name)
        if not any(jnp.issubdtype(array.dtype, kind) for kind in (np.floating, np.integer)):
            raise ValueError(
                f"{name!r} has dtype {array.dtype}. Give real numbers, such as float32."
            )
        with np.errstate(over="ignore"):  # becomes Inf, which is refused
            values = array.astype(np.float32)
        if values.ndim < 2 or not len(values):
            raise ValueError(
                f"{name!r} has shape {values.shape}. Give arrays whose first axis is the worker."
            )
        if not np.isfinite(values).all():
            raise ValueError(
                f"{name!r} holds NaN or Inf. Give gradients without, such as those of another step."
            )
        if values[0].size >= LARGE:
            steps.setdefault(f"step {step}" if step else "", {})[parameter] = values
    if not steps:
        raise ValueError(
            f"no array of {LARGE} coordinates or more for a worker. Give gradients as "
            "[workers, *shape]."
        )
    counts = {len(leaf) for gradients in steps.values() for leaf in gradients.values()}
    if len(counts) > 1:
        raise ValueError(
            f"arrays are of {sorted(counts)} workers. Give the same number of workers for all."
        )
    first = next(iter(steps))
    for step in steps:  # all go through one program
        one, other = ({(n, g.shape) for n, g in steps[each].items()} for each in (first, step))
        if one != other:
            raise ValueError(
                f"{min(one ^ other)[0]!r} of {step or 'no step'} is not as in "
                f"{first or 'no step'}, or has less than {LARGE} coordinates in one. Give all "
                "steps the same parameters. A number at the start of a name, before a slash, is "
                "its step."
            )
    return steps


def of_workers(gradients: Gradients, count: int) -> Gradients:
    """Return the gradients of the first workers."""
    return {name: leaf[:count] for name, leaf in gradients.items()}


def check_sums(path: Path, steps: Mapping[str, Gradients], counts: Iterable[int]) -> None:
    """Raise CommandError unless sums over the first workers can be measured.

    For each of `counts`, the file has to hold as many gradients, and their sum must not be zero.
    """
    for count in counts:
        for step, gradients in steps.items():
            there = len(next(iter(gradients.values())))
            if there < count:
                raise CommandError(
                    f"--workers: {count}, but {path} holds the gradients of {there}. Give at most "
                    f"{there}."
                )
            if not any(leaf[:count].sum(0, np.float64).any() for leaf in gradients.values()):
                raise CommandError(
                    f"--gradients {path}: the sum over {count} workers is zero everywhere"
                    f"{step and f' at {step}'}, and no error can be relative to it. Give other "
                    "gradients, or another number of workers."
                )


def _read(path: Path) -> Mapping[str, NDArray]:
    if not path.is_file():
        raise ValueError("there is no such file. Give the path of one.")
    if path.suffix not in _WRITERS:
        raise ValueError("its name has another suffix. Give an .npz or a .safetensors file.")
    if path.suffix == ".safetensors" and importlib.util.find_spec("safetensors") is None:
        raise ValueError(f"safetensors is not installed: {install_extra('cli')}")
    try:
        if path.suffix == ".safetensors":
            from safetensors.numpy import load_file

            return load_file(path)
        # Opened here, as NumPy leaves a damaged one open.
        with path.open("rb") as file, np.load(file) as members:
            arrays = dict(members)
        for name, array in arrays.items():
            if not isinstance(array, np.ndarray):  # but the bytes of another file
                raise ValueError(f"its member {name!r} is no .npy file")
        return arrays
    except Exception as error:  # a damaged file ends in any kind
        raise ValueError(
            f"cannot be read as {path.suffix}: {str(error)!r}. Give a file that "
            f"{_WRITERS[path.suffix]} wrote."
        ) from None
