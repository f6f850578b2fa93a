"""Marsit: the last sign is that of one worker, each as likely; scales, weights and bytes."""

import collections
import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dynamiq_jax as dq
from dynamiq_jax.methods import ErrorFeedback
from dynamiq_jax.topologies import Butterfly, Ring, resolve_topology
from dynamiq_research import Marsit
from pallas_kernels.codec.rounding import half_to_offset
from tests.support.gradients import of_workers
from tests.support.hlo import compiled_collectives, sent_bytes
from tests.support.workers import call_on, simulated

KEY = jax.random.key(3)
UNIT = Marsit(scale=1.0)  # so that sums are whole numbers
TOPOLOGIES = {
    "ring": Ring(),
    "unrolled": Ring(unroll=True),
    "butterfly": Butterfly(),
    "all_to_all": resolve_topology("all_to_all"),
}
OFTEN = {"ring": (2, 3, 5, 8, 16), "butterfly": (8,)}
OFTEN |= {"all_to_all": (3, 8, 16)}
LAW = [
    pytest.param(name, workers, marks=() if workers in OFTEN[name] else pytest.mark.slow)
    for name in OFTEN
    for workers in (2, 3, 5, 8, 16)
    if TOPOLOGIES[name].supports(workers)
]
SIZE = 5000  # coordinates; the last row is not full
BLOCK = 4096  # coordinates with the same share of positive workers


@functools.cache
def summing(method: Marsit, topology: str):
    """Return a function of (key, values of each worker) to the sum on each."""

    def local(key, values):
        call = call_on(values.size, jax.lax.axis_size("data"), TOPOLOGIES[topology])
        return method.all_reduce(values, call, key, ()).total.astype(values.dtype)

    return simulated(local)


def sums(method: Marsit, topology: str, values: np.ndarray, keys: int = 1) -> np.ndarray:
    """Return sums for several keys, [keys, size], which all replicas have."""
    found = []
    for number in range(keys):
        result = np.asarray(summing(method, topology)(jax.random.key(number), values))
        np.testing.assert_array_equal(result, result[:1].repeat(len(result), axis=0))
        found.append(result[0])
    return np.stack(found)


def signs_of(num_workers: int) -> np.ndarray:
    """Return signs [workers, n + 1, BLOCK]: k of the workers are positive in block k, from each
    worker on in turn.
    """
    worker, share, place = np.ogrid[:num_workers, : num_workers + 1, :BLOCK]
    return np.where((worker - place) % num_workers < share, 1, -1).astype(np.float32)


def deviations(shares: np.ndarray, expected: float, draws: int) -> np.ndarray:
    """Return how many standard deviations measured shares are off."""
    return np.abs(shares - expected) / math.sqrt(expected * (1 - expected) / draws)


def as_bytes(signs: jax.Array, weights: jax.Array) -> jax.Array:
    """Return stacked messages of signs, uint8 [messages, bytes], and weights, uint16 [.., 1]."""
    low, high = weights & 255, weights >> 8
    return jnp.concatenate([signs, low.astype(jnp.uint8), high.astype(jnp.uint8)], axis=1)


# ------------------------------------------------------------------------------------- the sign


@pytest.mark.parametrize(("topology", "num_workers"), LAW)
def test_a_sign_is_positive_as_often_as_workers_are(topology, num_workers, keys=4):
    """And with one positive worker, whichever it is: each is drawn as often."""
    values = signs_of(num_workers).reshape(num_workers, -1)
    found = sums(UNIT, topology, values, keys).reshape(keys, num_workers + 1, BLOCK)
    assert set(np.unique(found)) == {-num_workers, num_workers}
    assert (found[:, 0] < 0).all() and (found[:, -1] > 0).all()
    for share in range(1, num_workers):
        positive = np.mean(found[:, share] > 0)
        assert deviations(positive, share / num_workers, keys * BLOCK) < 5
    alone = [found[:, 1, first::num_workers] > 0 for first in range(num_workers)]
    for drawn in alone:
        assert deviations(drawn.mean(), 1 / num_workers, drawn.size) < 5


@pytest.mark.parametrize("topology", ("ring", "all_to_all"))
def test_signs_are_independent_of_one_another(topology, num_workers=8, keys=6):
    """Of neighbors, of lanes and rows that share a part of the hash, of chunks and of keys."""
    size = num_workers * 4096
    values = np.where(np.arange(num_workers) % 2, 1, -1).astype(np.float32)
    values = values[:, None].repeat(size, axis=1)
    found = np.sign(sums(UNIT, topology, values, keys))
    pairs = [found[:, lag:] * found[:, :-lag] for lag in (1, 8, 32, 64, 128, 256, 512, 4096)]
    pairs += [found[1:] * found[:-1]]
    for products in pairs:
        assert abs(products.mean()) < 5 / math.sqrt(products.size)


