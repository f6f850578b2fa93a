"""Methods that sum some blocks only: the right ones, in full, and the share left out is reported.

`tests/conformance/test_methods.py` has what every method owes: replicas, NaN and Inf, bytes.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import dynamiq_jax as dq
from dynamiq_research import SparseBlocks, TopKChunked
from tests.support.gradients import of_workers
from tests.support.hlo import TREE
from tests.support.workers import TWO_WIDTHS, call_on, simulated

NUM_WORKERS, BLOCK, NUM_BLOCKS = 4, 64, 40
SIZE = NUM_BLOCKS * BLOCK - 17  # the last block is padded
KEY = jax.random.key(2)
TOP_K = TopKChunked(bits=8.0, inner=dq.methods.Exact(), block_size=BLOCK)
TOP_K_ROOM = TOP_K.num_chosen(call_on(SIZE, NUM_WORKERS))
seeds = st.integers(0, 2**32 - 1)


def local_all_reduce(method, size, num_workers=NUM_WORKERS):
    """Return a local function to the sum, to what this worker applied, and to the metrics."""
    call = call_on(size, num_workers, feedback=True)

    def local(key, flat):
        reduced = method.all_reduce(flat, call, key, ())
        return reduced.total, reduced.applied, reduced.metrics

    return local


@functools.cache
def runner(method, size, num_workers):
    return simulated(local_all_reduce(method, size, num_workers))


def reduced(method, gradients):
    """Return the sum [size], what each worker applied [n, size], and the metrics. All workers agree
    on the sum and on the metrics.
    """
    run = runner(method, gradients.shape[1], len(gradients))
    total, applied, metrics = jax.tree.map(np.asarray, run(KEY, gradients))
    for leaf in (total, *metrics.values()):
        assert {replica.tobytes() for replica in leaf} == {leaf[0].tobytes()}
    return total[0], applied, {name: value[0] for name, value in metrics.items()}


def in_blocks(flat: np.ndarray) -> np.ndarray:
    """Reshape [..., size] to [..., blocks, BLOCK]."""
    padding = [(0, 0)] * (flat.ndim - 1) + [(0, -flat.shape[-1] % BLOCK)]
    return np.pad(flat, padding).reshape(*flat.shape[:-1], -1, BLOCK)


def restricted(flat: np.ndarray, blocks: np.ndarray) -> np.ndarray:
    """Return values [..., size] with all but some blocks, bool [..., blocks], set to zero."""
    return np.where(np.repeat(blocks, BLOCK, axis=-1)[..., : flat.shape[-1]], flat, np.float32(0))


# ------------------------------------------------------------------------------- top-k of blocks


@given(seed=seeds)
def test_the_blocks_with_the_largest_norms_over_all_workers_are_summed(seed):
    """Against float64: norms are compared in bfloat16, rounded twice."""
    gradients = of_workers(seed, NUM_WORKERS, SIZE)
    total, applied, _ = reduced(TOP_K, gradients)
    chosen = in_blocks(total).any(axis=1)
    assert np.count_nonzero(chosen) == TOP_K_ROOM < NUM_BLOCKS
    norms = np.sqrt(np.sum(in_blocks(gradients).astype(np.float64) ** 2, axis=(0, 2)))
    assert norms[chosen].min() >= norms[~chosen].max() * (1 - 2**-7)
    np.testing.assert_array_equal(applied, restricted(gradients, chosen))
    expected = restricted(gradients.sum(axis=0, dtype=np.float64), chosen)
    np.testing.assert_allclose(total, expected, rtol=1e-5, atol=1e-6 * np.abs(expected).max())


def test_blocks_that_only_one_worker_has_count_for_all():
    """The norm is that over workers: none of the others has the largest block."""
    gradients = np.zeros((NUM_WORKERS, SIZE), np.float32)
    gradients[:, : 30 * BLOCK] = 1
    gradients[2, 33 * BLOCK] = 1000
    total, _, _ = reduced(dataclasses.replace(TOP_K, bits=0.3), gradients)
    assert np.flatnonzero(total).tolist() == [33 * BLOCK]


@pytest.mark.parametrize(
    ("inner", "inner_bits", "bits"),
    (
        *((dq.methods.BF16(), 16, bits) for bits in (0.5, 2.0, 8.0, 16.0)),
        *((TWO_WIDTHS, 6, bits) for bits in (0.5, 2.0, 5.5)),
    ),
    ids=str,
)
def test_the_bits_are_those_asked_for(inner, inner_bits, bits):
    """As many blocks as fit, and not one more."""
    method, size, n = TopKChunked(bits=bits, inner=inner), 1 << 20, 8
    report = dq.wire_report({"w": jax.ShapeDtypeStruct((size,), jnp.float32)}, n, method=method)
    room = method.num_chosen(call_on(size, n))
    assert room < size // 256
    assert bits - 0.1 < report.bits <= bits
    assert room == pytest.approx((bits - 1 / 16) / inner_bits * size / 256, rel=0.05)
    more = method.cost_of(room + 1, call_on(size, n))
    assert call_on(size, n).topology.bytes_sent(more, n) > bits / 8 * size * 2 * (n - 1) / n


@pytest.mark.parametrize("bits", (8.0, 32.0))
def test_a_bucket_that_fits_as_a_whole_costs_less(bits):
    method, call = TopKChunked(bits=bits, inner=TWO_WIDTHS), call_on(1 << 20, 8)
    assert method.num_chosen(call) == 1 << 12
    tree = {"w": jax.ShapeDtypeStruct((1 << 20,), jnp.float32)}
    assert dq.wire_report(tree, 8, method=method).bits == pytest.approx(6 + 1 / 16, rel=0.01)


# ----------------------------------------------------------------------------- any sparse blocks


@given(seed=seeds)
def test_units_of_the_gradient_do_not_matter(seed):
    check_units(seed, TOP_K)


def check_units(seed, method):
    gradients = of_workers(seed, NUM_WORKERS, SIZE)
    total, _, _ = reduced(method, gradients)
    assert np.any(total)
    for unit in (2.0**-60, 2.0**60):
        scaled, _, _ = reduced(method, gradients * np.float32(unit))
        np.testing.assert_array_equal(scaled, total * np.float32(unit))


def test_nan_and_inf_surface_and_stay_in_their_blocks(method=TOP_K):
    """In the least of all blocks, and there alone."""
    gradients = of_workers(3, NUM_WORKERS, SIZE)
    gradients[:, -3 * BLOCK :] = 0
    gradients[2, -1], gradients[1, -2 * BLOCK] = np.nan, -np.inf
    total, _, _ = reduced(method, gradients)
    spoilt = ~np.isfinite(total)
    assert spoilt[-1] and spoilt[-2 * BLOCK]
    assert not np.any(spoilt[: -3 * BLOCK])
    assert np.any(total[: -3 * BLOCK])


def test_more_blocks_that_are_not_finite_than_there_is_room_for_surface(
    method=dataclasses.replace(TOP_K, bits=1.0),
):
    gradients = of_workers(4, NUM_WORKERS, SIZE)
    gradients[1, :: 2 * BLOCK] = np.nan
    total, applied, _ = reduced(method, gradients)
    spoilt = np.isnan(in_blocks(total)).any(axis=1)
    np.testing.assert_array_equal(spoilt, np.arange(NUM_BLOCKS) % 2 == 0)
    # What the others leave out is theirs to keep, not NaN.
    assert np.all(np.isfinite(applied[0]))


def test_zeros_are_zeros(method=TOP_K):
    total, applied, metrics = reduced(method, np.zeros((NUM_WORKERS, SIZE), np.float32))
    assert not np.any(total) and not np.any(applied)
    assert not any(metrics.values())


def test_subnormal_blocks_do_no_harm(method=TOP_K):
    """They are too small for float32 arithmetic on many devices: they may go, not turn into NaN."""
    gradients = np.full((NUM_WORKERS, SIZE), 1e-40, np.float32)
    gradients[:, 5 * BLOCK : 6 * BLOCK] = 1e-30
    total, _, _ = reduced(method, gradients)
    np.testing.assert_allclose(total[5 * BLOCK : 6 * BLOCK], NUM_WORKERS * 1e-30, rtol=1e-6)
    assert np.all(np.abs(np.delete(total, np.s_[5 * BLOCK : 6 * BLOCK])) < 1e-38)


@pytest.mark.parametrize("dtype", (jnp.float16, jnp.bfloat16))
def test_narrow_gradients_give_the_sum_of_their_values(dtype, method=TOP_K):
    gradients = jnp.asarray(1e3 * of_workers(5, NUM_WORKERS, SIZE)).astype(dtype)
    total, applied, _ = reduced(method, gradients)
    wide, wide_applied, _ = reduced(method, gradients.astype(jnp.float32))
    np.testing.assert_array_equal(total, wide)
    np.testing.assert_array_equal(applied, wide_applied)
    assert total.dtype == np.float32 and np.any(total)


def test_there_is_room_for_one_block_at_least(method=dataclasses.replace(TOP_K, bits=0.3)):
    size = BLOCK + 1
    assert [method.num_chosen(call_on(s, NUM_WORKERS)) for s in (1, size)] == [1, 1]
    gradients = np.tile(np.arange(1, size + 1, dtype=np.float32), (NUM_WORKERS, 1))
    total, _, _ = reduced(method, gradients)
    assert np.count_nonzero(in_blocks(total).any(axis=1)) == 1


def test_the_defaults_cost_the_bits_of_their_docstrings(name="topk_chunked", bits=2.0):
    assert dq.wire_report(TREE, 8, method=name).bits == pytest.approx(bits, abs=0.06)


# ---------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize("bits", (1 / 16, 0, 32.5, float("nan"), "2", True))
def test_bits_out_of_range(bits):
    with pytest.raises(ValueError, match=rf"bits={bits!r} is out of range.*0.0625.*at most 32"):
        TopKChunked(bits=bits)


def test_impossible_blocks_and_inner_methods(cls=TopKChunked):
    assert issubclass(cls, SparseBlocks)
    for block_size in (0, 2.5, None):
        with pytest.raises(ValueError, match=f"block_size={block_size!r} is not possible.*Give"):
            cls(block_size=block_size)
    for inner in ("bf16", TopKChunked()):
        with pytest.raises(ValueError, match=r"(?s)inner=.*cannot sum blocks.*Give one"):
            cls(inner=inner)
