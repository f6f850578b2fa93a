"""Top-K: the largest coordinates of each worker, gathered: against NumPy, and its bytes."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from dynamiq_jax._measurement.gradients import worker_gradients
from dynamiq_jax.methods import ErrorFeedback
from dynamiq_research import EF21M, TopK
from dynamiq_research.single_coordinates.largest import largest
from research.tests.support.reducing import reducing
from tests.support.gradients import of_workers, vnmse
from tests.support.hlo import compiled_collectives, sent_bytes
from tests.support.workers import call_on, simulated

WORKERS, SIZE = 4, 3000
FULL = TopK(bits=4.0, values="float32")
KEY = jax.random.key(0)


def reduced(method: TopK, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the sum, which all workers have, and what each applied, [workers, size]."""
    total, applied = reducing(method, values.shape[1], len(values))(KEY, values)
    total = np.asarray(total)
    assert {replica.tobytes() for replica in total} == {total[0].tobytes()}
    return total[0], np.asarray(applied)


def kept(values: np.ndarray, count: int) -> np.ndarray:
    """Zero all but the largest magnitudes of each worker: of equal ones, the first are kept."""
    order = np.argsort(-np.abs(values.astype(np.float64)), axis=1, kind="stable")[:, :count]
    result = np.zeros_like(values)
    np.put_along_axis(result, order, np.take_along_axis(values, order, axis=1), axis=1)
    return result


@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 2**32 - 1),
    bits=st.sampled_from((0.5, 4.0, 32.0)),
    agreement=st.sampled_from((0.0, 1.0)),
    dtype=st.sampled_from(("float32", "bfloat16")),
    workers=st.sampled_from((2, 5)),
)
@pytest.mark.slow
def test_a_sum_is_that_of_the_largest_of_each_worker(seed, bits, agreement, dtype, workers):
    """Also where all workers have the same places, and where magnitudes are equal."""
    values = of_workers(seed % 97, workers, 300, agreement=agreement)
    if seed % 2:
        values = np.sign(values)
    method = TopK(bits=bits, values=dtype)
    count = method.num_chosen(call_on(300, workers))
    expected = kept(values, count).astype(dtype).astype(np.float32)
    total, applied = reduced(method, values)
    np.testing.assert_array_equal(applied, expected)
    in_order = functools.reduce(np.add, expected, np.zeros(300, np.float32))
    np.testing.assert_array_equal(total, in_order)


def test_large_coordinates_lose_the_least():
    """Less than as many at random, and no more than the share that is left out."""
    values = of_workers(0, WORKERS, SIZE)
    total, _ = reduced(FULL, values)
    count = FULL.num_chosen(call_on(SIZE, WORKERS))
    assert count == int(4 * SIZE / (4 * 8 * WORKERS))
    assert vnmse(total, values.sum(axis=0)) < 1 - count / SIZE - 0.3


@pytest.mark.parametrize("bad", (np.nan, np.inf, -np.inf))
def test_what_is_not_finite_comes_first_and_stays_where_it_is(bad):
    values = of_workers(0, WORKERS, SIZE)
    values[:, 7] = 0
    values[2, 7] = bad
    total, _ = reduced(FULL, values)
    np.testing.assert_array_equal(np.nonzero(~np.isfinite(total))[0], [7])
    np.testing.assert_equal(total[7], np.float32(bad))
    everywhere = np.full((WORKERS, SIZE), np.float32(bad))
    assert (~np.isfinite(reduced(FULL, everywhere)[0])).sum() == FULL.num_chosen(
        call_on(SIZE, WORKERS)
    )


@pytest.mark.parametrize("exponent", (-100, 100))
def test_the_range_of_float32_is_kept(exponent):
    values = of_workers(0, WORKERS, SIZE)
    plain, scaled = (
        reduced(FULL, values * np.float32(2.0) ** power)[0].astype(np.float64)
        for power in (0, exponent)
    )
    np.testing.assert_array_equal(scaled, plain * 2.0**exponent)


