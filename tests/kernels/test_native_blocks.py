"""Formats with one width in the native codec: the bytes and the bits of the methods."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from dynamiq_jax.methods import MXFP4, MXFP6, MXFP8, MXINT8, Axis, BlockInt, Call, RecodedChunks
from dynamiq_jax.methods._blockwise import NativeChunks
from dynamiq_jax.topologies import Ring
from pallas_kernels import _native
from pallas_kernels.native_blocks import FORMATS
from tests.support.gradients import of_workers
from tests.support.native_calls import with_and_without

pytestmark = [
    # The base then rounds products and sums once.
    pytest.mark.optimized,
    pytest.mark.skipif(_native.why_not() is not None, reason=str(_native.why_not())),
]

CHUNKS, ROWS = 2, 70  # more rows of a chunk than a thread takes at a time
SIZE = 256 * CHUNKS * ROWS - 3
CALL = Call(size=SIZE, axis=Axis("", CHUNKS), topology=Ring())
METHODS = {
    **{element: MXFP8(element=element) for element in MXFP8.elements},
    **{element: MXFP6(element=element) for element in MXFP6.elements},
    "e2m1": MXFP4(),
    "int8": MXINT8(),
    "8 bits": BlockInt(),
    "4 bits, blocks of 128": BlockInt(code_bits=4, block=128),
    "5 bits, blocks of 256, noise": BlockInt(code_bits=5, block=256, rounding="stochastic"),
    "7 bits, blocks of 64, noise": BlockInt(code_bits=7, block=64, rounding="stochastic"),
    "2 bits": BlockInt(code_bits=2),
    "3 bits, noise": BlockInt(code_bits=3, rounding="stochastic"),
    "6 bits": BlockInt(code_bits=6, block=64),
}
FAST = ("e4m3", "int8", "5 bits, blocks of 256, noise")
KINDS = ("usual", "zeros", "NaN", "Inf", "tiny", "subnormal", "huge", "whole", "halves", "bits")


def rows_of(seed: int, kinds: list[str]) -> np.ndarray:
    """Draw float32 [SIZE]: kinds of rows, which repeat."""
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((CHUNKS * ROWS, 256)).astype(np.float32)
    rows *= np.exp2(rng.integers(-9, 9, rows.shape)).astype(np.float32)
    bits = rng.integers(0, 2**32, rows.shape, np.uint32).view(np.float32)
    scaled = {"tiny": -122, "subnormal": -135, "huge": 119}  # by a power of two
    with np.errstate(over="ignore"):
        for number in range(len(rows)):
            row = rows[number]
            match kinds[number % len(kinds)]:
                case "zeros":
                    row[:200] = 0
                case "NaN" | "Inf" as kind:
                    row[rng.integers(256)] = np.float32(kind)
                case kind if kind in scaled:
                    row *= np.float32(2.0 ** scaled[kind])
                case "whole":
                    row[:] = np.rint(row)
                case "halves":  # between two codes of 8 bits
                    row[:] = rng.integers(-127, 127, row.shape) + 0.5
                    row[::32] = 127
                case "bits":
                    row[:] = bits[number]
    return rows.reshape(-1)[:SIZE]


def codec_of(method, values, native: bool):
    codec = method.bind(values, CALL, jax.random.key(3))
    assert isinstance(codec, NativeChunks)
    parts = {name: getattr(codec, name) for name in ("local", "encode", "decode")}
    return codec if native else RecodedChunks(**parts)


@functools.cache
def programs(name: str, native: bool):
    """All operations, each as a program of its own."""

    def program(operation):
        def run(values, *arguments):
            return getattr(codec_of(METHODS[name], values, native), operation)(*arguments)

        return jax.jit(run)

    return {each: program(each) for each in ("compress", "hop", "accumulate", "decompress")}


def meaning(name: str, message):
    """Return the codes and the sides of a message, with zero for codes of blocks that are NaN.

    Such a code depends on which of two NaN a sum of them is.
    """
    codes, *sides = METHODS[name].format.unpack(message)
    values = METHODS[name].decode_rows(codes, *sides)
    return jnp.where(jnp.isnan(values), np.uint16(0), codes), *sides


def assert_same(found, expected):
    found, expected = np.asarray(found), np.asarray(expected)
    assert found.dtype == expected.dtype and found.shape == expected.shape
    if found.dtype != np.float32:
        np.testing.assert_array_equal(found, expected)
        return
    both_nan = np.isnan(found) & np.isnan(expected)
    differing = (found.view(np.uint32) != expected.view(np.uint32)) & ~both_nan
    assert not differing.any(), (found[differing][:5], expected[differing][:5])


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in FAST else pytest.mark.slow) for n in METHODS]
)
@pytest.mark.parametrize("dtype", [jnp.float32, pytest.param(jnp.bfloat16, marks=pytest.mark.slow)])
@settings(max_examples=12)
@given(
    seed=st.integers(0, 2**32 - 1),
    kinds=st.lists(st.sampled_from(KINDS), min_size=3, max_size=12),
    chunk=st.integers(0, CHUNKS - 1),
    turn=st.integers(0, 5),
    raw=st.booleans(),
)
@example(seed=0, kinds=["halves"], chunk=0, turn=0, raw=False)
def test_bytes_and_bits_are_those_of_the_method(name, dtype, seed, kinds, chunk, turn, raw):
    ours, other, third = (jnp.asarray(rows_of(seed + i, kinds)).astype(dtype) for i in range(3))
    native, base = (programs(name, each) for each in (True, False))
    messages = [base["compress"](values, chunk, 0) for values in (other, third)]
    if raw:  # as no codec writes them
        drawn = np.random.default_rng(seed).integers(0, 256, (2, messages[0].size), np.uint8)
        messages = [jnp.asarray(message) for message in drawn]
    stacked = jnp.stack(messages)
    for operation, arguments in (
        ("compress", (chunk, turn)),
        ("hop", (stacked[:1], chunk, turn)),
        ("hop", (stacked, chunk, turn)),
        ("accumulate", (stacked, chunk)),
        ("decompress", (stacked,)),
    ):
        found, expected = (each[operation](ours, *arguments) for each in (native, base))
        if found.dtype == np.uint8:
            found, expected = (meaning(name, message) for message in (found, expected))
        jax.tree.map(assert_same, found, expected)


def test_every_format_is_tried():
    assert {method.native_format for method in METHODS.values()} == set(FORMATS)
    assert {m.code_bits for m in METHODS.values() if isinstance(m, BlockInt)} == set(range(2, 9))


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("collective", "topology"),
    [
        *((dq.psum, topology) for topology in ("ring", "butterfly", "all_to_all")),
        (dq.psum_scatter, "ring"),
        (dq.all_gather, None),
    ],
)
@pytest.mark.parametrize("check_vma", [True, False])
def test_collectives_run_it_and_have_the_bits_of_the_method(
    collective, topology, check_vma, data_mesh, monkeypatch
):
    method = BlockInt(code_bits=6, rounding="stochastic")
    compression = dq.Compression(method, topology)
    kept = {"tiled": True} if collective is not dq.psum else {}
    splits = bool(kept) or not check_vma

    def run(gradient):
        result = collective(gradient[0], "data", compression, key=jax.random.key(1), **kept)
        return result[None] if splits else result

    mapped = jax.shard_map(
        run,
        mesh=data_mesh(4),
        in_specs=P("data"),
        out_specs=P("data") if splits else P(),
        check_vma=check_vma,
    )
    gradients = of_workers(0, 4, 4 * 256 * 20)
    found = with_and_without(monkeypatch, mapped, gradients, calls="block_")
    assert np.std(found[0]) > 1e-4
    np.testing.assert_array_equal(*found)


def test_error_feedback_under_vmap_has_the_bits_of_the_method(monkeypatch):
    method = dq.methods.ErrorFeedback(inner=MXFP4())
    optimizer = dq.all_reduce_gradients("data", method=method)

    def steps(gradient):
        state = optimizer.init(gradient)
        first, state = optimizer.update(gradient, state)
        second, _ = optimizer.update(gradient, state)
        return first, second

    mapped, gradients = jax.vmap(steps, axis_name="data"), jnp.asarray(of_workers(1, 2, 256 * 30))
    ours, base = with_and_without(monkeypatch, mapped, gradients, calls="block_")
    np.testing.assert_array_equal(ours, base)
    assert np.any(ours[0] != ours[1])


def test_arrays_of_other_shapes_are_refused():
    """The custom calls read no memory beyond their arguments."""
    codec = codec_of(MXFP8(), jnp.ones(SIZE), True)
    with pytest.raises(
        jax.errors.JaxRuntimeError,
        match=r"payloads has the shape \[2, \d+\], not \[any, \d+\]\. Use implementation",
    ):
        codec.decompress(jnp.zeros((2, codec.blocks.payload_bytes - 1), jnp.uint8))
    payload = codec.compress(jnp.int32(0), 0)[None]
    no_chunk = f"block_hop: place={CHUNKS} of chunks of {ROWS} of the {CHUNKS * ROWS} local rows"
    with pytest.raises(jax.errors.JaxRuntimeError, match=no_chunk):
        codec.hop(payload, jnp.int32(CHUNKS), 1)
