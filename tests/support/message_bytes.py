"""Bytes of messages for tests: altered, and signed again so that only deeper checks see it."""

import hashlib
import json
import struct
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np

from dynamiq_jax.islands.messages import Message

PREFIX = struct.Struct("<4sI32sI")


def signed(header: bytes, body: bytes, *, version: int = 1, magic: bytes = b"DQMS") -> bytes:
    """Return a message of a compressed header and a body, with a valid checksum."""
    rest = struct.pack("<I", len(header)) + header + body
    return magic + struct.pack("<I", version) + hashlib.sha256(rest).digest() + rest


def taken_apart(data: bytes) -> tuple[bytes, bytes]:
    """Return the compressed header and the body of a message."""
    length = PREFIX.unpack_from(data)[-1]
    return data[PREFIX.size : PREFIX.size + length], data[PREFIX.size + length :]


def with_header(data: bytes, change: Callable[[dict[str, Any]], Any]) -> bytes:
    """Return a message whose header was changed in place, or replaced by what `change` returns."""
    header, body = taken_apart(data)
    fields = json.loads(zlib.decompress(header))
    changed = change(fields)
    text = json.dumps(fields if changed is None else changed)
    return signed(zlib.compress(text.encode()), body)


def same_bits(one: Any, other: Any) -> bool:
    """Return whether arrays are equal bit for bit, but for the bits of NaN."""
    one, other = np.asarray(one), np.asarray(other)
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    if one.dtype.kind not in "fV":  # bfloat16 is a V
        return one.tobytes() == other.tobytes()
    with np.errstate(invalid="ignore"):  # NaN that signal
        lost = np.isnan(one.astype(np.float64))
        if not np.array_equal(lost, np.isnan(other.astype(np.float64))):
            return False
    zero = np.zeros((), one.dtype)
    return np.where(lost, zero, one).tobytes() == np.where(lost, zero, other).tobytes()


def random_body(message: Message, seed: int) -> Message:
    """Return a message with other bytes in its body, which no encoder need ever write."""
    body = np.random.default_rng(seed).bytes(len(message.body))
    return Message(message.leaves, message.formats, body)
