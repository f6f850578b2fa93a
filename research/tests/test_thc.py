"""THC: a rotation that loses nothing, integers that add up without loss, and the error of one
rounding for each worker.

`test_methods.py` has what every method owes: replicas, unbiased sums, bytes, scattered parts.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

import dynamiq_jax as dq
from dynamiq_jax.methods import SummedChunks
from dynamiq_research import THC
from dynamiq_research.thc import hadamard
from dynamiq_research.thc.method import BlockLayout, _norm_words
from tests.support.gradients import of_workers, vnmse
from tests.support.workers import call_on, simulated

N, SIZE, BLOCK = 4, 16_384, 1024
KEY = jax.random.key(3)
SMALL, WIDE = THC(block=BLOCK), THC(block=BLOCK, clamp=4.5)


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def lost_to_clamping(clamp: float) -> float:
    """Return the share of normal coordinates that a clamp takes away: 2 Q(clamp)."""
    return math.erfc(clamp / math.sqrt(2))


@functools.cache
def psum_with(method: THC, topology="ring"):
    return simulated(
        lambda key, g: dq.psum(g, "data", key=key, method=dq.Compression(method, topology))
    )


@functools.cache
def alone(method: THC):
    """Return a function of (key, values) to what each worker's own payloads decode to."""

    def local(key, flat):
        codec = method.bind(flat, call_on(SIZE, N), key)
        return codec.decompress(lax.map(lambda chunk: codec.compress(chunk, 0), jnp.arange(N)))

    return simulated(local)


def steps_of(method: THC, g: np.ndarray) -> np.ndarray:
    """Return the steps of the grid of every block, float64 [SIZE / BLOCK]: the largest norm of all
    workers as the next bfloat16, in standard deviations.
    """
    norms = np.linalg.norm(g.astype(np.float64).reshape(len(g), -1, BLOCK), axis=-1).max(axis=0)
    unit = np.exp2(np.frexp(norms)[1] - 8)
    largest = 2 ** (method.code_bits - 1) - 1
    return np.ceil(norms / unit) * unit * method.standard_deviations / largest / math.sqrt(BLOCK)


# ---------------------------------------------------------------------------------- the rotation


@functools.cache
def rotation(block: int):
    signs = hadamard.random_signs(jax.random.key(block), block)
    rotate = jax.jit(lambda x: hadamard.rotate(x, signs))
    return rotate, jax.jit(lambda x: hadamard.unrotate(x, signs)), np.asarray(signs)


@pytest.mark.parametrize("block", (256, 512, 2**14, 2**15))
def test_the_rotation_keeps_inner_products_and_is_undone(block):
    rotate, unrotate, _ = rotation(block)
    x = normal(block, 3, block)
    y = np.asarray(rotate(x))
    np.testing.assert_allclose(unrotate(y), x, atol=1e-5)
    np.testing.assert_allclose(y @ y.T, x @ x.T, rtol=1e-4, atol=1e-4 * block)
    assert np.abs(np.vdot(x, y)) < 0.2 * np.vdot(x, x)  # it does something


def test_the_transform_is_that_of_sylvester():
    rotate, _, signs = rotation(512)
    matrix = functools.reduce(np.kron, [np.array([[1, 1], [1, -1]])] * 9) / math.sqrt(512)
    x = normal(0, 3, 512)
    np.testing.assert_allclose(rotate(x), (x * signs) @ matrix, atol=1e-5)
    assert set(signs) == {-1, 1}
    assert abs(signs.sum()) < 5 * math.sqrt(512)


@pytest.mark.parametrize("block", (256, 2**14))
@pytest.mark.parametrize("scale", (1e-30, 1.0, 1e37))
def test_a_spike_is_spread_evenly(block, scale):
    rotate, unrotate, _ = rotation(block)
    spike = np.zeros((3, block), np.float32)
    spike[:, 77] = scale
    spread = np.asarray(rotate(spike))
    np.testing.assert_allclose(np.abs(spread) / scale, 1 / math.sqrt(block), rtol=1e-5)
    np.testing.assert_allclose(unrotate(spread) / np.float32(scale), spike / scale, atol=1e-5)


