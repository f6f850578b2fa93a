"""What every method owes, on every topology."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dynamiq_jax.buckets import BUCKET_BYTES, EXACT_BELOW, resolve_options
from dynamiq_jax.collectives import reduce_tree

import dynamiq_jax as dq
from dynamiq_jax.methods import METHODS, MXFP8, ErrorFeedback, Method, PowerSGD, resolve_method
from dynamiq_jax.methods._base import ChunkedMethod
from dynamiq_jax.topologies import TOPOLOGIES, Auto, Ring, Topology, resolve_topology
from tests.support.gradients import of_workers, vnmse
from tests.support.workers import simulated

NUM_WORKERS, SIZE = 4, 20_001  # divides by nothing
MATRIX = (177, 113)  # of as many coordinates: a vector has no rank
KEY = jax.random.key(0)
CASES = {
    **{name: resolve_method(name) for name in METHODS},
    "error_feedback": ErrorFeedback(method=PowerSGD()),
    "paper": dq.DynamiQ.paper(),
    "mxfp8_shared": MXFP8(shared_scale=True),
}
CHUNKED = [name for name, method in CASES.items() if isinstance(method, ChunkedMethod)]
EXACT = {"exact"}  # up to the order of float32 additions
# Methods that the key does not change: name to the vNMSE that they are within, here.
DETERMINISTIC = {
    "bf16": (1e-7, 1e-4),  # half a unit in the last of 8 bits, a few times
    "blockint": (3e-5, 4e-4),  # half of 1/127 of the block's largest, a few times
    "flash_communication": (3e-4, 4e-3),  # half of 1/31 of what lies between spikes, a few times
    "omnireduce": (0.03, 0.06),  # the energy of three blocks of four, the smallest
    "topk_chunked": (0.09, 0.15),  # and of seven of eight
    # Up to two compressions more on a ring than all to all; the largest of blocks saturate.
    "mxfp8": (1e-3, 4e-3),
    "mxfp8_shared": (8e-4, 3e-3),
    "mxfp6": (1e-3, 4e-3),
    "mxfp4": (2e-2, 5e-2),
    "mxint8": (1e-4, 4e-4),
    # Noise has no low rank: most of it is left out.
    "powersgd": (0.1, 0.99),
    "error_feedback": (0.1, 0.99),
}

methods = pytest.mark.parametrize("name", CASES)
EVERY_TOPOLOGY = {name: resolve_topology(name) for name in TOPOLOGIES if name != "auto"}
EVERY_TOPOLOGY["bidirectional ring"] = Ring(bidirectional=True)
topologies = pytest.mark.parametrize("topology", EVERY_TOPOLOGY.values(), ids=EVERY_TOPOLOGY)


@functools.cache
def psum_with(name: str, topology: str):
    """`dq.psum`, and what it would be of a method that carries state, in a first step."""
    options = resolve_options(CASES[name], topology, EXACT_BELOW, BUCKET_BYTES)

    def local(key, tree):
        if options.method.is_stateful:
            # Low rank sums vectors exactly.
            matrices = jax.tree.map(lambda x: x.reshape(MATRIX) if x.ndim == 1 else x, tree)
            total, _ = reduce_tree(
                matrices, "data", key=key, options=options, mean=False, states=None
            )
            return jax.tree.map(lambda x, leaf: x.reshape(leaf.shape), total, tree)
        return dq.psum(tree, "data", key=key, method=options.method, topology=topology)

    return simulated(local)


@functools.cache
def gradient() -> np.ndarray:
    return of_workers(1, NUM_WORKERS, SIZE)


# ---------------------------------------------------------------------------------- registration


def test_names_give_the_defaults_of_their_classes():
    assert {name: type(resolve_method(name)) for name in METHODS} == METHODS
    assert {name: type(resolve_topology(name)) for name in TOPOLOGIES} == TOPOLOGIES
    assert resolve_method("dynamiq") == dq.DynamiQ()
    mine = dq.DynamiQ(bits=4.0)
    assert resolve_method(mine) is mine


@pytest.mark.parametrize("cls", (*METHODS.values(), *TOPOLOGIES.values()))
def test_strategies_are_frozen_hashable_values(cls):
    assert issubclass(cls, Method | Topology | Auto)
    assert cls() == cls()
    assert hash(cls()) == hash(cls())
    assert all(field.kw_only for field in dataclasses.fields(cls))
    for field in dataclasses.fields(cls):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(cls(), field.name, None)


# ------------------------------------------------------------------------------------ conformance


@methods
@topologies
def test_replicas_are_identical_and_the_key_fixes_the_bits(name, topology):
    run = psum_with(name, topology)
    result = np.asarray(run(KEY, gradient()))
    assert {replica.tobytes() for replica in result} == {result[0].tobytes()}
    np.testing.assert_array_equal(run(jax.random.key(0), gradient()), result)
    other = np.asarray(run(jax.random.key(1), gradient()))
    assert np.array_equal(other, result) == (name in EXACT | DETERMINISTIC.keys())


@methods
@topologies
def test_the_sum_is_unbiased_or_within_its_error(name, topology):
    """A bias of a few per cent of the squared error is left by correlated hops."""
    truth = gradient().sum(axis=0, dtype=np.float64)
    run = psum_with(name, topology)
    if name in EXACT:
        np.testing.assert_allclose(
            run(KEY, gradient())[0], truth, atol=1e-6 * np.abs(truth).max(), rtol=1e-6
        )
        return
    if name in DETERMINISTIC:
        low, high = DETERMINISTIC[name]
        assert low < vnmse(run(KEY, gradient())[0], truth) < high
        return
    results = [np.asarray(run(jax.random.key(k), gradient())[0], float) for k in range(32)]
    single, of_mean = np.mean([vnmse(r, truth) for r in results]), vnmse(np.mean(results, 0), truth)
    assert 1e-12 < single < 0.1
    assert 8 < single / of_mean < 45
    gain = np.vdot(np.mean(results, axis=0), truth) / np.vdot(truth, truth)
    assert abs(gain - 1) < 4 * np.sqrt(single / 32)


@methods
@topologies
@pytest.mark.parametrize("dtype", (jnp.float32, jnp.bfloat16, jnp.float16))
def test_shape_and_dtype_are_kept(name, topology, dtype):
    tree = {"w": jax.ShapeDtypeStruct((NUM_WORKERS, 96, 128), dtype)}
    result = jax.eval_shape(psum_with(name, topology), KEY, tree)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), result) == {
        "w": ((NUM_WORKERS, 96, 128), dtype)
    }


@pytest.mark.parametrize("name", CHUNKED)
@topologies
@pytest.mark.parametrize("num_workers", (2, 4, 8))
@pytest.mark.parametrize("size", (8192, SIZE))
def test_the_report_counts_the_payloads_that_there_are(name, topology, num_workers, size):
    method, num_chunks = CASES[name], topology.num_chunks(num_workers)

    def first_message(flat):
        codec = method.bind(flat, "data", num_workers, num_chunks, KEY)
        return codec.compress(jnp.int32(0), 0)

    stacked = jax.ShapeDtypeStruct((num_workers, size), jnp.float32)
    payload = jax.eval_shape(jax.vmap(first_message, axis_name="data"), stacked)
    cost = method.wire_cost(size, num_workers, num_chunks)
    total = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(payload))
    assert total == num_workers * cost.payload_bytes
    tree = {"w": jax.ShapeDtypeStruct((size,), jnp.float32)}
    report = dq.wire_report(tree, num_workers, method=method, topology=topology)
    messages = topology.payloads_sent(num_workers) * cost.payload_bytes
    assert report.compressed_bytes == messages + cost.statistics_bytes


@pytest.mark.parametrize("size", (2048, 2049, 20_001))
def test_no_compression_takes_the_path_of_every_method(size):
    """Padding to whole chunks is no reason to leave it: the baseline has to be like the others."""
    tree = {"w": jax.ShapeDtypeStruct((size,), jnp.float32)}
    assert dq.wire_report(tree, 8, method="exact").exact_leaves == ()


@methods
def test_state_is_stable_under_update(name):
    """One state in, one of the same structure, shapes and dtypes out."""
    reduce = dq.all_reduce_gradients("data", method=CASES[name])

    def local(gradient):
        tree = {"w": gradient.reshape(MATRIX)}
        state = reduce.init(tree)
        return state, *reduce.update(tree, state)

    before, updates, after = jax.eval_shape(jax.vmap(local, axis_name="data"), gradient())
    assert updates["w"].shape == (NUM_WORKERS, *MATRIX)
    assert after == before
    assert bool(jax.tree.leaves(before.method)) == CASES[name].is_stateful
