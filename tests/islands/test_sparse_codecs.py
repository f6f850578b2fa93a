"""Sparse messages by NumPy, which specifies them, JAX and the native codec: the same bits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dynamiq_jax.islands import Sparse, _sparse
from pallas_kernels import _native, native_sparse
from tests.islands.test_sparse import SETTINGS
from tests.support.message_bytes import same_bits
from tests.support.native_calls import assert_shapes_are_checked, called

needs_library = pytest.mark.skipif(_native.why_not() is not None, reason=str(_native.why_not()))
MORE = (*SETTINGS, Sparse(keep=5, chunk=65536, bits=1), Sparse(keep=2048, bits=4))
KINDS = ("usual", "whole", "zeros", "few", "equal", "special", "subnormal", "tiny", "huge", "bits")
KINDS += ("between",)


def values_of(seed: int, size: int, chunk: int, kinds: list[str]) -> np.ndarray:
    """Draw float32 [size]: kinds of blocks, which repeat."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(-(-size // chunk) * chunk).astype(np.float32)
    values *= np.exp2(rng.integers(-9, 9, values.size)).astype(np.float32)
    scaled = {"subnormal": -135, "tiny": -127, "huge": 119}  # by a power of two
    with np.errstate(over="ignore"):
        for number, block in enumerate(values.reshape(-1, chunk)):
            match kinds[number % len(kinds)]:
                case "whole":
                    block[:] = rng.integers(-3, 4, chunk)
                case "zeros":
                    block[:] = np.copysign(np.float32(0), block)
                case "few":
                    block[rng.permutation(chunk)[7:]] = 0
                case "equal":
                    block[:] = np.copysign(block[0], block)
                case "special":
                    special = (np.nan, -np.nan, np.inf, -np.inf, -0.0, 1e-45, -1.1754944e-38)
                    block[rng.permutation(chunk)[:7]] = special
                case kind if kind in scaled:
                    block *= np.float32(2.0 ** scaled[kind])
                case "between":  # two bfloat16, for the scale of one value
                    words = block.view(np.uint32)
                    words[:] = words & np.uint32(0xFFFF0000) | np.uint32(0x8000)
                case "bits":
                    block[:] = rng.integers(0, 2**32, chunk, np.uint32).view(np.float32)
    return values[:size]


@functools.cache
def codec(sparse: Sparse, name: str):
    """The encoder and the decoder of a setting, on blocks."""
    form = sparse.format
    fields = {"keep": form.keep, "bits": form.bits}

    def encode(rows):
        if name == "jax":
            return _sparse.encoded_in_jax(rows, form, sparse.gain)
        size, factor = len(rows) * sum(form.widths), form.factor(sparse.gain)
        return native_sparse.encode(rows, size, **fields, factor=factor)

    def decode(message):
        if name == "jax":
            return _sparse.decoded_in_jax(message, form)
        shape = message.size // sum(form.widths), form.chunk
        return native_sparse.decode(message, shape, **fields)

    return jax.jit(encode), jax.jit(decode)


def compare(sparse: Sparse, name: str, values: np.ndarray) -> None:
    """Encode and decode a vector, and compare the bits with those of the specification."""
    rows = np.pad(values, (0, -values.size % sparse.chunk)).reshape(-1, sparse.chunk)
    encode, decode = codec(sparse, name)
    message = sparse.format.encode(values, sparse.gain)
    np.testing.assert_array_equal(encode(rows), message)
    found = np.asarray(decode(message)).reshape(-1)[: values.size]
    assert same_bits(found, sparse.format.decode([message], values.size))


CODECS = ("jax", pytest.param("native", marks=needs_library))


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("sparse", MORE, ids=str)
@settings(max_examples=15)
@given(
    seed=st.integers(0, 2**32 - 1),
    kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=6),
    ragged=st.integers(0, 255),
)
@example(seed=0, kinds=list(KINDS[:5]), ragged=100)
@example(seed=1, kinds=list(KINDS[5:]), ragged=0)
def test_the_bits_are_those_of_the_specification(name, sparse, seed, kinds, ragged):
    blocks = 2 if sparse.chunk > 4096 else 6
    compare(sparse, name, values_of(seed, blocks * sparse.chunk - ragged, sparse.chunk, kinds))


