"""Bits to widths: the budget is met exactly, and no other split of it has a lower error."""

import functools
import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

import dynamiq_jax as dq
from dynamiq_jax._core import Axis
from dynamiq_jax.methods import Call, _dynamiq
from dynamiq_jax.topologies import Ring
from pallas_kernels import choice, operations
from pallas_kernels.backend import Backend
from pallas_kernels.codec import WIDTHS, Allocation, allocation
from pallas_kernels.codec.allocation import ENERGY_LIMIT, count_by_blocks
from pallas_kernels.codec.levels import distortion
from tests.support import oracle
from tests.support.gradients import heavy_tailed, vnmse
from tests.support.workers import TWO_WIDTHS, simulated

ALL = tuple(range(2, 17))
ROWS = 40
seeds = st.integers(0, 2**32 - 1)


@functools.cache
def solver(widths: tuple[int, ...], exponent: float):
    """Return a compiled function of (energies [chunks, ROWS], units) to the rows of planes."""
    allocation = Allocation(widths, exponent)
    return jax.jit(allocation.solve)


def solve(energies: np.ndarray, units: int, widths=ALL, exponent: float = 1.0) -> np.ndarray:
    """Return the widths of rows with energies [ROWS], largest first."""
    energies = np.asarray(energies, np.int32)
    plane_rows = np.asarray(solver(widths, exponent)(energies, np.int32(units)))
    assert np.all(np.diff(plane_rows) <= 0)
    return np.sum(np.arange(len(energies))[:, None] < plane_rows, axis=1)


def some_energies(seed: int, rows: int = ROWS) -> np.ndarray:
    """Logarithms of energies, largest first: spread or alike, some of them equal, some zero."""
    rng = np.random.default_rng(seed)
    spread = rng.choice([0, 1, 30, 300, 3000])
    energies = rng.integers(1 << 13, 1 << 14) + spread * rng.standard_normal(rows)
    energies = np.clip(np.rint(energies), 1, ENERGY_LIMIT - 1).astype(np.int32)
    energies[rng.random(rows) < rng.choice([0, 0.3, 0.95])] = 0
    return -np.sort(-energies)


width_sets = st.sampled_from((ALL, (2, 4, 8), (3, 7), (5,), WIDTHS, (0, 4, 5, 16)))


@given(seed=seeds, widths=width_sets, share=st.floats(0, 1), exponent=st.sampled_from((0.5, 1, 2)))
def test_widths_are_those_of_the_page(seed, widths, share, exponent):
    energies = some_energies(seed)
    units = int(ROWS * (min(widths) + share * (max(widths) - min(widths))))
    expected = oracle.solve_widths(energies, units, widths, exponent)
    found = solve(energies, units, widths, exponent)
    np.testing.assert_array_equal(found, expected)
    # Fewer units are left than the largest step, but where all rows are as wide as they may be.
    largest = max(np.diff(sorted({0, *widths})))
    assert units - largest < found.sum() <= units or np.all(found[energies > 0] == max(widths))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("widths", ((16,), (0, 2), (2, 16), (0, 16), ALL), ids=str)
@pytest.mark.parametrize("rows", (1, 2, 3))
def test_widths_of_few_rows_are_those_of_the_page(widths, rows):
    """Also of zeros alone, and where the exponent makes the largest needs.

    Two bits or none have a single gain, which is zero: two bits save nothing but the bias of none.
    """
    for share, seed in itertools.product((0, 0.4, 1), range(6)):
        units = int(rows * (min(widths) + share * (max(widths) - min(widths))))
        energies = some_energies(seed, rows) * (seed > 0)
        expected = oracle.solve_widths(energies, units, widths, 0.1)
        np.testing.assert_array_equal(solve(energies, units, widths, 0.1), expected)


def test_needs_are_those_of_the_page():
    text = (Path(__file__).parents[2] / "docs" / "wire_format.md").read_text()
    (listed,) = re.findall(r"For widths from 2 to 16, `e` is ([\d, ]+)\.", text)
    needs = [step.energy for step in Allocation(ALL, 1.0).steps]
    assert [int(energy) for energy in listed.split(",")] == needs


def test_other_devices_find_the_same_widths(monkeypatch):
    """They count in another way, and try other numbers of prices at a time."""
    energies = jnp.asarray(np.stack([some_energies(seed) for seed in range(8)]), jnp.int32)
    found = Allocation(ALL, 0.1).solve(energies, 5 * ROWS)
    monkeypatch.setitem(allocation._COUNT_AT_LEAST, "cpu", count_by_blocks)
    monkeypatch.setattr(allocation, "_USUAL_PRICES", 33)
    np.testing.assert_array_equal(Allocation(ALL, 0.1).solve(energies, 5 * ROWS), found)


