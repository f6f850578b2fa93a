"""ARC-Top-K: the blocks whose sums are the largest, as a sketch estimates them.

`test_methods.py` has what every method owes, and `test_topk_chunked.py` what any choice of blocks
does.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import dynamiq_jax as dq
from dynamiq_jax.methods import ErrorFeedback, Exact, Method
from dynamiq_research import EF21M, ARCTopK, SparseBlocks, TopKChunked
from research.benchmarks import arc_synthetic
from research.tests.support.reducing import reducing
from tests.support.gradients import of_workers
from tests.support.states import only
from tests.support.workers import call_on, simulated

NUM_WORKERS, BLOCK, NUM_BLOCKS = 8, 64, 1024
SIZE, ROOM = NUM_BLOCKS * BLOCK, NUM_BLOCKS // 8
KEY = jax.random.key(4)
seeds = st.integers(0, 2**32 - 1)


def with_room(cls: type[SparseBlocks], blocks: int = ROOM, **fields) -> SparseBlocks:
    """Return a method that sums so many blocks in float32."""
    method = cls(block_size=BLOCK, inner=Exact(), bits=32.0, **fields)
    method = dataclasses.replace(
        method, bits=method.score_bits / BLOCK + 32 * blocks / NUM_BLOCKS + 1e-3
    )
    assert method.num_chosen(call_on(SIZE, NUM_WORKERS)) == blocks
    return method


def reduced(method: Method, gradients: np.ndarray, key=KEY) -> tuple[np.ndarray, np.ndarray]:
    """Return the sum [size], which all workers have, and what each applied [n, size]."""
    run = reducing(method, gradients.shape[1], len(gradients))
    total, applied = map(np.asarray, run(key, gradients))
    assert {replica.tobytes() for replica in total} == {total[0].tobytes()}
    return total[0], applied


def in_blocks(flat: np.ndarray) -> np.ndarray:
    return flat.reshape(*flat.shape[:-1], -1, BLOCK)


def drawn(seed: int, octaves: float, opposed: float = 0.0) -> np.ndarray:
    """Draw [n, SIZE] with lognormal magnitudes of blocks. A share of the blocks has noise of eight
    times its magnitude, with one sign on half of the workers and the other on the other half.
    """
    rng = np.random.default_rng(seed)
    magnitudes = np.exp2(octaves * rng.standard_normal((NUM_BLOCKS, 1)))
    common, noise = rng.standard_normal((2, NUM_BLOCKS, BLOCK))
    own = rng.standard_normal((NUM_WORKERS, NUM_BLOCKS, BLOCK))
    noisy = 8 * (rng.random((NUM_BLOCKS, 1)) < opposed)
    sides = np.where(np.arange(NUM_WORKERS) % 2, -1, 1)[:, None, None]
    mixed = np.sqrt(0.1) * common + np.sqrt(0.9) * own + sides * noisy * noise
    return (magnitudes * mixed).reshape(NUM_WORKERS, SIZE).astype(np.float32)


def left_out(total: np.ndarray, gradients: np.ndarray) -> float:
    """Return the share of the energy of the sum that a result lacks."""
    truth = gradients.sum(axis=0, dtype=np.float64)
    return float(np.sum((total - truth) ** 2) / np.sum(truth**2))


def least_left_out(gradients: np.ndarray, room: int) -> float:
    """Return the share that the blocks with the largest sums lack."""
    energies = np.sort(np.sum(in_blocks(gradients.sum(axis=0, dtype=np.float64)) ** 2, axis=1))
    return float(energies[:-room].sum() / energies.sum())


# ------------------------------------------------------------------------------------- the choice


def apart(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return whole gradients [n, SIZE] with four blocks, and these blocks. Each of them has half of
    the sum of the one before, and larger values on every worker.
    """
    rng = np.random.default_rng(seed)
    chosen = rng.permutation(NUM_BLOCKS)[:4]
    gradients = np.zeros((NUM_WORKERS, NUM_BLOCKS, BLOCK), np.float32)
    for block, shared, opposed in zip(chosen, (8, 4, 2, 1), (0, 10, 18, 32), strict=True):
        signs = rng.choice(np.array((-1, 1)), BLOCK)
        gradients[::2, block] = shared + opposed * signs
        gradients[1::2, block] = shared - opposed * signs
    return gradients.reshape(NUM_WORKERS, SIZE), chosen


@given(seed=seeds)
@pytest.mark.slow
def test_the_blocks_with_the_largest_sums_are_summed(seed):
    """Not those with the largest values, which `TopKChunked` sums. A worker applies its own values
    of these blocks and nothing else.
    """
    gradients, blocks = apart(seed)
    wide = with_room(ARCTopK, 2, rank=64)  # estimates within a tenth
    for method, expected in ((wide, blocks[:2]), (with_room(TopKChunked, 2), blocks[2:])):
        total, applied = reduced(method, gradients, jax.random.key(seed))
        is_chosen = np.isin(np.arange(NUM_BLOCKS), expected)[:, None]
        kept = np.where(is_chosen, in_blocks(gradients), np.float32(0))
        np.testing.assert_array_equal(in_blocks(applied), kept)
        np.testing.assert_array_equal(in_blocks(total), kept.sum(axis=0))


