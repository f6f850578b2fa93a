"""The codec against an independent implementation of the wire format, bit for bit.

The oracle computes levels and probabilities in float64 and marks the codes that do not depend on
the last bits of float32 ("decided"). Those have to be equal, and the others within one level.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dynamiq_jax as dq
from dynamiq_jax._core import Axis
from dynamiq_jax.methods import Call
from dynamiq_jax.methods._dynamiq import combine_norms
from dynamiq_jax.methods._dynamiq_codec import DynamiQChunks
from dynamiq_jax.topologies import AllToAll, Ring
from pallas_kernels import operations, row_blocks
from pallas_kernels.codec import WIDTHS, Layout, LocalRows, Places, make_places, place_rows
from tests.support import oracle
from tests.support.gradients import of_workers, vnmse
from tests.support.kernel_cases import small_layout
from tests.support.workers import TWO_WIDTHS

FEW_WIDTHS = (8, 5, 2)
NUM_CHUNKS, ROWS_PER_WIDTH = 3, 32
SEED = np.array([0x12345678, 0x9ABCDEF0], np.uint32)
HOPS = 4


class Codec(NamedTuple):
    """A way to quantize, and the widths that an equal number of rows get."""

    group_size: int
    rounding: str
    spacing: oracle.Spacing
    widths: tuple[int, ...]

    @property
    def layout(self) -> Layout:
        rows, (spacing, gap_ratio) = ROWS_PER_WIDTH * len(self.widths), self.spacing
        # One unit for each chunk is left over, and has to be zeros.
        bits = float(np.mean(self.widths)) + 1 / rows
        quantizer = {"group_size": self.group_size, "rounding": self.rounding, "spacing": spacing}
        widths = tuple(sorted(self.widths))
        return small_layout(rows, widths, bits, NUM_CHUNKS, gap_ratio=gap_ratio, **quantizer)

    @property
    def row_widths(self) -> np.ndarray:
        return np.repeat(self.widths, ROWS_PER_WIDTH)

    @property
    def kind(self) -> oracle.Kind:
        return oracle.Kind(
            self.layout.units,
            self.widths,
            1.0,
            self.group_size,
            self.spacing,
            self.rounding,
            tuple(SEED.tolist()),
        )

    def places(self, order: np.ndarray) -> Places:
        """Places with as many rows of every width, whatever the rows."""
        plane_rows = (self.row_widths[:, None] > np.arange(16)).sum(axis=0)
        every = np.broadcast_to(plane_rows, (len(order), 16)).astype(np.int32)
        return make_places(jnp.asarray(order), jnp.asarray(every))


# Widths, groups, levels and offsets do not interact, so that four codecs cover all choices.
QUADRATIC, GEOMETRIC = oracle.Spacing("quadratic", 2.7), oracle.Spacing("geometric", 2.7)
CODECS = {
    "paper": Codec(16, "correlated", GEOMETRIC, (16, 11, 8, 4, 2, 0)),
    "independent": Codec(32, "independent", QUADRATIC, WIDTHS[::-1]),
    "default": Codec(32, "correlated", QUADRATIC, FEW_WIDTHS),
    "nearest": Codec(8, "nearest", oracle.Spacing("quadratic", 1.0), FEW_WIDTHS),
}
every_codec = pytest.mark.parametrize("name", CODECS)


by_base = operations.by("xla")
compress, hop, decompress = (
    jax.jit(operation, static_argnames="layout")
    for operation in (
        functools.partial(operations.compress, implementation="xla"),
        by_base.hop,
        by_base.decompress,
    )
)


@functools.cache
def path(name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Messages of chunk 1 after each of `HOPS` compressions, rows added at each, and the table."""
    layout, chunk = CODECS[name].layout, np.int32(1)
    rng = np.random.default_rng(3)
    order = rng.permutation(layout.num_rows).astype(np.int32).reshape(NUM_CHUNKS, -1)
    rows = of_workers(0, HOPS, layout.size).reshape(HOPS, -1, 256)
    places = CODECS[name].places(order)
    local = [LocalRows(own, places, SEED) for own in rows]
    messages = [compress(local[0], chunk, np.int32(0), layout=layout)]
    for turn in range(1, HOPS):
        received = messages[-1][None]
        messages.append(hop(received, local[turn], chunk, np.int32(turn), layout=layout))
    return np.stack(messages), rows, order


