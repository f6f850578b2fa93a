"""PowerSGD: exact where the rank suffices, the best of its rank after some steps, and all of its
bytes promised.
"""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from dynamiq_jax.methods import Call, ErrorFeedback, Method, Reduced, WireCost
from dynamiq_research import PowerSGD
from tests.support.gradients import vnmse
from tests.support.hlo import sent_bytes
from tests.support.states import only
from tests.support.workers import call_on, on_mesh, simulated

NUM_WORKERS = 4
KEY = jax.random.key(3)
SHAPES = ((48, 40), (300,), (6, 8, 40), (3, 5))  # two matrices, and two leaves that go whole
SIZES = [math.prod(shape) for shape in SHAPES]


def low_rank(seed: int, num_workers: int, rows: int, columns: int, rank: int) -> np.ndarray:
    """Return [num_workers, rows, columns]: matrices of the same `rank` columns."""
    rng = np.random.default_rng(seed)
    basis = rng.standard_normal((rows, rank))
    weights = rng.standard_normal((num_workers, rank, columns))
    return (basis @ weights).astype(np.float32)


def call_of(shapes, num_workers: int = NUM_WORKERS, topology="all_to_all", **options) -> Call:
    """Return the call of a bucket of leaves."""
    size = sum(map(math.prod, shapes))
    return call_on(size, num_workers, topology, shapes=tuple(shapes), **options)


@functools.cache
def steps(method: PowerSGD, call: Call, num_steps: int = 1):
    """Return a function of [n, num_steps or 1, size] to the sums of as many steps, one after the
    other: [n, num_steps, size].
    """

    def local(key, gradients):
        def step(state, inputs):
            reduced = method.all_reduce(inputs[0], call, inputs[1], state)
            return reduced.state, reduced.total

        gradients = jnp.broadcast_to(gradients, (num_steps, call.size))
        keys = jax.random.split(key, num_steps)
        return jax.lax.scan(step, method.init_state(call), (gradients, keys))[1]

    return simulated(local)


def one_step(method: PowerSGD, call: Call, flat: np.ndarray) -> np.ndarray:
    """Return the sums of a first step, [n, size]."""
    return np.asarray(steps(method, call)(KEY, flat[:, None])[:, 0])


def gradient(seed: int = 0) -> np.ndarray:
    """Return [n, size]: leaves of full rank."""
    rng = np.random.default_rng(seed)
    return rng.standard_normal((NUM_WORKERS, sum(SIZES))).astype(np.float32)


def leaves_of(flat: np.ndarray) -> list[np.ndarray]:
    return np.split(flat, np.cumsum(SIZES)[:-1], axis=-1)


# ------------------------------------------------------------------------------- what is summed


@pytest.mark.parametrize("exponent", (-28, 28))
def test_matrices_of_its_rank_are_summed_exactly(exponent):
    """In the first step, from a random start, and in the next, which starts from products of
    gradients. A rank to spare finds directions of rounding errors.
    """
    scale, num_workers = np.float32(10.0**exponent), 3
    matrices = (41, 64, 3), (25, 20, 4), (20, 20, 1)
    leaves = [low_rank(seed, num_workers, *matrix) * scale for seed, matrix in enumerate(matrices)]
    call = call_of([leaf.shape[1:] for leaf in leaves], num_workers)
    method = PowerSGD(rank=4)
    flat = np.concatenate([leaf.reshape(num_workers, -1) for leaf in leaves], axis=1)
    assert len(state_shapes(method, call)) == len(leaves)  # all are factorized
    results = np.asarray(steps(method, call, 2)(KEY, flat[:, None])[0], float) / scale
    ends = np.cumsum([leaf[0].size for leaf in leaves])[:-1]
    for ours, leaf in zip(np.split(results, ends, axis=1), leaves, strict=True):
        truth = leaf.sum(axis=0, dtype=np.float64).reshape(-1) / scale
        # The random start of a matrix of its full rank may be badly conditioned.
        assert max(vnmse(result, truth) for result in ours) < 1e-9


