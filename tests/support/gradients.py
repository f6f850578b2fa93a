"""Gradients for tests, with heavy tails, and the error of an estimate."""

import numpy as np
from numpy.typing import NDArray

from dynamiq_jax._measurement.gradients import worker_gradient, worker_gradients

_SCALE, _TAIL = np.float32(1e-3), 4


def heavy_tailed(
    seed: int, shape: tuple[int, ...], *, spread: float = 2.0, scale: float = 1e-3
) -> NDArray[np.float32]:
    """Draw an array whose rows of 256 have lognormal magnitudes (`spread` octaves of standard
    deviation), and inside a row Student's t with 4 degrees of freedom: most values are small and a
    few large, at both levels.
    """
    flat = worker_gradient(0, int(np.prod(shape)), seed, agreement=0.0, octaves=spread, tail=_TAIL)
    return (np.float32(scale) * flat).reshape(shape)


def of_workers(
    seed: int, num_workers: int, size: int, *, agreement: float = 0.5
) -> NDArray[np.float32]:
    """Draw [num_workers, size]: a common signal plus each worker's own noise, with heavy tails.

    `agreement` is the share of the energy that the workers have in common.
    """
    like = {"octaves": 2.0, "tail": _TAIL}
    return _SCALE * worker_gradients(num_workers, size, seed, agreement=agreement, **like)


def vnmse(estimate: NDArray, truth: NDArray) -> float:
    """||estimate - truth||^2 / ||truth||^2 in float64."""
    estimate, truth = np.asarray(estimate, np.float64), np.asarray(truth, np.float64)
    return float(np.sum((estimate - truth) ** 2) / np.sum(truth**2))