@pytest.mark.parametrize(
    ("octaves", "low", "high"), ((0.0, 0.85, 0.875), (0.5, 0.72, 0.78), (1.5, 0.23, 0.3))
)
def test_it_is_a_contraction_of_the_sum(octaves, low, high, keys=40):
    """In the mean over keys, the error is at most 7 / 8, the share of the blocks that are left out.
    It is close to that if all norms are equal but for chance. It is never below that of the best
    choice.
    """
    gradients, method = drawn(7, octaves), with_room(ARCTopK)
    results = [reduced(method, gradients, jax.random.key(key))[0] for key in range(keys)]
    errors = np.array([left_out(result, gradients) for result in results])
    least = least_left_out(gradients, ROOM)
    assert least - 1e-6 <= errors.min() < errors.max()
    assert low < errors.mean() <= high <= 7 / 8
    assert errors.mean() < least + 0.12


@given(seed=seeds)
@pytest.mark.slow
def test_with_room_for_all_blocks_it_is_the_method_inside(seed):
    """Whole numbers that bfloat16 has, and so does their sum."""
    gradients = np.clip(np.round(4 * drawn(seed, 1.0)), -16, 16)
    method = ARCTopK(bits=32.0, block_size=BLOCK)
    assert method.num_chosen(call_on(SIZE, NUM_WORKERS)) == NUM_BLOCKS
    total, applied = reduced(method, gradients)
    np.testing.assert_array_equal(total, gradients.sum(axis=0))
    np.testing.assert_array_equal(applied, gradients)


@pytest.mark.parametrize("opposed", (0.0, 0.3))
def test_it_captures_more_where_noise_cancels_and_less_where_none_does(opposed, draws=3):
    """Of the energy of the sum, with an eighth of the blocks."""
    captured: dict[str, list[float]] = {"arc": [], "top": [], "best": []}
    for seed in range(draws):
        gradients = drawn(seed, 1.5, opposed)
        for name, method in (("arc", with_room(ARCTopK)), ("top", with_room(TopKChunked))):
            total, _ = reduced(method, gradients, jax.random.key(seed))
            captured[name].append(1 - left_out(total, gradients))
        captured["best"].append(1 - least_left_out(gradients, ROOM))
    arc, top, best = (float(np.mean(shares)) for shares in captured.values())
    if opposed:
        assert 0.75 <= arc < best
        assert top <= 0.62
    else:
        assert arc + 0.02 < top < best < 0.9


def test_more_columns_choose_better_and_cost_more():
    gradients = drawn(3, 1.5)
    shares = []
    for rank in (1, 4, 16):
        method = with_room(ARCTopK, rank=rank)
        errors = [
            left_out(reduced(method, gradients, jax.random.key(key))[0], gradients)
            for key in range(8)
        ]
        shares.append(np.mean(errors))
        assert ARCTopK(rank=rank).score_bits == 8 * (rank + 1)
    assert shares[0] > shares[1] + 0.05 > shares[2] + 0.06


def test_every_key_draws_another_sketch():
    gradients, method = drawn(5, 0.5), with_room(ARCTopK)
    first, again, other = (
        reduced(method, gradients, jax.random.key(key))[0] != 0 for key in (0, 0, 1)
    )
    np.testing.assert_array_equal(first, again)
    assert 0.02 < np.mean(first != other) < 0.2


# ------------------------------------------------------------------------------ range and NaN


@given(seed=seeds)
@pytest.mark.slow
def test_units_of_the_gradient_do_not_matter(seed):
    gradients, method = of_workers(seed, NUM_WORKERS, SIZE), with_room(ARCTopK)
    total, _ = reduced(method, gradients)
    assert np.any(total)
    for unit in (2.0**-60, 2.0**60):
        scaled, _ = reduced(method, gradients * np.float32(unit))
        np.testing.assert_array_equal(scaled, total * np.float32(unit))


@pytest.mark.parametrize("scale", (1e-30, 1e30))
def test_gradients_at_the_ends_of_float32(scale):
    gradients, method = drawn(1, 1.5), with_room(ARCTopK)
    total, _ = reduced(method, gradients * np.float32(scale))
    assert np.all(np.isfinite(total))
    assert left_out(total / np.float32(scale), gradients) < 0.4


