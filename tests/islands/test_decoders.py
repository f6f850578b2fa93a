"""The decoder of JAX and that of NumPy: the same bits of every format, and those of a gather."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import dynamiq_jax as dq
from dynamiq_jax import islands
from dynamiq_jax._core import Axis
from dynamiq_jax.islands import messages
from dynamiq_jax.islands.messages.formats import level_positions
from dynamiq_jax.methods import Call, resolve_method
from dynamiq_jax.topologies import Ring
from pallas_kernels.codec import levels
from tests.support.gradients import heavy_tailed, vnmse
from tests.support.message_bytes import random_body, same_bits

KEY = jax.random.key(0)
METHODS = ("dynamiq:4", "paper:3.5", "bf16", "exact", "blockint:4", "mxfp8", "mxfp6", "mxfp4")
METHODS += ("mxint8", "mxfp8:element=e5m2", "mxfp6:element=e3m2")
ALL = dq.Compression(exact_below=0)


def values_of(seed: int, size: int, dtype: str = "float32") -> np.ndarray:
    """Values over 40 orders of magnitude, with zeros, and some that are not finite."""
    random = np.random.default_rng(seed)
    rows = -(-size // 64)
    scales = 10.0 ** random.uniform(-30, 8, (rows, 1))
    flat = (random.standard_normal((rows, 64)) * scales).reshape(-1)[:size]
    flat[random.random(size) < 0.05] = 0
    if seed % 3 == 0:
        flat[random.integers(size)] = random.choice([np.nan, np.inf, -np.inf])
    with np.errstate(over="ignore"):  # of float16
        return flat.astype(np.float32).astype(jnp.dtype(dtype))


def agree(*encoded: messages.Message, weights=None) -> None:
    of_jax = islands.decode(*encoded, weights=weights)
    of_numpy = messages.decode(*encoded, weights=weights)
    assert of_jax.keys() == of_numpy.keys()
    for name, values in of_jax.items():
        assert same_bits(values, of_numpy[name]), name


def agree_on(tree, method, seed: int) -> messages.Message:
    """Compare decoders of what is encoded, and of any bytes in its place."""
    message = islands.encode(tree, key=KEY, method=dataclasses.replace(ALL, method=method))
    agree(message)
    agree(random_body(message, seed))
    return message


@pytest.mark.sampled(2)
@pytest.mark.parametrize("method", METHODS)
def test_the_decoders_agree_on_what_is_encoded_and_on_any_bytes(method):
    message = agree_on({"w": values_of(3, 2000), "tail": values_of(1, 700)}, method, 0)
    assert {leaf.bucket for leaf in message.leaves} == {0}


@pytest.mark.slow
@given(
    method=st.sampled_from(METHODS),
    sizes=st.lists(st.integers(1, 9000), min_size=1, max_size=3),
    dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
    seed=st.integers(0, 999),
)
def test_the_decoders_agree_on_all_shapes_and_dtypes(method, sizes, dtype, seed):
    tree = [values_of(seed + number, size, dtype) for number, size in enumerate(sizes)]
    agree_on(tree, method, seed)


@pytest.mark.slow
@given(
    bits=st.floats(2.375, 15.0),
    group_size=st.sampled_from([8, 16, 32]),
    exponent=st.floats(0.1, 2.0),
    spacing=st.sampled_from([("quadratic", 1), ("quadratic", 2.9), ("geometric", 6.0)]),
    seed=st.integers(0, 999),
)
def test_the_decoders_agree_on_all_settings_of_dynamiq(bits, group_size, exponent, spacing, seed):
    method = dq.DynamiQ(
        bits=bits,
        widths=(0, *range(2, 17)),
        group_size=group_size,
        exponent=exponent,
        spacing=spacing[0],
        gap_ratio=spacing[1],
    )
    agree_on([values_of(seed, 5000)], method, seed)


def test_the_decoders_agree_on_small_parts_of_complex_numbers():
    """JAX flushes subnormal results of both parts, also where the other one is large."""
    half = np.array([1 + 1e-40j, 1e-39 - 2j, 0.5 - 1e-40j], np.complex64)
    first, second = (islands.encode({"w": leaf}, key=KEY) for leaf in (half, half.conj()))
    agree(first, second)
    agree(first, first)


def test_the_decoders_agree_on_messages_larger_than_a_block_of_rows():
    """Which NumPy decodes one after the other."""
    tree = [heavy_tailed(0, (4200, 256))]
    for method in ("dynamiq:4", "blockint:4"):
        agree(islands.encode(tree, key=KEY, method=method))


def test_the_levels_of_both_decoders_are_the_same_and_near_those_of_the_encoder():
    for spacing, ratio in (("quadratic", 2.7), ("geometric", 2.7), ("quadratic", 1)):
        for width in range(17):
            of_jax = levels.position_table(width, spacing, ratio)
            of_numpy = level_positions(width, spacing, ratio)
            np.testing.assert_array_equal(of_jax, of_numpy)
            codes = np.arange(len(of_jax), dtype=np.float32)
            known = levels.make_levels(width, spacing, ratio).position(jnp.asarray(codes))
            np.testing.assert_allclose(of_jax, known, rtol=2.0**-21)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "method", ("dynamiq:4:rounding=nearest", "bf16", "blockint:4:block=64", "mxfp6")
)
def test_the_body_is_what_a_worker_gathers(method):
    """With another worker beside it, in the middle of an all-gather."""
    size, chosen = 1024, resolve_method(method)
    parts = heavy_tailed(5, (2, size))

    def sent(part):
        axis = Axis("data", 2)
        call = Call(size=2 * size, axis=axis, topology=Ring(), collective="all_gather")
        codec = chosen.bind(part, call, KEY)
        norms = getattr(codec, "row_norms", None)
        return norms, codec.compress(axis.index, 0)

    norms, payloads = jax.jit(jax.vmap(sent, axis_name="data"))(parts)
    for worker in range(2):
        message = islands.encode([parts[worker]], key=KEY, method=method)
        own = [] if norms is None else [norms[worker].reshape(2, -1)[worker]]
        sent = [*own, payloads[worker]]
        assert message.body == b"".join(np.asarray(array).tobytes() for array in sent)


@pytest.mark.parametrize(
    "method", (pytest.param("dynamiq:4:rounding=nearest", marks=pytest.mark.slow), "bf16", "mxfp4")
)
def test_decoding_is_an_all_gather(method, data_mesh):
    """The levels of DynamiQ are rounded once in a message, and as a compiler likes elsewhere."""
    tree = {"w": heavy_tailed(1, (2, 600, 3)), "b": heavy_tailed(2, (2, 5))}
    gather = functools.partial(dq.all_gather, axis_name="data", key=KEY, method=method)
    gathered = jax.jit(jax.vmap(gather, axis_name="data"))(tree)
    for worker in range(2):
        own = jax.tree.map(lambda leaf, w=worker: leaf[w], tree)
        decoded = islands.decode(islands.encode(own, key=KEY, method=method), like=own)
        of_worker = jax.tree.map(lambda leaf, w=worker: leaf[0, w], gathered)
        for name in tree:
            rtol = 2.0**-20 if method.startswith("dynamiq") and name == "w" else 0
            np.testing.assert_allclose(decoded[name], of_worker[name], rtol=rtol, atol=0)


def test_a_message_rounds_without_bias_and_on_request_to_nearest():
    """Over many keys, the mean of unbiased messages comes nearer; that of others stays."""
    tree, count = [heavy_tailed(4, (2048,))], 24

    def error(method):
        keys = map(jax.random.key, range(count))
        encoded = [islands.encode(tree, key=key, method=method) for key in keys]
        mean = islands.decode(*encoded, weights=[1 / count] * count)
        return vnmse(mean["0"], tree[0]), vnmse(islands.decode(encoded[0])["0"], tree[0])

    of_mean, of_one = error("dynamiq:3:rounding=nearest")
    assert of_mean == pytest.approx(of_one, rel=1e-3)
    of_mean, of_one_unbiased = error("dynamiq:3")
    assert of_one < of_one_unbiased < 4 * of_one
    assert of_one_unbiased / count / 2 < of_mean < of_one_unbiased / count * 2
