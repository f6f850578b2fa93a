"""Rounding noise of repeated reductions of the same values, for every way to get a key."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from tests.support.workers import STOCHASTIC

WORKERS = 4
REPEATS = 4
SHAPE = (64, 128)
Means = Callable[[Mesh, jax.Array], list[jax.Array]]

# Gradients of `loss` at zero are the rows of a batch, negative, averaged over the batch.
METHOD = STOCHASTIC  # the noise of a key, whatever the method


def loss(w: jax.Array, rows: jax.Array) -> jax.Array:
    return -jnp.vdot(w, jnp.mean(rows, axis=0))


def keys() -> list[jax.Array]:
    return [jax.random.key(number) for number in range(REPEATS)]


def inside(function: Callable[..., jax.Array], out_spec: P = P()) -> Means:
    """`function(values of a worker, key)` inside `shard_map`, with a key for each call."""

    def means(mesh: Mesh, rows: jax.Array) -> list[jax.Array]:
        mapped = jax.jit(
            jax.shard_map(
                lambda rows, key: function(rows[0], key),
                mesh=mesh,
                in_specs=(P("data"), P()),
                out_specs=out_spec,
            )
        )
        return [mapped(rows, key) for key in keys()]

    return means


def cast(rows: jax.Array, **given: Any) -> jax.Array:
    def total(w: jax.Array) -> jax.Array:
        w = dq.pcast(w, "data", to="varying", mean=True, method=METHOD, **given)
        return -loss(w, rows[None])

    return jax.grad(total)(jnp.zeros(SHAPE))


def gathered(part: jax.Array, key: jax.Array) -> jax.Array:
    whole = dq.all_gather(part, "data", key=key, to="invarying", method=METHOD)
    return jnp.mean(whole, axis=0)


def casts_of_one_trace(mesh: Mesh, rows: jax.Array) -> list[jax.Array]:
    def gradients(rows: jax.Array) -> jax.Array:
        def total(w: jax.Array) -> jax.Array:
            return sum(
                -loss(dq.pcast(w, "data", to="varying", mean=True, method=METHOD), rows)
                for _ in range(REPEATS)
            )

        return jax.grad(total)(jnp.zeros(SHAPE)) / REPEATS

    mapped = jax.shard_map(gradients, mesh=mesh, in_specs=P("data"), out_specs=P())
    return [jax.jit(mapped)(rows)]


def by_steps(mesh: Mesh, rows: jax.Array) -> list[jax.Array]:
    transform = dq.all_reduce_gradients("data", method=METHOD)
    update = jax.jit(
        jax.shard_map(
            lambda rows, state: transform.update(rows[0], state),
            mesh=mesh,
            in_specs=(P("data"), P()),
            out_specs=P(),
        )
    )
    state, means = transform.init(rows[0]), []
    for _ in range(REPEATS):
        mean, state = update(rows, state)
        means.append(mean)
    return means


def by_key_of_gradients(mesh: Mesh, rows: jax.Array) -> list[jax.Array]:
    grad_fn = dq.value_and_grad(loss, mesh=mesh, axis_name="data", method=METHOD)
    return [-grad_fn(jnp.zeros(SHAPE), rows, key=key)[1] for key in keys()]


def of_replicas(mesh: Mesh, rows: jax.Array) -> list[jax.Array]:
    mean = jax.jit(
        lambda rows, key: dq.mean_of_replicas(rows, "data", key=key, mesh=mesh, method=METHOD)
    )
    return [mean(rows, key) for key in keys()]


def of_broadcasts(mesh: Mesh, rows: jax.Array, **given: Any) -> jax.Array:
    def total(w: jax.Array) -> jax.Array:
        replicas = dq.broadcast_to_replicas(w, "data", mesh=mesh, mean=True, method=METHOD, **given)
        return jnp.vdot(replicas, rows)

    return jax.grad(total)(jnp.zeros(SHAPE))


def broadcasts_with_keys(mesh: Mesh, rows: jax.Array) -> list[jax.Array]:
    gradient = jax.jit(lambda key: of_broadcasts(mesh, rows, key=key))
    return [gradient(key) for key in keys()]


def with_argument(*others: Any, **settings: Any) -> Means:
    """`data_parallel` with a further argument, which the loss does not use."""

    def means(mesh: Mesh, rows: jax.Array) -> list[jax.Array]:
        of_all = dq.data_parallel(
            lambda w, rows, other: loss(w, rows),
            mesh=mesh,
            axis_name="data",
            method=METHOD,
            **settings,
        )
        gradient = jax.grad(of_all)
        return [-gradient(jnp.zeros(SHAPE), rows, other) for other in others]

    return means


def calls_of_one_trace(mesh: Mesh, rows: jax.Array) -> list[jax.Array]:
    of_all = dq.data_parallel(loss, mesh=mesh, axis_name="data", method=METHOD)

    def total(w: jax.Array) -> jax.Array:
        return sum(of_all(w, rows) for _ in range(REPEATS))

    return [-jax.jit(jax.grad(total))(jnp.zeros(SHAPE)) / REPEATS]


def wrappers_of_one_loss(mesh: Mesh, rows: jax.Array) -> list[jax.Array]:
    def total(w: jax.Array) -> jax.Array:
        wrappers = [
            dq.data_parallel(loss, mesh=mesh, axis_name="data", method=METHOD)
            for _ in range(REPEATS)
        ]
        return sum(wrapper(w, rows) for wrapper in wrappers)

    return [-jax.grad(total)(jnp.zeros(SHAPE)) / REPEATS]


WAYS: dict[str, Means] = {
    "pmean": inside(lambda x, key: dq.pmean(x, "data", key=key, method=METHOD)),
    "psum": inside(lambda x, key: dq.psum(x, "data", key=key, method=METHOD) / WORKERS),
    "psum_scatter": inside(
        lambda x, key: dq.psum_scatter(x, "data", key=key, tiled=True, method=METHOD) / WORKERS,
        P("data"),
    ),
    "all_gather": inside(gathered),
    "pcast with keys": inside(lambda x, key: cast(x, key=key)),
    "pcast several times": casts_of_one_trace,
    "all_reduce_gradients": by_steps,
    "value_and_grad": by_key_of_gradients,
    "mean_of_replicas": of_replicas,
    "broadcast_to_replicas": broadcasts_with_keys,
    "data_parallel with steps": with_argument(*(jnp.int32(n) for n in range(REPEATS))),
    "data_parallel with numbers": with_argument(*(0.5 * n for n in range(REPEATS))),
    "data_parallel with keys": with_argument(*jax.random.split(jax.random.key(0), REPEATS)),
    "data_parallel with texts": with_argument(*map(str, range(REPEATS)), static_argnums=2),
    "data_parallel several times": calls_of_one_trace,
    "data_parallel of one loss": wrappers_of_one_loss,
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("way", WAYS)
def test_noise_of_repeated_reductions_averages_out(
    way: str, data_mesh: Callable[[int], Mesh]
) -> None:
    mesh = data_mesh(WORKERS)
    rows = jax.random.normal(jax.random.key(1), (WORKERS, *SHAPE))
    exact = jnp.mean(rows, axis=0)
    one = dq.vnmse(WAYS["pmean"](mesh, rows)[0], exact)
    if way == "all_gather":  # of four parts, not of their sum
        one = dq.vnmse(WAYS[way](mesh, rows)[0], exact)
    of_all = dq.vnmse(jnp.mean(jnp.stack(WAYS[way](mesh, rows)), axis=0), exact)
    assert 0.5 * one / REPEATS < of_all < 1.7 * one / REPEATS


def test_a_call_outside_of_a_trace_can_be_repeated(data_mesh: Callable[[int], Mesh]) -> None:
    rows = jax.random.normal(jax.random.key(1), (WORKERS, *SHAPE))
    gradient = jax.grad(dq.data_parallel(loss, mesh=data_mesh(WORKERS), axis_name="data"))
    first, again = gradient(jnp.zeros(SHAPE), rows), gradient(jnp.zeros(SHAPE), rows)
    assert (first == again).all()