def test_a_matrix_is_approximated_as_well_as_its_rank_allows():
    """Warm start: steps on one matrix are subspace iterations, which end at its singular vectors.
    The first step, from random directions, is a good deal worse.
    """
    rng = np.random.default_rng(0)
    shape, rank = (60, 50), 3
    left, right = (np.linalg.qr(rng.standard_normal((size, 50)))[0] for size in shape)
    values = 0.8 ** np.arange(50)
    matrix = (left * values) @ right.T
    noise = rng.standard_normal((NUM_WORKERS, *shape))
    mine = matrix / NUM_WORKERS + noise - noise.mean(axis=0)  # the workers' sum is the matrix
    flat = mine.reshape(NUM_WORKERS, 1, -1).astype(np.float32)
    results = steps(PowerSGD(rank=rank), call_of([shape]), 30)(KEY, flat)
    best = np.sum(values[rank:] ** 2) / np.sum(values**2)
    errors = [vnmse(result, matrix.reshape(-1)) for result in np.asarray(results[0])]
    assert errors[-1] == pytest.approx(best, rel=0.03)
    assert best * 0.999 < min(errors)  # nothing of its rank is better
    assert errors[0] > 1.2 * best


def test_what_is_not_factorized_is_what_the_method_inside_makes_of_it():
    g = gradient()
    exact = sequence(g)[0, 0]
    rounded = one_step(PowerSGD(rank=2, inner=dq.methods.BF16()), call_of(SHAPES), g)[0]
    found = zip(SHAPES, *map(leaves_of, (exact, rounded, g.sum(axis=0, dtype=float))), strict=True)
    for shape, of_exact, of_rounded, truth in found:
        if shape in ((300,), (3, 5)):
            assert vnmse(of_exact, truth) < 1e-12 < 1e-7 < vnmse(of_rounded, truth) < 1e-4
        else:  # rank 2 of noise
            assert 0.2 < min(vnmse(each, truth) for each in (of_exact, of_rounded)) < 1.0


@pytest.mark.parametrize(
    ("shape", "factors"),
    (
        ((64, 32, 3, 3), [(288, 4)]),  # kernel of PyTorch: output x rest, as in the paper
        ((3, 3, 32, 64), [(64, 4)]),  # kernel of JAX: rest x output, the same from the other side
        ((8, 9, 100), [(100, 4)]),
        ((3, 3, 2, 2), []),
        ((4000,), []),
        ((1, 4000), []),
        ((), []),
    ),
)
def test_leaves_are_cut_where_the_factors_are_smallest(shape, factors):
    assert state_shapes(PowerSGD(), call_of([shape])) == factors


def state_shapes(method: PowerSGD, call: Call) -> list[tuple[int, ...]]:
    return [q.shape for q in jax.eval_shape(lambda: method.init_state(call))]


def test_a_matrix_is_factorized_where_that_saves_bytes():
    """And whole where its factors have as many numbers."""
    for rank, count in ((1, 1), (31, 1), (32, 0), (64, 0)):
        assert state_shapes(PowerSGD(rank=rank), call_of([(64, 64)])) == [(64, rank)] * count


@pytest.mark.parametrize(("size", "columns"), ((900, 30), (901, 30), (930, 30), (931, 31)))
def test_a_vector_is_a_nearly_square_matrix(size, columns):
    assert state_shapes(PowerSGD(rank=2), call_on(size, NUM_WORKERS)) == [(columns, 2)]


def test_a_vector_of_low_rank_as_a_square_and_one_that_is_padded():
    square = low_rank(0, NUM_WORKERS, 30, 30, 2).reshape(NUM_WORKERS, -1)
    method, call = PowerSGD(rank=2), call_on(900, NUM_WORKERS, "all_to_all")
    assert vnmse(one_step(method, call, square)[0], square.sum(axis=0)) < 1e-10
    padded = square[:, :-17]
    result = one_step(method, call.of_size(883), padded)
    assert result.shape == (NUM_WORKERS, 883)
    # Zeros at the end raise the rank.
    assert 1e-6 < vnmse(result[0], padded.sum(axis=0)) < 0.05
    whole = one_step(PowerSGD(rank=100), call.of_size(883), padded)  # a rank that it does not have
    np.testing.assert_allclose(whole[0], padded.sum(axis=0), rtol=1e-5, atol=1e-5)


def test_leaves_of_a_tree_are_factorized_each_in_its_shape():
    """Buckets know the shapes of their leaves, and these are what has a low rank."""
    shapes = ((90, 20), (24, 50))
    matrices = [low_rank(i, NUM_WORKERS, *shape, 2) for i, shape in enumerate(shapes)]
    reduce = dq.all_reduce_gradients("data", method=PowerSGD(rank=2))

    def local(_, *leaves):
        return reduce.update(leaves, reduce.init(leaves))

    means, state = simulated(local)(KEY, *matrices)
    assert [q.shape[2:] for q in only(state)] == [(20, 2), (50, 2)]
    for ours, matrix in zip(means, matrices, strict=True):
        assert vnmse(ours[0], matrix.mean(axis=0)) < 1e-9