@functools.cache
def decoded(name: str) -> np.ndarray:
    """The messages of `path`, decoded: float32 [HOPS, rows, 256] in the order of the message."""
    messages, _, order = path(name)
    layout = CODECS[name].layout
    table = np.arange(HOPS * order.shape[1], dtype=np.int32).reshape(HOPS, -1)
    places = CODECS[name].places(table)
    return np.asarray(decompress(messages, places, layout=layout)).reshape(HOPS, -1, 256)


@pytest.mark.sampled(2)
@every_codec
def test_every_message_of_a_path_is_that_of_the_page_and_decodes_to_its_values(name):
    codec, (messages, rows, order) = CODECS[name], path(name)
    received = np.zeros_like(decoded(name)[0])
    for turn, message in enumerate(messages):
        # Messages are checked one by one: each continues from the library's own last one. The sum
        # is formed as the library forms it, from values decoded in float32.
        check_message(message, received + rows[turn][order[1]], turn, codec)
        received = decoded(name)[turn]
        expected = oracle.decode_message(message, codec.row_widths, codec.kind)
        # Levels to 2^-21, and one float32 product.
        np.testing.assert_allclose(received, expected, rtol=2.0**-20, atol=0)
        assert np.any(received)
    # Equality with the page would not show that two hops share offsets by mistake in both.
    local = LocalRows(rows[0], codec.places(np.tile(order[:1], (NUM_CHUNKS, 1))), SEED)
    numbers = [np.int32(number) for number in range(HOPS)]
    sent = {
        np.asarray(compress(local, chunk, turn, layout=codec.layout)).tobytes()
        for chunk in numbers[:NUM_CHUNKS]
        for turn in numbers
    }
    assert len(sent) == (1 if codec.rounding == "nearest" else NUM_CHUNKS * HOPS)


def test_a_hop_adds_any_number_of_messages():
    """A butterfly and an all-to-all send several partial sums to be decoded, summed and encoded."""
    codec, (messages, rows, order) = CODECS["default"], path("default")
    turn, total = np.int32(7), rows[0][order[1]]
    local = LocalRows(rows[0], codec.places(order), SEED)
    message = hop(messages[1:], local, np.int32(1), turn, layout=codec.layout)
    for values in decoded("default")[1:]:
        total = total + values
    check_message(np.asarray(message), total, 7, CODECS["default"])


def check_message(message: np.ndarray, values: np.ndarray, turn: int, codec: Codec) -> None:
    """Check a message of chunk 1 that holds `values`, in the order of the message."""
    rows, widths, kind = codec.layout.rows_per_chunk, codec.row_widths, codec.kind
    assert message.shape == (oracle.payload_bytes(rows, kind.units, codec.group_size),)
    ids = rows + np.arange(rows)
    u = oracle.rounding_offsets(ids, turn, kind.seed, codec.rounding)
    expected = oracle.encode_chunk(values, widths, kind, u)
    codes, group_scales, super_scales = oracle.parse_message(
        message, widths, kind.units, codec.group_size
    )
    np.testing.assert_array_equal(super_scales, expected.super_scales)
    # A sum may be contracted with the product before it, which is one bit more exact: a maximum
    # next to a step of the scale may then take the next step.
    off = np.abs(group_scales.astype(int) - expected.group_scales.astype(int))
    assert off.max() <= (1 if turn else 0)
    assert np.mean(off) < 1e-3
    same = np.repeat(off == 0, codec.group_size, axis=1)
    for width in codec.widths:
        of = widths == width
        compare_codes(codes[of], expected.codes[of], expected.decided[of], same[of], width)


