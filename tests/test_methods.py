"""What every method owes, on every topology; and room for a family that is not built in."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gradients import of_workers, vnmse
from jax.sharding import PartitionSpec as P
from toy_methods import ErrorFeedback
from workers import TWO_CLASSES, simulated

import dynamiq_jax as dq
from dynamiq_jax.buckets import BUCKET_BYTES, EXACT_BELOW, resolve_options
from dynamiq_jax.collectives import is_stateful, reduce_tree
from dynamiq_jax.methods import METHODS, Method, resolve_method
from dynamiq_jax.methods.base import ChunkedMethod
from dynamiq_jax.topologies import TOPOLOGIES, Auto, Ring, Topology, resolve_topology

NUM_WORKERS, SIZE = 4, 20_001  # divides by nothing
KEY = jax.random.key(0)
CASES = {
    **{name: resolve_method(name) for name in METHODS},
    "paper": dq.DynamiQ.paper(),
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
        if is_stateful(options.method):
            return reduce_tree(tree, "data", key=key, options=options, mean=False, states=None)[0]
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
        state = reduce.init({"w": gradient})
        return state, *reduce.update({"w": gradient}, state)

    before, updates, after = jax.eval_shape(jax.vmap(local, axis_name="data"), gradient())
    assert updates["w"].shape == (NUM_WORKERS, SIZE)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), after) == jax.tree.map(
        lambda x: (x.shape, x.dtype), before
    )


# ------------------------------------------------------------------ a stateful method, over steps

FEEDBACK = ErrorFeedback(inner=dq.Exact())
STEPS, FEEDBACK_SIZE = 6, 20_000


def run_steps(method: ErrorFeedback, mesh=None):
    """Outputs [steps, n, size] and residuals [steps + 1, n, size] of all_reduce_gradients."""
    reduce = dq.all_reduce_gradients("data", method=method)
    gradients = np.stack(
        [of_workers(step, NUM_WORKERS, FEEDBACK_SIZE) for step in range(STEPS)], axis=1
    )

    def local(gradients):
        state = reduce.init(gradients[0])

        def step(state, gradient):
            output, state = reduce.update(gradient, state)
            return state, (output, state.method[0])

        if mesh is not None:  # the first residual is a constant, and what follows it is not
            state = state._replace(
                method=jax.tree.map(lambda x: jax.lax.pcast(x, "data", to="varying"), state.method)
            )
        _, (outputs, residuals) = jax.lax.scan(step, state, gradients)
        return outputs, residuals

    if mesh is None:
        outputs, residuals = jax.jit(jax.vmap(local, axis_name="data"))(gradients)
    else:
        mapped = jax.shard_map(
            lambda stacked: jax.tree.map(lambda x: x[None], local(stacked[0])),
            mesh=mesh,
            in_specs=P("data"),
            out_specs=P("data"),
        )
        outputs, residuals = jax.jit(mapped)(gradients)
    residuals = np.concatenate([np.zeros_like(residuals[:, :1]), residuals], axis=1)
    return gradients.swapaxes(0, 1), *(np.asarray(x).swapaxes(0, 1) for x in (outputs, residuals))


@functools.cache
def feedback_run():
    return run_steps(FEEDBACK)


def test_what_is_applied_and_what_is_kept_make_up_the_input():
    """Law: applied + residual == input + previous residual, summed over the workers."""
    gradients, outputs, residuals = feedback_run()
    for step in range(STEPS):
        applied = NUM_WORKERS * outputs[step][0]
        np.testing.assert_allclose(
            applied + residuals[step + 1].sum(axis=0),
            (gradients[step] + residuals[step]).sum(axis=0),
            rtol=1e-5,
            atol=1e-6 * np.abs(gradients).max(),
        )
        assert np.any(residuals[step + 1])
        assert np.mean(outputs[step][0] == 0) > 0.2  # it is coarse


def test_nothing_is_lost_over_time():
    gradients, outputs, residuals = feedback_run()
    truth = gradients.sum(axis=(0, 1), dtype=np.float64)
    applied = NUM_WORKERS * outputs[:, 0].sum(axis=0, dtype=np.float64)
    assert vnmse(applied + residuals[-1].sum(axis=0), truth) < 1e-10
    assert vnmse(applied, truth) > 1e-4


def test_replicas_stay_identical_while_their_residuals_differ():
    _, outputs, residuals = feedback_run()
    np.testing.assert_array_equal(outputs, outputs[:, :1].repeat(NUM_WORKERS, axis=1))
    assert np.all(np.any(residuals[1:, 1:] != residuals[1:, :-1], axis=-1))


def test_state_is_carried_the_same_way_on_a_mesh(data_mesh):
    """With a lossy method inside: feedback composes with any method."""
    method = ErrorFeedback(inner=TWO_CLASSES)
    ours, expected = run_steps(method, data_mesh(NUM_WORKERS)), run_steps(method)
    np.testing.assert_array_equal(ours[1], expected[1])
    np.testing.assert_array_equal(ours[2], expected[2])


def test_state_has_the_size_of_its_bucket():
    reduce = dq.all_reduce_gradients("data", method=FEEDBACK)
    tree = {"a": jnp.ones(5000), "b": jnp.ones((60, 50), jnp.bfloat16), "c": jnp.ones(10)}

    def init(_):
        return reduce.init(tree)

    state = jax.eval_shape(jax.vmap(init, axis_name="data"), jnp.zeros(NUM_WORKERS))
    assert [leaf.shape for leaf in state.method] == [(NUM_WORKERS, 5000), (NUM_WORKERS, 3000)]