@pytest.mark.parametrize(("weights", "newer"), (((3,), 1 / 4), ((1, 5, 2), 1 / 9)))
def test_a_hop_weighs_messages_by_the_workers_in_them(weights, newer):
    """The sign of each message is drawn in proportion to its weight, and weights add up."""
    size, rows = 8 * 1024 * 64, 1024 * 64 // 256
    negative = jnp.zeros((len(weights), rows * 32), jnp.uint8)

    def local(key, own):
        codec = UNIT.bind(own, call_on(size, 8), key)

        def merged(positive, own_is_positive):
            bits = negative if positive is None else negative.at[positive].set(255)
            message = as_bytes(bits, jnp.array(weights, jnp.uint16)[:, None])
            return codec.hop(message, jnp.int32(2 if own_is_positive else 3), 5)

        return [merged(m, False) for m in range(len(weights))], merged(None, True)

    own = np.full((8, 8, rows * 256), -1, np.float32)
    own[:, 2] = 1
    received, mine = simulated(local)(KEY, own.reshape(8, -1))
    total = sum(weights) + 1
    for merged, own_weight in zip([*received, mine], (*weights, 1), strict=True):
        merged = np.asarray(merged)
        assert merged.dtype == np.uint8 and merged.shape == (8, rows * 32 + 2)
        assert (merged[:, -2:].copy().view(np.uint16) == total).all()
        drawn = np.bitwise_count(merged[0, :-2]).sum() / (rows * 256)
        assert deviations(drawn, own_weight / total, rows * 256) < 5
    assert 1 / total == newer


@pytest.mark.parametrize("weight", (1, 2, 6, 14, 62))
def test_noise_of_16_bits_is_as_good_as_exact(weight, monkeypatch):
    """All values that noise has, each once: a probability is off by less than 2^-16."""
    grid = half_to_offset(jnp.arange(2**16, dtype=jnp.uint32)).reshape(256, 256)
    monkeypatch.setattr("dynamiq_research.marsit.offsets", lambda *_: grid)

    def local(key, own):
        codec = UNIT.bind(own, call_on(2 * 2**16, 2), key)
        message = as_bytes(jnp.zeros((1, 2**13), jnp.uint8), jnp.full((1, 1), weight, jnp.uint16))
        return codec.hop(message, jnp.int32(0), 1)[:-2]

    bits = simulated(local)(KEY, np.ones((2, 2 * 2**16), np.float32))
    assert abs(np.bitwise_count(np.asarray(bits[0])).sum() - 2**16 / (weight + 1)) < 1


@pytest.mark.parametrize("topology", ("butterfly", "all_to_all"))
def test_every_merge_of_a_chunk_has_noise_of_its_own(topology, monkeypatch, num_workers=8):
    """Also in hops of several messages, on the way of all of them to the last one."""

    def number_as_noise(row_ids, number, seed, rounding):
        assert rounding == "independent"
        return jnp.broadcast_to(number.astype(jnp.float32), (row_ids.size, 256))

    def count(before, newcomer, noise):
        (counts, weight), (others, _) = before, newcomer
        places = jnp.arange(counts.size, dtype=jnp.float32)
        merged = counts + others + (places == noise[0, 0]).astype(jnp.uint8)
        return type(before)(merged, weight)

    monkeypatch.setattr("dynamiq_research.marsit.offsets", number_as_noise)
    monkeypatch.setattr("dynamiq_research.marsit._merge", count)
    call = call_on(num_workers * 512, num_workers, TOPOLOGIES[topology])

    def local(key, values):
        payload = call.topology.summed(UNIT.bind(values, call, key), call.axis)
        return payload[:-2]

    negative = np.full((num_workers, call.size), -1, np.float32)
    counts = np.asarray(simulated(local)(KEY, negative))
    assert counts.shape == (num_workers, num_workers**2) and counts.max() == 1
    np.testing.assert_array_equal(counts.sum(axis=1), num_workers - 1)


def test_the_program_does_not_grow_with_the_workers():
    def length(num_workers):
        call = call_on(num_workers * 256, num_workers, "all_to_all")
        run = jax.vmap(lambda x: UNIT.all_reduce(x, call, KEY, ()).total, axis_name="data")
        return str(jax.make_jaxpr(run)(jnp.ones((num_workers, call.size)))).count(" xor ")

    assert length(32) == length(4) > 0


# --------------------------------------------------------------------------------------- scales


