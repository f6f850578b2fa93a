"""Workers whose keys differ: methods whose results depend on every worker's key are NaN instead."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from dynamiq_jax.methods import METHODS
from tests.buckets.test_keys import SIZE, WORKERS, means, own_key
from tests.support.gradients import of_workers

# Their results depend on what every worker makes of its own key.
ROTATED = (
    *("thc", "entropy_coded", "rand_k"),
    *("entropy_coded:coder=patched", "omnireduce:inner=thc", "ef+thc"),
)


@pytest.mark.parametrize("method", [*METHODS.installed, *ROTATED[3:]])
def test_replicas_are_the_same_bits(method):
    found = means(method)
    assert np.isnan(found).any() == (method in ROTATED)  # zero in blocks that are not sent
    for replica in found:
        np.testing.assert_array_equal(replica, found[0])


@pytest.mark.parametrize("method", ROTATED[:2])
@pytest.mark.parametrize("half", ["psum_scatter", "all_gather"])
def test_halves_show_keys_that_differ(method, half):
    values = of_workers(0, WORKERS, SIZE)

    def local(row, key):
        return getattr(dq, half)(row, "data", key=key, method=method, tiled=True)

    def differing(row):
        return local(row, own_key())

    def same(row):
        return local(row, jax.random.key(0))

    assert np.isnan(jax.vmap(differing, axis_name="data")(values)).all()
    assert np.isfinite(jax.vmap(same, axis_name="data")(values)).all()


def test_one_key_that_differs_is_enough():
    def local(row):
        key = jax.random.key(jnp.where(lax.axis_index("data") == WORKERS - 1, 1, 0))
        return dq.psum(row, "data", key=key, method="thc")

    assert np.isnan(jax.vmap(local, axis_name="data")(of_workers(0, WORKERS, SIZE))).all()


@pytest.mark.parametrize("method", ROTATED[:2])
def test_keys_that_differ_on_a_mesh(method):
    mesh = jax.make_mesh((WORKERS,), ("data",), devices=jax.devices()[:WORKERS])

    def local(rows):
        return dq.psum(rows[0], "data", key=own_key(), method=method)[None]

    mapped = jax.shard_map(
        local, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False
    )
    values = jax.device_put(of_workers(0, WORKERS, SIZE), jax.NamedSharding(mesh, P("data")))
    assert np.isnan(np.asarray(jax.jit(mapped)(values))).all()
