"""One all-reduce of given gradients, with all workers simulated on one device.

The workers are rows of a batch, and run the program that real ones run.
"""

import dataclasses
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

from dynamiq_jax._workshop.gradient_files import Gradients
from dynamiq_jax._workshop.machine import num_cores
from dynamiq_jax._workshop.settings import Setting

_AXIS = "workers"
_GROUP = 256  # coordinates whose relative error is looked at together


@dataclasses.dataclass(frozen=True)
class Simulated:
    """Errors of one setting on the gradients of one step, and its time."""

    vnmse: float  # against the sum in float64
    relative: float  # mean over groups of 256 of their squared error over their squared norm
    gain: float  # the sum's component along the truth; of an unbiased method 1 on average
    seconds: float  # of one call, all workers on this machine
    replicas_equal: bool  # all workers hold the same bits


class Simulation:
    """A setting compiled for gradients of some shapes.

    Args:
      setting: how to sum.
      gradients: arrays [workers, *shape].
    """

    def __init__(self, setting: Setting, gradients: Gradients):
        def reduce(tree: Gradients, seed: Array) -> tuple[Gradients, Array]:
            key = jax.random.key(seed)
            sums = jax.vmap(lambda local: setting.all_reduce(local, _AXIS, key), axis_name=_AXIS)(
                tree
            )
            bits = [jax.lax.bitcast_convert_type(leaf, jnp.uint32) for leaf in sums.values()]
            equal = jnp.stack([jnp.all(leaf == leaf[:1]) for leaf in bits]).all()
            return {name: leaf[0] for name, leaf in sums.items()}, equal

        self._function = jax.jit(reduce).lower(gradients, np.uint32(0)).compile()

    def __call__(self, gradients: Gradients, seeds: Sequence[int]) -> Simulated:
        """Sum gradients with several seeds: mean errors, and the time of the fastest."""
        truth = _flat({name: leaf.sum(0, np.float64) for name, leaf in gradients.items()})
        on_device = jax.device_put(gradients)
        times, found, equal = [], [], True
        for seed in seeds:
            start = time.perf_counter()
            sums, same = jax.block_until_ready(self._function(on_device, np.uint32(seed)))
            times.append(time.perf_counter() - start)
            equal = equal and bool(same)
            found.append(_errors(_flat(sums), truth))
        vnmse, relative, gain = np.mean(found, axis=0)
        return Simulated(float(vnmse), float(relative), float(gain), min(times), equal)


def codec_ns(seconds: float, size: int, num_workers: int) -> float:
    """Return nanoseconds of one core for each coordinate and worker, if all cores were busy."""
    return 1e9 * seconds * num_cores() / (size * num_workers)


def _errors(estimate: NDArray, truth: NDArray) -> tuple[float, float, float]:
    squared, norms = (_of_groups(x) for x in ((estimate - truth) ** 2, truth**2))
    nonzero = norms > 0
    return (
        squared.sum() / norms.sum(),
        np.mean(squared[nonzero] / norms[nonzero]),
        estimate @ truth / (truth @ truth),
    )


def _of_groups(values: NDArray) -> NDArray:
    return np.pad(values, (0, -values.size % _GROUP)).reshape(-1, _GROUP).sum(axis=1)


def _flat(tree: Gradients) -> NDArray:
    return np.concatenate([np.asarray(tree[name], np.float64).reshape(-1) for name in sorted(tree)])
