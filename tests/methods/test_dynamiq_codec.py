"""The codec of one bucket of DynamiQ, and sums whose rows are ordered again: less error where a
table misleads, and the same bytes.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dynamiq_jax as dq
from dynamiq_jax._core import SumCodec
from dynamiq_jax.methods import _dynamiq_codec
from dynamiq_jax.methods._dynamiq_codec import DynamiQChunks, ReorderedSums
from pallas_kernels.codec import LocalRows, make_places
from tests.support import oracle
from tests.support.gradients import heavy_tailed, of_workers, vnmse
from tests.support.workers import TWO_WIDTHS, simulated

CHUNKS, ROWS, WORKERS = 3, 64, 8


def codec_of(rows: jax.Array, order: jax.Array) -> DynamiQChunks:
    """Return the codec of a worker that holds `rows`, with a table that need not suit them: places
    are solved for as if the rows fell off by a factor of 8 from the first to the last.
    """
    seed = jnp.array([1, 2], jnp.uint32)
    layout = TWO_WIDTHS.layout(rows.size, CHUNKS)
    energies = jnp.linspace(9000 + 6 * 32, 9000, order.shape[1]).astype(jnp.int32)
    plane_rows = layout.allocation.solve(jnp.tile(energies, (CHUNKS, 1)), layout.units)
    return DynamiQChunks(
        local=LocalRows(rows, make_places(order.astype(jnp.int32), plane_rows), seed),
        layout=layout,
        implementation=None,
    )


def messages_of_sums(codec: DynamiQChunks, sums: SumCodec) -> jax.Array:
    """Return the final messages of all chunks, where the only other worker has sent zeros."""
    local = codec.local._replace(rows=jnp.zeros_like(codec.local.rows))
    zeros = dataclasses.replace(codec, local=local)

    def message(chunk: jax.Array) -> jax.Array:
        return sums.hop(zeros.compress(chunk, 0)[None], chunk, 1)

    return jax.lax.map(message, jnp.arange(CHUNKS))


@functools.partial(jax.jit, static_argnames="reorders")
def sent_and_decoded(rows, order, *, reorders):
    codec = codec_of(rows, order)
    sums = ReorderedSums(codec) if reorders else codec
    messages = messages_of_sums(codec, sums)
    return messages, sums.decompress(messages)


def in_order_of_norms(rows: np.ndarray) -> np.ndarray:
    """Return the table of consecutive chunks, each by the true norms of its rows."""
    norms = np.linalg.norm(rows.astype(np.float64), axis=1).reshape(CHUNKS, ROWS)
    return np.argsort(-norms, axis=1) + np.arange(CHUNKS)[:, None] * ROWS


def some_rows(seed: int = 0) -> np.ndarray:
    return heavy_tailed(seed, (CHUNKS * ROWS, 256))


def test_sums_of_eight_or_more_workers_are_ordered_again():
    codec = DynamiQChunks(local=None, layout=None, implementation=None)
    assert codec.of_sums(7) is codec
    assert codec.of_sums(8) == ReorderedSums(codec)


@pytest.mark.slow
def test_a_table_that_misleads_costs_nothing_any_more():
    rows = some_rows()
    right, wrong = in_order_of_norms(rows), np.arange(CHUNKS * ROWS).reshape(CHUNKS, ROWS)

    def error(order: np.ndarray, *, reorders: bool) -> float:
        _, decoded = sent_and_decoded(rows, order, reorders=reorders)
        return vnmse(decoded, rows.reshape(-1))

    best, misled = (error(order, reorders=False) for order in (right, wrong))
    again = error(wrong, reorders=True)
    assert misled > 4 * best  # so that there is something to mend
    assert 0.5 * best < again < 1.1 * best


def test_scales_stay_in_the_order_of_the_table():
    """In all messages they are what anybody could compute of the sum, and as many bytes."""
    rows = some_rows()
    order = np.random.default_rng(1).permutation(CHUNKS * ROWS).reshape(CHUNKS, ROWS)
    messages, _ = sent_and_decoded(rows, order, reorders=True)
    layout = TWO_WIDTHS.layout(rows.size, CHUNKS)
    assert messages.shape == (CHUNKS, layout.payload_bytes)
    for message, table in zip(np.asarray(messages), order, strict=True):
        group_scales, super_scales = map(np.asarray, layout.scales(jnp.asarray(message)))
        expected = oracle.row_scales(rows[table], TWO_WIDTHS.group_size)
        np.testing.assert_array_equal(group_scales, expected[0])
        np.testing.assert_array_equal(super_scales, expected[1])


def test_what_is_not_finite_stays_in_its_row():
    rows = some_rows()
    rows[5, 7], rows[100, 0], rows[101, 3] = np.nan, np.inf, 2.0**127
    rows[102] = 0
    order = in_order_of_norms(np.nan_to_num(rows, posinf=0, nan=0))
    _, decoded = sent_and_decoded(rows, order, reorders=True)
    decoded = np.asarray(decoded).reshape(rows.shape)
    lost = np.isin(np.arange(len(rows)), (5, 100, 101))
    assert np.isnan(decoded[lost]).all() and np.isfinite(decoded[~lost]).all()
    assert not decoded[102].any()
    assert 1e-7 < vnmse(decoded[~lost], rows[~lost]) < 1e-2


def test_a_rounded_codec_carries_the_values_of_a_compression_with_the_same_turn():
    """In the coordinates of the bucket, whatever the order of the table."""
    rows = some_rows()
    order = np.random.default_rng(1).permutation(CHUNKS * ROWS).reshape(CHUNKS, ROWS)

    @jax.jit
    def run(rows, order):
        codec, chunks = codec_of(rows, order), jnp.arange(CHUNKS)
        values, rounded = codec.rounded(3)
        sent = jax.lax.map(lambda chunk: codec.compress(chunk, 3), chunks)
        return values, rounded.local.rows, codec.decompress(sent)

    values, carried, expected = map(np.asarray, run(rows, order))
    np.testing.assert_array_equal(values, carried.reshape(-1))
    np.testing.assert_array_equal(values, expected)
    assert 1e-5 < vnmse(values, rows.reshape(-1)) < 1e-2


@functools.cache
def all_to_all(method: dq.DynamiQ, reorders: bool = True):
    """Return a function of (key, values) to their sum, with sums ordered again or not."""
    del reorders  # which the code is patched for, where this traces
    how = dq.Compression(method, "all_to_all")
    return simulated(lambda key, g: dq.psum(g, "data", how, key=key))


@pytest.mark.parametrize(
    ("rounding", "least", "most"),
    ((None, 0.015, 0.04), pytest.param("independent", -0.004, 0.004, marks=pytest.mark.slow)),
)
def test_an_all_to_all_is_as_unbiased_as_its_rounding(rounding, least, most):
    """What the mean over keys keeps of a squared error: one part in keys, and the bias, of
    correlated rounding by default.
    """
    keys, gradients = 32, of_workers(3, WORKERS, 128 * 256)
    truth = gradients.sum(axis=0, dtype=np.float64)
    run = all_to_all(dataclasses.replace(TWO_WIDTHS, rounding=rounding))
    estimates = [run(key, gradients)[0] for key in jax.random.split(jax.random.key(0), keys)]
    single = np.mean([vnmse(estimate, truth) for estimate in estimates])
    of_mean = vnmse(np.mean(estimates, axis=0, dtype=np.float64), truth)
    assert 3e-4 < single < 7e-4
    assert least < of_mean / single - 1 / keys < most


def test_sums_in_which_much_cancels_have_less_error(monkeypatch):
    """Half of the rows are large at all workers and small in the sum: statistics cannot know."""
    gradients = of_workers(7, WORKERS, 128 * 256, agreement=1.0).reshape(WORKERS, 128, 256)
    gradients[1::2, ::2] *= -0.9
    gradients = gradients.reshape(WORKERS, -1)
    truth = gradients.sum(axis=0, dtype=np.float64)

    def error(reorders: bool) -> float:
        total = np.asarray(all_to_all(TWO_WIDTHS, reorders)(jax.random.key(1), gradients))
        assert (total == total[0]).all()
        return vnmse(total[0], truth)

    ordered = error(reorders=True)
    monkeypatch.setattr(_dynamiq_codec, "_MIN_WORKERS_TO_REORDER", WORKERS + 1)
    assert 0.3 < ordered / error(reorders=False) < 0.6