def row_means(values: np.ndarray) -> np.ndarray:
    """Return the mean magnitudes of rows of 256 over workers [workers, size], in float64."""
    size = values.shape[-1]
    rows = [
        np.abs(values[:, start : start + 256]).mean(dtype=np.float64)
        for start in range(0, size, 256)
    ]
    return np.array(rows)


@pytest.mark.parametrize("topology", ("ring", "all_to_all"))
def test_a_sum_is_the_scale_of_its_row_times_workers(topology, num_workers=4):
    """Of the last row too, in which padding has no part. Two roundings to bfloat16."""
    values = of_workers(0, num_workers, SIZE)
    found = np.abs(sums(Marsit(), topology, values)[0])
    expected = num_workers * row_means(values).repeat(256)[:SIZE]
    np.testing.assert_allclose(found, expected, rtol=2**-7)
    assert np.any(np.abs(found / expected - 1) > 2**-10)


@pytest.mark.parametrize("exponent", (-100, -90, 90, 127))
def test_the_scale_covers_the_range_of_float32(exponent):
    """A power of two changes no bits: nothing overflows or underflows on the way."""
    values = np.clip(of_workers(0, 4, SIZE) * np.float32(500), -0.45, 0.45)
    plain, scaled = (
        sums(Marsit(), "ring", values * np.float32(2.0) ** power)[0].astype(np.float64)
        for power in (0, exponent)
    )
    np.testing.assert_array_equal(scaled, plain * 2.0**exponent)


@pytest.mark.parametrize("dtype", (jnp.bfloat16, jnp.float16))
def test_narrow_gradients_are_those_of_float32(dtype):
    values = of_workers(0, 4, SIZE).astype(dtype)
    found, expected = (sums(Marsit(), "ring", v) for v in (values, values.astype(np.float32)))
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, expected.astype(dtype))


def test_a_constant_scale_is_not_sent():
    values = of_workers(0, 4, SIZE)
    assert set(np.unique(np.abs(sums(Marsit(scale=1e-3), "ring", values)))) == {np.float32(4e-3)}
    call = call_on(SIZE, 4)
    assert Marsit(scale=1e-3).wire_cost(call).statistics_bytes == 0
    assert Marsit().wire_cost(call).statistics_bytes == 3 * 2 * 2 * 5


def test_with_a_constant_scale_nan_reaches_its_chunk(num_workers=4):
    values = of_workers(0, num_workers, num_workers * 1024)
    values[1, 1500] = np.nan
    lost = ~np.isfinite(sums(UNIT, "ring", values)[0])
    np.testing.assert_array_equal(lost.reshape(num_workers, -1).mean(axis=1), [0, 1, 0, 0])


def test_rows_of_zeros_stay_zero():
    values = of_workers(0, 4, SIZE)
    values[:, 256:512] = 0
    found = sums(Marsit(), "ring", values)[0]
    np.testing.assert_array_equal(found == 0, (values == 0).all(axis=0))


@pytest.mark.parametrize(("num_workers", "busy"), ((4, 0), (4, 1), (3, 0), (3, 1), (3, 2)))
def test_zeros_count_as_either_sign(num_workers, busy, keys=8):
    """One that is always positive would outvote the only worker that has a gradient."""
    values = np.zeros((num_workers, 4 * 4096), np.float32)
    values[:busy] = 1.0
    found = sums(UNIT, "all_to_all", values, keys) > 0
    expected = (busy + (num_workers - busy) / 2) / num_workers
    assert deviations(found.mean(), expected, found.size) < 5
    even = found[:, ::2].mean(axis=1)  # for each key
    if (num_workers - busy) % 2:  # which lanes have one more depends on the key
        assert np.any(even > expected) and np.any(even < expected)
    else:  # as many of either sign
        assert (deviations(even, expected, found[0, ::2].size) < 5).all()


# ------------------------------------------------------------------------- the other collectives


@pytest.mark.parametrize("topology", ("ring", "all_to_all"))
def test_a_scattered_sum_adds_up_the_signs_that_arrive(topology, num_workers=4):
    """Of single workers: the exact sum of signs. Of a ring: two signs, of which one counts for
    three workers.
    """
    values = signs_of(num_workers).reshape(num_workers, -1)
    arguments = {"method": dq.Compression(UNIT, TOPOLOGIES[topology], exact_below=0)}
    scatter = simulated(lambda key, g: dq.psum_scatter(g, "data", key=key, tiled=True, **arguments))
    found = np.asarray(scatter(KEY, values)).reshape(num_workers + 1, BLOCK)
    for share, block in enumerate(found):
        total = 2 * share - num_workers
        spread = math.sqrt((num_workers**2 - total**2) / BLOCK)
        assert abs(block.mean() - total) <= 5 * spread
        if topology == "all_to_all":
            np.testing.assert_array_equal(block, total)
    if topology == "ring":
        assert set(np.unique(found)) == {-4, -2, 2, 4}


