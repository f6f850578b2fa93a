"""Rounding noise of repeated reductions of the same values, for every way to get a key."""

from collections.abc import Callable

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

METHOD = STOCHASTIC  # the noise of a key, whatever the method


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


def gathered(part: jax.Array, key: jax.Array) -> jax.Array:
    whole = dq.all_gather(part, "data", key=key, to="invarying", method=METHOD)
    return jnp.mean(whole, axis=0)


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


WAYS: dict[str, Means] = {
    "pmean": inside(lambda x, key: dq.pmean(x, "data", key=key, method=METHOD)),
    "psum": inside(lambda x, key: dq.psum(x, "data", key=key, method=METHOD) / WORKERS),
    "psum_scatter": inside(
        lambda x, key: dq.psum_scatter(x, "data", key=key, tiled=True, method=METHOD) / WORKERS,
        P("data"),
    ),
    "all_gather": inside(gathered),
    "all_reduce_gradients": by_steps,
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
