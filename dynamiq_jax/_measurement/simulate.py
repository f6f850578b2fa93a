"""One all-reduce of given gradients, with all workers on virtual devices of this machine.

They run the program that real workers run.
"""

import dataclasses
import statistics
import time
from collections.abc import Iterable, Sequence

import jax
import numpy as np
from numpy.typing import NDArray

from dynamiq_jax._console.environment import num_cores
from dynamiq_jax._measurement.all_reduce import CompiledAllReduce, checksums
from dynamiq_jax._measurement.devices import make_mesh
from dynamiq_jax._measurement.gradient_files import Gradients
from dynamiq_jax._measurement.settings import Setting

_GROUP = 256  # coordinates whose relative error is looked at together


def make_devices(num_workers: int) -> None:
    """Make virtual CPU devices for all workers, before the first use of JAX."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", max(8, num_workers))


@dataclasses.dataclass(frozen=True)
class Simulated:
    """Errors of one setting on the gradients of one step, and its time."""

    vnmse: float  # against the sum in float64
    relative: float  # mean over groups of 256 of their squared error over their squared norm
    above_half: float  # share of these groups whose squared error is above half their squared norm
    gain: float  # the sum's component along the truth; of an unbiased method 1 on average
    seconds: float  # of one call, all workers on this machine
    replicas_equal: bool  # all workers hold the same bits


class Simulation:
    """A setting compiled for gradients [workers, *shape] of some shapes.

    Raises:
      ValueError: there are fewer devices than workers; see `make_devices`.
    """

    def __init__(self, setting: Setting, gradients: Gradients):
        num_workers = len(next(iter(gradients.values())))
        devices = jax.devices()
        if len(devices) < num_workers:
            raise ValueError(
                f"gradients are of {num_workers} workers, but there are {len(devices)} devices. "
                "Call make_devices before anything else of JAX."
            )
        self._compiled = CompiledAllReduce(setting, make_mesh(devices[:num_workers]), gradients)

    def __call__(self, gradients: Gradients, seeds: Sequence[int]) -> Simulated:
        """Sum gradients with several seeds: mean errors, and the time of the fastest."""
        truth = _flat({name: leaf.sum(0, np.float64) for name, leaf in gradients.items()})
        sums, seconds, equal = zip(*(self.sums(gradients, seed) for seed in seeds), strict=True)
        errors = [_errors(_flat(tree), truth) for tree in sums]
        vnmse, relative, above_half, gain = np.mean(errors, axis=0).tolist()
        return Simulated(vnmse, relative, above_half, gain, min(seconds), all(equal))

    def sums(self, gradients: Gradients, seed: int) -> tuple[Gradients, float, bool]:
        """Return the sums on the first worker, their seconds, and whether all workers have them."""
        on_devices = jax.device_put(gradients, self._compiled.sharding)
        start = time.perf_counter()
        sums = self._compiled(on_devices, seed)
        seconds = time.perf_counter() - start
        first = jax.tree.map(lambda leaf: np.asarray(leaf.addressable_shards[0].data)[0], sums)
        equal = all(len({*checksums(leaf)}) == 1 for leaf in sums.values())
        return first, seconds, equal


def codec_ns(seconds: float, size: int, num_workers: int) -> float:
    """Return nanoseconds of one core for each coordinate and worker, if all cores were busy."""
    return 1e9 * seconds * num_cores() / (size * num_workers)


def geometric_mean(values: Iterable[float]) -> float:
    """Return the geometric mean of all positive values; 0 if there is none."""
    positive = [value for value in values if value > 0]
    return statistics.geometric_mean(positive) if positive else 0.0


def relative_errors(estimate: NDArray, truth: NDArray) -> NDArray[np.float64]:
    """Return the squared error over the squared norm of each group of 256 that is not zero."""
    squared, norms = (
        np.pad(values, (0, -values.size % _GROUP)).reshape(-1, _GROUP).sum(axis=1)
        for values in ((estimate - truth) ** 2, truth**2)
    )
    return squared[norms > 0] / norms[norms > 0]


def _errors(estimate: NDArray, truth: NDArray) -> tuple[float, float, float, float]:
    relative = relative_errors(estimate, truth)
    return (
        np.sum((estimate - truth) ** 2) / (truth @ truth),
        relative.mean(),
        float(np.mean(relative > 0.5)),
        estimate @ truth / (truth @ truth),
    )


def _flat(tree: Gradients) -> NDArray:
    return np.concatenate([np.asarray(tree[name], np.float64).reshape(-1) for name in sorted(tree)])