def test_another_key_is_another_rotation():
    one, other = (hadamard.random_signs(jax.random.key(k), 4096) for k in range(2))
    assert 0.4 < np.mean(np.asarray(one) == np.asarray(other)) < 0.6


# ------------------------------------------------------------------------- sums without more error


@functools.cache
def sum_of_integers():
    """Return a function of (key, values) to what every topology has to give, and to the integers of
    each worker, which are added in int32 here.
    """

    def local(key, flat):
        # The key of the only bucket.
        codec = SMALL.bind(flat, call_on(SIZE, N), jax.random.fold_in(key, 0))
        total = lax.psum(codec.encoded.astype(jnp.int32), "data").astype(jnp.int16)
        return codec.decode(total, None), codec.encoded

    return simulated(local)


@pytest.mark.parametrize("topology", ("ring", "all_to_all"))
def test_a_topology_gives_the_sum_of_the_integers_bit_for_bit(topology):
    g = of_workers(0, N, SIZE)
    expected, integers = map(np.asarray, sum_of_integers()(KEY, g))
    result = np.asarray(psum_with(SMALL, topology)(KEY, g))
    np.testing.assert_array_equal(result.view(np.uint32), expected.view(np.uint32))
    assert np.abs(integers).max() == 7
    assert len({worker.tobytes() for worker in integers}) == N


def test_integers_are_on_the_grid_of_the_largest_norm():
    """Rotated, what a worker sends is whole steps: of the norms of all workers, on every one."""
    g = of_workers(15, N, SIZE) * np.float32([[1], [4], [2], [0.01]])
    own = np.asarray(alone(SMALL)(KEY, g))
    signs = hadamard.random_signs(jax.random.split(KEY)[0], BLOCK)
    rotated = np.asarray(hadamard.rotate(own.reshape(-1, BLOCK), signs), np.float64)
    whole = rotated.reshape(N, -1, BLOCK) / steps_of(SMALL, g)[:, None]
    np.testing.assert_allclose(whole, np.rint(whole), atol=1e-3)
    largest = np.abs(np.rint(whole)).max(axis=(1, 2))
    assert largest[1] == 7 and largest[3] == 1 and (largest < 7).sum() == 3


@pytest.mark.slow
def test_a_worker_gets_its_part_of_the_same_sum():
    def local(key, flat):
        return dq.psum_scatter(flat, "data", key=key, tiled=True, method=SMALL)

    g = of_workers(2, N, SIZE)
    parts = np.asarray(simulated(local)(KEY, g))
    np.testing.assert_allclose(
        parts.reshape(-1), psum_with(SMALL)(KEY, g)[0], rtol=1e-4, atol=1e-6 * np.abs(g).max()
    )


def test_gathered_parts_have_the_error_of_one_rounding():
    """Of the grid of their own worker: no other one's norm widens it, and no sum its integers."""
    method, parts = dataclasses.replace(WIDE, code_bits=6), normal(5, N, 4 * BLOCK)
    parts *= np.float32([[1], [100], [1e-3], [1e6]])
    run = simulated(lambda key, x: dq.all_gather(x, "data", key=key, tiled=True, method=method))
    gathered = np.asarray(run(KEY, parts))
    assert len({replica.tobytes() for replica in gathered}) == 1
    rounding = (4.5 / 31) ** 2 / 6
    for ours, part in zip(gathered[0].reshape(N, -1), parts, strict=True):
        assert vnmse(ours, part) == pytest.approx(rounding, rel=0.05)


# ---------------------------------------------------------------------------- width of the integers


def test_wire_bits_are_those_of_the_docstring():
    bits = {1: 4, 2: 5, 4: 6, 8: 7, 16: 8, 64: 10}
    assert {n: THC().wire_bits(n) for n in bits} == bits
    for n in (2, 4, 8):
        assert THC().wire_cost(call_on(n << 16, n)).payload_bytes == bits[n] * 2**16 / 8
        gather = call_on(n << 16, n, collective="all_gather")  # nothing is summed
        assert THC().wire_cost(gather).payload_bytes == 4 * 2**16 / 8


