"""Codecs of chunks: both families, on chunks of a few numbers."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dynamiq_jax._core import LocalChunks, SumCodec, as_chunks, take_chunk
from dynamiq_jax.methods import ChunkCodec, RecodedChunks, SummedChunks

METHODS_OF_A_CODEC = ("compress", "hop", "accumulate", "decompress", "rounded")
VALUES = np.arange(
    1.0, 12.0, dtype=np.float32
)  # 11 coordinates in 3 chunks of 4, one of them padded


def recoded(first: int = 0, chunks: slice = slice(None)) -> RecodedChunks:
    """A codec whose payload holds values that are doubled, the chunk and the turn."""
    return RecodedChunks(
        local=LocalChunks(as_chunks(jnp.asarray(VALUES), 3)[chunks], VALUES.size, first),
        encode=lambda values, chunk, turn: (2 * values, jnp.asarray(chunk), jnp.asarray(turn)),
        # Decoding notices a payload of another chunk.
        decode=lambda payload, chunk: jnp.where(payload[1] == chunk, payload[0] / 2, jnp.nan),
    )


def summed(first: int = 0, chunks: slice = slice(None)) -> SummedChunks:
    """A codec of whole numbers in halves: uint8, packed by turning them around."""
    encoded = as_chunks(jnp.asarray(VALUES), 3).astype(jnp.uint8)[chunks]

    def decode(sums, chunk):
        steps = jnp.array([0.5, 1.0, 2.0], jnp.float32)  # of each chunk
        of_sums = steps if chunk is None else steps[chunk][None]
        return (sums.astype(jnp.float32) * of_sums[:, None]).reshape(-1)

    return SummedChunks(
        encoded=encoded,
        decode=decode,
        size=VALUES.size,
        first=first,
        pack=lambda numbers: numbers[::-1],
        unpack=lambda payloads: payloads[:, ::-1],
    )


STEPS = np.repeat(np.float32([0.5, 1, 2]), 4)


@pytest.mark.parametrize("missing", METHODS_OF_A_CODEC)
def test_a_codec_without_one_of_its_methods_cannot_be_made(missing):
    def method(self, *arguments): ...

    complete = dict.fromkeys(METHODS_OF_A_CODEC, method)
    assert isinstance(type("Complete", (ChunkCodec,), complete)(), SumCodec)
    del complete[missing]
    with pytest.raises(TypeError, match=rf"abstract.*'?{missing}'?"):
        type("Incomplete", (ChunkCodec,), complete)()


def test_the_codec_of_sums_is_the_codec_itself_unless_it_says_so():
    codec = recoded()
    assert codec.of_sums(1000) is codec


def test_a_vector_is_cut_into_equal_chunks_padded_with_zeros():
    chunks = np.asarray(as_chunks(jnp.arange(1, 8), 2))
    np.testing.assert_array_equal(chunks, [[1, 2, 3, 4], [5, 6, 7, 0]])
    assert as_chunks(jnp.arange(1, 8), 2, multiple_of=3).shape == (2, 6)
    assert as_chunks(jnp.arange(6), 2, multiple_of=3).shape == (2, 3)
    np.testing.assert_array_equal(take_chunk(jnp.asarray(chunks), jnp.int32(1)), chunks[1])


def test_local_chunks_are_those_from_the_first_on():
    local = LocalChunks(jnp.arange(8, dtype=jnp.bfloat16).reshape(2, 4), 20, first=3)
    chunk = local.at(jnp.int32(4))
    assert chunk.dtype == jnp.float32
    np.testing.assert_array_equal(chunk, [4, 5, 6, 7])


@pytest.mark.parametrize("first", (0, 2))
def test_a_recoded_chunk_holds_the_local_values_and_what_arrived(first):
    codec = recoded(first, slice(first, None))
    chunk = jnp.int32(2)
    mine = np.float32([9, 10, 11, 0])
    values, of_chunk, turn = codec.compress(chunk, 5)
    np.testing.assert_array_equal(values, 2 * mine)
    assert (of_chunk, turn) == (2, 5)
    received = (jnp.stack([2 * jnp.ones(4), jnp.arange(4.0)]), jnp.array([2, 2]), jnp.array([0, 1]))
    arrived = np.ones(4) + np.arange(4) / 2
    np.testing.assert_array_equal(codec.accumulate(received, chunk), mine + arrived)
    values, of_chunk, turn = codec.hop(received, chunk, 7)
    np.testing.assert_array_equal(values, 2 * (mine + arrived))
    assert (of_chunk, turn) == (2, 7)


def test_recoded_payloads_of_all_chunks_decode_to_the_bucket():
    codec = recoded()
    payloads = jax.lax.map(lambda chunk: codec.compress(chunk, 0), jnp.arange(3))
    np.testing.assert_array_equal(codec.decompress(payloads), VALUES)


def test_a_rounded_codec_carries_what_it_decoded():
    codec = dataclasses.replace(
        recoded(),
        encode=lambda values, chunk, turn: (2 * jnp.floor(values / 4) * 4 + 2 * turn, chunk),
    )
    values, rounded = codec.rounded(3)
    expected = np.floor(np.pad(VALUES, (0, 1)) / 4) * 4 + 3
    np.testing.assert_array_equal(values, expected[:11])
    np.testing.assert_array_equal(rounded.local.values.reshape(-1), expected)
    assert rounded.local.size == VALUES.size


@pytest.mark.parametrize("first", (0, 2))
def test_summed_chunks_add_what_is_encoded(first):
    codec = summed(first, slice(first, None))
    chunk = jnp.int32(2)
    np.testing.assert_array_equal(codec.compress(chunk, 0), [0, 11, 10, 9])
    received = jnp.array([[1, 2, 3, 4], [5, 5, 5, 5]], jnp.uint8)
    payload = codec.hop(received, chunk, 1)
    assert payload.dtype == jnp.uint8
    np.testing.assert_array_equal(payload, [6, 18, 18, 18])
    np.testing.assert_array_equal(codec.accumulate(received, chunk), [36, 36, 36, 12])


def test_summed_chunks_are_those_from_the_first_on():
    codec = summed(1, slice(1, None))
    np.testing.assert_array_equal(codec.compress(jnp.int32(1), 0), [8, 7, 6, 5])


def test_summed_payloads_of_all_chunks_decode_to_the_bucket():
    codec = summed()
    payloads = jax.lax.map(lambda chunk: codec.compress(chunk, 0), jnp.arange(3))
    expected = VALUES * STEPS[:11]
    np.testing.assert_array_equal(codec.decompress(payloads), expected)
    values, same = codec.rounded(4)  # sums lose nothing more than what each worker has encoded
    np.testing.assert_array_equal(values, expected)
    assert same is codec
