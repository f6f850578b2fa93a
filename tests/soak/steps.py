"""The step of a program: its collectives inside one jitted function on a mesh.

A worker is a device. Everything that a step takes and returns is stacked, with an axis of the
workers in front, so that the copy that each worker has of a result is seen by itself.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from tests.soak.programs import COMPRESS, HALVES, Collective, Leaf, Program
from tests.support.workers import first

Tree = Any


class Step:
    """A program on the devices of all processes.

    Args:
      program: collectives, and the axes of the mesh.
      processes: number of processes that the program is made for; the devices of a single one may
        stand for those of all.
    """

    def __init__(self, program: Program, processes: int):
        self.program, names = program, program.mesh
        shape = (processes, -1) if len(names) == 2 else (-1,)
        devices = np.array(jax.devices()).reshape(shape)
        self.mesh = Mesh(devices, names, axis_types=(AxisType.Auto,) * len(names))
        self.workers = devices.size
        self.stacked = P(names)
        self.values = self.put(
            [
                self._drawn(number, each, (self.workers,))
                for number, each in enumerate(program.collectives)
            ]
        )
        self.weights = [  # parameters of global functions
            self._drawn(0xA, each) if each.kind == COMPRESS else [] for each in program.collectives
        ]

    def put(self, tree: Tree) -> Tree:
        """Place stacked arrays of all workers, of which each process has its own rows."""
        sharding = NamedSharding(self.mesh, self.stacked)

        def place(leaf: np.ndarray) -> Array:
            return jax.make_array_from_callback(leaf.shape, sharding, lambda rows: leaf[rows])

        return jax.tree.map(place, tree)

    def compile(self) -> None:
        """Trace and compile the first state and the step.

        Where a process traces another step alone, calls do so. While it lowers that one, the others
        may wait with theirs: of two programs that are lowered, nobody knows which one is for a log.
        """
        sharding = NamedSharding(self.mesh, self.stacked)
        start = jax.jit(self._start, out_shardings=sharding)
        if self.program.alone is not None:
            self.start, self.run = start, jax.jit(self._step, out_shardings=sharding)
            return
        start = start.lower(self.values, self.weights)
        self.start = start.compile()
        state = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            start.out_info,
        )
        step = jax.jit(self._step, out_shardings=sharding)
        self.run = step.lower(state, self.values, self.weights, np.int32(0)).compile()

    # ---------------------------------------------------------------------------------- values

    def _shapes(self, each: Collective, whole_in: str) -> list[tuple[int, int]]:
        """Return the shapes of leaves of one worker, which are whole in one kind of collective."""
        count = self.mesh.shape[each.axes[0]] if each.kind == whole_in else 1
        return [(leaf.rows * count, leaf.columns) for leaf in each.leaves]

    def _drawn(
        self, number: int, each: Collective, stacked: tuple[int, ...] = ()
    ) -> list[np.ndarray]:
        """Draw values. Those that are summed exactly are integers, which no order rounds."""
        random = np.random.default_rng((self.program.seed, number))
        values = []
        for shape, leaf in zip(self._shapes(each, "psum_scatter"), each.leaves, strict=True):
            is_exact = each.method == "exact" or leaf.rows * leaf.columns < 1024
            size = (*stacked, *shape)
            drawn = random.integers(-8, 9, size) if is_exact else random.standard_normal(size)
            values.append(drawn.astype(np.float32).astype(jnp.dtype(leaf.dtype)))
        return values

    # ------------------------------------------------------------------------------------- step

    def _start(self, values: Tree, weights: Tree) -> Tree:
        """Return the first state: sums of results, and states of methods."""
        spec = self.stacked

        def local(values: Tree) -> Tree:
            return [
                _stacked(self._transformation(each).init(first(values[number])).method)
                for number, each in enumerate(self.program.collectives)
                if each.kind == "all_reduce_gradients"
            ]

        map_local = jax.shard_map(
            local, mesh=self.mesh, in_specs=spec, out_specs=spec, check_vma=self.program.check_vma
        )
        states = map_local(values) if self._is_stateful() else []
        sums = [
            [jnp.zeros((self.workers, *shape)) for shape in self._shapes(each, "all_gather")]
            for each in self.program.collectives
        ]
        return {"sums": sums, "states": states}

    def _is_stateful(self) -> bool:
        return any(each.kind == "all_reduce_gradients" for each in self.program.collectives)

    def _step(self, state: Tree, values: Tree, weights: Tree, step: Array) -> Tree:
        results, states = self._results(values, weights, state["states"], step)
        sums = jax.tree.map(
            lambda total, leaf: total * np.float32(0.5) + leaf.astype(jnp.float32),
            state["sums"],
            results,
        )
        return {"sums": sums, "states": states}

    def _results(self, values: Tree, weights: Tree, states: Tree, step: Array) -> Any:
        collectives, spec = self.program.collectives, self.stacked
        inner = [n for n, each in enumerate(collectives) if each.kind != COMPRESS]

        def local(values: Tree, states: Tree, step: Array) -> Any:
            results: list[Tree] = []
            left, after_step = list(states), []
            for number in inner:
                each = collectives[number]
                own = self._changed(first(values[number]), each, results, step)
                if each.kind == "all_reduce_gradients":
                    before = dq.AllReduceState(step, first(left.pop(0)))
                    result, after = self._transformation(each).update(own, before)
                    after_step.append(_stacked(after.method))
                else:
                    result = self._call(number, own, step)
                results.append(result)
            return _stacked(results), after_step

        results, after_step = jax.shard_map(
            local,
            mesh=self.mesh,
            in_specs=(spec, spec, P()),
            out_specs=spec,
            check_vma=self.program.check_vma,
        )([values[n] for n in range(len(collectives))], states, step)
        for number in range(len(inner), len(collectives)):
            each = collectives[number]
            own = self._changed(values[number], each, results, step)
            results = [*results, self._compress(each, own, weights[number])]
        return results, after_step

    def _changed(self, own: Tree, each: Collective, results: list[Tree], step: Array) -> Tree:
        """Return the values of a step, which may depend on the results of another collective."""
        factor = (1 + step % 3).astype(jnp.float32)
        if each.after is not None:
            other = jax.tree.leaves(results[each.after])[0].astype(jnp.float32)
            # Of one worker or of all of them, stacked: an element of each.
            is_stacked = each.kind == COMPRESS
            element = (
                other.reshape(other.shape[0], -1)[:, :1] if is_stacked else other.reshape(-1)[0]
            )
            factor = factor + jnp.round(jnp.tanh(element) * np.float32(2))
            factor = factor[..., None] if is_stacked else factor
        return [(leaf.astype(jnp.float32) * factor).astype(leaf.dtype) for leaf in own]

    def _transformation(self, each: Collective) -> Any:
        method = _compression(each)
        return dq.all_reduce_gradients(_names(each), seed=self.program.seed, method=method)

    def _call(self, number: int, own: Tree, step: Array) -> Tree:
        each = self.program.collectives[number]
        key = jax.random.fold_in(jax.random.key(self.program.seed + number), step)
        tiled = {"tiled": True} if each.kind in HALVES else {}
        call = getattr(dq, each.kind)
        return call(own, _names(each), key=key, method=_compression(each), **tiled)

    def _compress(self, each: Collective, own: Tree, weights: Tree) -> Tree:
        """Return gradients whose copies are stacked again, that of each worker in its own row."""
        gradients = dq.compress(
            jax.grad(_loss),
            _names(each),
            in_specs=(P(), self.stacked),  # This function is called inside of a `jax.jit`.
            method=_compression(each),
        )(weights, own)
        return jax.tree.map(
            lambda leaf: jnp.broadcast_to(leaf[None], (self.workers, *leaf.shape)), gradients
        )


def another(program: Program) -> Program:
    """Return a program like one, but with other shapes."""
    collectives = tuple(
        dataclasses.replace(each, leaves=(*each.leaves, Leaf(1, 7, "float32")))
        for each in program.collectives
    )
    return dataclasses.replace(program, collectives=collectives, alone=None)


def _loss(weights: Tree, values: Tree) -> Array:
    """Return a loss whose gradient is the sum of all workers' values, times one more than the
    weights.
    """
    total = jnp.float32(0)
    for weight, value in zip(weights, values, strict=True):
        weight, value = weight.astype(jnp.float32), value.astype(jnp.float32)
        total = total + ((weight + np.float32(0.5) * weight * weight) * value).sum()
    return total


def _compression(each: Collective) -> dq.Compression:
    return dq.Compression(
        each.method,
        each.topology,
        bucket_bytes=each.bucket_bytes,
        bucketing=each.bucketing,
        unrolled_buckets=each.unrolled_buckets,
    )


def _names(each: Collective) -> Any:
    return each.axes if len(each.axes) > 1 else each.axes[0]


def _stacked(tree: Tree) -> Tree:
    return jax.tree.map(lambda leaf: leaf[None], tree)