@given(bits=st.integers(2, 8), num_workers=st.integers(1, 250))
def test_a_sum_fits_and_would_not_fit_in_one_bit_less(bits, num_workers):
    largest_sum = (2 ** (bits - 1) - 1) * num_workers
    width = THC(code_bits=bits).wire_bits(num_workers)
    assert largest_sum <= 2 ** (width - 1) - 1
    assert largest_sum > 2 ** (width - 2) - 1


@functools.cache
def chain_of_hops(num_workers: int, bits: int):
    """Return a function of int8 [n, 256] to what comes out of one hop after the other, and to the
    sum that it should be.
    """
    width = THC(code_bits=bits).wire_bits(num_workers)
    layout, signs = BlockLayout(chunk_size=256, num_chunks=1, block=256, width=width), jnp.ones(256)

    def run(integers):
        numbers = integers.astype(jnp.int16)
        codec = SummedChunks(
            encoded=numbers[:1].reshape(1, 1, 256),
            decode=lambda sums, chunk: layout.as_values(sums, jnp.ones((1, 1)), signs),
            size=256,
            pack=layout.pack,
            unpack=layout.unpack,
        )
        payload = codec.compress(0, 0)
        assert payload.size == layout.payload_bytes
        for turn, mine in enumerate(numbers[1:], start=1):
            codec = dataclasses.replace(codec, encoded=mine.reshape(1, 1, 256))
            payload = codec.hop(payload[None], 0, turn)
        total = jnp.sum(integers.astype(jnp.int32), axis=0).astype(jnp.float32)
        return codec.decompress(payload[None]), hadamard.unrotate(total[None], signs)[0]

    return jax.jit(run)


@pytest.mark.parametrize(("num_workers", "bits"), ((2, 2), (5, 4), (9, 8)))
@given(seed=st.integers(0, 999))
def test_hops_add_and_never_overflow(num_workers, bits, seed):
    """Both ends of the range most of the time."""
    rng, largest = np.random.default_rng(seed), 2 ** (bits - 1) - 1
    integers = rng.integers(-largest, largest + 1, (num_workers, 256), np.int8)
    integers[:, :100], integers[:, 100:200] = largest, -largest
    result, expected = chain_of_hops(num_workers, bits)(integers)
    np.testing.assert_allclose(result, expected, rtol=1e-6, atol=1e-5 * largest)
    assert np.abs(expected).max() > num_workers * largest


def test_workers_that_all_send_their_largest_integers_are_summed():
    """A spike is spread evenly, so that clamp=1 makes every coordinate the largest integer."""
    spike = np.zeros((3, 8192), np.float32)
    spike[:, 5] = -2.0
    result = np.asarray(psum_with(THC(clamp=1.0))(KEY, spike))
    np.testing.assert_allclose(result, spike * np.float32(3), atol=1e-4)


# --------------------------------------------------------------------------------- saturating sums


def saturating(bits: int) -> THC:
    return THC(block=BLOCK, sum_bits=bits)


@functools.cache
def decoded_integers(method: THC):
    """Return a function of (key, values) to the integers of each worker, [n, SIZE], and to the
    decoded sum of other integers, [SIZE].
    """

    def local(key, flat, sums):
        codec = method.bind(flat, call_on(SIZE, N), jax.random.fold_in(key, 0))
        return codec.encoded.reshape(-1), codec.decode(sums.reshape(codec.encoded.shape), None)

    return simulated(local)


def clipped(sums: np.ndarray, bits: int) -> np.ndarray:
    return np.clip(sums, 1 - 2 ** (bits - 1), 2 ** (bits - 1) - 1)


