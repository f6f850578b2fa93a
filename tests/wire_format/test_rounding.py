"""Each offset is uniform, and those of a path are arranged so that its errors cancel."""

import functools

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels.codec import rounding
from tests.support import oracle

pytestmark = pytest.mark.optimized

ROWS, LANES = 512, 256
COUNT = ROWS * LANES
RANDOM = ("correlated", "independent")
words = st.integers(0, 2**32 - 1)

jitted = jax.jit(rounding.offsets, static_argnums=3)


def offsets(kind: str, turn: int, seed: tuple[int, int] = (7, 11), first: int = 0) -> np.ndarray:
    ids = np.arange(first, first + ROWS, dtype=np.uint32)
    return np.asarray(jitted(ids, np.int32(turn), np.array(seed, np.uint32), kind), np.float64)


@functools.cache
def path(kind: str, turns: int) -> np.ndarray:
    """Offsets of all compressions on the path of each coordinate, [turns, ROWS * LANES]."""
    return np.stack([offsets(kind, turn).reshape(-1) for turn in range(turns)])


def kolmogorov_smirnov(samples: np.ndarray) -> float:
    """sqrt(N) times the largest distance to the uniform distribution: 0.4 to 2 for random ones."""
    ordered = np.sort(samples.reshape(-1))
    steps = np.arange(ordered.size + 1) / ordered.size
    distance = max(np.max(steps[1:] - ordered), np.max(ordered - steps[:-1]))
    return float(distance * np.sqrt(ordered.size))


def correlation(a: np.ndarray, b: np.ndarray) -> float:
    """sqrt(N) times the correlation: within 4 for independent samples."""
    a, b = a.reshape(-1), b.reshape(-1)
    return float(np.corrcoef(a, b)[0, 1] * np.sqrt(a.size))


@pytest.mark.parametrize("kind", RANDOM)
@given(first=words, turn=st.integers(0, 1000), seed=st.tuples(words, words))
def test_offsets_are_those_of_the_oracle(kind, first, turn, seed):
    ids = (first + np.arange(ROWS)).astype(np.uint32)
    ours = np.asarray(jitted(ids, np.int32(turn), np.array(seed, np.uint32), kind))
    assert ours.dtype == np.float32
    np.testing.assert_array_equal(ours, oracle.rounding_offsets(ids, turn, seed, kind))


@pytest.mark.parametrize("kind", RANDOM)
@pytest.mark.parametrize("turn", (0, 1, 7))
def test_every_offset_is_uniform(kind, turn):
    u = offsets(kind, turn)
    assert u.min() > 0
    assert u.max() < 1
    assert 0.2 < kolmogorov_smirnov(u) < 2
    # Also lane by lane and row by row: no coordinate is special.
    for axis in (0, 1):
        spread = (u.mean(axis=axis) - 0.5) * np.sqrt(12 * u.shape[axis])
        assert 0.8 < spread.std() < 1.2


@pytest.mark.parametrize("kind", RANDOM)
def test_coordinates_and_seeds_are_uncorrelated(kind):
    u = offsets(kind, 3)
    assert abs(correlation(u[1:], u[:-1])) < 4
    assert abs(correlation(u[:, 1:], u[:, :-1])) < 4
    assert abs(correlation(u[:, : LANES // 2], u[:, LANES // 2 :])) < 4  # of one word each
    for seed in ((8, 11), (7, 12), (11, 7)):
        assert abs(correlation(u, offsets(kind, 3, seed))) < 4


def test_correlated_hops_step_by_the_golden_ratio():
    u = path("correlated", 8)
    golden = (np.sqrt(5) - 1) / 2
    for turn in range(1, 8):
        turned = u[turn] - u[0] - turn * golden
        assert np.max(np.abs(turned - np.rint(turned))) < 2.0**-13  # of 16 bits, with a carry


@pytest.mark.parametrize("turns", (2, 3, 5, 8, 13, 16))
def test_correlated_hops_leave_no_large_gap(turns):
    """The offsets of a path cover [0, 1) evenly for any number of workers."""
    ordered = np.sort(path("correlated", turns), axis=0)
    gaps = np.diff(np.concatenate([ordered, ordered[:1] + 1]), axis=0)
    assert np.max(gaps) * turns < 2
    assert np.min(gaps) * turns > 0.3


def test_independent_hops_are_uncorrelated():
    u = path("independent", 4)
    assert max(abs(correlation(u[i], u[j])) for i in range(4) for j in range(i)) < 4
    # Correlated ones are, by design: 1 - 6 g (1 - g) = -0.42 for a step g of the golden ratio.
    assert correlation(*path("correlated", 2)) / np.sqrt(COUNT) == pytest.approx(-0.42, abs=0.01)


def variance_of_sum(kind: str, turns: int, p: np.ndarray) -> float:
    """Variance of a path's summed rounding errors, relative to that of independent rounding."""
    errors = (path(kind, turns) < p) - p
    return float(np.mean(errors.sum(axis=0) ** 2) / np.mean(np.sum(p * (1 - p), axis=0)))


@pytest.mark.parametrize("turns", (2, 4, 8, 16))
def test_errors_of_a_path_cancel(turns):
    """With the same fraction at every turn, the errors of all roundings sum to about one error.

    They cancel even where fractions are unrelated.
    """
    same = np.random.default_rng(0).random((1, COUNT)).repeat(turns, axis=0)
    unrelated = np.random.default_rng(1).random((turns, COUNT))
    for p, least, most in ((same, 0.1 / turns, 2 / turns), (unrelated, 0.4, 0.75)):
        assert 0.97 < variance_of_sum("independent", turns, p) < 1.03
        if turns > 2 or p is same:
            assert least < variance_of_sum("correlated", turns, p) < most


@pytest.mark.parametrize("kind", RANDOM)
def test_no_error_of_a_path_has_a_mean(kind):
    p = np.random.default_rng(2).random((8, COUNT))
    errors = ((path(kind, 8) < p) - p).sum(axis=0)
    assert abs(errors.mean()) * np.sqrt(COUNT) < 4 * errors.std()
