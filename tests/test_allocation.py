"""Bits to widths: the budget is met exactly, and no other split of it has a lower error."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import dynamiq_jax as dq
from dynamiq_jax._core import Axis
from dynamiq_jax.methods import Call
from dynamiq_jax.methods import _allocation as allocation
from dynamiq_jax.topologies import Ring
from pallas_kernels.codec.levels import error_coefficient
from tests.support.gradients import heavy_tailed

WIDTHS = dq.DynamiQ().widths
PAPER_WIDTHS = (2, 4, 8)
GRID = 8192  # places at which a distribution of norms is sampled

# Sorted log2 norms: flat, spread, skewed.
COUNT = len(allocation.POSITIONS)
quantiles = st.lists(st.floats(-30, 30), min_size=COUNT, max_size=COUNT).map(
    lambda q: tuple(sorted(q))
)


def mean_width(fractions: allocation.Fractions) -> float:
    return sum(width * share for width, share in fractions)


def expected_error(boundaries: np.ndarray, widths: tuple[int, ...], log2_norms) -> float:
    """Sum of F c_w over ranked super-groups; the i-th width ends at share `boundaries[i]`."""
    at = (np.arange(GRID) + 0.5) / GRID
    log2_f = 2 * np.interp(at, allocation.POSITIONS, log2_norms)[::-1]
    # The error up to a share, so that a boundary may fall between two samples.
    f = np.exp2(log2_f - log2_f.max())
    up_to = np.concatenate([[0], np.cumsum(f)]) / GRID
    energy = np.diff(
        np.interp(np.concatenate([[0], boundaries]), np.linspace(0, 1, GRID + 1), up_to)
    )
    return float(energy @ [error_coefficient(width) for width in widths])


def bits_on_the_wire(method: dq.DynamiQ, size: int, num_workers: int) -> float:
    """Return the bits per coordinate of all bytes of one pass over the link."""
    cost = method.wire_cost(Call(size=size, axis=Axis("data", num_workers), topology=Ring()))
    statistics = cost.statistics_bytes / (2 * (num_workers - 1)) * num_workers
    return 8 * (cost.payload_bytes * num_workers + statistics) / size


@given(group_size=st.sampled_from((8, 16, 32)), bits=st.floats(3.5, 16))
def test_the_mean_width_is_the_budget(group_size, bits):
    # A byte for each group, and two bytes each for the super-scale and the norm of 256.
    code_bits = bits - 8 / group_size - 32 / 256
    assert bits - allocation.overhead_bits(group_size) == code_bits
    fractions = allocation.solve_fractions(code_bits, WIDTHS)
    assert mean_width(fractions) == pytest.approx(code_bits, abs=1e-9)


@given(
    share=st.floats(0, 1), widths=st.sets(st.sampled_from((0, *WIDTHS)), min_size=1), q=quantiles
)
def test_any_budget_is_met_for_any_widths_and_norms(share, widths, q):
    code_bits = min(widths) + share * (max(widths) - min(widths))
    fractions = allocation.solve_fractions(code_bits, tuple(widths), q)
    assert mean_width(fractions) == pytest.approx(code_bits, abs=1e-9)
    assert sum(part for _, part in fractions) == pytest.approx(1, abs=1e-12)
    assert all(part > 0 for _, part in fractions)
    used = [width for width, _ in fractions]
    assert set(used) <= widths
    assert used == sorted(used, reverse=True)


@pytest.mark.parametrize("widths", (WIDTHS, PAPER_WIDTHS))
@given(share=st.floats(0.1, 0.9), q=quantiles)
def test_no_exchange_between_neighboring_widths_lowers_the_error(widths, share, q):
    """Widen some super-groups by one width and narrow others by one, at the same mean width."""
    code_bits = widths[0] + share * (widths[-1] - widths[0])
    shares = dict(allocation.solve_fractions(code_bits, widths, q))
    ordered = tuple(sorted(widths, reverse=True))
    boundaries = np.cumsum([shares.get(width, 0.0) for width in ordered])
    best = expected_error(boundaries, ordered, q)
    gaps = -np.diff(ordered)
    tried = 0
    for widened in range(len(gaps)):
        for narrowed in range(len(gaps)):
            moved = boundaries.copy()
            moved[widened] += 0.02 / gaps[widened]
            moved[narrowed] -= 0.02 / gaps[narrowed]
            if widened == narrowed or np.any(np.diff(moved, prepend=0) < 0) or moved[-2] > 1:
                continue
            tried += 1
            # One percent for rounding, and for widths left out because they gain little.
            assert expected_error(moved, ordered, q) >= 0.99 * best
    assert tried or len(shares) <= 2


def test_widths_that_hardly_lower_the_error_are_left_out():
    """Each width is compiled on its own, so that a rare one has to be worth it."""
    code_bits = 5 - allocation.overhead_bits(32)

    def best_of(*widths: int) -> tuple[allocation.Fractions, float]:
        at = (np.arange(4096) + 0.5) / 4096
        log2_norms = np.interp(at, allocation.POSITIONS, allocation.REFERENCE_LOG2_NORMS)[::-1]
        energies = np.exp2(2 * (log2_norms - log2_norms.max()))
        return allocation._optimum(code_bits, widths, energies)

    best, least = best_of(*sorted(WIDTHS, reverse=True))
    kept = dict(allocation.solve_fractions(code_bits, WIDTHS))
    left_out = dict(best).keys() - kept.keys()
    assert left_out
    assert all(dict(best)[width] <= 0.02 for width in left_out)
    assert best_of(*kept)[1] <= 1.01 * least
    for width in kept:
        if kept[width] <= 0.02:
            assert best_of(*(w for w in kept if w != width))[1] > 1.01 * least


def test_an_exchange_away_from_the_optimum_does_raise_the_error():
    """The test above can fail: equal shares of all widths are far from optimal."""
    q = tuple(np.linspace(-6, 6, COUNT))
    ordered = tuple(sorted(WIDTHS, reverse=True))
    equal = np.arange(1, len(ordered) + 1) / len(ordered)
    shares = dict(allocation.solve_fractions(float(np.mean(ordered)), WIDTHS, q))
    best = np.cumsum([shares.get(width, 0.0) for width in ordered])
    assert expected_error(best, ordered, q) < 0.5 * expected_error(equal, ordered, q)


def test_the_widths_spread_with_the_norms():
    shape = np.linspace(-1, 1, COUNT)
    variances = []
    for spread in (0.0, 1.0, 2.0, 4.0, 8.0, 16.0):
        fractions = allocation.solve_fractions(5.0, WIDTHS, tuple(spread * shape))
        variances.append(sum(part * (width - 5) ** 2 for width, part in fractions))
    assert variances == sorted(variances)
    assert variances[0] <= 1  # equal norms: only the two widths next to the budget
    assert variances[-1] > 10


def test_only_the_spread_of_the_norms_matters():
    q = np.cumsum(np.random.default_rng(0).integers(0, 16, COUNT) / 16)
    assert allocation.solve_fractions(5.0, WIDTHS, tuple(q)) == allocation.solve_fractions(
        5.0, WIDTHS, tuple(q + 64)
    )


def test_quantiles_leave_out_what_has_no_logarithm():
    norms = np.array([0.0, 1.0, np.inf, 2.0, np.nan, 4.0], np.float32)
    found = dict(zip(allocation.POSITIONS, allocation.log2_norm_quantiles(norms), strict=True))
    assert (found[0.0], found[0.5], found[1.0]) == (0.0, 1.0, 2.0)


def test_fitted_fractions_keep_the_budget_and_lower_the_expected_error():
    gradient = heavy_tailed(0, (1 << 18,), spread=4.0)
    method = dq.DynamiQ(bits=5.0)
    fitted = method.fit({"w": gradient})
    assert dict(fitted.fractions).keys() <= set(method.widths)
    norms = np.linalg.norm(gradient.reshape(-1, 256).astype(np.float64), axis=1)
    q = allocation.log2_norm_quantiles(norms)

    def error(m: dq.DynamiQ) -> float:
        classes = m.layout(1 << 24, 8).classes
        ends = np.cumsum([c.rows for c in classes])
        return expected_error(ends / ends[-1], tuple(c.width for c in classes), q)

    assert bits_on_the_wire(fitted, 1 << 24, 8) == pytest.approx(5.0, rel=0.002)
    assert error(fitted) <= 1.001 * error(method)
    flat = method.fit({"w": np.ones(1 << 16, np.float32)})
    assert error(fitted) < 0.5 * error(flat)


@pytest.mark.parametrize("preset", (dq.DynamiQ, dq.DynamiQ.paper))
@given(bits=st.floats(3.0, 8.0), num_workers=st.integers(2, 8))
def test_large_buckets_cost_the_bits_they_promise(preset, bits, num_workers):
    assert bits_on_the_wire(preset(bits=bits), 4 << 20, num_workers) == pytest.approx(
        bits, rel=0.01
    )
