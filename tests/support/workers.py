"""Two ways to run one per-worker function: simulated by vmap, and on a mesh of devices. Methods
that compile fast.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from dynamiq_jax.methods import Axis, Call, ChunkedMethod, RecodedChunks, Reduced, WireCost
from dynamiq_jax.topologies import Topology, resolve_topology

# With two widths, an all-reduce has larger steps to take.
TWO_WIDTHS = dq.DynamiQ(bits=6.0, widths=(4, 8))

PerWorker = Callable[..., Any]  # (key, *local trees) -> local tree


def tiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return functools.partial(function, tiled=True)


# Each with the exact one of JAX.
COLLECTIVES = {
    "psum": (dq.psum, lax.psum),
    "pmean": (dq.pmean, lax.pmean),
    "psum_scatter": (tiled(dq.psum_scatter), tiled(lax.psum_scatter)),
    "all_gather": (tiled(dq.all_gather), tiled(lax.all_gather)),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class StochasticBF16(ChunkedMethod):
    """Stochastic rounding to bfloat16, with noise of the key, the chunk and the turn: for tests of
    keys and of noise that do not depend on the method. Compiles in a fifth of the time of
    `TWO_WIDTHS`. A rounding has a vNMSE of about 5e-6.
    """

    def wire_cost(self, call: Call) -> WireCost:
        return WireCost(payload_bytes=2 * -(-call.size // call.num_chunks))

    def bind(self, values: Array, call: Call, key: Array) -> RecodedChunks:
        seed = jax.random.bits(key, (), jnp.uint32)

        def encode(values: Array, chunk: Array, turn: Any) -> Array:
            noise = jnp.arange(values.size, dtype=jnp.uint32) * np.uint32(0x9E3779B9) + seed
            for number in (chunk, turn):  # a hash
                noise = noise ^ (jnp.asarray(number, jnp.uint32) * np.uint32(0x27D4EB2F))
                noise = (noise ^ (noise >> 16)) * np.uint32(0x85EBCA6B)
                noise = (noise ^ (noise >> 13)) * np.uint32(0xC2B2AE35)
            bits = lax.bitcast_convert_type(values, jnp.uint32)
            return ((bits + (noise >> 16)) >> 16).astype(jnp.uint16)

        def decode(codes: Array, chunk: Array) -> Array:
            return lax.bitcast_convert_type(codes.astype(jnp.uint32) << 16, jnp.float32)

        return RecodedChunks(local=call.local_chunks(values), encode=encode, decode=decode)


STOCHASTIC = StochasticBF16()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Largest(dq.methods.Exact):
    """Sums of the largest coordinates of each worker: biased, and hops lose nothing."""

    share: float = 1 / 32

    def all_reduce(self, flat: Array, call: Call, key: Array, state: Any) -> Reduced:
        sizes = jnp.abs(flat)
        least = jnp.sort(sizes)[-max(1, int(self.share * flat.size))]
        applied = jnp.where(sizes < least, jnp.zeros((), flat.dtype), flat)
        reduced = super().all_reduce(applied, call, key, state)
        return dataclasses.replace(reduced, applied=applied)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decaying(dq.methods.Exact):
    """Adds a part of the values of the step before. Says nothing about the kind of its state."""

    decay: float = 0.5
    is_stateful = True

    def init_state(self, call: Call) -> Array:
        return jnp.zeros(call.size)

    def all_reduce(self, flat: Array, call: Call, key: Array, state: Any) -> Reduced:
        values = flat + self.decay * state
        return dataclasses.replace(super().all_reduce(values, call, key, state), state=values)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OfShapes(dq.methods.Exact):
    """Takes leaves as they are."""

    uses_shapes = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class CountingZeros(dq.methods.Exact):
    """The exact sum, with a metric of its own: the share of its coordinates that are zero."""

    metrics = ("zeros",)

    def all_reduce(self, flat: Array, call: Call, key: Array, state: Any) -> Reduced:
        reduced = super().all_reduce(flat, call, key, state)
        zeros = lax.pmean(jnp.mean((flat == 0).astype(jnp.float32)), call.axis.name)
        return dataclasses.replace(reduced, metrics={"zeros": zeros})


def mesh_of(*, kind: AxisType = AxisType.Auto, **sizes: int) -> Mesh:
    """A mesh of axes by name, the slowest first, which the compiler manages by default."""
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(kind,) * len(sizes))


def first(stacked: Any) -> Any:
    """The first row of each leaf."""
    return jax.tree.map(lambda leaf: leaf[0], stacked)


def over(axes: tuple[str, ...], fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn` on workers of several axes, slowest first, on one device."""
    for name in reversed(axes):
        fn = jax.vmap(fn, axis_name=name)
    return jax.jit(fn)


def simulated(fn: PerWorker) -> Callable[..., Any]:
    """`fn` on all workers at once, on one device: `(key, *stacked trees)` to a stacked tree."""

    def run(key: jax.Array, *stacked: Any) -> Any:
        return jax.vmap(lambda *local: fn(key, *local), axis_name="data")(*stacked)

    return jax.jit(run)


def described(tree: Any) -> Any:
    """Shapes and dtypes of all leaves."""
    return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree)


def mapped(fn: Callable[..., Any], mesh: Mesh, *, check_vma: bool = True) -> Callable[..., Any]:
    """`fn` of local trees on the devices of a mesh, one worker each: a function of stacked trees to
    a stacked tree. Leading axes are those of the mesh.
    """
    axes, number = P(*mesh.axis_names), len(mesh.axis_names)

    def local(*stacked: Any) -> Any:
        result = fn(*jax.tree.map(lambda leaf: leaf[(0,) * number], stacked))
        return jax.tree.map(lambda leaf: leaf[(None,) * number], result)

    return jax.shard_map(local, mesh=mesh, in_specs=axes, out_specs=axes, check_vma=check_vma)


def mesh_program(fn: PerWorker, mesh: Mesh, *, check_vma: bool = True) -> Any:
    """Jit `fn` on the devices of a mesh, one worker each: `(key, tuple of stacked trees)` to a
    stacked tree, in which every replica has its own copy. Leading axes are those of the mesh.
    """
    axes = P(*mesh.axis_names)
    own = (0,) * len(mesh.axis_names)

    def local(key: jax.Array, stacked: tuple[Any, ...]) -> Any:
        result = fn(key, *jax.tree.map(lambda leaf: leaf[own], stacked))
        return jax.tree.map(lambda leaf: leaf[(None,) * len(own)], result)

    return jax.jit(
        jax.shard_map(local, mesh=mesh, in_specs=(P(), axes), out_specs=axes, check_vma=check_vma)
    )


def on_mesh(fn: PerWorker, mesh: Mesh, *, check_vma: bool = True) -> Callable[..., Any]:
    """Run `fn` on the devices of a mesh: `(key, *stacked trees)` to a stacked tree."""
    program = mesh_program(fn, mesh, check_vma=check_vma)
    return lambda key, *stacked: program(key, stacked)


def call_on(size: int, num_workers: int, topology: Topology | str = "ring", **options: Any) -> Call:
    """Return the call of a bucket over the axis "data", for tests that call a method directly."""
    topology = resolve_topology(topology)
    return Call(size=size, axis=Axis("data", num_workers), topology=topology, **options)
