"""Gradient accumulation of the workers of one process, each until a compute threshold."""

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dynamiq_jax.parts import vary_over
from dynamiq_research.drop_compute.thresholds import Table
from dynamiq_research.drop_compute.workers import LOCAL, Workers

P = PartitionSpec
# Seconds at an event of a worker's step: 0 is its start, m the end of its m-th micro-batch, and one
# more than the number of micro-batches the end of the step, after the all-reduce. A clock can have
# a method `check(workers, micro_batches)`, which raises ValueError for others than its own.
Clock = Callable[[int, int, int], float]  # (step, worker, event)


def wall_clock(step: int, worker: int, event: int) -> float:
    """Return the seconds of this machine's clock."""
    del step, worker, event
    return time.perf_counter()


class Sums(NamedTuple):
    """Sums over the micro-batches of a step, of each device along a leading axis."""

    gradient: Any  # of weight times gradient, [devices, *shape], float32 at least
    loss: Array  # of weight times loss, float32 [devices]
    weight: Array  # float32 [devices]
    done: Array  # micro-batches, int32 [devices]


class Accumulated(NamedTuple):
    """Result of the loops of all workers of this process."""

    sums: Sums  # split over the devices of the mesh
    starts: Table  # [workers of this process]: the clock at the start of each loop
    # Seconds after the start at which micro-batches were done, [workers of this process,
    # micro_batches]. NaN for those that nobody waited for, which are none without a threshold.
    elapsed: Table


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Accumulation:
    """Loops of all workers of this process over the micro-batches of a step.

    Each worker is a group of devices with programs of its own, which do not communicate: so workers
    may do other numbers of micro-batches.
    """

    loss_fn: Callable[[Any, Any], Array]
    num_targets: Callable[[Any, Any], Array] | None
    workers: Workers
    min_done: int
    in_flight: int
    clock: Clock

    def run(
        self, params: Any, micro_batches: Sequence[Any], threshold: float, step: int
    ) -> Accumulated:
        """Accumulate the gradients of this process.

        Args:
          params: pytree of arrays, replicated over the mesh.
          micro_batches: rows of this process; see `DropCompute.step`.
          threshold: seconds after which a worker starts no further micro-batch.
          step: number of the step, for the clock.
        """

        # Before threads start. Programs are made once, and the first access to the shards of an
        # array, which JAX keeps, is not safe in several threads.
        _ = self._programs
        views = [self.workers.view(params, mesh) for mesh in self.workers.local]

        def accumulate(number: int) -> tuple[Sums, list[float]]:
            return self._accumulate(number, views[number], micro_batches, threshold, step)

        numbers = range(len(views))
        # A thread waits for each: a slow worker must not hide when another was done. Threads have
        # none of the caller's contexts, such as a mesh, which is not that of a worker.
        with ThreadPoolExecutor(len(numbers)) as threads:
            accumulated = list(threads.map(accumulate, numbers))
        seconds = np.full((len(accumulated), 1 + len(micro_batches)), np.nan)
        for row, (_, read) in zip(seconds, accumulated, strict=True):
            row[: len(read)] = read
        sums = self.workers.joined([sums for sums, _ in accumulated])
        return Accumulated(sums, seconds[:, 0], seconds[:, 1:] - seconds[:, :1])

    def _accumulate(
        self, number: int, own: Any, micro_batches: Sequence[Any], threshold: float, step: int
    ) -> tuple[Sums, list[float]]:
        """Run the loop of one worker with its own view; also return the clock at its events."""
        first, add = self._programs[number]
        worker = self.workers.first + number
        marks: list[Array] = []
        read = [self.clock(step, worker, 0)]

        def wait_for_next() -> None:
            marks[len(read) - 1].block_until_ready()  # the clock has to follow the device
            read.append(self.clock(step, worker, len(read)))

        sums = first(own)
        for index in range(len(micro_batches)):
            if index > self.in_flight:
                wait_for_next()
                if index >= self.min_done and read[-1] - read[0] >= threshold:
                    break
            sums, mark = add(sums, own, self.workers.rows(micro_batches[index], number))
            marks.append(mark)
        while threshold == math.inf and len(read) <= len(marks):
            wait_for_next()
        return sums, read

    @functools.cached_property
    def _programs(self) -> list[tuple[Callable[..., Sums], Callable[..., tuple[Sums, Array]]]]:
        """Programs of each worker: the sums of no micro-batch, and with one more."""
        return [(self._first(mesh), self._add(mesh)) for mesh in self.workers.local]

    def _first(self, mesh: Mesh) -> Callable[..., Sums]:
        def zeros(params: Any) -> Sums:
            def of(shape: tuple[int, ...], dtype: Any) -> Array:
                return jnp.zeros((mesh.size, *shape), dtype)

            gradient = jax.tree.map(lambda leaf: of(leaf.shape, sum_dtype(leaf)), params)
            scalar = of((), jnp.float32)
            return Sums(gradient, loss=scalar, weight=scalar, done=of((), jnp.int32))

        return jax.jit(zeros, out_shardings=NamedSharding(mesh, P(LOCAL)))

    def _add(self, mesh: Mesh) -> Callable[..., tuple[Sums, Array]]:
        def local(sums: Sums, params: Any, batch: Any) -> tuple[Sums, Array]:
            # As varying, they have gradients of this device's rows.
            own = vary_over(params, (LOCAL,))
            loss, grads = jax.value_and_grad(self.loss_fn)(own, batch)
            loss = loss.astype(jnp.float32)
            weight = jnp.ones((), jnp.float32)
            if self.num_targets is not None:
                weight = jnp.asarray(self.num_targets(params, batch)).astype(jnp.float32)

            def plus(total: Array, gradient: Array) -> Array:
                weighted = weight.astype(total.dtype) * gradient.astype(total.dtype)
                # A mean over no targets may be NaN, and zero times NaN is NaN.
                return total + jnp.where(weight == 0, jnp.zeros_like(weighted), weighted)[None]

            after = Sums(
                jax.tree.map(plus, sums.gradient, grads),
                loss=plus(sums.loss, loss),
                weight=sums.weight + weight[None],
                done=sums.done + 1,
            )
            return after, loss[None]

        def add(sums: Sums, params: Any, batch: Any) -> tuple[Sums, Array]:
            specs = jax.tree.map(lambda leaf: P(LOCAL) if leaf.ndim else P(), batch)
            mapped = jax.shard_map(
                local, mesh=mesh, in_specs=(P(LOCAL), P(), specs), out_specs=P(LOCAL)
            )
            return mapped(sums, params, batch)

        return jax.jit(add, donate_argnums=0)


def sum_dtype(leaf: Any) -> Any:
    """Return the dtype in which gradients of a parameter are summed: float32 at least."""
    return leaf.dtype if leaf.dtype.itemsize >= 4 else jnp.float32
