"""The codec against an independent implementation of the wire format, bit for bit.

The oracle computes levels and probabilities in float64 and says which codes do not hang on the last
bits of float32 ("decided"): those have to be equal, the others within one level.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dynamiq_jax.codec import packing

import dynamiq_jax as dq
from pallas_kernels import blocks
from pallas_kernels.codec.layout import Layout, make_layout
from pallas_kernels.codec.rounding import ROUNDINGS
from pallas_kernels.operations import compress, decompress, hop
from tests.support import oracle
from tests.support.gradients import of_workers, vnmse

ALL_WIDTHS = tuple(reversed(packing.WIDTHS))
FEW_WIDTHS = (8, 5, 2)
NUM_CHUNKS, ROWS_PER_WIDTH = 3, 32
SEED = np.array([0x12345678, 0x9ABCDEF0], np.uint32)
HOPS = 4

# Widths do not interact with how offsets are made: every width with two kinds of rounding and both
# group sizes, and a few widths with everything.
CODECS = [
    (16, "correlated", ALL_WIDTHS, "geometric"),
    (32, "independent", ALL_WIDTHS, "quadratic"),
    *(
        (group_size, rounding, FEW_WIDTHS, "quadratic")
        for group_size in (16, 32)
        for rounding in ROUNDINGS
    ),
]
codecs = pytest.mark.parametrize(
    "codec", CODECS, ids=lambda codec: f"{codec[0]}-{codec[1]}-{len(codec[2])}-{codec[3]}"
)
Codec = tuple[int, str, tuple[int, ...], str]
GAP_RATIO = 2.7


@functools.cache
def layout_of(codec: Codec) -> Layout:
    group_size, rounding, widths, spacing = codec
    return make_layout(
        256 * NUM_CHUNKS * ROWS_PER_WIDTH * len(widths),
        NUM_CHUNKS,
        fractions=tuple((width, 1 / len(widths)) for width in widths),
        group_size=group_size,
        spacing=spacing,
        gap_ratio=GAP_RATIO,
        rounding=rounding,
    )


jitted_compress = jax.jit(compress, static_argnames="layout")
jitted_hop = jax.jit(hop, static_argnames="layout")


@functools.partial(jax.jit, static_argnames="layout")
def jitted_decompress(messages, layout):
    """Messages one by one, rows in the order of the message: float32 [rows, 256]."""
    one = dataclasses.replace(layout, num_chunks=len(messages))
    order = jnp.arange(one.num_rows, dtype=jnp.int32).reshape(len(messages), -1)
    return decompress(messages, order, layout=one)


@functools.cache
def path(codec: Codec) -> tuple[list[np.ndarray], list[np.ndarray], np.ndarray]:
    """Messages of chunk 1 after each of `HOPS` compressions, the rows added at each, the table."""
    layout = layout_of(codec)
    rng = np.random.default_rng(3)
    order = rng.permutation(layout.num_rows).astype(np.int32).reshape(NUM_CHUNKS, -1)
    local = of_workers(0, HOPS, layout.size).reshape(HOPS, -1, 256)
    args = order, np.int32(1)
    messages = [jitted_compress(local[0], *args, np.int32(0), SEED, layout=layout)]
    for index in range(1, HOPS):
        messages.append(
            jitted_hop(
                messages[-1][None], local[index], *args, np.int32(index), SEED, layout=layout
            )
        )
    return [np.asarray(message) for message in messages], list(local), order


def spacing_of(kind: str) -> oracle.Spacing:
    return oracle.Spacing(kind, GAP_RATIO)


def class_rows(layout: Layout) -> list[tuple[int, int]]:
    return [(c.width, c.rows) for c in layout.classes]


@codecs
def test_every_message_of_a_path_is_the_one_of_the_page(codec):
    group_size, rounding, widths, spacing = codec
    layout = layout_of(codec)
    messages, local, order = path(codec)
    mix = class_rows(layout)
    assert mix == [(width, ROWS_PER_WIDTH) for width in widths]
    received = np.zeros((layout.rows_per_chunk, 256), np.float32)
    ids = layout.rows_per_chunk + np.arange(layout.rows_per_chunk)
    for index, message in enumerate(messages):
        assert message.shape == (oracle.payload_bytes(mix, group_size),)
        u = oracle.rounding_offsets(ids, index, tuple(SEED.tolist()), rounding)
        # Messages are checked one by one: each continues from the library's own last one. The sum
        # is formed as the library forms it, from values decoded in float32.
        values = received + local[index][order[1]]
        expected = oracle.encode_chunk(values, mix, group_size, spacing_of(spacing), u)
        codes, group_scales, super_scales = oracle.parse_message(message, mix, group_size)
        np.testing.assert_array_equal(super_scales, expected.super_scales)
        # A sum may be contracted with the product before it, which is one bit more exact: a maximum
        # next to a step of the scale may then take the next step.
        off = np.abs(group_scales.astype(int) - expected.group_scales.astype(int))
        assert off.max() <= (1 if index else 0)
        assert np.mean(off) < 1e-3
        same = np.repeat(off == 0, group_size, axis=1)
        for width, rows in oracle.class_slices(mix):
            compare_codes(
                codes[rows], expected.codes[rows], expected.decided[rows], same[rows], width
            )
        decoded = jitted_decompress(message[None], layout=layout)
        received = np.asarray(decoded)


def compare_codes(
    ours: np.ndarray, expected: np.ndarray, decided: np.ndarray, same: np.ndarray, width: int
) -> None:
    """`same` marks coordinates whose scale is the same."""
    if width == 0:
        return
    np.testing.assert_array_equal(ours[decided & same], expected[decided & same])
    mask = 2 ** (width - 1) - 1
    assert np.max(np.abs((ours & mask).astype(int) - (expected & mask).astype(int))[same]) <= 1
    np.testing.assert_array_equal(ours >> (width - 1), expected >> (width - 1))
    # A coordinate is undecided with probability 2 margin: 0.02 % at 8 bits, 4 % at 16, where one
    # level is close to the precision of float32. On top: five standard deviations, or three.
    expected_share = 2 * oracle.margin(width)
    undecided = 1 - decided.mean()
    slack = max(5 * np.sqrt(expected_share / decided.size), 3.5 / decided.size)
    assert undecided < expected_share + slack
    assert width > 8 or undecided < 1e-3


@codecs
def test_messages_decode_to_the_values_of_the_page(codec):
    layout = layout_of(codec)
    messages = np.stack(path(codec)[0])
    decoded = np.asarray(jitted_decompress(messages, layout=layout)).reshape(HOPS, -1, 256)
    for message, values in zip(messages, decoded, strict=True):
        expected = oracle.decode_message(
            message, class_rows(layout), codec[0], spacing_of(codec[3])
        )
        # Levels to 2^-21, and one float32 product.
        np.testing.assert_allclose(values, expected, rtol=2.0**-20, atol=0)
        assert np.any(values)


@pytest.mark.parametrize("rounding", ("correlated", "independent"))
def test_the_hop_and_the_chunk_change_the_noise(rounding):
    """Equality with the oracle would not notice two hops that share offsets by mistake there."""
    codec = (32, rounding, FEW_WIDTHS, "quadratic")
    layout, (_, local, order) = layout_of(codec), path(codec)
    same = np.tile(order[:1], (NUM_CHUNKS, 1))  # every chunk holds the same rows
    messages = {
        np.asarray(
            jitted_compress(local[0], same, np.int32(c), np.int32(h), SEED, layout=layout)
        ).tobytes()
        for c in range(NUM_CHUNKS)
        for h in range(HOPS)
    }
    assert len(messages) == NUM_CHUNKS * HOPS


@pytest.mark.parametrize("block", (5, 24, 64))
def test_blocks_leave_no_trace_in_the_message(monkeypatch, block):
    """The XLA backend works in blocks of rows, whose last overlaps the one before."""
    codec = (32, "correlated", FEW_WIDTHS, "quadratic")
    layout, (messages, local, order) = layout_of(codec), path(codec)
    monkeypatch.setattr(blocks, "_CPU_BLOCK_ROWS", block)
    blocked = jax.jit(lambda *args: hop(*args, layout=layout))
    message = blocked(messages[0][None], local[1], order, np.int32(1), np.int32(1), SEED)
    np.testing.assert_array_equal(message, messages[1])
    payloads = np.stack(messages[:NUM_CHUNKS])
    decode = jax.jit(lambda payloads: decompress(payloads, order, layout=layout))
    expected = np.zeros((layout.num_rows, 256), np.float32)
    expected[order.reshape(-1)] = jitted_decompress(payloads, layout=layout)
    np.testing.assert_array_equal(decode(payloads), expected)


# -------------------------------------------------------------------------------- whole all-reduces

SIZE = 3 * 256 * 300 + 77
presets = pytest.mark.parametrize(
    ("method", "num_workers"),
    (
        (dq.DynamiQ(), 4),
        (dq.DynamiQ(), 8),
        (dq.DynamiQ.paper(), 4),
        (dq.DynamiQ.paper(centre=True), 9),
    ),
    ids=("default", "many", "paper", "centred"),
)


@functools.cache
def whole(method: dq.DynamiQ, num_workers: int, topology: str):
    """Worker gradients, their compressed sum, and the order of rows that the method chose."""
    grads = of_workers(5, num_workers, SIZE)
    key = jax.random.key(17)

    def local(gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
        bound = method.bind(gradient, "data", num_workers, num_workers, jax.random.fold_in(key, 0))
        total = dq.psum(gradient, "data", key=key, method=method, topology=topology)
        return total, bound.order

    total, order = jax.jit(jax.vmap(local, axis_name="data"))(grads)
    seed = jax.random.bits(jax.random.fold_in(key, 0), (2,), np.uint32)  # of bucket 0
    return grads, np.asarray(total), np.asarray(order[0]), tuple(np.asarray(seed).tolist())


def bits_that_give(order: np.ndarray, mix: list[tuple[int, int]]) -> np.ndarray:
    """Norm bits that sort into a given table of rows: the rank, from the top down."""
    ranked, first = [], 0
    for _, rows in mix:
        ranked.append(order[:, first : first + rows].T.reshape(-1))
        first += rows
    ranked = np.concatenate(ranked)
    bits = np.empty(ranked.size, np.uint16)
    bits[ranked] = np.arange(ranked.size, 0, -1)
    return bits


@presets
def test_the_rows_are_ordered_as_the_page_says(method, num_workers):
    grads, _, order, _ = whole(method, num_workers, "ring")
    mix = class_rows(method.layout(SIZE, num_workers))
    rows = np.stack([oracle.to_rows(g, num_workers) for g in grads])
    bits = oracle.combine_norms(oracle.row_norms(rows))
    np.testing.assert_array_equal(
        oracle.row_table(bits_that_give(order, mix), mix, num_workers), order
    )
    expected = oracle.row_table(bits, mix, num_workers)
    # Norms are float32 here and float64 there: one may round to the neighbouring bfloat16.
    swapped = np.abs(bits[order].astype(int) - bits[expected].astype(int))
    assert swapped.max() <= 1
    assert np.mean(order == expected) > 0.9


@pytest.mark.parametrize("topology", (oracle.ring, oracle.all_to_all), ids=lambda t: t.__name__)
@presets
def test_the_whole_all_reduce_is_the_one_of_the_page(method, num_workers, topology):
    grads, totals, order, seed = whole(method, num_workers, topology.__name__)
    mix = class_rows(method.layout(SIZE, num_workers))
    spacing = oracle.Spacing(method.spacing, method.gap_ratio)
    estimate, payloads = oracle.all_reduce(
        topology,
        grads,
        oracle.Kind(mix, method.group_size, spacing, method.rounding, seed),
        centre=method.centre,
        norm_bits=bits_that_give(order, mix),
    )
    assert len(payloads) == num_workers
    assert {len(p) for p in payloads} == {
        method.wire_cost(SIZE, num_workers, num_workers).payload_bytes
    }
    truth = grads.sum(axis=0, dtype=np.float64)
    ours, theirs = vnmse(totals[0], truth), vnmse(estimate, truth)
    assert ours == pytest.approx(theirs, rel=0.15)
    assert 1e-5 < ours < 1e-1
    # The two agree far more closely with each other than with the truth: same codes, same noise.
    assert vnmse(totals[0], estimate) < 0.1 * ours
    assert np.median(np.abs(totals[0] - estimate)) < 1e-6 * np.abs(truth).max()


def test_a_hop_adds_any_number_of_messages():
    """What a butterfly and an all-to-all need: several partial sums, decoded, summed, encoded."""
    layout = dq.DynamiQ(widths=(8,), bits=8.375).layout(2 * 256 * 16, 2)
    rows = jnp.asarray(np.random.default_rng(0).normal(size=(4, layout.num_rows, 256)), jnp.float32)
    order = jnp.arange(layout.num_rows, dtype=jnp.int32).reshape(2, -1)
    seed = jnp.asarray(SEED, jnp.uint32)
    sent = [compress(part, order, 1, 0, seed, layout=layout) for part in rows[1:]]
    total = hop(jnp.stack(sent), rows[0], order, 1, 1, seed, layout=layout)
    decoded = jitted_decompress(total[None], layout=layout)
    assert 1e-7 < dq.vnmse(decoded, rows.sum(axis=0)[order[1]]) < 1e-3