@pytest.mark.parametrize("bad", (np.nan, np.inf, -np.inf))
@pytest.mark.parametrize("lost", (2, 400))
def test_blocks_that_are_not_finite_surface_with_and_without_room(bad, lost):
    """On one worker, in blocks whose other values are small: room is for 128."""
    gradients, method = drawn(2, 1.0), with_room(ARCTopK)
    gradients[:, : lost * BLOCK] *= 1e-6
    gradients[3, : lost * BLOCK : BLOCK] = bad
    total, applied = reduced(method, gradients)
    spoilt = ~np.isfinite(in_blocks(total)).all(axis=1)
    np.testing.assert_array_equal(spoilt, np.arange(NUM_BLOCKS) < lost)
    assert np.all(np.isfinite(np.delete(applied, 3, axis=0)))
    assert np.any(total[lost * BLOCK :]) == (lost < 128)


def test_sums_that_cancel_are_not_sent():
    """They are zero, and each worker keeps its values."""
    gradients = drawn(2, 1.0)
    gradients[1::2] = -gradients[::2]
    total, applied = reduced(with_room(ARCTopK), gradients)
    assert not np.any(total) and not np.any(applied)


@pytest.mark.parametrize("dtype", (jnp.bfloat16, jnp.float16))
def test_narrow_gradients_give_the_sum_of_their_values(dtype):
    gradients = jnp.asarray(drawn(5, 1.0)).astype(dtype)
    method = with_room(ARCTopK)
    wide = reduced(method, gradients.astype(jnp.float32))
    for ours, expected in zip(reduced(method, gradients), wide, strict=True):
        np.testing.assert_array_equal(ours, expected)
    assert np.any(wide[0])


# ------------------------------------------------------------------------------------------ bytes


@pytest.mark.parametrize("rank", (1, 4, 7))
@pytest.mark.parametrize("num_workers", (2, 5, 8))
def test_scores_cost_the_sketch_and_a_number_for_each_block(rank, num_workers):
    call = call_on(100 * 256 + 1, num_workers)
    share = -(-101 // num_workers)
    expected = (num_workers - 1) * share * (2 * rank + 2)
    assert ARCTopK(rank=rank).scores_bytes(101, call.axis) == expected


@pytest.mark.parametrize("bits", (0.5, 2.0, 8.0))
def test_the_bits_are_those_asked_for(bits):
    """As many blocks as fit, and not one more."""
    method, size, n = ARCTopK(bits=bits), 1 << 20, 8
    report = dq.wire_report({"w": jax.ShapeDtypeStruct((size,), jnp.float32)}, n, method=method)
    assert bits - 0.02 < report.bits <= bits
    room = method.num_chosen(call_on(size, n))
    assert room == pytest.approx((bits - 40 / 256) / 16 * size / 256, rel=0.01)


# ---------------------------------------------------------------------------- the whole of training


def test_a_warm_up_with_another_method_carries_the_same_state():
    """The recipe of the docstring."""
    first, later = (
        dq.all_reduce_gradients("data", method=ErrorFeedback(inner=inner))
        for inner in (Exact(), ARCTopK())
    )
    gradients = of_workers(0, NUM_WORKERS, 4096).reshape(NUM_WORKERS, 64, 64)

    def local(_, gradient):
        mean, state = first.update(gradient, first.init(gradient))
        return mean, state, later.update(gradient, state)[1]

    mean, warm, state = simulated(local)(KEY, gradients)
    np.testing.assert_allclose(mean[0], gradients.mean(axis=0), rtol=1e-5, atol=1e-8)
    assert not np.any(only(warm).residual)
    assert np.any(only(state).residual)


@pytest.mark.slow
def test_it_reaches_an_optimum_where_a_choice_of_each_worker_stalls(steps=200):
    """The benchmark, of which 1000 steps are in its result file. The start is at a distance of 61;
    the noise of gradients alone makes 5e-4.
    """
    config = arc_synthetic.Config(steps=steps)
    reached = {}
    for name, inner in arc_synthetic.compressors(config).items():
        method = EF21M(inner=inner, momentum=arc_synthetic.MOMENTUM)
        if name != "TopKChunked":
            run = arc_synthetic.descent(method, config.workers, steps)
            reached[name] = float(run(KEY)[-1])
    assert 1e-4 < reached["exact"] < 1e-3
    assert reached["ARCTopK"] < 2e-3
    assert 0.05 < reached["local top-k"] < 0.2


# ----------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize("bits", (40 / 256, 0, 32.5, float("nan"), "2", True))
def test_bits_out_of_range(bits):
    with pytest.raises(ValueError, match=rf"bits={bits!r} is out of range.*0.15625.*at most 32"):
        ARCTopK(bits=bits)


@pytest.mark.parametrize("rank", (0, -1, 2.0, None, True))
def test_an_impossible_rank(rank):
    with pytest.raises(ValueError, match=rf"rank={rank!r} is not possible\. Give an integer"):
        ARCTopK(rank=rank)


def test_impossible_blocks_and_inner_methods():
    with pytest.raises(ValueError, match=r"block_size=0 is not possible.*Give"):
        ARCTopK(block_size=0)
    with pytest.raises(ValueError, match=r"(?s)inner=ARCTopK.*cannot sum blocks.*Give one"):
        ARCTopK(inner=ARCTopK())
