"""Bits to widths: the budget is met exactly, and no other split of it has a lower error."""

import numpy as np
import pytest
from dynamiq_jax.codec import allocation, layout
from hypothesis import given
from hypothesis import strategies as st

import dynamiq_jax as dq
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


def layout_of(method: dq.DynamiQ, size: int, num_workers: int) -> layout.Layout:
    return method.layout(size, num_workers)


def bits_on_the_wire(method: dq.DynamiQ, size: int, num_workers: int) -> float:
    """All bytes of one pass over the link, per coordinate."""
    cost = method.wire_cost(size, num_workers, num_workers)
    statistics = cost.statistics_bytes / (2 * (num_workers - 1)) * num_workers
    return 8 * (cost.payload_bytes * num_workers + statistics) / size


@given(bits=st.floats(2.5, 16), centre=st.booleans())
def test_the_mean_width_is_the_budget(bits, centre):
    method = dq.DynamiQ(bits=bits, centre=centre)
    code_bits = bits - allocation.overhead_bits(method.group_size, statistics=1 + centre)
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
def test_no_exchange_between_neighbouring_widths_lowers_the_error(widths, share, q):
    """Widen some super-groups by one width, narrow others by one, at the same mean width."""
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
            # A per cent may go to rounding, and to leaving out widths that hardly pay.
            assert expected_error(moved, ordered, q) >= 0.99 * best
    assert tried or len(shares) <= 2


def test_an_exchange_away_from_the_optimum_does_raise_the_error():
    """The test above can tell: equal shares of all widths are far from optimal."""
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
    assert variances[0] <= 1  # equal norms: only the two widths about the budget
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


@given(size=st.integers(1, 1 << 21), num_workers=st.integers(1, 9), bits=st.floats(2.5, 16))
def test_layouts_have_room_for_every_row(size, num_workers, bits):
    found = layout_of(dq.DynamiQ(bits=bits), size, num_workers)
    rows = -(-size // 256)
    assert found.rows_per_chunk == -(-rows // num_workers)
    assert found.num_rows >= rows
    first_row, codes_start = 0, 0
    for c in found.classes:
        assert (c.first_row, c.codes_start) == (first_row, codes_start)
        assert c.rows > 0
        first_row += c.rows
        codes_start += 32 * c.width * c.rows
    assert first_row == found.rows_per_chunk
    widths = [c.width for c in found.classes]
    assert widths == sorted(set(widths), reverse=True)
    row_overhead = 256 // found.group_size + 2
    used = codes_start + row_overhead * found.rows_per_chunk
    assert used <= found.payload_bytes < used + 16
    assert found.payload_bytes % 16 == 0


def test_shares_that_add_up_to_almost_one_still_cover_every_row():
    """A million rows a chunk, and shares as far from 1 as a method accepts."""
    shares = ((8, 0.25), (6, 0.25), (4, 0.25), (2, 0.25 - 9e-7))
    bits = mean_width(shares) + allocation.overhead_bits(32, statistics=1)
    method = dq.DynamiQ(bits=bits, fractions=shares)
    rows = 1 << 21
    assert layout_of(method, 256 * rows, 1).rows_per_chunk == rows


@pytest.mark.parametrize("preset", (dq.DynamiQ, dq.DynamiQ.paper))
@given(bits=st.floats(3.0, 8.0), num_workers=st.integers(2, 8))
def test_large_buckets_cost_the_bits_they_promise(preset, bits, num_workers):
    assert bits_on_the_wire(preset(bits=bits), 4 << 20, num_workers) == pytest.approx(
        bits, rel=0.01
    )
