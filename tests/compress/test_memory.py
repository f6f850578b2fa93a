"""Temporaries of compressed steps: gradients, and a few buckets beside them."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from tests.support.workers import STOCHASTIC

LAYERS = 4
BUCKETS = (2**18, 2**20)  # bytes


def update(mean, shapes):
    """A step of products, whose gradients are in memory, and the shapes of its arguments."""

    def loss(weights, rows):
        return sum(jnp.mean((rows[:, : len(w)] @ w) ** 2) for w in weights)

    def step(weights, rows):
        return jax.tree.map(jnp.subtract, weights, mean(jax.grad(loss)(weights, rows)))

    weights = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return step, (weights, jax.ShapeDtypeStruct((8, 2048), jnp.float32))


def stacked(mean):
    """The same for a loop over layers."""

    def loss(weights, rows):
        return jnp.mean(lax.scan(lambda x, w: (jnp.tanh(x @ w), None), rows, weights)[0] ** 2)

    def step(weights, rows):
        return weights - mean(jax.grad(loss)(weights, rows))

    weights = jax.ShapeDtypeStruct((LAYERS, 512, 512), jnp.float32)
    return step, (weights, jax.ShapeDtypeStruct((8, 512), jnp.float32))


def mean_over_data(tree):
    return lax.pmean(tree, "data")


FORMS = {
    "a leaf of even rows": update(mean_over_data, [(1024, 1024)]),
    "a leaf of odd rows": update(mean_over_data, [(1031, 1024)]),
    "many leaves": update(mean_over_data, [(512, 512)] * 4 + [(512,)] * 4),
    "a loop over layers": stacked(mean_over_data),
}


def size_of(form):
    return sum(leaf.size * 4 for leaf in jax.tree.leaves(FORMS[form][1][0]))


def temporaries(step, args, mesh, bucket_bytes, *, has_key, specs=P()):
    mapped = jax.shard_map(
        step, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), axis_names={"data"}
    )
    compressed = dq.compress(
        mapped,
        "data",
        key=(lambda *args: jax.random.key(0)) if has_key else None,
        method=dq.Compression(
            STOCHASTIC, specs=specs, bucket_bytes=bucket_bytes, bucketing="striped"
        ),
    )
    compiled = jax.jit(compressed, donate_argnums=0).lower(*args).compile()
    return compiled.memory_analysis().temp_size_in_bytes


@functools.cache
def of_form(form, mesh, bucket_bytes, *, has_key):
    return temporaries(*FORMS[form], mesh, bucket_bytes, has_key=has_key)


@pytest.mark.parametrize("form", ("a leaf of even rows", "a leaf of odd rows", "many leaves"))
def test_temporaries_are_the_gradients_and_three_buckets(data_mesh, form):
    """So smaller buckets take no more, whatever divides the rows of the leaves."""
    found = [of_form(form, data_mesh(4), each, has_key=True) for each in BUCKETS]
    for bucket, bytes_found in zip(BUCKETS, found, strict=True):
        assert size_of(form) <= bytes_found <= size_of(form) + 3.1 * bucket
    assert found == sorted(found)


@pytest.mark.parametrize("form", FORMS)
def test_a_step_without_a_key_needs_no_more_memory(data_mesh, form):
    with_key, without = (
        of_form(form, data_mesh(4), BUCKETS[0], has_key=each) for each in (True, False)
    )
    assert 0.99 * with_key <= without <= 1.02 * with_key


def test_temporaries_of_shards_are_those_of_a_device():
    """Without a key, on a mesh with an axis that the compiler manages."""
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    step, ((whole,), rows) = update(mean_over_data, [(1024, 2048)])
    sharding = NamedSharding(mesh, P(None, "model"))
    args = ([jax.ShapeDtypeStruct(whole.shape, whole.dtype, sharding=sharding)], rows)
    found = temporaries(step, args, mesh, BUCKETS[0], has_key=False, specs=P(None, "model"))
    assert whole.size <= found <= whole.size + 3.1 * BUCKETS[0]