# ------------------------------------------------------------------------------ the method inside


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recorder(Method):
    """Sums exactly and notes the keys and sizes of its calls. It does not say what it applies."""

    calls: list

    def wire_cost(self, call):
        return WireCost(4)

    def all_reduce(self, flat, call, key, state):
        self.calls.append((call.size, flat.size, jax.random.key_data(key)))
        total = jax.lax.psum(flat, call.axis.name)
        return Reduced(total, total)


def recorded(call: Call):
    """Return a function of (key, values) to the calls of the method inside, (size, size, key)."""

    def local(key, flat):
        inner = Recorder(calls=[])
        method = PowerSGD(rank=2, inner=inner)
        method.all_reduce(flat, call, key, method.init_state(call))
        return inner.calls

    return simulated(local)


def test_both_messages_have_keys_of_their_own():
    """With one key, a stochastic method inside would round both with the same noise."""
    run = recorded(call_of(SHAPES))
    calls = [jax.tree.map(lambda leaf: leaf[0], run(jax.random.key(k), gradient())) for k in (0, 1)]
    sizes = [2 * (48 + 48) + 315, 2 * (40 + 40)]
    assert [size for size, _, _ in calls[0]] == [given for _, given, _ in calls[0]] == sizes
    assert len({tuple(key.tolist()) for both in calls for _, _, key in both}) == 4


def test_a_method_inside_that_does_not_say_what_it_leaves_out():
    with pytest.raises(
        ValueError, match=r"inner=Recorder.* does not return the values that it applied"
    ):
        recorded(call_of(SHAPES, feedback=True))(KEY, gradient())


# -------------------------------------------------------------------------- on all workers, always


def test_a_mesh_gives_what_the_simulation_gives(data_mesh):
    reduce = dq.all_reduce_gradients("data", method=PowerSGD(rank=2))
    gradients = gradient()[:, : 48 * 40].reshape(NUM_WORKERS, 48, 40)

    def local(key, g):
        def step(state, _):
            mean, state = reduce.update(g, state)
            return state, mean

        return jax.lax.scan(step, reduce.init(g), None, 3)

    state, means = on_mesh(local, data_mesh(NUM_WORKERS))(KEY, gradients)
    expected_state, expected = simulated(local)(KEY, gradients)
    for leaf in jax.tree.leaves((only(state), means)):
        np.testing.assert_array_equal(leaf, np.asarray(leaf)[:1].repeat(NUM_WORKERS, axis=0))
    # Products of matrices are added up in another order.
    np.testing.assert_allclose(means, expected, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(only(state)[0], only(expected_state)[0], atol=1e-3)


def test_a_state_that_is_known_to_be_replicated_stays_so(data_mesh):
    """Carried with P(): one copy in a checkpoint. Types say so, under check_vma."""
    method, call = PowerSGD(rank=2), call_of(SHAPES, topology="ring")

    def local(state, flat):
        reduced = method.all_reduce(flat[0], call, KEY, state)
        return reduced.total, reduced.state

    mapped = jax.shard_map(
        local, mesh=data_mesh(NUM_WORKERS), in_specs=(P(), P("data")), out_specs=P()
    )
    state = method.init_state(call)
    total, after = jax.jit(mapped)(state, gradient())
    assert [leaf.shape for leaf in after] == [leaf.shape for leaf in state]
    expected = sequence(gradient())[0, 0]
    np.testing.assert_allclose(total, expected, rtol=1e-3, atol=1e-3)


def test_parts_of_a_bucket_have_factors_of_their_own():
    """Two axes: each worker of the fast one has a part of the bucket, and a state of its own."""
    axes = ("hosts", "local")
    reduce = dq.all_reduce_gradients(axes, method=PowerSGD(rank=2))
    mesh = jax.make_mesh(
        (2, 2), axes, axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:NUM_WORKERS]
    )

    def local(g):
        def step(state, _):
            mean, state = reduce.update(g[0], state)
            return state, mean

        state, means = jax.lax.scan(step, reduce.init(g[0]), None, 3)
        return means[-1:], only(state)[0]

    mapped = jax.shard_map(local, mesh=mesh, in_specs=P(axes), out_specs=P(axes))
    matrices = low_rank(0, NUM_WORKERS, 32, 32, 1)  # each part of 512 is 23 x 23
    means, state = map(np.asarray, jax.jit(mapped)(matrices))
    assert (means == means[:1]).all()
    assert state.shape == (NUM_WORKERS, 23, 2)
    np.testing.assert_array_equal(state[:2], state[2:])
    assert np.any(state[0] != state[1])
    assert 0 < vnmse(means[0], matrices.mean(axis=0)) < 0.9


