"""Bytes that are no message, or no longer one: refused with a sentence, or decoded as they say."""

import functools
import subprocess
import sys
import time
import tracemalloc
import zlib
from pathlib import Path

import jax
import numpy as np
import pytest

from dynamiq_jax import islands
from dynamiq_jax.islands import messages
from tests.support.gradients import heavy_tailed
from tests.support.message_bytes import same_bits, signed, taken_apart, with_header

ROOT = Path(__file__).parents[2]
KEY = jax.random.key(0)
TREE = {"w": heavy_tailed(0, (40, 30)), "b": heavy_tailed(1, (900,)), "n": np.arange(5.0)}
METHODS = ({"w": "dynamiq:4", "b": "blockint:4", "n": "uncompressed"}, "bf16", "mxfp6")


@functools.cache
def message_of(number: int = 0) -> bytes:
    """A message, by the number of its method."""
    return islands.encode(TREE, key=KEY, method=METHODS[number]).to_bytes()


def refused(data: bytes, match: str) -> None:
    with pytest.raises(ValueError, match=match) as raised:
        messages.Message.from_bytes(data)
    assert "\n" not in str(raised.value) and str(raised.value).endswith(".")


def test_what_is_no_message_is_refused():
    data = message_of()
    header, body = taken_apart(data)
    refused(b"", "begins with b''")
    refused(b"PK\x03\x04" + data, "begins with b'PK")
    refused(data[:3], "ends after 3 bytes")
    refused(data[:-1], "checksum of the message .* is wrong")
    refused(data + b"\0", "checksum")
    refused(signed(header, body, version=2), "of version 2, and this dynamiq-jax reads 1")
    refused(signed(header, body[:-1]), "has a body of .* bytes, but its header is of")
    refused(signed(header, body + b"\0"), "has a body of")
    refused(signed(b"text", body), "the header of the message is damaged")
    refused(signed(header[:-1], body), "no whole header")
    refused(signed(zlib.compress(bytes(1 << 25)), body), "no whole header of at most 2097152")
    for wrong in (3, None, "x"):
        with pytest.raises(TypeError, match="Give the bytes of a message"):
            messages.Message.from_bytes(wrong)


def test_the_time_to_refuse_a_header_grows_with_its_buckets():
    """A small message of nothing but a header keeps nobody busy: their square is 400 times."""

    def seconds(count: int) -> float:
        leaves = (messages.Leaf(f"{number}", (1,), "float32", number) for number in range(count))
        (form,) = islands.encode([np.zeros(512, np.float32)], key=KEY, method="bf16").formats
        data = messages.Message(tuple(leaves), (form,) * count, b"").to_bytes()
        start = time.process_time()
        refused(data, "has a body of 0 bytes")
        return time.process_time() - start

    assert seconds(8000) < 80 * min(seconds(400) for _ in range(3))


@pytest.mark.parametrize(
    ("change", "match"),
    (
        (lambda h: h.pop("names"), "'names'"),
        (lambda h: h.update(more=1), "'more'"),
        (lambda h: [h], "not possible"),
        (lambda h: h["names"].pop(), "zip"),
        (lambda h: h["names"].__setitem__(0, h["names"][1]), "two leaves of one name"),
        (lambda h: h["shapes"].__setitem__(0, [-1]), "leaf that is not possible"),
        (lambda h: h["shapes"].__setitem__(0, [900.0]), "leaf that is not possible"),
        (lambda h: h["shapes"].__setitem__(0, [True]), "leaf that is not possible"),
        (lambda h: h["shapes"].__setitem__(0, [0, 1 << 40, 1 << 40]), "leaf that is not possible"),
        (lambda h: h["shapes"].__setitem__(0, [1 << 40]), "has a body of"),
        (lambda h: h["shapes"].__setitem__(0, [1] * 33), "leaf that is not possible"),
        (lambda h: h["dtypes"].__setitem__(0, "object"), "leaf that is not possible"),
        (lambda h: h["dtypes"].__setitem__(0, "int32"), "leaf that is not possible"),
        (lambda h: h["buckets"].__setitem__(0, 9), "leaf that is not possible"),
        (lambda h: h["buckets"].__setitem__(0, True), "leaf that is not possible"),
        (lambda h: h["formats"].append(h["formats"][0]), "bucket without values"),
        (lambda h: h["formats"][0].update(method="thc"), "'thc'"),
        (lambda h: h["formats"][0].update(method=[1]), "unhashable"),
        (lambda h: h["formats"][0].update(code_bits=9), "has code_bits=9, which blockint does not"),
        (lambda h: h["formats"][0].update(code_bits="4"), "has code_bits='4'"),
        (lambda h: h["formats"][0].update(block=31), "has block=31"),
        (lambda h: h["formats"][1].update(bits=1e300), r"has bits=1e\+300, which dynamiq does not"),
        (lambda h: h["formats"][1].update(bits=float("nan")), "has bits=nan"),
        (lambda h: h["formats"][1].update(bits=[4]), r"has bits=\(4,\)"),
        (lambda h: h["formats"][1].update(widths=[]), "has widths"),
        (lambda h: h["formats"][1].update(widths=[2, 2]), "has widths"),
        (lambda h: h["formats"][1].update(widths=[2, 99]), "has widths"),
        (lambda h: h["formats"][1].update(widths=[8]), "has bits=4"),
        (lambda h: h["formats"][1].update(widths=[2]), "has bits=4"),
        (lambda h: h["formats"][1].update(group_size=7), "has group_size"),
        (lambda h: h["formats"][1].update(exponent=0), "has exponent"),
        (lambda h: h["formats"][1].update(spacing="log"), "has spacing"),
        (lambda h: h["formats"][1].update(gap_ratio=9), "has gap_ratio"),
    ),
)
def test_a_header_that_is_not_possible_is_refused(change, match):
    def in_place(header):
        result = change(header)
        return result if isinstance(result, list) and result[:1] == [header] else None

    refused(with_header(message_of(), in_place), match)