@pytest.mark.parametrize("topology", ("ring", "all_to_all"))
@pytest.mark.parametrize("bits", (4, 5))
def test_sums_saturate_once_a_hop_after_all_that_arrived(topology, bits):
    """Bit for bit: partial sums on a ring, and the final one only, all to all."""
    g = of_workers(0, N, SIZE)
    zeros = np.zeros((N, SIZE), np.int16)
    integers, _ = decoded_integers(saturating(bits))(KEY, g, zeros)
    integers = np.asarray(integers, np.int32).reshape(N, N, -1)  # [worker, chunk, coordinate]
    expected = []
    for chunk in range(N):  # starts at the worker after it
        mine = np.roll(integers[:, chunk], -(chunk + 1), axis=0)
        total = mine[0]
        for one in mine[1:]:
            total = clipped(total + one, bits) if topology == "ring" else total + one
        expected.append(clipped(total, bits))
    assert np.abs(expected).max() == 2 ** (bits - 1) - 1
    sums = np.tile(np.concatenate(expected).astype(np.int16), (N, 1))
    _, decoded = decoded_integers(saturating(bits))(KEY, g, sums)
    result = np.asarray(psum_with(saturating(bits), topology)(KEY, g))
    np.testing.assert_array_equal(result.view(np.uint32), np.asarray(decoded).view(np.uint32))
    assert not np.array_equal(result, psum_with(SMALL, topology)(KEY, g))


@pytest.mark.parametrize("topology", ("ring", "butterfly", "all_to_all"))
def test_sums_that_fit_are_those_of_enough_bits(topology):
    """Norms are those of the first worker: the integers of the others are small."""
    g = of_workers(1, N, SIZE) * np.float32([[1], [0.01], [0.02], [0.01]])
    few, enough = (np.asarray(psum_with(m, topology)(KEY, g)) for m in (saturating(5), SMALL))
    np.testing.assert_array_equal(few.view(np.uint32), enough.view(np.uint32))
    assert (THC(sum_bits=5).wire_bits(N), SMALL.wire_bits(N)) == (5, 6)


@pytest.mark.parametrize(
    ("num_workers", "agreement", "errors"),
    (
        (8, 0.5, {7: 0.0055, 6: 0.023, 5: 0.195, 4: 0.50}),
        pytest.param(64, 0.5, {10: 0.0012, 9: 0.0117, 8: 0.151}, marks=pytest.mark.slow),
    ),
)
@pytest.mark.slow
def test_the_error_of_sums_that_saturate(num_workers, agreement, errors):
    """Normal coordinates, against integers that were added in NumPy on the grid of one worker's
    norm. That of the largest norm is wider: by 2 % for 8 workers and 3 % for 64.
    """
    size, widening = 128 * 1024, {8: 1.02, 64: 1.03}[num_workers]
    rng = np.random.default_rng(0)
    common = rng.standard_normal(size, np.float32) * math.sqrt(agreement)
    g = rng.standard_normal((num_workers, size), np.float32) * math.sqrt(1 - agreement) + common
    truth = g.sum(axis=0, dtype=np.float64)
    for bits, error in errors.items():
        sum_bits = None if bits == max(errors) else bits
        method = THC(sum_bits=sum_bits, block=2048, clamp=2.5 / widening)
        assert method.wire_bits(num_workers) == bits
        assert vnmse(psum_with(method)(KEY, g)[0], truth) == pytest.approx(error, rel=0.1)


# -------------------------------------------------------------------------------------- the error


@pytest.mark.parametrize("bits", (4, 8))
def test_the_error_of_one_worker_is_that_of_its_grid(bits):
    """With a wide clamp, nothing but rounding loses anything: step^2 / 6 a coordinate."""
    g, method = normal(6, N, SIZE), dataclasses.replace(WIDE, code_bits=bits)
    own = np.asarray(alone(method)(KEY, g), np.float64)
    assert 0.97 < np.mean((own - g) ** 2) / np.mean(steps_of(method, g) ** 2 / 6) < 1.03


def test_workers_round_independently_and_hops_round_nothing():
    """Errors of equal gradients would add up if their noise were equal."""
    g = np.tile(normal(7, 1, SIZE), (N, 1))
    error = np.asarray(psum_with(WIDE)(KEY, g)[0], np.float64) - g.sum(axis=0, dtype=np.float64)
    assert 0.95 < np.mean(error**2) / (N * np.mean(steps_of(WIDE, g) ** 2 / 6)) < 1.05


