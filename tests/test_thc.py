"""THC: a rotation that loses nothing, integers that add up without loss, and the error of one
rounding for each worker.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dynamiq_jax.codec import hadamard
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

import dynamiq_jax as dq
from dynamiq_jax.methods._thc import THC, _Layout, _THCChunks
from dynamiq_jax.topologies import Ring, resolve_topology
from tests.support.gradients import of_workers, vnmse
from tests.support.workers import on_mesh, simulated

N, SIZE, BLOCK = 4, 16_384, 1024
KEY = jax.random.key(3)
SMALL = THC(block=BLOCK)


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def lost_to_clamping(clamp: float) -> float:
    """Share of normal coordinates that a clamp takes away: 2 Q(clamp)."""
    return math.erfc(clamp / math.sqrt(2))


@functools.cache
def psum_with(method: THC, topology="ring"):
    return simulated(lambda key, g: dq.psum(g, "data", key=key, method=method, topology=topology))


@functools.cache
def alone(method: THC):
    """What each worker's own payloads decode to, and the steps of the grid [n, chunks, blocks]."""

    def local(key, flat):
        codec = method.bind(flat, "data", N, N, key)
        payloads = lax.map(lambda chunk: codec.compress(chunk, 0), jnp.arange(N))
        return codec.decompress(payloads), codec.steps

    return simulated(local)


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
    x = normal(0, 2, 512)
    np.testing.assert_allclose(rotate(x), (x * signs) @ matrix, atol=1e-5)
    assert set(signs) == {-1, 1}
    assert abs(signs.sum()) < 5 * math.sqrt(512)


@pytest.mark.parametrize("block", (256, 2**14))
@pytest.mark.parametrize("scale", (1e-30, 1.0, 1e37))
def test_a_spike_is_spread_evenly(block, scale):
    rotate, unrotate, _ = rotation(block)
    spike = np.zeros((1, block), np.float32)
    spike[0, 77] = scale
    spread = np.asarray(rotate(spike))
    np.testing.assert_allclose(np.abs(spread) / scale, 1 / math.sqrt(block), rtol=1e-5)
    np.testing.assert_allclose(unrotate(spread) / np.float32(scale), spike / scale, atol=1e-5)


def test_another_key_is_another_rotation():
    one, other = (hadamard.random_signs(jax.random.key(k), 4096) for k in range(2))
    assert 0.4 < np.mean(np.asarray(one) == np.asarray(other)) < 0.6


# ------------------------------------------------------------------------- sums without more error


@functools.cache
def sum_of_integers():
    """The integers of all workers, added in int32 and decoded: what every topology has to give."""

    def local(key, flat):
        codec = SMALL.bind(flat, "data", N, N, key)
        total = lax.psum(codec.integers.astype(jnp.int32), "data")
        words = lax.bitcast_convert_type(total.astype(jnp.int16), jnp.uint16)
        return codec.decompress(jax.vmap(codec.layout.pack)(words)), codec.integers

    # The key of the only bucket.
    return simulated(lambda key, g: local(jax.random.fold_in(key, 0), g))


@pytest.mark.parametrize("topology", ("ring", "butterfly", "all_to_all"))
def test_a_topology_gives_the_sum_of_the_integers_bit_for_bit(topology):
    g = of_workers(0, N, SIZE)
    expected, integers = map(np.asarray, sum_of_integers()(KEY, g))
    result = np.asarray(psum_with(SMALL, topology)(KEY, g))
    np.testing.assert_array_equal(result.view(np.uint32), expected.view(np.uint32))
    assert np.abs(integers).max() == 7
    assert len({worker.tobytes() for worker in integers}) == N


def test_what_workers_apply_adds_up_to_the_result():
    """Error feedback keeps the rest: nothing else may be lost on the way."""

    def local(key, flat):
        reduced, applied = SMALL.all_reduce_applied(
            flat, "data", N, topology=Ring(), key=key, state=()
        )
        return reduced.total, applied

    g = of_workers(1, N, SIZE)
    total, applied = map(np.asarray, simulated(local)(KEY, g))
    assert vnmse(total[0], applied.sum(axis=0, dtype=np.float64)) < 1e-12
    assert all(1e-3 < vnmse(mine, own) < 0.1 for mine, own in zip(applied, g, strict=True))


@pytest.mark.parametrize("topology", ("ring", "all_to_all"))
def test_a_worker_gets_its_part_of_the_same_sum(topology):
    def local(key, flat):
        return dq.psum_scatter(flat, "data", key=key, tiled=True, method=SMALL, topology=topology)

    g = of_workers(2, N, SIZE)
    parts = np.asarray(simulated(local)(KEY, g))
    np.testing.assert_allclose(
        parts.reshape(-1), psum_with(SMALL)(KEY, g)[0], rtol=1e-4, atol=1e-6 * np.abs(g).max()
    )


