"""Collectives of one program wait for each other, whichever functions send them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from tests.support.hlo import unordered
from tests.support.workers import STOCHASTIC, OfShapes, mapped, mesh_of

SIZE = 4096
SMALL_BUCKETS = dq.Compression(bucket_bytes=4 * SIZE, bucketing="in_order")
STRIPES = dq.Compression(bucket_bytes=2**18, bucketing="striped")


def key(number: int) -> jax.Array:
    return jax.random.key(number)


def pmean(x: jax.Array, number: int, **settings: Any) -> Any:
    return dq.pmean(x, "data", key=key(number), **settings)


def tree_of(x: jax.Array) -> dict[str, Any]:
    return {"w": x, "v": 2 * x, "bias": x[:8], "steps": jnp.arange(3), "any": x[:4] > 0}


def large(x: jax.Array) -> jax.Array:
    return jnp.broadcast_to(x[None], (64, SIZE))


def gathered(x: jax.Array, number: int) -> jax.Array:
    return dq.all_gather(x, "data", key=key(number))


def optimizers(x: jax.Array) -> Any:
    def update(method: str, gradient: jax.Array) -> Any:
        optimizer = optax.chain(dq.all_reduce_gradients("data", method=method), optax.sgd(0.1))
        updates, state = optimizer.update(gradient, optimizer.init(gradient), gradient)
        return updates, jax.tree.map(jnp.sum, state)

    return update("ef+blockint:4", x), update("bf16", 2 * x)


INSIDE: dict[str, Callable[[jax.Array], Any]] = {
    "twice": lambda x: (pmean(x, 0), pmean(2 * x, 1)),
    "thrice": lambda x: (
        pmean(x, 0),
        pmean(2 * x, 1, method=dq.Compression(topology="butterfly")),
        pmean(3 * x, 2),
    ),
    "all to all": lambda x: (
        pmean(x, 0),
        pmean(2 * x, 1, method=dq.Compression(topology="all_to_all")),
    ),
    "exact leaves beside": lambda x: (pmean(tree_of(x), 0), pmean(tree_of(2 * x), 1)),
    "buckets": lambda x: (pmean(tree_of(x), 0, method=SMALL_BUCKETS), pmean(x, 1)),
    "stripes": lambda x: (pmean(large(x), 0, method=STRIPES), pmean(x, 1)),
    "metrics": lambda x: (pmean(tree_of(x), 0, with_metrics=True), pmean(x, 1)),
    "limit": lambda x: (pmean(x, 0, method=dq.Compression(max_error=0.1)), pmean(x, 1)),
    "scatter and mean": lambda x: (
        dq.psum_scatter({"w": x, "bias": x[:8]}, "data", key=key(0), tiled=True),
        pmean(x, 1),
    ),
    "gather and mean": lambda x: (gathered(x, 0), pmean(x, 1), gathered(2 * x, 2)),
    "an inner function between": lambda x: (
        pmean(x, 0),
        jax.lax.cond(x[0] > 0, lambda: x, lambda: 2 * x),
        pmean(2 * x, 1),
    ),
    "optimizers": optimizers,
    "methods": lambda x: (
        pmean(x.reshape(64, -1), 0, method="mxfp4"),
        pmean(x, 1, method="mxfp8"),
        pmean(x, 2, method="blockint"),
        pmean(x, 3, method=OfShapes()),
    ),
}


FAST = ("twice", "exact leaves beside", "gather and mean")
FORMS = [
    pytest.param(name, True, marks=() if name in FAST else pytest.mark.slow) for name in INSIDE
]
FORMS += [pytest.param(name, False, marks=pytest.mark.slow) for name in FAST]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("name", "check_vma"), FORMS)
def test_collectives_of_one_trace_are_ordered(
    name: str, check_vma: bool, data_mesh: Callable[[int], Mesh]
) -> None:
    program = mapped(INSIDE[name], data_mesh(4), check_vma=check_vma)
    assert not unordered(text_of(program, jnp.ones((4, SIZE))))


@pytest.mark.parametrize("check_vma", [False, True])
def test_collectives_of_a_vmap_and_behind_it_are_ordered(
    check_vma: bool, data_mesh: Callable[[int], Mesh]
) -> None:
    def twice(x: jax.Array) -> Any:
        return pmean(x, 0, method=STOCHASTIC), pmean(2 * x, 1, method=STOCHASTIC)

    def local(x: jax.Array) -> Any:
        rows = jax.vmap(jax.vmap(twice))(x.reshape(2, 2, -1))
        return *rows, pmean(x, 2, method=STOCHASTIC)

    program = mapped(local, data_mesh(4), check_vma=check_vma)
    assert not unordered(text_of(program, jnp.ones((4, SIZE))))


def text_of(function: Callable[..., Any], *args: Any) -> str:
    return jax.jit(function).lower(*args).compile().as_text()


@pytest.mark.slow
def test_collectives_of_shards_and_fast_axes_are_ordered() -> None:
    mesh = mesh_of(data=2, fast=2, model=2)

    axes = ("data", "fast")

    def reduce(x: jax.Array) -> Any:
        tree = {"w": x[0, 0], "bias": x[0, 0, :8]}
        split = dq.pmean(tree, axes, key=key(0), method=dq.Compression(specs=P("model")))
        whole = dq.pmean(2 * x[0, 0], axes, key=key(1), method=dq.Compression(specs=P()))
        return split["w"], whole

    program = jax.shard_map(reduce, mesh=mesh, in_specs=P(*axes), out_specs=P(), axis_names={*axes})
    assert not unordered(text_of(program, jnp.ones((2, 2, SIZE))))
