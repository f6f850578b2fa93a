"""Messages: their bytes, their headers, sums of them, and errors for what makes none."""

import dataclasses
import functools
import json
import zlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from dynamiq_jax import islands
from dynamiq_jax.islands import messages
from tests.support.gradients import heavy_tailed
from tests.support.hlo import collectives
from tests.support.message_bytes import PREFIX, same_bits, taken_apart
from tests.support.workers import STOCHASTIC

KEY = jax.random.key(0)
DECODERS = islands.decode, messages.decode
TREE = {
    "layers": [{"kernel": heavy_tailed(0, (64, 33)), "bias": heavy_tailed(1, (64,))}],
    "half": heavy_tailed(2, (40, 40)).astype(jnp.bfloat16),
    "wide": np.arange(3, dtype=np.int32),
    "mask": np.array([True, False]),
    "pair": (np.zeros((0, 5), np.float32), np.float32(2.5)),
    "none": None,
}
LAYER = (
    *("self_attention/query/kernel", "self_attention/key/kernel", "norm_1/scale"),
    *("self_attention/value/kernel", "self_attention/out/kernel", "norm_2/scale"),
    *("mlp/up/kernel", "mlp/gate/kernel", "mlp/down/kernel"),
)


def test_a_tree_comes_back():
    message = islands.encode(TREE, key=KEY, method="blockint:8")
    back = messages.Message.from_bytes(message.to_bytes())
    assert back == message and message.nbytes == len(message.to_bytes())
    tree = islands.decode(back, like=TREE)
    assert jax.tree.structure(tree) == jax.tree.structure(TREE)
    for decoded, leaf in zip(jax.tree.leaves(tree), jax.tree.leaves(TREE), strict=True):
        assert (decoded.shape, decoded.dtype) == (np.shape(leaf), jnp.asarray(leaf).dtype)
        if np.size(leaf) < 512:
            np.testing.assert_array_equal(decoded, leaf)
        else:
            assert 1e-7 < float(dq.vnmse([decoded], [leaf])) < 1e-3
    by_path = islands.decode(back)
    assert [*by_path] == [leaf.name for leaf in message.leaves]
    assert {"layers/0/kernel", "pair/1"} <= by_path.keys()


@pytest.mark.parametrize(
    "method", (pytest.param("dynamiq:4", marks=pytest.mark.slow), "exact", "mxfp4")
)
def test_the_body_has_the_bytes_of_a_compiled_all_gather(method, data_mesh):
    tree = {name: TREE[name] for name in ("layers", "wide", "mask", "pair")}
    gather = functools.partial(dq.all_gather, axis_name="data", key=KEY, method=method)
    mapped = jax.shard_map(
        lambda tree: gather(jax.tree.map(lambda leaf: leaf[0], tree)),
        mesh=data_mesh(2),
        in_specs=P("data"),
        out_specs=P("data"),
    )
    both = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), tree)
    hlo = jax.jit(mapped).lower(both).compile().as_text()
    sent = sum(collective.sent_bytes(2) for collective in collectives(hlo))
    assert len(islands.encode(tree, key=KEY, method=method).body) == sent > 1000


@given(
    shapes=st.lists(st.lists(st.integers(0, 40), max_size=3), min_size=1, max_size=4),
    below=st.sampled_from([0, 100, 1024]),
    bucket_bytes=st.sampled_from([2**19, 2**27]),  # each leaf fits: a message cuts none
)
def test_the_body_has_the_bytes_of_the_report(shapes, below, bucket_bytes):
    """An all-reduce of what two workers gather has a reduce-scatter too, which sends as much.

    Beside it, an all-gather pads buckets to rows of 256.
    """
    tree = [np.ones(shape, np.float32) for shape in shapes]
    both = [jax.ShapeDtypeStruct((2, *shape), jnp.float32) for shape in shapes]
    options = dq.Compression(exact_below=below, bucket_bytes=bucket_bytes, bucketing="in_order")
    message = islands.encode(tree, key=KEY, method=dataclasses.replace(options, method="mxfp8"))
    report = dq.wire_report(both, 2, method=dataclasses.replace(options, method="mxfp8"))
    of_rows = 264  # bytes, in MXFP8
    padding = len(message.body) - report.bytes_per_worker / 2
    assert 0 <= padding <= of_rows * len(message.formats)
    assert sum(leaf.bucket is None for leaf in message.leaves) == sum(
        leaf.method is None for leaf in report.leaves
    )


