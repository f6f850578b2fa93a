"""Sparse messages: the largest coordinates of each block, and damage to their bytes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import dynamiq_jax as dq
from dynamiq_jax.islands import Sparse, decode, encode, messages
from dynamiq_jax.islands._sparse import decoded, encoded
from tests.support.gradients import heavy_tailed
from tests.support.message_bytes import same_bits

SETTINGS = (
    Sparse(),
    Sparse(keep=64, bits=2, gain=1.0),
    Sparse(keep=1, chunk=256, bits=4, gain=0.5),
    Sparse(keep=128, chunk=256, bits=3, gain=2.0),
    Sparse(keep=37, chunk=512, bits=2),
)
settings_of = pytest.mark.parametrize("sparse", SETTINGS, ids=str)


def both(values: np.ndarray, sparse: Sparse) -> np.ndarray:
    """Values as JAX and NumPy decode them, the same bits."""
    message = encode([values], sparse)
    (of_jax,) = decode(message).values()
    (of_numpy,) = messages.decode(messages.Message.from_bytes(message.to_bytes())).values()
    np.testing.assert_array_equal(of_jax, of_numpy)
    return of_numpy


@settings_of
def test_the_largest_of_each_block_are_sent_with_their_signs(sparse):
    values = heavy_tailed(0, (3 * sparse.chunk + 77,))
    found = both(values, sparse)
    rows = np.pad(values, (0, -values.size % sparse.chunk)).reshape(-1, sparse.chunk)
    kept = np.pad(found, (0, -found.size % sparse.chunk)).reshape(rows.shape) != 0
    for row, here in zip(rows, kept, strict=True):
        count = np.count_nonzero(here)
        assert count == min(sparse.keep, np.count_nonzero(row))
        assert np.abs(row[here]).min() >= np.abs(row[~here]).max()
    signs = np.sign(found[found != 0])
    np.testing.assert_array_equal(signs, np.sign(values[found != 0]))


@settings_of
def test_values_are_odd_multiples_of_the_scale_of_their_block(sparse):
    values = heavy_tailed(1, (2 * sparse.chunk,))
    found = both(values, sparse).reshape(2, -1)
    for row, own in zip(found, values.reshape(2, -1), strict=True):
        sizes = np.unique(np.abs(row[row != 0]))
        scale = np.abs(own[row != 0]).max() / 2**sparse.bits
        if sparse.bits == 1:
            scale = np.abs(own[row != 0]).mean()
        odd = sizes / (sparse.gain * scale)
        np.testing.assert_allclose(odd, np.round(odd), rtol=2**-8)
        assert {*np.round(odd).astype(int)} <= {*range(1, 2**sparse.bits, 2)}
        # Within a step of the values, before the gain.
        off = np.abs(row[row != 0] / sparse.gain - own[row != 0])
        assert sparse.bits == 1 or off.max() <= 1.1 * scale


def test_the_bytes_are_those_that_are_promised():
    assert Sparse().bits_a_coordinate == 0.25
    assert Sparse(keep=64, bits=2).bits_a_coordinate < 0.22  # 12 bits a place, as published
    for sparse in SETTINGS:
        message = encode({"w": np.ones((8, sparse.chunk), np.float32)}, sparse)
        assert 8 * len(message.body) == sparse.bits_a_coordinate * 8 * sparse.chunk


def test_small_leaves_are_sent_too_unless_a_choice_says_otherwise():
    tree = {"w": heavy_tailed(0, (64, 64)), "norm": heavy_tailed(1, (64,))}
    assert [leaf.bucket for leaf in encode(tree, Sparse()).leaves] == [0, 0]
    apart = encode(tree, dq.Compression(Sparse()))
    assert [leaf.bucket for leaf in apart.leaves] == [None, 0]
    np.testing.assert_array_equal(decode(apart)["norm"], tree["norm"])


@given(seed=st.integers(0, 2**32 - 1), keep=st.integers(1, 128), bits=st.integers(1, 4))
def test_any_places_come_back(seed, keep, bits):
    sparse = Sparse(keep=keep, chunk=256, bits=bits, gain=1.0)
    values = np.zeros((2, 256), np.float32)
    random = np.random.default_rng(seed)
    for row in values:
        row[random.choice(256, keep, replace=False)] = random.choice([-1, 1], keep)
    found = sparse.format.decode([sparse.format.encode(values.reshape(-1), 1.0)], values.size)
    top = (2**bits - 1) / 2**bits if bits > 1 else 1
    np.testing.assert_allclose(found.reshape(2, -1), top * values, rtol=2**-8)


@pytest.mark.parametrize("bad", (np.nan, np.inf, -np.inf))
def test_what_is_not_finite_surfaces_in_its_block(bad):
    values = heavy_tailed(3, (3 * 4096,))
    values[5000] = bad
    found = both(values, Sparse())
    lost = ~np.isfinite(found)
    assert lost[5000] and np.count_nonzero(lost) == 124
    assert not lost[:4096].any() and not lost[8192:].any()


def test_zeros_and_values_below_the_normal_numbers_are_zeros():
    assert not both(np.zeros(5000, np.float32), Sparse()).any()
    assert not both(np.full(5000, 1e-40, np.float32), Sparse()).any()


def test_a_residual_gets_all_that_was_left_out_in_the_end():
    """Error feedback around the codec: the mean of what is sent becomes what is wanted."""
    wanted = jnp.asarray(heavy_tailed(4, (4096,)))

    @jax.jit
    def step(residual):
        whole = wanted + residual
        sent = decoded(encoded(whole, Sparse().format, 1.25), Sparse().format)
        return whole - sent, sent

    residual, total = jnp.zeros(4096), jnp.zeros(4096)
    for _ in range(400):
        residual, sent = step(residual)
        total = total + sent
    assert dq.vnmse(total / 400, wanted) < 0.02


@pytest.mark.parametrize("change", (1, -1))
def test_a_block_with_other_places_is_refused_by_both_decoders(change):
    message = encode([heavy_tailed(5, (8192,))], Sparse())
    body = bytearray(message.body)
    place = 2 * 2 + 32  # in the high bits of the second block
    byte = next(b for b in range(place, place + 31) if body[b] not in (0, 255))
    bit = next(b for b in range(8) if (body[byte] >> b & 1) == (change < 0))
    body[byte] ^= 1 << bit
    damaged = dataclasses.replace(message, body=bytes(body))
    for reader in (decode, messages.decode):
        with pytest.raises(ValueError, match=rf"block 1 of a sparse message has {124 + change} pl"):
            reader(messages.Message.from_bytes(damaged.to_bytes()))


@pytest.mark.parametrize("bits", (0x0071, 0x8071, 0x8000, 0x7FC1, 0xFF80))
def test_scales_that_no_encoder_writes_are_the_same_values_for_both_decoders(bits):
    message = encode([heavy_tailed(5, (4096,))], Sparse())
    body = bits.to_bytes(2, "little") + message.body[2:]
    changed = messages.Message(message.leaves, message.formats, body)
    (of_jax,), (of_numpy,) = decode(changed).values(), messages.decode(changed).values()
    assert same_bits(of_jax, of_numpy)


@pytest.mark.sampled(40)
@pytest.mark.parametrize("seed", range(400))
def test_random_bytes_decode_to_the_same_bits_or_are_refused(seed):
    """What holds no number that a reader would use as a place outside of its block."""
    random = np.random.default_rng(seed)
    sparse = Sparse(keep=5, chunk=256, bits=2)
    message = encode([heavy_tailed(6, (512,))], sparse)
    body = random.integers(0, 256, len(message.body), dtype=np.uint8)
    if seed % 2:  # as many places as there have to be
        own = np.frombuffer(message.body, np.uint8)
        body[4:18] = own[4:18]
    changed = messages.Message(message.leaves, message.formats, body.tobytes())
    try:
        (of_numpy,) = messages.decode(changed).values()
    except ValueError as error:
        assert "places" in str(error)
        with pytest.raises(ValueError, match="places"):
            decode(changed)
        return
    (of_jax,) = decode(changed).values()
    np.testing.assert_array_equal(of_jax, of_numpy)


@pytest.mark.parametrize(
    "field", ({"keep": 0}, {"keep": 2049}, {"chunk": 4000}, {"bits": 5}, {"gain": 3.0}), ids=str
)
def test_impossible_fields(field):
    ((name, value),) = field.items()
    with pytest.raises(ValueError, match=f"{name}={value}"):
        Sparse(**field)


def test_no_collective_adds_up_sparse_messages():
    with pytest.raises(ValueError, match=r"is for messages.*islands\.encode"):
        jax.vmap(lambda x: dq.psum(x, "data", Sparse()), axis_name="data")(jnp.ones((2, 8192)))