def test_gathered_parts_have_the_error_of_one_rounding():
    parts = normal(5, N, 5000)
    run = simulated(
        lambda key, x: dq.all_gather(x, "data", key=key, tiled=True, method=THC(bits=6))
    )
    gathered = np.asarray(run(KEY, parts))
    assert len({replica.tobytes() for replica in gathered}) == 1
    assert 1e-4 < vnmse(gathered[0], parts.reshape(-1)) < 5e-3


@pytest.mark.parametrize("check_vma", (True, False))
def test_replicas_on_a_mesh_hold_the_same_bits(data_mesh, check_vma):
    g = of_workers(3, N, SIZE)
    result = on_mesh(
        lambda key, x: dq.psum(x, "data", key=key, method=SMALL), data_mesh(N), check_vma=check_vma
    )(KEY, g)
    replicas = {np.asarray(replica).tobytes() for replica in result}
    assert len(replicas) == 1
    assert vnmse(np.asarray(result)[0], psum_with(SMALL)(KEY, g)[0]) < 1e-12


# ---------------------------------------------------------------------------- width of the integers


def test_wire_bits_are_those_of_the_docstring():
    assert {n: THC().wire_bits(n) for n in (1, 2, 4, 8, 16, 64)} == {
        1: 4,
        2: 5,
        4: 6,
        8: 7,
        16: 8,
        64: 10,
    }
    for n in (2, 4, 8):
        cost = THC().wire_cost(n << 16, n, n)
        assert cost.payload_bytes == THC().wire_bits(n) * 2**16 / 8


@given(bits=st.integers(2, 8), num_workers=st.integers(1, 250))
def test_a_sum_fits_and_would_not_fit_in_one_bit_less(bits, num_workers):
    largest_sum = (2 ** (bits - 1) - 1) * num_workers
    width = THC(bits=bits).wire_bits(num_workers)
    assert largest_sum <= 2 ** (width - 1) - 1
    assert largest_sum > 2 ** (width - 2) - 1


@functools.cache
def chain_of_hops(num_workers: int, bits: int):
    """int8 [n, 1, 256] through one hop after the other, decoded, and the sum that it should be."""
    width = THC(bits=bits).wire_bits(num_workers)
    layout, ones = _Layout(size=256, num_chunks=1, block=256, width=width), jnp.ones(256)

    def run(integers):
        codecs = [
            _THCChunks(integers=mine[None], steps=jnp.ones((1, 1)), signs=ones, layout=layout)
            for mine in integers
        ]
        payload = codecs[0].compress(0, 0)
        for turn, codec in enumerate(codecs[1:], start=1):
            payload = codec.hop(payload[None], 0, turn)
        total = jnp.sum(integers.astype(jnp.int32), axis=0).astype(jnp.float32)
        return codecs[-1].decompress(payload[None]), hadamard.unrotate(total, ones)[0]

    return jax.jit(run)


@pytest.mark.parametrize(("num_workers", "bits"), ((2, 2), (5, 4), (9, 8)))
@given(seed=st.integers(0, 999))
def test_hops_add_and_never_overflow(num_workers, bits, seed):
    """Both ends of the range most of the time."""
    rng, largest = np.random.default_rng(seed), 2 ** (bits - 1) - 1
    integers = rng.integers(-largest, largest + 1, (num_workers, 1, 256), np.int8)
    integers[:, :, :100], integers[:, :, 100:200] = largest, -largest
    result, expected = chain_of_hops(num_workers, bits)(integers)
    np.testing.assert_allclose(result, expected, rtol=1e-6, atol=1e-5 * largest)
    assert np.abs(expected).max() > num_workers * largest


@pytest.mark.parametrize("num_workers", (3, 8))
def test_workers_that_all_send_their_largest_integers_are_summed(num_workers):
    """A spike is spread evenly, so that clamp=1 makes every coordinate the largest integer."""
    spike = np.zeros((num_workers, 8192), np.float32)
    spike[:, 5] = -2.0
    result = np.asarray(psum_with(THC(clamp=1.0))(KEY, spike))
    np.testing.assert_allclose(result, spike * np.float32(num_workers), atol=1e-4)


# -------------------------------------------------------------------------------------- the error


@pytest.mark.parametrize("bits", (4, 8))
def test_the_error_of_one_worker_is_that_of_its_grid(bits):
    """Wide clamp: nothing is lost but by rounding, step^2 / 6 a coordinate."""
    g = normal(6, N, SIZE)
    own, steps = map(np.asarray, alone(THC(bits=bits, block=BLOCK, clamp=4.5))(KEY, g))
    squares = (own.astype(np.float64) - g) ** 2
    assert 0.97 < squares.mean() / np.mean(steps[0] ** 2 / 6) < 1.03
    assert steps[0].mean() == pytest.approx(4.5 / (2 ** (bits - 1) - 1), rel=0.15)


