"""Gradients in files: one array for each parameter, with the worker as its first axis."""

import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dynamiq_jax.cli.errors import CommandError

Gradients = dict[str, NDArray[np.float32]]  # parameter to [workers, *shape]

_STEP = re.compile(r"(\d+)/(.+)")
_LARGE = 1024  # coordinates: smaller parameters are summed exactly in training, and left out here


def load(path: Path) -> dict[str, Gradients]:
    """Reads an .npz or .safetensors file.

    Args:
      path: the file. Its arrays are [workers, *shape]; names STEP/PARAMETER put them to the
        training step that they are of.

    Returns:
      Label of a step to its gradients; small parameters are left out.

    Raises:
      CommandError: the file cannot be read, or holds something else.
    """
    steps: dict[str, Gradients] = {}
    for name, array in _read(path).items():
        match = _STEP.fullmatch(name)
        step, parameter = match.groups() if match else ("", name)
        values = np.asarray(array).astype(np.float32)
        if values.ndim < 2:
            raise CommandError(
                f"--gradients {path}: {name!r} has shape {values.shape}. Give arrays whose first "
                "axis is the worker."
            )
        if not np.isfinite(values).all():
            raise CommandError(
                f"--gradients {path}: {name!r} holds NaN or Inf. Give gradients without, such as "
                "those of another step."
            )
        if values[0].size >= _LARGE:
            steps.setdefault(f"step {step}" if step else "", {})[parameter] = values
    if not steps:
        raise CommandError(
            f"--gradients {path}: no array of {_LARGE} coordinates or more for a worker. Give "
            "gradients as [workers, *shape]."
        )
    counts = {len(leaf) for gradients in steps.values() for leaf in gradients.values()}
    if len(counts) > 1:
        raise CommandError(
            f"--gradients {path}: arrays are of {sorted(counts)} workers. Give the same number of "
            "workers for all."
        )
    return steps


def num_workers(gradients: Gradients) -> int:
    """How many workers' gradients there are."""
    return len(next(iter(gradients.values())))


def _read(path: Path) -> Mapping[str, NDArray]:
    if not path.is_file():
        raise CommandError(f"--gradients {path}: there is no such file.")
    if path.suffix == ".npz":
        with np.load(path) as arrays:
            return dict(arrays)
    if path.suffix != ".safetensors":
        raise CommandError(f"--gradients {path}: give an .npz or a .safetensors file.")
    if importlib.util.find_spec("safetensors") is None:
        raise CommandError(
            f"--gradients {path}: safetensors is not installed: pip install 'dynamiq-jax[cli]'"
        )
    from safetensors import numpy as safetensors

    return safetensors.load_file(path)
