"""Rows of small norm: each of them arrives, for little more error of the whole sum."""

import functools

import jax
import numpy as np
import pytest

import dynamiq_jax as dq
from dynamiq_jax.methods import DynamiQ
from dynamiq_jax.topologies import resolve_topology
from tests.support.workers import simulated

FROM_2 = tuple(range(2, 17))
# Topologies and workers, and the narrowest code that the budget of 5 bits has room for there.
PATHS = {
    ("ring", 2): 3,
    ("ring", 8): 3,
    ("ring", 16): 4,
    ("ring", 64): 4,
    ("butterfly", 8): 3,
    ("butterfly", 64): 3,
    ("all_to_all", 4): 3,
    ("all_to_all", 64): 3,
}


def gradients(workers: int) -> dict[str, np.ndarray]:
    """A kernel in which every twelfth row is small, as those of rare tokens in an embedding, and a
    vector at a hundredth of its scale.
    """
    rng = np.random.default_rng(0)
    rows = np.exp2(1.5 * rng.standard_normal((256, 1)))
    rows[::12] *= 2.0**-12
    kernel = rows * rng.standard_t(5, size=(workers, 256, 256))
    scale = 1e-2 * np.sqrt(np.mean(kernel**2)) * rng.normal(size=(workers, 4096))
    return {"kernel": kernel.astype(np.float32), "scale": scale.astype(np.float32)}


def relative_errors(method: DynamiQ, topology: str, workers: int, bucketing: str) -> np.ndarray:
    """Squared errors of all rows over their energies, then the vNMSE of the whole sum."""
    how = dq.Compression(method, topology, bucketing=bucketing, bucket_bytes=2**17, exact_below=0)
    tree = gradients(workers)
    run = simulated(lambda key, tree: dq.psum(tree, "data", how, key=key))
    found = jax.tree.map(lambda leaf: np.asarray(leaf[0], np.float64), run(jax.random.key(1), tree))
    truth = jax.tree.map(lambda leaf: leaf.sum(axis=0, dtype=np.float64), tree)
    off = jax.tree.map(np.subtract, found, truth)
    squared, energy = (
        np.concatenate([np.sum(leaf.reshape(-1, 256) ** 2, axis=1) for leaf in leaves.values()])
        for leaves in (off, truth)
    )
    return np.append(squared / energy, squared.sum() / energy.sum())


@functools.cache
def measured(bits: float, path: tuple[str, int], bucketing: str) -> tuple[np.ndarray, np.ndarray]:
    """Errors with the default widths, and with all of them."""
    methods = [DynamiQ(bits=bits, widths=widths) for widths in (None, FROM_2)]
    return tuple(relative_errors(method, *path, bucketing) for method in methods)


FAST = ((5.0, ("all_to_all", 4), "striped"),)
SETTINGS = (5.0, "striped"), (5.0, "in_order"), (6.0, "striped"), (8.0, "in_order")
SLOW = sorted({(bits, path, how) for path in PATHS for bits, how in SETTINGS} - {*FAST})


@pytest.mark.parametrize(
    ("bits", "path", "bucketing"),
    (*FAST, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)),
    ids=str,
)
def test_no_row_is_noise_from_5_bits_up(bits, path, bucketing):
    """Widths from 2 leave rows without anything but noise, among them those of the vector."""
    (*rows, whole), (*rows_before, before) = measured(bits, path, bucketing)
    assert 1e-3 < max(rows) < 1
    assert np.mean(np.greater(rows, 0.5)) <= 0.01 < np.mean(np.greater(rows_before, 0.5))
    assert max(rows_before) > 1
    # Long rings take 4 bits: their hops add up to three times the error.
    assert 1e-7 < whole < (1.35 if PATHS[path] == 3 else 2) * before


@pytest.mark.parametrize(
    "path", (("ring", 8), pytest.param(("all_to_all", 8), marks=pytest.mark.slow)), ids=str
)
def test_few_rows_are_noise_at_4_bits(path):
    (*rows, whole), (*rows_before, before) = measured(4.0, path, "striped")
    assert np.mean(np.greater(rows, 1)) <= 0.003 < 0.05 < np.mean(np.greater(rows_before, 1))
    assert before < whole < 1.5 * before


@pytest.mark.parametrize(
    ("bits", "path", "least"),
    (
        *((5.0, path, least) for path, least in PATHS.items()),
        *((bits, ("ring", 64), 5) for bits in (6.0, 8.0, 16.0)),
        *((bits, ("ring", 8), 3) for bits in (4.0, 6.0, 16.0)),
        *((4.0, ("ring", n), 3) for n in (9, 64)),
        *((bits, path, 2) for bits in (2.375, 3.0, 3.5) for path in (("ring", 2), ("ring", 64))),
        *((6.0, ("ring", n), least) for n, least in ((8, 3), (9, 4), (48, 4), (49, 5))),
    ),
    ids=str,
)
def test_the_least_width_follows_the_budget_and_the_path(bits, path, least):
    """The largest magnitude of a code, squared, is at least twice the growth of the error, if that
    leaves half a bit.
    """
    topology, workers = resolve_topology(path[0]), path[1]
    layout = DynamiQ(bits=bits).layout(2**16, workers, growth=topology.error_growth(workers))
    assert layout.allocation.widths == tuple(range(least, 17))
    before = DynamiQ(bits=bits, widths=FROM_2).layout(2**16, workers)
    assert layout.payload_bytes == before.payload_bytes


def test_given_widths_stay():
    for method in (DynamiQ.paper(), DynamiQ(bits=6.0, widths=(8, 2, 4))):
        layout = method.layout(2**16, 64, growth=32.5)
        assert layout.allocation.widths == (2, 4, 8)