def test_headers_are_small():
    """At most 1 kB, and 16 bytes a leaf."""
    one = islands.encode([np.float32(1)], key=KEY)
    assert 0 < one.nbytes - len(one.body) < 1000
    for layers in (2, 30):
        shapes = [(8 + layer % 3, 8) for layer in range(layers)]
        tree = {
            f"decoder_layer_{layer}": {name: np.zeros(shape, np.float32) for name in LAYER}
            for layer, shape in enumerate(shapes)
        }
        message = islands.encode(tree, key=KEY, method="bf16")
        count = len(message.leaves)
        assert count == 9 * layers
        assert count < message.nbytes - len(message.body) < 1000 + 16 * count


def header_bytes(names, shapes):
    """Length of a header of many buckets, whose body does not matter."""
    (form,) = islands.encode([np.zeros((512, 64), np.float32)], key=KEY).formats
    buckets = [number // 20 for number in range(len(names))]
    leaves = map(messages.Leaf, names, shapes, ["float32"] * len(names), buckets)
    return messages.Message(tuple(leaves), (form,) * (buckets[-1] + 1), b"").nbytes


@pytest.mark.parametrize("count", (600, 3000))
def test_headers_of_unlike_leaves_are_small(count):
    """Nested paths of words, and unlike shapes; random characters come on top."""
    rng = np.random.default_rng(count)
    words = sorted({word for path in LAYER for word in path.split("/")})
    paths = ["/".join(rng.choice(words, 5)) + f"/{number}" for number in range(count)]
    shapes = [tuple(map(int, rng.integers(1, 5000, rng.integers(0, 4)))) for _ in range(count)]
    assert count < header_bytes(paths, shapes) < 1000 + 16 * count
    hashes = [rng.bytes(16).hex() for _ in range(count)]
    promised = 1000 + 16 * count
    assert promised < header_bytes(hashes, shapes) < promised + 32 * count


def test_the_header_is_json():
    message = islands.encode(TREE, key=KEY, method={"half": "bf16", "": "mxfp4"})
    header, body = taken_apart(message.to_bytes())
    fields = json.loads(zlib.decompress(header))
    assert body == message.body
    assert fields["names"] == [leaf.name for leaf in message.leaves]
    assert [form["method"] for form in fields["formats"]] == ["bf16", "mxfp4"]
    assert PREFIX.unpack_from(message.to_bytes())[:2] == (b"DQMS", 1)


def test_a_fragment_is_a_message_of_its_own():
    params = {"a": heavy_tailed(0, (64, 64)), "b": heavy_tailed(1, (64, 64))}
    local_sgd = dq.training.LocalSGD(axis_name="data", every=4, fragments=2)
    one, other = local_sgd.split(params)
    encoded = [islands.encode(part, key=KEY, method="exact") for part in (one, other)]
    assert all(message.nbytes < 64 * 64 * 4 + 1000 for message in encoded)
    merged = islands.decode(encoded[0]) | islands.decode(encoded[1])
    assert merged.keys() == {"a", "b"}
    for name, leaf in params.items():
        np.testing.assert_array_equal(merged[name], leaf)


def test_a_sum_of_messages_is_one_in_float32_in_their_order():
    trees = [{"w": heavy_tailed(seed, (700,)), "n": np.full(2, seed)} for seed in range(3)]
    methods = ("mxfp8", "exact", "blockint:8")
    encoded = [islands.encode(t, key=KEY, method=m) for t, m in zip(trees, methods, strict=True)]
    total = islands.decode(*encoded)
    parts = [np.asarray(islands.decode(message)["w"]) for message in encoded]
    np.testing.assert_array_equal(total["w"], (parts[0] + parts[1]) + parts[2])
    np.testing.assert_array_equal(total["n"], [3, 3])
    of_numpy = messages.decode(*encoded)
    assert all(same_bits(total[name], of_numpy[name]) for name in total)


@given(weights=st.lists(st.floats(-2, 2, width=32), min_size=2, max_size=2), seed=st.integers(0, 9))
def test_weighted_sums_of_both_decoders_are_the_same(weights, seed):
    """No product is fused with a sum."""
    dtypes = ("float32", "bfloat16", "float16")
    values = [heavy_tailed(seed + number, (300,)) for number in range(2)]
    trees = [{name: each.astype(name) for name in dtypes} for each in values]
    encoded = [islands.encode(tree, key=KEY, method="exact") for tree in trees]
    of_jax, of_numpy = (decode(*encoded, weights=weights) for decode in DECODERS)
    assert all(same_bits(of_jax[name], of_numpy[name]) for name in dtypes)
    exact = np.tensordot(np.float32(weights).astype(float), np.float64(values), 1)
    np.testing.assert_allclose(of_jax["float32"], exact, rtol=1e-5, atol=1e-9)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("method", ("blockint:4", "mxfp4", "mxfp8", "dynamiq:4", "bf16"))
def test_bodies_of_any_bytes_are_the_same_values_of_both_decoders(method):
    """Also with scales that no encoder writes, such as subnormal ones."""
    message = islands.encode({"w": np.ones(2048, np.float32)}, key=KEY, method=method)
    rng = np.random.default_rng(0)
    body = rng.integers(0, 256, len(message.body), np.uint8)
    for step in (1, 2):  # of every second byte alone, scales of 16 bits are small
        kept = np.where(np.arange(body.size) % step, 0, body).astype(np.uint8)
        hostile = dataclasses.replace(message, body=kept.tobytes())
        of_jax, of_numpy = (decode(hostile)["w"] for decode in DECODERS)
        is_number = ~np.isnan(of_numpy)  # of which there are many
        np.testing.assert_array_equal(np.isnan(of_jax), ~is_number)
        assert same_bits(np.asarray(of_jax)[is_number], of_numpy[is_number])


def test_errors_of_encode():
    def refused(error, match, tree=TREE, **kwargs):
        with pytest.raises(error, match=match):
            islands.encode(tree, **{"key": KEY, **kwargs})

    of_messages = r"StochasticBF16.* cannot be in a message. Give one of \['bf16'"
    refused(ValueError, of_messages, method=STOCHASTIC)
    refused(ValueError, r"ErrorFeedback.*\(feedback=True\)", method="ef+dynamiq:3")
    refused(ValueError, "bucketing='striped'", method=dq.Compression(bucketing="striped"))
    refused(ValueError, "specs=.* are of a collective", method=dq.Compression(specs=P("data")))
    refused(ValueError, "max_error=0.1 limits", method=dq.Compression(max_error=0.1))
    refused(ValueError, "cannot be in a message", [np.float32(1)], method=STOCHASTIC)
    refused(TypeError, "key=3 is not a PRNG key", key=3)
    refused(TypeError, "dtype float8_e4m3fn, which no message", [jnp.ones(3, jnp.float8_e4m3fn)])
    refused(TypeError, "str", ["text"])
    refused(TypeError, r"tree\['0'\] is a shape", [jax.ShapeDtypeStruct((3,), jnp.float32)])
    for large in (np.array([2**40]), np.uint64(2**33 + 5)):
        if not jax.config.jax_enable_x64:
            refused(ValueError, r"tree\['a'\] has dtype u?int64 and numbers that", {"a": large})
    refused(ValueError, "2 leaves of the path 'a/b'", {"a/b": 1.0, "a": {"b": 1.0}})
    with pytest.raises(TypeError, match="tree\\['0'\\] is traced"):
        jax.jit(lambda x: islands.encode([x], key=KEY))(1.0)


@pytest.mark.parametrize(
    "weights",
    (0.5, "ab", [0.5], [[0.5, 0.5]], [0.5, np.nan], [0.5, [1.0]], [0.5, 1e300], [0.5, "2"]),
)
def test_weights_that_are_no_numbers_are_refused(weights):
    message = islands.encode({"w": jnp.ones(4)}, key=KEY)
    for decode in DECODERS:
        with pytest.raises(ValueError, match=r"weights=.* are not 2 finite numbers"):
            decode(message, message, weights=weights)
        (halved,) = decode(message, message, weights=jnp.array([0.5, 0.25])).values()
        np.testing.assert_array_equal(halved, np.full(4, 0.75, np.float32))


def test_errors_of_decode():
    message = islands.encode({"w": np.ones(3, np.float32)}, key=KEY)
    other = islands.encode({"w": np.ones(4, np.float32)}, key=KEY)
    more = islands.encode({"w": np.ones(3, np.float32), "x": np.ones(3, np.int32)}, key=KEY)
    for decode in DECODERS:
        with pytest.raises(ValueError, match="no message to decode"):
            decode()
        with pytest.raises(TypeError, match=r"a message is a bytes\. Give what islands.encode"):
            decode(message.to_bytes())
        with pytest.raises(ValueError, match="have no sum"):
            decode(message, other)
        with pytest.raises(ValueError, match="of 1 and of 2 leaves"):
            decode(message, more)
        with pytest.raises(ValueError, match="leaf 'x' has dtype int32"):
            decode(more, weights=[1.0])
    with pytest.raises(ValueError, match=r"has the leaf \('w', \(3,\)\), where like has \('v', "):
        islands.decode(message, like={"v": np.ones(3)})


def test_a_double_needs_64_bits_in_jax_alone(request):
    if request.config.getoption("--x64"):
        pytest.skip("64 bits are enabled: nothing is refused")
    leaf = messages.Leaf("w", (2,), "float64", None)
    message = messages.Message((leaf,), (), np.array([1.0, 1e300]).tobytes())
    np.testing.assert_array_equal(messages.decode(message)["w"], [1.0, 1e300])
    with pytest.raises(ValueError, match=r"dtype float64\. Set"):
        islands.decode(message)


def test_leaves_that_are_sharded_are_encoded_as_wholes(data_mesh):
    tree = {"w": heavy_tailed(0, (64, 33))}
    sharding = jax.sharding.NamedSharding(data_mesh(8), P("data"))
    sharded = jax.device_put(tree, {"w": sharding})
    one, other = (islands.encode(each, key=KEY, method="mxfp8") for each in (tree, sharded))
    assert one == other


def test_numbers_of_numpy_are_those_of_python_in_a_header():
    method = dq.methods.BlockInt(code_bits=np.int64(4), block=np.int32(64))
    message = islands.encode(TREE, key=KEY, method=method)
    assert message == islands.encode(TREE, key=KEY, method="blockint:4:block=64")
    assert messages.Message.from_bytes(message.to_bytes()) == message
    islands.encode([np.float32(1)], key=KEY, method=dq.DynamiQ(bits=np.float32(4.5)))


@pytest.mark.parametrize("order", "<>")
@pytest.mark.parametrize("kind", ("f4", "f2", "i4", "u2"))
def test_arrays_of_any_byte_order_are_encoded(order, kind):
    values = np.arange(5, dtype=order + kind)
    (decoded,) = islands.decode(islands.encode([values], key=KEY)).values()
    np.testing.assert_array_equal(decoded, values)


RELEASED = np.load(Path(__file__).parent / "messages_0.2.0.npz")


@pytest.mark.parametrize("name", [name for name in RELEASED if "." not in name])
def test_messages_of_the_release_before_are_read(name):
    """Made and decoded by `dq.encode` and `dq.decode` of 0.2.0."""
    message = messages.Message.from_bytes(RELEASED[name].tobytes())
    for decode in DECODERS:
        for leaf, values in decode(message).items():
            assert same_bits(values, RELEASED[f"{name}.{leaf}"])
