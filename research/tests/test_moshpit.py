"""Moshpit all-reduce: laws of averages in rounds over a grid with dead peers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from benchmarks.speed.mesh_bytes import sent_by_axes
from dynamiq_research import moshpit_mean, moshpit_variance
from tests.support.workers import STOCHASTIC

KEY = jax.random.key(0)
AXES = ("x", "y", "z")


@functools.cache
def on_grid(dimensions: int, **options):
    """(values [*grid, ...], alive [*grid] or [*grid, rounds]) to values after the rounds."""

    def local(values, alive):
        return moshpit_mean(values, AXES[:dimensions], key=KEY, alive=alive, **options)

    for name in reversed(AXES[:dimensions]):
        local = jax.vmap(local, axis_name=name)
    return jax.jit(local)


def oracle(values: np.ndarray, alive: np.ndarray, dimensions: int, first: int = 0) -> np.ndarray:
    """The rounds in NumPy; alive [*grid, rounds]."""
    grid = values.shape[:dimensions]
    values = values.astype(np.float64)
    for number in range(alive.shape[-1]):
        axis = (first + number) % dimensions
        here = alive[..., number].reshape(*grid, *(1,) * (values.ndim - dimensions))
        total = np.where(here, values, 0).sum(axis, keepdims=True)
        count = here.sum(axis, keepdims=True)
        values = np.where(here, total / np.maximum(count, 1), values)
    return values


@given(
    grid=st.lists(st.integers(2, 4), min_size=1, max_size=3),
    rounds=st.integers(1, 4),
    first=st.integers(0, 4),
    seed=st.integers(0, 99),
    dead=st.sampled_from((0.0, 0.2, 0.6)),
)
@pytest.mark.slow
def test_rounds_are_those_of_the_oracle_and_keep_the_sum(grid, rounds, first, seed, dead):
    rng = np.random.default_rng(seed)
    values = rng.normal(size=(*grid, 3)).astype(np.float32)
    alive = rng.random((*grid, rounds)) >= dead
    found = np.asarray(on_grid(len(grid), rounds=rounds, first=first)(values, alive))
    np.testing.assert_allclose(found, oracle(values, alive, len(grid), first), atol=1e-6)
    over_grid = tuple(range(len(grid)))
    np.testing.assert_allclose(found.mean(over_grid), values.mean(over_grid), atol=1e-6)


@pytest.mark.parametrize(
    "grid, rounds, dead", (((8, 8), 1, 0.05), ((8, 8), 2, 0.05), ((4, 3), 2, 0.2), ((4, 3), 5, 0.3))
)
def test_the_variance_falls_by_the_law(grid, rounds, dead):
    """Any grid, and more rounds than axes. A coordinate is a trial, with dead peers of its own."""
    rng = np.random.default_rng(rounds)
    values = rng.normal(size=(*grid, 10_000)).astype(np.float32)
    alive = rng.random((*grid, 10_000, rounds)) >= dead

    def trial(value, alive):
        return moshpit_mean(value[None], AXES[:2], key=KEY, alive=alive, rounds=rounds)[0]

    run = jax.vmap(jax.vmap(jax.vmap(trial), axis_name="y"), axis_name="x")
    found = np.asarray(jax.jit(run)(values, alive))
    mean = values.mean((0, 1))
    np.testing.assert_allclose(found.mean((0, 1)), mean, atol=1e-6)
    measured = np.mean((found - mean) ** 2) / np.mean((values - mean) ** 2)
    law = moshpit_variance(rounds, grid=grid, dead=dead)
    assert 0.001 < law < 0.5
    assert measured == pytest.approx(law, rel=0.02)


def test_the_law_is_the_closed_form_in_the_first_round_of_each_axis():
    share = {size: 0.05 + (1 - 0.05**size) / size for size in (8, 3)}
    peers = 8 * 3 * 8
    expected = (share[8] * share[3] * share[8] - 1 / peers) / (1 - 1 / peers)
    assert moshpit_variance(3, grid=(8, 3, 8), dead=0.05) == pytest.approx(expected, rel=1e-9)
    assert moshpit_variance(0, grid=(8, 3), dead=0.05) == 1
    assert moshpit_variance(9, grid=(8, 3), dead=1.0) == pytest.approx(1, rel=1e-9)


def test_without_dead_peers_all_have_the_mean_after_a_round_for_each_axis():
    values = np.random.default_rng(0).normal(size=(4, 3, 2, 50)).astype(np.float32)
    found = on_grid(3)(values, np.ones((4, 3, 2), bool))
    np.testing.assert_allclose(
        found, np.broadcast_to(values.mean((0, 1, 2)), found.shape), atol=1e-6
    )
    assert moshpit_variance(3, grid=(4, 3, 2)) == 0
    two = on_grid(3, rounds=2)(values, np.ones((4, 3, 2), bool))
    assert np.ptp(two, axis=(0, 1)).max() < 1e-6 < 0.1 < np.ptp(two, axis=2).max()


FAST = "dynamiq:6:widths=(4,8)"  # compiles in a third of the time of the default


@pytest.mark.slow
def test_an_axis_may_have_a_second_turn_with_a_lossy_method():
    """Its peers have the same values then, which jax.vmap knows."""

    def local(values):
        return moshpit_mean(values, AXES[:2], key=KEY, rounds=3, method=FAST)

    values = np.random.default_rng(0).normal(size=(4, 2, 4096)).astype(np.float32)
    found = jax.vmap(jax.vmap(local, axis_name="y"), axis_name="x")(values)
    assert np.ptp(found, axis=(0, 1)).max() == 0
    assert 1e-7 < np.mean((found[0, 0] - values.mean((0, 1))) ** 2) < 1e-2


def test_calls_of_one_round_go_on_with_the_next_axis():
    values = np.random.default_rng(0).normal(size=(4, 3, 50)).astype(np.float32)
    alive = np.random.default_rng(1).random((4, 3, 2)) < 0.7
    whole = on_grid(2)(values, alive)
    half = on_grid(2, rounds=1)(values, alive[..., 0])
    other = on_grid(2, rounds=1, first=1)(half, alive[..., 1])
    np.testing.assert_array_equal(other, whole)


def test_narrow_leaves_are_rounded_once():
    values = np.random.default_rng(0).normal(size=(2, 4, 500)).astype(jnp.bfloat16)
    found = on_grid(2)(values, np.ones((2, 4), bool))
    assert found.dtype == jnp.bfloat16
    mean = values.astype(np.float32).mean((0, 1)).astype(jnp.bfloat16)
    assert np.mean(np.asarray(found[0, 0]) != mean) < 0.01


def test_a_line_of_dead_peers_and_each_dead_peer_keep_what_they_have():
    values = np.random.default_rng(0).normal(size=(3, 4, 8)).astype(np.float32)
    alive = np.ones((3, 4), bool)
    alive[1], alive[0, 2] = False, False
    found = np.asarray(on_grid(2)(values, alive))
    np.testing.assert_array_equal(found[~alive], values[~alive])
    assert np.all(found[alive] != values[alive])


def test_nan_of_a_dead_peer_stays_with_it():
    values = np.random.default_rng(0).normal(size=(3, 4, 8)).astype(np.float32)
    values[1, 2] = np.nan
    alive = np.ones((3, 4), bool)
    alive[1, 2] = False
    found = np.asarray(on_grid(2)(values, alive))
    assert np.all(np.isnan(found[1, 2])) and np.sum(np.isnan(found)) == 8


def test_nan_of_a_living_peer_surfaces_on_its_line_first():
    values = np.random.default_rng(0).normal(size=(3, 4, 8)).astype(np.float32)
    values[1, 2, 5] = np.nan
    alive = np.ones((3, 4), bool)
    first = np.isnan(on_grid(2, rounds=1)(values, alive))
    assert np.all(first[:, 2, 5]) and first.sum() == 3
    both = np.isnan(on_grid(2)(values, alive))
    assert np.all(both[..., 5]) and both.sum() == 12


def test_errors_of_a_lossy_method_add_up_over_rounds():
    """Independent rounding in each round: two rounds err about as much as both together."""
    values = np.random.default_rng(0).normal(size=(4, 4, 4096)).astype(np.float32)
    alive = np.ones((4, 4), bool)
    exact = np.asarray(on_grid(2, rounds=1)(values, alive))
    lossy = np.asarray(on_grid(2, rounds=1, method=STOCHASTIC)(values, alive))
    one = np.mean((lossy - exact) ** 2)
    mean = values.mean((0, 1))
    both = np.mean((np.asarray(on_grid(2, method=STOCHASTIC)(values, alive)) - mean) ** 2)
    assert 0 < one < 1e-5
    # The first errors are averaged over the second axis, whose values have deviations of half.
    assert 0.6 * one / 2 < both < 1.4 * one / 2


def test_without_deaths_a_lossy_method_leaves_all_with_the_same_bits():
    values = np.random.default_rng(0).normal(size=(4, 4, 2048)).astype(np.float32)
    found = np.asarray(on_grid(2, method=STOCHASTIC)(values, np.ones((4, 4), bool)))
    assert {leaf.tobytes() for leaf in found.reshape(16, -1)} == {found[0, 0].tobytes()}
    first = np.asarray(on_grid(2, method=STOCHASTIC, rounds=1)(values, np.ones((4, 4), bool)))
    # Lines have noise of their own in the first round: of the same values, they make other ones.
    same = np.broadcast_to(values[:, :1], values.shape)
    lines = np.asarray(on_grid(2, method=STOCHASTIC, rounds=1)(same, np.ones((4, 4), bool)))
    assert np.mean(lines[0, 0] != lines[0, 1]) > 0.3
    assert np.all(np.ptp(first, axis=0) == 0)


def grid_mesh(*sizes: int):
    return jax.make_mesh(sizes, AXES[: len(sizes)], axis_types=(AxisType.Auto,) * len(sizes))


@pytest.mark.parametrize("check_vma", (True, False))
def test_a_mesh_gives_what_the_simulation_does(check_vma):
    """The same bits, whatever types say about the peers that hold the same values."""
    values = np.random.default_rng(0).normal(size=(4, 2, 2048)).astype(np.float32)
    alive = np.array([[1, 1], [1, 0], [0, 0], [1, 1]], bool)

    def local(values, alive):
        mean = moshpit_mean(values[0, 0], ("x", "y"), key=KEY, alive=alive[0, 0], method=STOCHASTIC)
        return mean[None, None]

    spec = P("x", "y")
    mapped = jax.shard_map(
        local, mesh=grid_mesh(4, 2), in_specs=spec, out_specs=spec, check_vma=check_vma
    )
    found = jax.jit(mapped)(values, alive)
    np.testing.assert_array_equal(found, on_grid(2, method=STOCHASTIC)(values, alive))
    np.testing.assert_array_equal(found[~alive], values[~alive])


@pytest.mark.parametrize("masked", (False, True))
def test_it_sends_an_all_reduce_for_each_axis_and_the_number_of_living_peers(masked):
    """Without a mask, all have the same mean by its type, which leaves by P()."""
    mesh = grid_mesh(4, 2)
    values, alive = np.ones((4, 2, 64, 64), np.float32), np.ones((4, 2), bool)

    def local(values, alive):
        here = {"alive": alive[0, 0]} if masked else {}
        mean = moshpit_mean(values[0, 0], ("x", "y"), key=KEY, method="bf16", **here)
        return mean[None, None] if masked else mean

    spec = P("x", "y")
    mapped = jax.shard_map(
        local, mesh=mesh, in_specs=(spec, spec), out_specs=spec if masked else P()
    )
    sent = sent_by_axes(jax.jit(mapped).lower(values, alive).compile().as_text(), mesh)
    one = jax.ShapeDtypeStruct((64, 64), "float32")
    for name, size in (("x", 4), ("y", 2)):
        expected = dq.wire_report(one, size, method="bf16").bytes_per_worker
        assert sent[(name,)] == expected + masked * 2 * (size - 1) / size * 4


def test_shards_of_leaves_travel_alone():
    mesh = jax.make_mesh((2, 2, 2), ("x", "y", "fsdp"), axis_types=(AxisType.Auto,) * 3)
    values = np.random.default_rng(0).normal(size=(2, 2, 64, 128)).astype(np.float32)
    alive = np.array([[True, True], [True, False]])

    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(P("x", "y"), P("x", "y")),
        out_specs=P("x", "y"),
        axis_names={"x", "y"},
    )
    def run(values, alive):
        mean = moshpit_mean(
            values[0, 0],
            ("x", "y"),
            key=KEY,
            alive=alive[0, 0],
            method=dq.Compression("bf16", specs=P("fsdp")),
        )
        return mean[None, None]

    placed = jax.device_put(values, jax.NamedSharding(mesh, P("x", "y", "fsdp")))
    compiled = jax.jit(run).lower(placed, alive).compile()
    sent = sent_by_axes(compiled.as_text(), mesh)
    leaf = jax.ShapeDtypeStruct((32, 128), "float32")
    half = dq.wire_report(leaf, 2, method="bf16").bytes_per_worker
    assert half <= sent[("x",)] <= half + 8 and half <= sent[("y",)] <= half + 8
    expected = oracle(values, np.stack([alive] * 2, axis=-1), 2)
    np.testing.assert_allclose(compiled(placed, alive), expected, atol=0.03)


@pytest.mark.parametrize(
    "change, error, words",
    (
        ({"axis_name": ("x", "x")}, ValueError, "does not name different axes"),
        ({"axis_name": ("x", "q")}, ValueError, "'q'"),
        ({"axis_name": (("x", "y"),)}, ValueError, "axis_name="),
        ({"axis_name": ()}, ValueError, "does not name different axes"),
        ({"axis_name": None}, ValueError, "axis_name=None"),
        ({"key": 3}, TypeError, "key=3 is not a PRNG key"),
        ({"rounds": 0}, ValueError, "rounds=0"),
        ({"first": -1}, ValueError, "first=-1"),
        ({"rounds": 2.0}, ValueError, "rounds=2.0"),
        ({"alive": np.ones(3, bool)}, ValueError, r"alive has shape \(3,\)"),
        ({"alive": 0.5}, TypeError, "float64"),
        ({"method": "powersgd"}, ValueError, "carries state.* moshpit_mean cannot"),
        ({"method": dq.Compression(max_error=0.1)}, ValueError, "max_error=0.1"),
        ({"tree": {"n": np.zeros(4, np.int32)}}, TypeError, r"tree\['n'\] has dtype int32"),
    ),
)
def test_wrong_arguments_are_refused(change, error, words):
    arguments = {"tree": np.zeros(4, np.float32), "axis_name": ("x", "y"), "key": KEY} | change
    tree, names = arguments.pop("tree"), arguments.pop("axis_name")

    def local(_):
        return moshpit_mean(tree, names, **arguments)

    with pytest.raises(error, match=words):
        jax.vmap(jax.vmap(local, axis_name="y"), axis_name="x")(jnp.zeros((2, 2)))


def test_a_key_of_a_peer_is_refused_in_any_round():
    """Also if it differs along an axis whose turn does not come."""

    def local():
        key = jax.random.fold_in(KEY, jax.lax.axis_index("y"))
        return moshpit_mean(jnp.ones(4), ("x", "y"), key=key, rounds=1)

    mapped = jax.shard_map(local, mesh=grid_mesh(4, 2), in_specs=(), out_specs=P())
    with pytest.raises(ValueError, match="key differs between the workers of axis 'y'"):
        jax.eval_shape(mapped)


@pytest.mark.parametrize(
    "change, words",
    (
        ({"rounds": -1}, "rounds=-1"),
        ({"grid": ()}, r"grid=\(\) is no grid"),
        ({"grid": 8}, "grid=8 is no grid"),
        ({"grid": (8, 1)}, r"grid=\(8, 1\): size=1"),
        ({"dead": 1.1}, "dead=1.1"),
    ),
)
def test_wrong_arguments_of_the_law_are_refused(change, words):
    arguments = {"rounds": 2, "grid": (8, 8), "dead": 0.05} | change
    with pytest.raises(ValueError, match=words):
        moshpit_variance(arguments.pop("rounds"), **arguments)
