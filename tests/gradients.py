"""Gradients that look like gradients, and how far an estimate of their sum is off."""

import numpy as np
from numpy.typing import NDArray

ROW = 256


def heavy_tailed(
    seed: int, shape: tuple[int, ...], *, spread: float = 2.0, scale: float = 1e-3
) -> NDArray[np.float32]:
    """Rows of 256 with lognormal magnitudes (`spread` octaves of standard deviation), and inside a
    row Student's t with 4 degrees of freedom: most is small and a little is large, at both levels.
    """
    rng = np.random.default_rng(seed)
    size = int(np.prod(shape))
    num_rows = -(-size // ROW)
    magnitudes = scale * np.exp2(spread * rng.standard_normal((num_rows, 1)))
    rows = magnitudes * rng.standard_t(4, (num_rows, ROW))
    return rows.reshape(-1)[:size].reshape(shape).astype(np.float32)


def of_workers(
    seed: int, num_workers: int, size: int, *, agreement: float = 0.5
) -> NDArray[np.float32]:
    """[num_workers, size]: a common signal plus each worker's own noise of the same row magnitudes.

    `agreement` is the share of the energy that the workers have in common.
    """
    rng = np.random.default_rng(seed)
    num_rows = -(-size // ROW)
    magnitudes = 1e-3 * np.exp2(2.0 * rng.standard_normal((num_rows, 1)))
    parts = magnitudes * rng.standard_t(4, (num_workers + 1, num_rows, ROW))
    mixed = np.sqrt(agreement) * parts[:1] + np.sqrt(1 - agreement) * parts[1:]
    return mixed.reshape(num_workers, -1)[:, :size].astype(np.float32)


def vnmse(estimate: NDArray, truth: NDArray) -> float:
    """||estimate - truth||^2 / ||truth||^2 in float64."""
    estimate, truth = np.asarray(estimate, np.float64), np.asarray(truth, np.float64)
    return float(np.sum((estimate - truth) ** 2) / np.sum(truth**2))