def compare_codes(
    ours: np.ndarray, expected: np.ndarray, decided: np.ndarray, same: np.ndarray, width: int
) -> None:
    """Compare codes; `same` marks coordinates whose scale is the same."""
    if width == 0:
        return
    np.testing.assert_array_equal(ours[decided & same], expected[decided & same])
    assert np.max(np.abs((ours >> 1).astype(int) - (expected >> 1).astype(int))[same]) <= 1
    np.testing.assert_array_equal(ours & 1, expected & 1)
    # A coordinate is undecided with probability 2 margin: 0.02 % at 8 bits, 6 % at 16, where one
    # level is close to the precision of float32. Five standard deviations more, or three codes.
    expected_share = 2 * oracle.margin(width)
    undecided = 1 - decided.mean()
    slack = max(5 * np.sqrt(expected_share / decided.size), 3.5 / decided.size)
    assert undecided < expected_share + slack
    assert width > 8 or undecided < 1e-3


@pytest.mark.parametrize("block", (5, pytest.param(24, marks=pytest.mark.slow)))
def test_blocks_leave_no_trace_in_the_message(monkeypatch, block):
    """The XLA backend works in blocks of rows, of which the last may overlap the one before."""
    layout, (messages, rows, order) = CODECS["default"].layout, path("default")
    local = LocalRows(rows[1], CODECS["default"].places(order), SEED)
    chunk, payloads = np.int32(1), messages[:NUM_CHUNKS]

    @jax.jit
    def blocked(payloads, local):
        sums = operations.by().decompress_accumulate(payloads[:1], local, chunk, layout=layout)
        sent = operations.by().hop(payloads[:1], local, chunk, 1, layout=layout)
        values = operations.by().decompress(payloads, local.places, layout=layout)
        return sent, values, sums, operations.by().statistics(local.rows)

    monkeypatch.setitem(row_blocks._BLOCK_ROWS, "cpu", block)
    sent, values, sums, norms = map(np.asarray, blocked(payloads, local))
    np.testing.assert_array_equal(sent, messages[1])
    own = decoded("default")[:NUM_CHUNKS]
    np.testing.assert_array_equal(values[order.reshape(-1)], own.reshape(-1, 256))
    # A multiply-add of one value may be contracted.
    atol = 2.0**-23 * np.abs(rows[1]).max()
    np.testing.assert_allclose(sums, own[0] + rows[1][order[1]], rtol=1e-6, atol=atol)
    np.testing.assert_allclose(norms, np.linalg.norm(rows[1], axis=1), rtol=1e-5)


# ---------------------------------------------------------------------------- codec of one bucket


def test_consecutive_chunks_are_those_of_the_whole_bucket():
    """In a reduce-scatter a sum has its coordinates in their order, and in an all-gather a worker
    holds the rows of its own chunk only.
    """
    layout = TWO_WIDTHS.layout(NUM_CHUNKS * 20 * 256, NUM_CHUNKS)
    own = of_workers(1, 3, layout.size).reshape(3, -1, 256)
    norms = jnp.asarray(oracle.row_norms(own[0]))
    places = place_rows(norms, layout, consecutive=True)
    chunk, part = 2, slice(40, 60)

    def codec(rows: jax.Array, first: int = 0) -> DynamiQChunks:
        local = LocalRows(rows, places, SEED)
        return DynamiQChunks(local=local, layout=layout, implementation=None, first=first)

    @jax.jit
    def run(own):
        sent = jnp.stack([codec(rows).compress(chunk, 0) for rows in own[1:]])
        total = codec(own[0]).accumulate(sent, chunk)
        decoded = [codec(own[0]).decompress(jnp.stack([m] * NUM_CHUNKS)) for m in sent]
        return sent, total, decoded, codec(own[1, part], part.start).compress(chunk, 0)

    sent, total, values, sent_from_part = run(own)
    expected = own[0, part] + sum(np.asarray(v).reshape(-1, 256)[part] for v in values)
    np.testing.assert_allclose(total, expected.reshape(-1), rtol=1e-5, atol=1e-9)
    assert 1e-6 < vnmse(total, own[:, part].sum(axis=0).reshape(-1)) < 1e-2
    np.testing.assert_array_equal(sent_from_part, sent[0])


