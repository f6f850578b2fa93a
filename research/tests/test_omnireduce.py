"""OmniReduce: the union of wanted blocks, in full, and the share left out is reported."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import dynamiq_jax as dq
from dynamiq_jax.methods import Axis
from dynamiq_research import OmniReduce
from research.tests import test_topk_chunked as laws
from research.tests.test_topk_chunked import (
    BLOCK,
    KEY,
    NUM_BLOCKS,
    NUM_WORKERS,
    SIZE,
    in_blocks,
    reduced,
    restricted,
    seeds,
)
from tests.support.workers import on_mesh, simulated

OMNI = OmniReduce(density=None, capacity=0.5, inner=dq.methods.Exact(), block_size=BLOCK)
OMNI_ROOM = 20


def integers(seed: int, wanted: np.ndarray) -> np.ndarray:
    """Return [n, SIZE] with nonzero values in the wanted blocks, bool [n, blocks]. Their sums are
    exact in any order.
    """
    values = np.random.default_rng(seed).integers(-50, 50, (len(wanted), SIZE)).astype(np.float32)
    values[:, ::BLOCK] = 7  # no wanted block is zero by chance
    return restricted(values, wanted)


@given(seed=seeds, union_size=st.integers(0, OMNI_ROOM), density=st.floats(0.1, 1))
def test_the_sum_is_exact_where_the_union_fits(seed, union_size, density):
    rng = np.random.default_rng(seed)
    union = np.isin(np.arange(NUM_BLOCKS), rng.choice(NUM_BLOCKS, union_size, replace=False))
    gradients = integers(seed, union & (rng.random((NUM_WORKERS, NUM_BLOCKS)) < density))
    total, applied, metrics = reduced(OMNI, gradients)
    np.testing.assert_array_equal(total, gradients.sum(axis=0))
    np.testing.assert_array_equal(applied, gradients)
    assert metrics == {"left_out": 0}


@given(seed=seeds, density=st.floats(0.05, 1))
def test_what_does_not_fit_is_told_and_is_what_few_workers_want(seed, density):
    """Law: a worker applies its chosen blocks and nothing else, and the sum is what all apply."""
    rng = np.random.default_rng(seed)
    wanted = rng.random((NUM_WORKERS, NUM_BLOCKS)) < density
    gradients = integers(seed, wanted)
    total, applied, metrics = reduced(OMNI, gradients)
    votes = wanted.sum(axis=0)
    first = np.lexsort((np.arange(NUM_BLOCKS), -votes))[:OMNI_ROOM]
    chosen = np.isin(np.arange(NUM_BLOCKS), first) & (votes > 0)
    np.testing.assert_array_equal(applied, restricted(gradients, chosen))
    np.testing.assert_array_equal(total, applied.sum(axis=0))
    union = np.count_nonzero(votes)
    left_out = np.float32(max(union - OMNI_ROOM, 0)) / np.float32(max(union, 1))
    assert metrics == {"left_out": left_out}


def test_there_are_cases_of_both_kinds():
    for density, fits in ((0.1, True), (0.9, False)):
        wanted = np.random.default_rng(0).random((NUM_WORKERS, NUM_BLOCKS)) < density
        assert (np.count_nonzero(wanted.any(axis=0)) <= OMNI_ROOM) == fits


@given(seed=seeds)
def test_the_union_is_that_of_the_largest_blocks_of_each_worker(seed):
    """With a density, on dense gradients. Many norms are equal: of these, the first."""
    rng = np.random.default_rng(seed)
    exponents = rng.integers(0, 20, (NUM_WORKERS, NUM_BLOCKS))
    signs = rng.choice(np.array((-1, 1)), (NUM_WORKERS, NUM_BLOCKS, BLOCK))
    gradients = np.ldexp(signs, exponents[..., None]).reshape(NUM_WORKERS, -1).astype(np.float32)
    method = dataclasses.replace(OMNI, density=0.1)
    total, _, metrics = reduced(method, gradients)
    union = np.zeros(NUM_BLOCKS, bool)
    for local in exponents:
        union[np.argsort(-local, kind="stable")[:4]] = True
    assert 4 <= np.count_nonzero(union) <= 16
    np.testing.assert_array_equal(total, restricted(gradients.sum(axis=0), union))
    assert metrics["left_out"] == 0


def test_a_density_of_sparse_gradients_wants_no_zeros():
    """Of three blocks that are not zero, not more than three, though the density is 20."""
    wanted = np.zeros((NUM_WORKERS, NUM_BLOCKS), bool)
    wanted[:, 37:] = True
    method = dataclasses.replace(OMNI, density=0.5, capacity=0.05)  # two of 40
    total, _, metrics = reduced(method, integers(0, wanted))
    assert metrics["left_out"] == np.float32(1 / 3)
    np.testing.assert_array_equal(np.flatnonzero(in_blocks(total).any(axis=1)), (37, 38))


def test_the_share_left_out_is_a_metric_of_every_step_on_a_mesh(data_mesh):
    """Steps that want 10, 40 and 25 blocks, of which 20 fit."""
    reduce = dq.all_reduce_gradients("data", method=OMNI)
    wanted = np.arange(NUM_BLOCKS) < np.array((10, 40, 25))[:, None]
    steps = np.stack([integers(i, np.tile(row, (NUM_WORKERS, 1))) for i, row in enumerate(wanted)])

    def local(_, gradients):
        def step(state, gradient):
            update, state = reduce.update(gradient, state)
            return state, (update, state.metrics["left_out"])

        state = reduce.init(gradients[0])
        assert state.method == {}
        return jax.lax.scan(step, state, gradients)[1]

    run = on_mesh(local, data_mesh(NUM_WORKERS), check_vma=False)
    updates, left_out = run(KEY, steps.swapaxes(0, 1))
    shares = np.array((0, 20 / 40, 5 / 25), np.float32)
    expected = restricted(steps.sum(axis=1), np.arange(NUM_BLOCKS) < OMNI_ROOM)
    for worker in range(NUM_WORKERS):
        np.testing.assert_array_equal(left_out[worker], shares)
        np.testing.assert_array_equal(updates[worker], expected / NUM_WORKERS)


def test_the_metric_of_a_tree_is_the_mean_over_coordinates():
    """Of two buckets, the smaller one leaves nothing out, and the larger one half of its blocks."""
    whole = np.ones((NUM_WORKERS, SIZE), np.float32)
    few = integers(0, np.tile(np.arange(NUM_BLOCKS) < 3, (NUM_WORKERS, 1)))[:, : 16 * BLOCK]
    options = dq.Compression(bucket_bytes=1, bucketing="in_order")
    reduce = dq.all_reduce_gradients("data", method=dataclasses.replace(options, method=OMNI))
    _, state = simulated(lambda _, tree: reduce.update(tree, reduce.init(tree)))(KEY, [whole, few])
    expected = 0.5 * SIZE / (SIZE + 16 * BLOCK)
    np.testing.assert_allclose(state.metrics["left_out"], np.full(NUM_WORKERS, expected), rtol=1e-6)


def test_a_sum_needs_no_state():
    """`dq.psum` takes the method too, and returns the sum alone."""
    gradients = integers(0, np.ones((NUM_WORKERS, NUM_BLOCKS), bool))
    total = simulated(lambda key, g: dq.psum(g, "data", key=key, method=OMNI))(KEY, gradients)
    expected = restricted(gradients.sum(axis=0), np.arange(NUM_BLOCKS) < OMNI_ROOM)
    np.testing.assert_array_equal(total, np.tile(expected, (NUM_WORKERS, 1)))


@pytest.mark.parametrize("many", (254, 255, 256, 300))
def test_counts_of_very_many_workers_are_no_sign_of_nan(many):
    """Votes are bytes, of which one value means not finite: without room, such blocks are NaN."""
    run = simulated(lambda _, blocks: OMNI.scores(blocks, Axis("data", many), KEY))
    blocks = np.ones((many, 2, BLOCK), np.float32)
    blocks[1:, 1] = 0
    np.testing.assert_array_equal(run(KEY, blocks), np.tile((min(many, 254), 1), (many, 1)))


# ------------------------------------------------------------------------- laws of sparse blocks


@given(seed=seeds)
def test_units_of_the_gradient_do_not_matter(seed):
    laws.check_units(seed, OMNI)


@pytest.mark.parametrize(
    "law",
    (
        laws.test_nan_and_inf_surface_and_stay_in_their_blocks,
        laws.test_zeros_are_zeros,
        laws.test_subnormal_blocks_do_no_harm,
        functools.partial(laws.test_narrow_gradients_give_the_sum_of_their_values, jnp.bfloat16),
    ),
    ids=("nan and inf", "zeros", "subnormal blocks", "narrow gradients"),
)
def test_laws_of_sparse_blocks(law):
    law(method=OMNI)


def test_laws_of_sparse_blocks_with_little_room():
    laws.test_more_blocks_that_are_not_finite_than_there_is_room_for_surface(
        dataclasses.replace(OMNI, capacity=0.1)
    )
    laws.test_there_is_room_for_one_block_at_least(dataclasses.replace(OMNI, capacity=0.01))
    laws.test_the_defaults_cost_the_bits_of_their_docstrings("omnireduce", 8.0)
    laws.test_impossible_blocks_and_inner_methods(OmniReduce)


@pytest.mark.parametrize("name", ("density", "capacity"))
@pytest.mark.parametrize("share", (0, -0.5, 1.01, float("nan"), "half"))
def test_impossible_shares(name, share):
    with pytest.raises(ValueError, match=rf"{name}={share!r} is out of range\. Give a share"):
        OmniReduce(**{name: share})