@pytest.mark.parametrize("clamp", (1.5, 4.5))
def test_the_bias_is_what_clamping_takes(clamp):
    g = np.tile(normal(8, 1, SIZE), (N, 1))
    run = alone(THC(block=BLOCK, clamp=clamp))
    results = [np.asarray(run(jax.random.key(k), g), np.float64) for k in range(8)]
    gain = np.vdot(np.sum(results, axis=(0, 1)), g[0]) / (8 * N * np.vdot(g[0], g[0]))
    # The norm is rounded up, by at most a part in 128: the clamp is a little wider than it says.
    assert 1 - lost_to_clamping(clamp) - 2e-3 < gain < 1 - lost_to_clamping(clamp * 1.01) + 3e-3


def test_the_mean_over_keys_is_the_sum():
    g, keys = of_workers(9, N, SIZE), 16
    truth = g.sum(axis=0, dtype=np.float64)
    results = [np.asarray(psum_with(WIDE)(jax.random.key(k), g)[0], float) for k in range(keys)]
    single = np.mean([vnmse(result, truth) for result in results])
    assert 0.87 / keys < vnmse(np.mean(results, axis=0), truth) / single < 1.13 / keys


def test_noise_depends_on_the_key(monkeypatch):
    """Even if the rotation did not."""
    signs = hadamard.random_signs(jax.random.key(0), 1024)
    monkeypatch.setattr(hadamard, "random_signs", lambda key, block: signs)
    g = of_workers(9, N, SIZE)
    reduce = simulated(lambda key, g: dq.psum(g, "data", key=key, method=THC(block=1024)))
    first, other = (np.asarray(reduce(jax.random.key(k), g)[0]) for k in (0, 1))
    assert np.mean(first != other) > 0.1


def test_the_default_clamp_has_less_error_than_others():
    """Of a sum: what clamping takes adds up more than rounding does."""
    g = of_workers(10, N, SIZE)
    truth = g.sum(axis=0, dtype=np.float64)

    def error(clamp: float | None) -> float:
        own = np.asarray(alone(THC(block=BLOCK, clamp=clamp))(KEY, g), np.float64)
        return vnmse(own.sum(axis=0), truth)

    default = error(None)
    assert all(1.1 * default < error(clamp) < 5 * default for clamp in (1.5, 4.5))


def test_the_default_clamps_are_those_of_the_docstring():
    clamps = {bits: THC(code_bits=bits).standard_deviations for bits in range(2, 9)}
    assert clamps == {2: 1.2, 3: 2.0, 4: 2.5, 5: 2.9, 6: 3.3, 7: 3.6, 8: 3.9}
    assert lost_to_clamping(clamps[4]) == pytest.approx(0.012, abs=5e-4)
    assert lost_to_clamping(clamps[6]) == pytest.approx(0.001, abs=5e-5)
    assert THC(code_bits=4, clamp=3.0).standard_deviations == 3.0


@pytest.mark.parametrize("bits", (4, 6, 8))
def test_the_default_clamp_weighs_the_loss_of_workers_twice(bits):
    """Rounding takes step^2 / 6, and the tails beyond a clamp have a closed form."""
    clamps, largest = np.arange(10, 61) / 10, 2 ** (bits - 1) - 1
    tails = np.array([lost_to_clamping(c) for c in clamps])
    density = np.exp(-(clamps**2) / 2) / math.sqrt(2 * math.pi)
    lost = (1 + clamps**2) * tails - 2 * clamps * density
    error = (clamps / largest) ** 2 / 6 * (1 - tails) + 2 * lost
    assert THC(code_bits=bits).standard_deviations == pytest.approx(
        clamps[error.argmin()], abs=0.11
    )


# --------------------------------------------------------------------------------- special values