# -------------------------------------------------------------------------------- whole all-reduces

SIZE = 3 * 256 * 100 + 77
runs = pytest.mark.parametrize(
    ("method", "num_workers", "topology"),
    (
        (dq.DynamiQ(), 5, Ring()),
        (dq.DynamiQ.paper(), 7, AllToAll()),
        (TWO_WIDTHS, 8, AllToAll()),  # the fewest workers whose sums are ordered again
    ),
    ids=("default_ring", "paper_all_to_all", "two_widths_all_to_all"),
)


def whole(method: dq.DynamiQ, num_workers: int, topology: Ring | AllToAll):
    """Worker gradients, their compressed sum, the norms that the workers agree on, the seed."""
    grads = of_workers(5, num_workers, SIZE)
    key = jax.random.key(17)
    axis = Axis("data", num_workers)
    layout = method.layout(SIZE, num_workers)

    def local(gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
        norms = combine_norms(operations.by().statistics(layout.as_rows(gradient)), axis)
        total = dq.psum(gradient, "data", key=key, method=dq.Compression(method, topology))
        return total, norms

    total, norms = jax.jit(jax.vmap(local, axis_name="data"))(grads)
    seed = jax.random.bits(jax.random.fold_in(key, 0), (2,), np.uint32)  # of bucket 0
    return grads, np.asarray(total), np.asarray(norms[0]), tuple(np.asarray(seed).tolist())


@pytest.mark.sampled(2)
@runs
def test_norms_and_the_whole_all_reduce_are_those_of_the_page(method, num_workers, topology):
    grads, totals, norms, seed = whole(method, num_workers, topology)
    rows = np.stack([oracle.to_rows(g, num_workers) for g in grads])
    expected = oracle.combine_norms(oracle.row_norms(rows))
    # Norms are float32 here and float64 there: one may round to the neighboring bfloat16.
    assert np.abs(norms.astype(int) - expected.astype(int)).max() <= 1
    assert np.mean(norms == expected) > 0.9

    call = Call(size=SIZE, axis=Axis("data", num_workers), topology=topology)
    sums = range(1, 1 + num_workers)  # of a ring; the other cases have widths of their own
    kind = oracle.Kind(
        oracle.units(method.bits, method.group_size, oracle.rows_per_chunk(SIZE, num_workers)),
        method.widths or oracle.default_widths(method.bits, method.group_size, sums),
        method.exponent,
        method.group_size,
        oracle.Spacing(method.spacing, method.gap_ratio),
        "correlated",
        seed,
    )
    of_page = oracle.ring if isinstance(topology, Ring) else oracle.all_to_all
    estimate, payloads = oracle.all_reduce(of_page, grads, kind, norm_bits=norms)
    assert len(payloads) == num_workers
    assert {len(p) for p in payloads} == {method.wire_cost(call).payload_bytes}
    truth = grads.sum(axis=0, dtype=np.float64)
    ours, theirs = vnmse(totals[0], truth), vnmse(estimate, truth)
    assert ours == pytest.approx(theirs, rel=0.15)
    assert 1e-5 < ours < 1e-1
    # The two agree far more closely with each other than with the truth: same codes, same noise.
    assert vnmse(totals[0], estimate) < 0.1 * ours
    assert np.median(np.abs(totals[0] - estimate)) < 1e-6 * np.abs(truth).max()
    np.testing.assert_array_equal(totals, np.broadcast_to(totals[0], totals.shape))