@pytest.mark.parametrize("wrapper", (ErrorFeedback, EF21M))
def test_feedback_recovers_what_is_left_out(wrapper, steps=60):
    values = worker_gradients(WORKERS, 512, 3, octaves=0.5)
    method, call = wrapper(inner=FULL), call_on(512, WORKERS)

    def local(key, values):
        def step(state, number):
            found = method.all_reduce(values, call, jax.random.fold_in(key, number), state)
            return found.state, found.total

        return jax.lax.scan(step, method.init_state(call), jnp.arange(steps))[1]

    totals = np.asarray(simulated(local)(KEY, values))[0]
    truth = values.sum(axis=0, dtype=np.float64)
    found = totals.mean(axis=0) if wrapper is ErrorFeedback else totals[-1]
    assert vnmse(found, truth) < 0.05 < vnmse(totals[0], truth)


# ------------------------------------------------------------------------------------------ bytes


@given(bits=st.floats(0.1, 32), size=st.integers(1, 10**6), workers=st.integers(2, 64))
def test_the_wire_keeps_within_the_budget(bits, size, workers):
    """The next coordinate would be above it, or there is only one, or there are all."""
    for values, entry in (("bfloat16", 6), ("float32", 8)):
        method, call = TopK(bits=bits, values=values), call_on(size, workers)
        count = method.num_chosen(call)
        allowed = bits / 8 * size * 2 * (workers - 1) / workers
        sent = call.topology.bytes_sent(method.wire_cost(call), workers)
        assert sent == (workers - 1) * entry * count
        assert 1 <= count <= size
        assert sent <= allowed * (1 + 1e-12) or count == 1
        assert count == size or (workers - 1) * entry * (count + 1) > allowed * (1 - 1e-12)


TREE = {"w": jax.ShapeDtypeStruct((300, 101), jnp.float32)}


@pytest.mark.parametrize(("topology", "values"), (("ring", "bfloat16"), ("all_to_all", "float32")))
def test_the_compiled_program_has_one_gather(data_mesh, topology, values):
    method = TopK(values=values)
    report = dq.wire_report(TREE, 4, method=dq.Compression(method, topology))
    found = compiled_collectives(data_mesh(4), TREE, method, topology)
    assert [one.kind for one in found] == ["all-gather"]
    assert found[0].sent_bytes(4) == report.bytes_per_worker
    inside = ErrorFeedback(inner=method)
    of_state = dq.wire_report(TREE, 4, method=dq.Compression(inside, topology))
    assert of_state.compressed_bytes == report.compressed_bytes
    assert sent_bytes(data_mesh(4), TREE, inside, topology) == of_state.bytes_per_worker


@pytest.mark.parametrize("name", ("top_k", "rand_k"))
def test_gradients_may_be_sharded_over_another_axis(name):
    """The parts of a bucket differ along it, and sums do too."""
    types = (AxisType.Auto, AxisType.Auto)
    mesh = jax.make_mesh((2, 2), ("data", "fsdp"), types, devices=jax.devices()[:4])
    values = of_workers(0, 2, 4096).reshape(2, 64, 64)
    spec = P("data", "fsdp")

    def local(values):
        return dq.psum(values[0], "data", key=KEY, method=name)[None]

    run = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec)
    found = np.asarray(jax.jit(run)(values))
    np.testing.assert_array_equal(found[0], found[1])
    assert 0 < vnmse(found[0], values.sum(axis=0)) < 1


@pytest.mark.parametrize(
    ("options", "says"),
    (
        ({"bits": 0}, r"bits=0 is out of range\. Give more than 0, and at most 32"),
        ({"bits": math.inf}, "bits=inf"),
        (
            {"values": "int8"},
            r"values='int8' is not possible\. Give one of \('bfloat16', 'float32'",
        ),
    ),
)
def test_fields_are_checked(options, says):
    with pytest.raises(ValueError, match=says):
        TopK(**options)


# -------------------------------------------------------------------------------------- selection

KEYS = st.integers(0, 2**32 - 1) | st.sampled_from((0, 1, 2**31, 2**32 - 1))


@settings(deadline=None)
@given(st.lists(KEYS, min_size=20, max_size=20), st.integers(1, 20))
@pytest.mark.slow
def test_the_largest_keys_are_found_and_of_equal_ones_the_first(keys, count):
    found = np.asarray(selecting(count)(np.array(keys, np.uint32)))
    expected = sorted(range(20), key=lambda place: (-keys[place], place))[:count]
    assert found.dtype == np.int32 and found.tolist() == sorted(expected)


@functools.cache
def selecting(count: int):
    return jax.jit(lambda keys: largest(keys, count))
