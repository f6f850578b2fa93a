"""Made-up gradients of workers that resemble those of a language model."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

_ROW = 256  # coordinates that share a magnitude


def worker_gradient(
    worker: int,
    size: int,
    seed: int,
    *,
    agreement: float = 0.5,
    octaves: float = 2.5,
    tail: int | None = None,
) -> NDArray[np.float32]:
    """Draw the gradient of one worker, which is the same on every machine.

    Args:
      seed: chooses the gradients of all workers.
      agreement: share of the energy that all workers have in common, 0 to 1.
      octaves: standard deviation of the logarithm of the magnitudes of rows of 256; 2.5 is that of
        a language model.
      tail: degrees of freedom of Student's t inside a row; None for normal values.

    Returns:
      float32 [size].
    """
    common = np.random.default_rng([seed, 0])
    own = np.random.default_rng([seed, 1 + worker])
    rows = -(-size // _ROW)

    def draw(rng: np.random.Generator) -> NDArray[np.float32]:
        if tail is None:
            return rng.standard_normal((rows, _ROW), np.float32)
        return rng.standard_t(tail, (rows, _ROW)).astype(np.float32)

    magnitudes = np.exp2(octaves * common.standard_normal((rows, 1), np.float32))
    signal, noise = draw(common), draw(own)
    share = np.float32(agreement)
    mixed = np.sqrt(share) * signal + np.sqrt(1 - share) * noise
    return (magnitudes.astype(np.float32) * mixed).reshape(-1)[:size]


def worker_gradients(
    num_workers: int, size: int, seed: int, **statistics: Any
) -> NDArray[np.float32]:
    """Draw the gradients of all workers, float32 [num_workers, size]; see `worker_gradient`."""
    return np.stack(
        [worker_gradient(worker, size, seed, **statistics) for worker in range(num_workers)]
    )