def best_exchange(energies: np.ndarray, widths: np.ndarray) -> float:
    """Return what a bit of one row would save at most, over what another row saves with its last.

    It is 0 if no row can be widened or narrowed.
    """
    weights = np.exp2((energies.astype(np.float64) - energies.max()) / 32)
    errors = np.array([1.0, 1.0, *(distortion(width) for width in range(2, 18))])
    wider = weights * (errors[widths] - errors[widths + 1])
    narrower = weights * (errors[widths - 1] - errors[widths])
    wider, narrower = (
        saved[(energies > 0) & possible]
        for saved, possible in ((wider, widths < 16), (narrower, widths > 2))
    )
    return wider.max() / narrower.min() if wider.size and narrower.size else 0.0


@given(seed=seeds, units=st.integers(2 * ROWS, 16 * ROWS))
def test_no_unit_is_left_or_wasted_and_no_exchange_of_a_bit_lowers_the_error(seed, units):
    energies = some_energies(seed)
    widths = solve(energies, units)
    assert set(widths.tolist()) <= {0, *ALL}
    if widths.sum() < units:  # nobody can use the last one: a row of zeros starts with two
        assert widths.sum() == units - 1
        assert np.all(widths[energies > 0] == 16)
    # Only rows of zeros have no bits. Nor do they get bits that others could use.
    assert np.all(widths[energies > 0] >= 2)
    assert np.all(widths[energies == 0] == 0) or np.all(widths[energies > 0] == 16)
    # Two needs, each rounded by up to half a step of 1/32 octave.
    assert best_exchange(energies, widths) <= 2 ** (1 / 32) * (1 + 1e-9)
    # Only ratios of energies matter.
    near = energies // 2 + 5000
    np.testing.assert_array_equal(solve(near, units), solve(near + 64, units))


def test_an_exchange_lowers_the_error_of_other_widths():
    """The test above can fail, also by the error of one step of energy."""
    energies = np.arange(ROWS, 0, -1) * 40 + 4000
    widths = solve(energies, 5 * ROWS)
    assert best_exchange(energies, widths) > 0.9
    assert best_exchange(energies, np.full(ROWS, 5)) > 1e6
    for row in np.flatnonzero(np.diff(widths))[:-1]:
        moved = widths.copy()
        moved[row], moved[row + 1] = widths[row + 1], widths[row]
        assert best_exchange(energies, moved) > 2 ** (1 / 32) * 1.01


