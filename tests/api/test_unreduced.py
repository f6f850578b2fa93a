"""Gradients that explicit sharding calls unreduced, in a global view."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from benchmarks.speed.mesh_bytes import sent_by_axes
from tests.support.gradients import vnmse
from tests.support.workers import STOCHASTIC, mesh_of

KEY = jax.random.key(0)
HAS_MAPS = jax.__version_info__ >= (0, 11)  # over some axes of unreduced arrays
needs_maps = pytest.mark.skipif(not HAS_MAPS, reason="JAX 0.10 cannot map over one axis of these")


@pytest.fixture
def mesh():
    mesh = mesh_of(kind=AxisType.Explicit, data=2, fsdp=4)
    with jax.set_mesh(mesh):
        yield mesh


def arrays():
    rng = np.random.default_rng(0)
    weights = jax.device_put(rng.normal(size=(64, 512)).astype(np.float32), P(None, "fsdp"))
    return weights, jax.device_put(rng.normal(size=(32, 64)).astype(np.float32), P("data"))


def loss_fn(w, x):
    return jnp.mean(jnp.tanh(x @ w) ** 2)


def gradient(w, x):
    return jax.grad(loss_fn)(jax.reshard(w, P(None, "fsdp", reduced={"data"})), x)


def reduced(reduce, axis_name="data"):
    def step(w, x):
        return reduce({"w": gradient(w, x)}, axis_name, key=KEY, method=STOCHASTIC)["w"]

    return jax.jit(step)


@needs_maps
def test_the_sum_is_the_gradient_of_the_batch(mesh):
    compiled = reduced(dq.psum).lower(*arrays()).compile()
    found, expected = compiled(*arrays()), jax.grad(loss_fn)(*arrays())
    assert 1e-7 < vnmse(found, expected) < 1e-3
    assert found.sharding.shard_shape(found.shape) == (64, 128)
    part = jax.ShapeDtypeStruct((64, 128), jnp.float32)
    report = dq.wire_report(part, 2, method=STOCHASTIC)
    assert sent_by_axes(compiled.as_text(), mesh) == {("data",): report.bytes_per_worker}
    shards = {str(shard.index): shard.data for shard in found.addressable_shards}
    for shard in found.addressable_shards:
        np.testing.assert_array_equal(shard.data, shards[str(shard.index)])


def test_where_maps_cannot_take_them_an_error_says_so(mesh):
    if HAS_MAPS:
        reduced(dq.psum)(*arrays())
        return
    with pytest.raises(ValueError, match="cannot map over one axis of unreduced arrays"):
        reduced(dq.psum)(*arrays())


def test_a_mean_of_terms_is_refused(mesh):
    with pytest.raises(ValueError, match=r"each device holds its term of a sum\. Use dq\.psum"):
        reduced(dq.pmean)(*arrays())


def test_another_axis_is_refused(mesh):
    with pytest.raises(ValueError, match=r"axis_name='fsdp': they differ in \['data', 'fsdp'\]"):
        reduced(dq.psum, "fsdp")(*arrays())


@needs_maps
def test_a_map_with_checked_types_is_told_what_to_do(mesh):
    def step(w, x):
        return jax.shard_map(
            lambda g: dq.psum(g, "data", key=KEY),
            in_specs=P(unreduced={"data"}),
            out_specs=P(),
            axis_names={"data"},
        )(gradient(w, x))

    with pytest.raises(ValueError, match=r"is unreduced over axis 'data' inside shard_map"):
        jax.jit(step)(*arrays())