def test_a_gathered_part_has_the_scales_and_signs_of_its_worker():
    parts = of_workers(0, 4, 1024, agreement=0)
    arguments = {"method": dq.Compression(Marsit(), exact_below=0)}
    gather = simulated(lambda key, g: dq.all_gather(g, "data", key=key, tiled=True, **arguments))
    found = np.asarray(gather(KEY, parts))
    np.testing.assert_array_equal(found, found[:1].repeat(4, axis=0))
    expected = np.abs(parts).reshape(-1, 256).mean(axis=1).repeat(256)
    np.testing.assert_allclose(found[0], np.sign(parts).reshape(-1) * expected, rtol=2**-8)


# --------------------------------------------------------------------------------------- feedback


def test_feedback_keeps_what_the_own_signs_leave_out(num_workers=4):
    method, call = Marsit(), call_on(SIZE, num_workers, feedback=True)
    values = of_workers(0, num_workers, SIZE)

    def local(key, values):
        with_feedback = method.all_reduce(values, call, key, ())
        alone = method.all_reduce(values, dataclasses.replace(call, feedback=False), key, ())
        return with_feedback.applied, with_feedback.total, alone.total

    applied, total, alone = map(np.asarray, simulated(local)(KEY, values))
    np.testing.assert_array_equal(total, alone)  # these signs are what is sent
    scales = np.abs(total[0]) / num_workers
    np.testing.assert_array_equal(applied, np.sign(values) * scales)


@pytest.mark.slow
def test_feedback_recovers_magnitudes(num_workers=4, size=2048, steps=200):
    """Of a gradient that stays: over steps, large values get what signs cannot give them."""
    values = of_workers(1, num_workers, size, agreement=0.9)
    truth = values.sum(axis=0, dtype=np.float64)
    method, call = ErrorFeedback(inner=Marsit()), call_on(size, num_workers, "all_to_all")

    def local(key, values):
        def step(state, number):
            reduced = method.all_reduce(values, call, jax.random.fold_in(key, number), state)
            return reduced.state, reduced.total

        return jax.lax.scan(step, method.init_state(call), jnp.arange(steps))[1].mean(axis=0)

    found = np.asarray(simulated(local)(KEY, values)[0], np.float64)
    alone = sums(Marsit(), "all_to_all", values, 8).mean(axis=0)
    gain, without = (np.vdot(x, truth) / np.vdot(truth, truth) for x in (found, alone))
    assert 0.8 < gain < 1.02, without
    assert 0.3 < without < 0.7


# ------------------------------------------------------------------------------------------ bytes

TREE = {"w": jax.ShapeDtypeStruct((1000, 1000), jnp.float32)}


@pytest.mark.parametrize("topology", ("ring", "butterfly", "all_to_all"))
def test_a_coordinate_has_one_bit_and_its_share_of_a_scale(topology):
    for workers in range(2, 17):
        if TOPOLOGIES[topology].supports(workers):
            scaled, unit = (
                dq.wire_report(TREE, workers, dq.Compression(method, TOPOLOGIES[topology]))
                for method in ("marsit", UNIT)
            )
            assert 1.06 < scaled.bits < 1.1
            assert 1.0 < unit.bits < 1.01


@pytest.mark.parametrize(("method", "topology"), ((Marsit(), "butterfly"), (UNIT, "unrolled")))
def test_the_compiled_program_sends_the_bytes_of_the_report(data_mesh, method, topology):
    tree = {"w": jax.ShapeDtypeStruct((300, 101), jnp.float32)}
    report = dq.wire_report(tree, 4, method=dq.Compression(method, TOPOLOGIES[topology]))
    sent = sent_bytes(data_mesh(4), tree, method, TOPOLOGIES[topology])
    assert sent == report.bytes_per_worker


@pytest.mark.parametrize(
    ("topology", "messages"),
    (
        ("unrolled", {"collective-permute": 3, "all-gather": 1}),
        ("all_to_all", {"all-to-all": 1, "all-gather": 1}),
    ),
)
def test_each_hop_is_one_message(data_mesh, topology, messages):
    tree = {"w": jax.ShapeDtypeStruct((300, 101), jnp.float32)}
    found = compiled_collectives(data_mesh(4), tree, UNIT, TOPOLOGIES[topology])
    assert collections.Counter(one.kind for one in found) == messages


# ----------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize("scale", (0, -1.0, 1e31, math.inf, math.nan, "1", True))
def test_a_scale_is_a_positive_number(scale):
    with pytest.raises(ValueError, match=r"scale=.* is out of range\. Give 1e-30 to 1e30, or None"):
        Marsit(scale=scale)