def test_a_row_of_four_times_the_energy_is_a_bit_wider():
    energies = np.concatenate([np.full(ROWS // 2, 9064), np.full(ROWS // 2, 9000)])
    assert set(solve(energies, 17 * ROWS // 2)) == {8, 9}
    # At half the exponent it takes 16 times.
    wider = np.concatenate([np.full(ROWS // 2, 9128), np.full(ROWS // 2, 9000)])
    assert set(solve(wider, 17 * ROWS // 2, exponent=0.5)) == {8, 9}
    assert set(solve(wider, 9 * ROWS)) == {8, 10}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("equal", (True, False), ids=("one_tie", "many_ties"))
def test_replicas_agree_where_all_rows_tie(equal, monkeypatch):
    """Also workers whose hardware computes other norms: here by up to a thirtieth."""
    method, size, workers = dq.DynamiQ(), 256 * 4 * 33, 4
    rng = np.random.default_rng(0)
    rows = np.ones((size // 256, 1), np.float32) if equal else 4.0 ** rng.integers(0, 3, (132, 1))
    signs = rng.choice([-1.0, 1.0], (workers, size // 256, 256))
    gradients = (signs * rows).reshape(workers, -1).astype(np.float32)
    call = Call(size=size, axis=Axis("data", workers), topology=Ring())

    def imprecise(norm: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        error = np.float32(0.01 * (not equal))  # without one, all rows stay equal

        def wrong(*args: Any, **arguments: Any) -> jax.Array:
            worker = lax.axis_index("data").astype(np.float32)
            return norm(*args, **arguments) * (1 + error * worker)

        return wrong

    monkeypatch.setattr(_dynamiq, "l2_norm", imprecise(_dynamiq.l2_norm))
    norms = imprecise(functools.partial(choice.run, None, Backend.statistics))
    monkeypatch.setattr(operations._Chosen, "statistics", staticmethod(norms), raising=False)

    def places(gradient: jax.Array):
        return method.bind(gradient, call, jax.random.key(0)).local.places

    found = jax.jit(jax.vmap(places, axis_name="data"))(gradients)
    for leaf in map(np.asarray, found):
        np.testing.assert_array_equal(leaf, np.broadcast_to(leaf[0], leaf.shape))
    # Equal rows are split: there is something to disagree on.
    assert len(np.unique(np.asarray(found.widths[0, 0]))) == (2 if equal else 4)
    total = simulated(lambda key, g: dq.psum(g, "data", key=key))(jax.random.key(1), gradients)
    np.testing.assert_array_equal(total, jnp.broadcast_to(total[0], total.shape))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("wrong", (np.nan, np.inf, 2.0**127))
def test_a_lost_row_takes_no_bits_from_the_others(wrong):
    """All rows are alike, and one of the four of each chunk is lost on one worker."""
    workers, rows = 4, 16
    gradients = np.random.default_rng(0).standard_normal((workers, rows, 256)).astype(np.float32)
    lost = gradients.copy()
    lost[1, ::4, 7] = wrong
    run = simulated(lambda key, g: dq.psum(g, "data", key=key))

    def errors(gradients: np.ndarray) -> np.ndarray:
        found = run(jax.random.key(0), gradients.reshape(workers, -1))[0].reshape(rows, 256)
        truth = gradients.sum(axis=0, dtype=np.float64)
        return np.array([vnmse(*row) for row in zip(found, truth, strict=True)])

    kept = np.arange(rows) % 4 != 0
    with np.errstate(invalid="ignore"):
        before, after = errors(gradients), errors(lost)
    assert np.all(np.isnan(after[~kept]))
    # The rows that are left have what the lost ones do not need.
    assert 0.05 < after[kept].mean() / before[kept].mean() < 0.8


@pytest.mark.sampled(2)
@pytest.mark.parametrize("topology", ("ring", "all_to_all"))
def test_a_power_of_two_scales_the_sum_exactly(topology):
    """With the order of sums in an all-to-all, whose widths follow the scales."""
    workers = 4
    options = {"method": dq.Compression(TWO_WIDTHS, topology)}
    run = simulated(lambda key, g: dq.psum(g, "data", key=key, **options))
    gradients = heavy_tailed(0, (workers, 256 * 40))
    found = run(jax.random.key(0), gradients)
    for power in (-60, 3, 50):
        scaled = run(jax.random.key(0), np.ldexp(gradients, power))
        np.testing.assert_array_equal(scaled, np.ldexp(found, power))
    assert 1e-6 < vnmse(found[0], gradients.sum(axis=0, dtype=np.float64)) < 0.1


@pytest.mark.parametrize(("workers", "rows_per_chunk"), ((16, 1), (4, 3)), ids=("one", "few"))
@pytest.mark.parametrize("alike", (True, False), ids=("white", "spread"))
@pytest.mark.slow
def test_a_tiny_bucket_has_no_more_error_than_one_width_for_all(workers, rows_per_chunk, alike):
    """Of the largest width that the budget allows: where there is nothing to choose, nothing else.

    Rows that differ gain from the choice, if a chunk has several of them.
    """
    rows, rng = workers * rows_per_chunk, np.random.default_rng(workers)
    scales = np.ones((rows, 1)) if alike else np.exp2(3 * rng.standard_normal((rows, 1)))
    gradients = scales * rng.standard_normal((workers, rows, 256))
    gradients = gradients.reshape(workers, -1).astype(np.float32)
    truth = gradients.sum(axis=0, dtype=np.float64)

    def error(method: dq.DynamiQ) -> float:
        run = simulated(lambda key, g: dq.psum(g, "data", key=key, method=method))
        keys = jax.random.split(jax.random.key(0), 4)
        return float(np.mean([vnmse(run(key, gradients)[0], truth) for key in keys]))

    one_width, found = error(dq.DynamiQ(bits=4.375, widths=(4,))), error(dq.DynamiQ(bits=5.0))
    choice = rows_per_chunk > 1
    assert found < (0.75 if choice else 1.05) * one_width
    assert found > (0.02 if choice else 0.95) * one_width


def bits_on_the_wire(method: dq.DynamiQ, size: int, num_workers: int) -> float:
    """Return the bits per coordinate of all bytes of one pass over the link."""
    cost = method.wire_cost(Call(size=size, axis=Axis("data", num_workers), topology=Ring()))
    statistics = cost.statistics_bytes / (2 * (num_workers - 1)) * num_workers
    return 8 * (cost.payload_bytes * num_workers + statistics) / size


@pytest.mark.parametrize("preset", (dq.DynamiQ, dq.DynamiQ.paper))
@given(bits=st.floats(3.0, 8.0), num_workers=st.integers(2, 8))
def test_large_buckets_cost_the_bits_they_promise(preset, bits, num_workers):
    found = bits_on_the_wire(preset(bits=bits), 4 << 20, num_workers)
    assert found == pytest.approx(bits, rel=0.001)