@pytest.mark.parametrize("value", (np.nan, -np.nan, np.inf, -np.inf, 3e38))
def test_what_is_not_finite_makes_its_block_nan_on_all_workers(value):
    g = of_workers(12, N, SIZE)
    g[2, 5 * BLOCK + 17] = value
    result = np.asarray(psum_with(SMALL)(KEY, g)).reshape(N, -1, BLOCK)
    assert np.isnan(result[:, 5]).all()
    assert np.isfinite(np.delete(result, 5, axis=1)).all()


def test_no_norm_is_below_a_value_of_its_block():
    """Not even by the rounding of its computation: here, values just above a bfloat16."""
    blocks = np.zeros((128, 256), np.float32)
    above = np.nextafter(np.arange(128, 256, dtype=np.float32), np.float32(1e9))
    blocks[:, 3] = above
    words = np.asarray(_norm_words(blocks)).astype(np.uint32)
    np.testing.assert_array_equal((words << 16).view(np.float32), np.arange(129, 257))


@pytest.mark.parametrize("scale", (1e-30, 1e-10, 1e30))
def test_the_size_of_a_gradient_does_not_matter(scale):
    g = normal(13, N, SIZE)
    truth = g.sum(axis=0, dtype=np.float64)
    result = np.asarray(psum_with(SMALL)(KEY, g * np.float32(scale))[0], np.float64) / scale
    expected = vnmse(psum_with(SMALL)(KEY, g)[0], truth)
    assert vnmse(result, truth) == pytest.approx(expected, rel=0.05)


def test_zero_blocks_are_exact_zeros():
    g = of_workers(14, N, SIZE)
    g[:, 3 * BLOCK : 5 * BLOCK] = 0
    result = np.asarray(psum_with(SMALL)(KEY, g)).reshape(N, -1, BLOCK)
    assert not result[:, 3:5].any()
    assert np.all(result[:, :3].any(axis=-1))


def test_a_block_that_one_worker_leaves_empty_is_that_of_the_others():
    g = of_workers(15, N, SIZE)
    g[1, :BLOCK] = 0
    own = np.asarray(alone(SMALL)(KEY, g))
    assert not own[1, :BLOCK].any()
    assert own[0, :BLOCK].any()


# -------------------------------------------------------------------------------------- the layout


@pytest.mark.parametrize("size", (2048, 20_001, 100_000, 1_000_003))
def test_padding_stays_small_and_blocks_large(size):
    layout = THC().layout(call_on(size, 8))
    assert layout.chunk_size == -(-size // 8)
    padded = layout.rows_per_chunk * 256
    assert 0 <= padded - layout.chunk_size <= max(layout.chunk_size / 16, 255)
    if layout.block < THC().block:
        assert -layout.chunk_size % (2 * layout.block) > layout.chunk_size / 16


# ------------------------------------------------------------------------------------------ errors


@pytest.mark.parametrize("bits", (1, 9, 4.5, float("nan"), "4", None))
def test_impossible_bits(bits):
    with pytest.raises(ValueError, match=r"code_bits=.* is not possible. Give .* 2 to 8\."):
        THC(code_bits=bits)


@pytest.mark.parametrize("block", (128, 1000, 2**21, 256.0, None))
def test_impossible_block(block):
    with pytest.raises(ValueError, match=r"block=.* is not possible. Give one of \(256, .*1048576"):
        THC(block=block)


@pytest.mark.parametrize("bits", (3, 17, 5.0, "7"))
def test_impossible_bits_of_a_sum(bits):
    """Fewer than those of one worker's integers would saturate what nothing was added to."""
    with pytest.raises(ValueError, match=r"sum_bits=.* is not possible. Give .* from 4 to 16\."):
        THC(sum_bits=bits)


@pytest.mark.parametrize("clamp", (0, 0.5, 17, float("nan"), "2"))
def test_impossible_clamp(clamp):
    with pytest.raises(ValueError, match=r"clamp=.* is out of range. Give 1 to 16 .*, or None\."):
        THC(clamp=clamp)


def test_more_workers_than_16_bits_can_sum():
    THC(code_bits=8).wire_bits(258)
    with pytest.raises(ValueError, match=r"code_bits=8 over 259 workers need 17 .*at most 258"):
        THC(code_bits=8).wire_bits(259)