@pytest.mark.parametrize(("value", "leaf"), ((np.nan, 0), (np.inf, 1), (-np.inf, 2), (np.nan, 3)))
def test_non_finite_values_surface_at_their_leaf_on_all_workers_and_go_again(value, leaf):
    good, bad = gradient(), gradient()
    position = int(np.cumsum([0, *SIZES])[leaf]) + 3
    bad[2, position] = value
    results = sequence(bad, good)
    assert np.isfinite(results[:, 1]).all()
    for number, part in enumerate(leaves_of(results[:, 0])):
        if number != leaf:
            assert np.isfinite(part).all()
        elif SHAPES[number] in ((48, 40), (6, 8, 40)):  # matrices
            assert np.isnan(part).all()
        else:
            assert (~np.isfinite(part[:, 3])).all()
            assert np.isfinite(part).sum() == part.size - NUM_WORKERS


def sequence(*gradients: np.ndarray) -> np.ndarray:
    """Return the sums of steps on gradients [n, size]: [n, steps, size]."""
    run = steps(PowerSGD(rank=2), call_of(SHAPES), 3)
    padded = [*gradients, *gradients[-1:] * (3 - len(gradients))]
    return np.asarray(run(KEY, np.stack(padded, axis=1)))


def test_a_gradient_of_zeros_does_not_end_the_search():
    zero = np.zeros_like(gradient())
    after = zero.copy()
    after[:, : 48 * 40] = low_rank(0, NUM_WORKERS, 48, 40, 2).reshape(NUM_WORKERS, -1)
    results = sequence(zero, after, after)[0]
    assert not results[0].any()
    assert vnmse(results[-1], after.sum(axis=0)) < 1e-9


# ------------------------------------------------------------------------------------------ bytes


def test_the_report_is_the_compiled_program(data_mesh):
    """Both messages, chunk by chunk; what is left out is kept without a byte more."""
    method, topology = ErrorFeedback(inner=PowerSGD(rank=3, inner=dq.methods.BF16())), "ring"
    tree = {"a": (100, 70), "b": (2000,), "c": (40, 5, 60), "exact": (10,)}
    shapes = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in tree.items()}
    sent = sent_bytes(data_mesh(NUM_WORKERS), shapes, method, topology)
    report = dq.wire_report(shapes, NUM_WORKERS, method=dq.Compression(method, topology))
    assert sent == report.bytes_per_worker
    factors = 3 * (100 + 70) + 2000 + 3 * (200 + 60)
    passes = 2 * (NUM_WORKERS - 1) / NUM_WORKERS
    assert report.compressed_bytes == pytest.approx(passes * factors * 2, rel=0.01)


def test_an_expensive_rank_costs_no_more_than_no_compression():
    tree = {"w": jax.ShapeDtypeStruct((64, 64), jnp.float32)}
    for rank in (1, 31, 32, 64, 1000):
        report = dq.wire_report(tree, NUM_WORKERS, method=PowerSGD(rank=rank))
        assert 4096 * 6 / report.compressed_bytes == pytest.approx(max(64 * 64 / (rank * 128), 1.0))


# ----------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize("rank", (0, -1, 2.0, True, None))
def test_a_rank_that_is_none(rank):
    with pytest.raises(
        ValueError, match=re.escape(f"rank={rank!r} ") + ".*Give an integer of at least 1"
    ):
        PowerSGD(rank=rank)


def test_an_inner_method_that_cannot_be():
    with pytest.raises(ValueError, match=r"inner='bf16' is not a method.*dq\.methods\.BF16\(\)"):
        PowerSGD(inner="bf16")
    with pytest.raises(ValueError, match=r"inner=PowerSGD.* carries state.*dq\.methods\.BF16\(\)"):
        PowerSGD(inner=PowerSGD())