def test_workers_round_independently_and_hops_round_nothing():
    """Of gradients that are all the same: errors would add up if their noise were."""
    g = np.tile(normal(7, 1, SIZE), (N, 1))
    wide = THC(block=BLOCK, clamp=4.5)
    _, steps = map(np.asarray, alone(wide)(jax.random.fold_in(KEY, 0), g))
    error = np.asarray(psum_with(wide)(KEY, g)[0], np.float64) - g.sum(axis=0, dtype=np.float64)
    assert 0.95 < np.mean(error**2) / (N * np.mean(steps[0] ** 2 / 6)) < 1.05


@pytest.mark.parametrize("clamp", (1.5, 4.5))
def test_the_bias_is_what_clamping_takes(clamp):
    g = np.tile(normal(8, 1, SIZE), (N, 1))
    run = alone(THC(block=BLOCK, clamp=clamp))
    results = [np.asarray(run(jax.random.key(k), g)[0], np.float64) for k in range(8)]
    gain = np.vdot(np.sum(results, axis=(0, 1)), g[0]) / (8 * N * np.vdot(g[0], g[0]))
    # The norm is rounded up, by at most a part in 128: the clamp is a little wider than it says.
    assert 1 - lost_to_clamping(clamp) - 2e-3 < gain < 1 - lost_to_clamping(clamp * 1.01) + 3e-3


def test_the_mean_over_keys_is_the_sum():
    g = of_workers(9, N, SIZE)
    truth = g.sum(axis=0, dtype=np.float64)
    run = psum_with(THC(block=BLOCK, clamp=4.5))
    results = [np.asarray(run(jax.random.key(k), g)[0], np.float64) for k in range(16)]
    single = np.mean([vnmse(result, truth) for result in results])
    assert 14 < single / vnmse(np.mean(results, axis=0), truth) < 18.5


def test_the_default_clamp_has_less_error_than_others():
    """Of a sum: what is lost by clamping adds up more than rounding does."""
    g = of_workers(10, N, SIZE)
    truth = g.sum(axis=0, dtype=np.float64)

    def error(clamp: float | None) -> float:
        own = np.asarray(alone(THC(block=BLOCK, clamp=clamp))(KEY, g)[0], np.float64)
        return vnmse(own.sum(axis=0), truth)

    default = error(None)
    assert all(1.1 * default < error(clamp) < 5 * default for clamp in (1.5, 4.5))


# --------------------------------------------------------------------------------- special values


@pytest.mark.parametrize("value", (np.nan, -np.nan, np.inf, -np.inf, 3e38))
def test_what_is_not_finite_makes_its_block_nan_on_all_workers(value):
    g = of_workers(12, N, SIZE)
    g[2, 5 * BLOCK + 17] = value
    result = np.asarray(psum_with(SMALL)(KEY, g)).reshape(N, -1, BLOCK)
    assert np.isnan(result[:, 5]).all()
    assert np.isfinite(np.delete(result, 5, axis=1)).all()


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
    own, steps = map(np.asarray, alone(SMALL)(KEY, g))
    assert not own[1, :BLOCK].any()
    assert own[0, :BLOCK].any()
    assert np.all(steps == steps[0])


# -------------------------------------------------------------------------------------- the layout


@pytest.mark.parametrize("size", (2048, 20_001, 100_000, 1_000_003))
@pytest.mark.parametrize("topology", ("ring", Ring(bidirectional=True)))
def test_padding_stays_small_and_blocks_large(size, topology):
    num_chunks = resolve_topology(topology).num_chunks(8)
    layout = THC()._layout(size, 8, num_chunks)
    padded = layout.rows_per_chunk * 256
    assert 0 <= padded - layout.chunk_size <= max(layout.chunk_size / 16, 255)
    if layout.block < THC().block:
        assert -layout.chunk_size % (2 * layout.block) > layout.chunk_size / 16


# ------------------------------------------------------------------------------------------ errors


@pytest.mark.parametrize("bits", (1, 9, 4.5, float("nan"), "4", None))
def test_impossible_bits(bits):
    with pytest.raises(ValueError, match=r"bits=.* is not possible. Give .* 2 to 8\."):
        THC(bits=bits)


@pytest.mark.parametrize("block", (128, 1000, 2**21, 256.0, None))
def test_impossible_block(block):
    with pytest.raises(ValueError, match=r"block=.* is not possible. Give a power of two.*\."):
        THC(block=block)


@pytest.mark.parametrize("clamp", (0, 0.5, 17, float("nan"), "2"))
def test_impossible_clamp(clamp):
    with pytest.raises(ValueError, match=r"clamp=.* is not possible. Give 1 to 16 .*\."):
        THC(clamp=clamp)


def test_more_workers_than_16_bits_can_sum():
    THC(bits=8).wire_bits(258)
    with pytest.raises(ValueError, match=r"bits=8 over 259 workers need 17 bits.*at most 258"):
        THC(bits=8).wire_bits(259)
