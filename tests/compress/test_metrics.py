"""Metrics of the groups of a compressed step, and the limit of its error."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq

WORKERS = 4


def gradient(weights, batch):
    return jax.grad(lambda weights: jnp.mean((batch @ weights) ** 2))(weights)


def step(weights, batch):
    return weights - gradient(weights, batch)


def arguments(mesh):
    weights, batch = (jax.random.normal(jax.random.key(n), (64, 64 * (9 - n))) for n in (1, 8))
    return (
        jax.device_put(weights, NamedSharding(mesh, P())),
        jax.device_put(batch, NamedSharding(mesh, P("data"))),
    )


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("jitted", [True, False])
def test_metrics_are_those_of_the_sum(kind, jitted):
    """Bytes are those of the report, the norm is near that of the exact gradient, and the estimated
    error is near the error of the new weights.
    """
    mesh = jax.make_mesh((WORKERS,), ("data",), axis_types=(kind,))
    with jax.set_mesh(mesh):
        weights, batch = arguments(mesh)
        compressed = dq.compress(jax.jit(step) if jitted else step, "data", with_metrics=True)
        new, (metrics,) = compressed(weights, batch)
        exact = np.asarray(weights - step(weights, batch), np.float64)
    (row,) = compressed.report(weights, batch).sums
    error = np.sum((np.asarray(weights - new, np.float64) - exact) ** 2) / np.sum(exact**2)
    assert metrics["bytes"] == row.bytes_after
    assert float(metrics["norm"]) == pytest.approx(np.linalg.norm(exact), rel=0.05)
    assert error / 2 < float(metrics["error"]) < 2 * error
    assert metrics["fallbacks"] == 0


def test_a_sum_above_the_limit_of_the_error_is_sent_again(data_mesh):
    mesh = data_mesh(WORKERS)
    options = dq.Compression(max_error=1e-9)
    compressed = dq.compress(jax.jit(step), "data", method=options, with_metrics=True)
    weights, batch = arguments(mesh)
    new, (metrics,) = compressed(weights, batch)
    assert metrics["fallbacks"] == 1
    np.testing.assert_allclose(new, step(weights, batch), rtol=1e-5, atol=1e-6)


def test_a_group_inside_of_a_map_has_no_metrics(data_mesh):
    mesh = data_mesh(WORKERS)

    def of_worker(weights, batch):
        return weights - jax.lax.pmean(gradient(weights, batch), "data")

    mapped = jax.shard_map(
        of_worker, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=False
    )
    with pytest.raises(ValueError, match=r"with_metrics=True.*inside of 'shard_map'.*dq.pmean"):
        dq.compress(mapped, "data", with_metrics=True)(*arguments(mesh))