def test_a_header_of_many_lists_is_refused_before_it_takes_much_memory():
    _, body = taken_apart(message_of())
    refused(signed(zlib.compress(b"[" * 100_000), body), "header of the message is not possible")
    many = b"[" + b"[]," * 690_000 + b"[]]"  # 2 kB that would be 40 MB of objects
    tracemalloc.start()
    try:
        refused(signed(zlib.compress(many), body), "header of the message is not possible")
        assert 1_000_000 < tracemalloc.get_traced_memory()[1] < 100_000_000
        refused(signed(zlib.compress(many * 2), body), "no whole header")
    finally:
        tracemalloc.stop()


def test_a_header_that_no_reader_takes_is_not_written():
    leaves = tuple(messages.Leaf(f"{number:0200}", (), "bool", None) for number in range(10_000))
    with pytest.raises(ValueError, match=r"header of 10000 leaves has .* at most 2097152"):
        messages.Message(leaves, (), bytes(10_000)).to_bytes()


def damaged(count: int):
    """Messages with flipped bits, cuts, and foreign bytes; most of them with a valid checksum."""
    entries = ("dtypes", "float16"), ("dtypes", "float64"), ("shapes", [1 << 47]), ("buckets", None)
    for column, value in entries:  # of a leaf in a bucket
        yield with_header(message_of(2), lambda h, c=column, v=value: h[c].__setitem__(0, v))
    header, body = taken_apart(message_of(2))
    yield from (signed(header, b""), message_of(2) + bytes(255), b'{"names": [1]}')
    yield signed(header, np.random.default_rng(1).bytes(len(body)))
    random = np.random.default_rng(0)
    for _ in range(count):
        data = bytearray(message_of(random.integers(len(METHODS))))
        header, body = (bytearray(part) for part in taken_apart(bytes(data)))
        kind = random.integers(5)
        if kind < 2:  # before the checksum is looked at
            target = data
        elif kind == 2:
            target = header
        elif kind == 3:
            target = body
        else:
            target = header = bytearray(zlib.decompress(header))
        for _ in range(random.integers(1, 4)):
            at = int(random.integers(len(target)))
            change = random.integers(4)
            if change == 0:
                target[at] ^= 1 << int(random.integers(8))
            elif change == 1:
                target[at] = random.integers(256)
            elif change == 2 and kind != 3:
                del target[at : at + int(random.integers(1, 9))]
            elif kind != 3:
                target[at:at] = random.bytes(int(random.integers(1, 9)))
        if kind < 2:
            yield bytes(data)
        else:
            yield signed(zlib.compress(header) if kind == 4 else bytes(header), bytes(body))


def is_refused(data: bytes) -> bool:
    """Read a message as a coordinator does; check what comes out if it is not refused."""
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    try:
        message = messages.Message.from_bytes(data)
    except ValueError as error:
        assert "\n" not in str(error) and len(str(error)) < 700
        return True
    decoded = messages.decode(message)
    for leaf in message.leaves:
        assert decoded[leaf.name].shape == leaf.shape
        assert str(decoded[leaf.name].dtype) == leaf.dtype
    # Values of 4 bytes from codes of 2.4 bits or more, some copies of them, and tables of levels.
    assert tracemalloc.get_traced_memory()[1] - before < 100 * len(data) + 3_000_000
    if not any("64" in leaf.dtype for leaf in message.leaves):  # JAX refuses these by name
        of_jax = islands.decode(message)
        assert of_jax.keys() == decoded.keys()
        assert all(same_bits(of_jax[name], decoded[name]) for name in decoded)
    return False


@pytest.mark.parametrize("count", (300, pytest.param(10_000, marks=pytest.mark.slow)))
def test_damaged_messages_are_refused_or_have_the_same_values_in_both_decoders(count):
    tracemalloc.start()
    try:
        outcomes = [is_refused(data) for data in damaged(count)]
    finally:
        tracemalloc.stop()
    # A body may hold any bits. Nearly all else is seen.
    assert 0.7 * count < sum(outcomes) < 0.95 * count


def test_messages_need_no_jax(tmp_path):
    """In a process where importing it is an error, as on a machine without it."""
    encoded = tmp_path / "message"
    encoded.write_bytes(message_of())
    program = f"""
import sys
sys.modules.update(dict.fromkeys(("jax", "jaxlib", "optax", "pallas_kernels")))
from dynamiq_jax.islands import messages
with open({str(encoded)!r}, "rb") as file:
    message = messages.Message.from_bytes(file.read())
tree = messages.decode(message, message, weights=(0.5, 0.5))
print(*(f"{{name}}:{{leaf.sum():.6e}}" for name, leaf in tree.items()))
print(sorted(name for name, module in sys.modules.items() if module and "jax" in name))
"""
    command = [sys.executable, "-c", program]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    sums, modules = ran.stdout.splitlines()
    decoded = islands.decode(messages.Message.from_bytes(message_of()))
    for name, of_numpy in (part.split(":") for part in sums.split()):
        assert float(of_numpy) == pytest.approx(float(decoded[name].sum()), rel=1e-3, abs=1e-6)
    assert all(name.startswith("dynamiq_jax") for name in eval(modules))
    assert "dynamiq_jax.islands.messages.decoding" in eval(modules)