@needs_library
@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    power=st.integers(8, 13),
    share=st.floats(0, 1),
    bits=st.integers(1, 4),
    gain=st.floats(0.5, 2),
    kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=3),
)
def test_all_settings_have_the_bits_of_the_specification(seed, power, share, bits, gain, kinds):
    chunk = 2**power
    keep = 1 + round(share * (chunk // 2 - 1))
    sparse = Sparse(keep=keep, chunk=chunk, bits=bits, gain=gain)
    compare(sparse, "native", values_of(seed, 3 * chunk - 17, chunk, kinds))


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("decay", (0.9, 0.95, 1.0))
def test_a_residual_has_the_same_bits_after_many_rounds(name, decay):
    """Differences would add up."""
    sparse = Sparse(keep=16, chunk=256, bits=2)
    encode, decode = codec(sparse, name)
    ours = theirs = np.zeros(1024, np.float32)
    for number in range(30):
        change = values_of(number, 1024, 256, ["usual"])
        ours, theirs = (change + np.float32(decay) * residual for residual in (ours, theirs))
        ours = ours - np.asarray(decode(encode(ours.reshape(-1, 256)))).reshape(-1)
        message = sparse.format.encode(theirs, sparse.gain)
        theirs = theirs - sparse.format.decode([message], theirs.size)
    np.testing.assert_array_equal(ours, theirs)
    assert np.abs(ours).max() > 0


@needs_library
def test_many_blocks_on_all_threads_have_the_bits_of_the_specification():
    sparse = Sparse(keep=9, chunk=256, bits=3)
    compare(sparse, "native", values_of(3, 256 * 3000, 256, list(KINDS)))


@needs_library
@pytest.mark.parametrize("seed", range(30))
def test_any_bytes_decode_inside_of_their_blocks(seed):
    """Also without the check that readers make before."""
    rng = np.random.default_rng(seed)
    sparse = Sparse(keep=5 + seed, chunk=256, bits=2)
    message = rng.integers(0, 256, 8 * sum(sparse.format.widths), np.uint8)
    found = np.asarray(codec(sparse, "native")[1](message))
    assert found.shape == (8, 256)
    assert (np.count_nonzero(found, axis=1) <= sparse.keep).all()


@needs_library
def test_other_shapes_and_numbers_are_refused():
    sparse = Sparse()
    message, rows = np.zeros(3 * 128, np.uint8), np.zeros((3, 4096), np.float32)
    numbers, factor = {"keep": np.int64(124), "bits": np.int64(1)}, np.float32(1)
    operands, results = {"values": rows}, {"message": message}
    assert message.size == 3 * sum(sparse.format.widths)
    assert_shapes_are_checked("sparse_decode", results, operands, numbers, is_free={("values", 2)})
    for wrong, words in (
        ({"keep": 0}, "keep=0"),
        ({"keep": 2049}, "keep=2049, not 1 to 2048"),
        ({"bits": 5}, "bits=5"),
    ):
        with pytest.raises(jax.errors.JaxRuntimeError, match=words):
            called("sparse_decode", results, operands, numbers | wrong)
    run = jax.ffi.ffi_call(_native.target("sparse_encode"), jax.ShapeDtypeStruct((9,), jnp.uint8))
    words = r"message has the shape \[9\], not \[384\]"
    with pytest.raises(jax.errors.JaxRuntimeError, match=words):
        jax.block_until_ready(run(rows, **numbers, factor=factor))


def lowered(platform: str) -> str:
    """A program of both directions for a platform."""

    def there_and_back(values):
        return _sparse.decoded(_sparse.encoded(values, Sparse().format, 1.25), Sparse().format)

    traced = jax.jit(there_and_back).trace(jnp.zeros(8192))
    return traced.lower(lowering_platforms=(platform,)).as_text()


@needs_library
def test_cpus_run_two_calls_and_nothing_else_that_computes():
    text = lowered("cpu")
    assert text.count("dynamiq_native_sparse") == 2
    assert "top_k" not in text and "sort" not in text


@pytest.mark.parametrize("platform", ("cuda", "tpu"))
def test_other_platforms_have_all_operations_in_the_program(platform):
    text = lowered(platform)
    assert "dynamiq_native" not in text and "callback" not in text
    assert text.count("top_k") >= 1


def test_cpus_without_the_library_run_the_same_operations(monkeypatch):
    monkeypatch.setenv("DYNAMIQ_NATIVE", "0")
    assert "dynamiq_native" not in lowered("cpu")
