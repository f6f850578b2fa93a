"""A message: named leaves in a header, and their bytes."""

import dataclasses
import functools
import hashlib
import itertools
import json
import math
import struct
import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dynamiq_jax.islands.messages.formats import (
    BlockIntFormat,
    DynamiQFormat,
    Format,
    MXFormat,
    Section,
    WordFormat,
)
from dynamiq_jax.islands.messages.sparse import SparseFormat

FORMATS: dict[str, type[Any]] = {  # by the names of their methods
    "dynamiq": DynamiQFormat,
    "exact": WordFormat,
    "bf16": WordFormat,
    "blockint": BlockIntFormat,
    **dict.fromkeys(("mxfp8", "mxfp6", "mxfp4", "mxint8"), MXFormat),
    "sparse": SparseFormat,
}
MESSAGE_FORMAT = 1  # version of the bytes: another one for any change of their meaning

MAGIC = b"DQMS"
_PREFIX = struct.Struct("<4sI32sI")  # magic, version, SHA-256 of what follows it, header bytes
_HASHED_FROM = struct.calcsize("<4sI32s")
_MOST_HEADER = 1 << 21  # bytes of JSON, enough for 20,000 leaves: a header inflates to no more
_MOST_SIZE, _MOST_RANK = 1 << 48, 32  # of a dimension, and of an array in NumPy and JAX

_FLOATING = ("float16", "bfloat16", "float32", "float64")
_WHOLE = tuple(f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64))
DTYPES = (*_FLOATING, *_WHOLE, "bool", "complex64", "complex128")


class Leaf(NamedTuple):
    """A leaf of a message."""

    name: str  # path in its tree, such as "layers/0/kernel"
    shape: tuple[int, ...]
    dtype: str
    bucket: int | None  # number of the bucket that holds it; None of a leaf that is sent as it is

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


class _Columns(NamedTuple):
    """A header as JSON: equal entries are neighbors, which compress well."""

    names: list[str]
    shapes: list[list[int]]
    dtypes: list[str]
    buckets: list[int | None]
    formats: list[dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Message:
    """A tree of arrays as bytes: what a worker sends in an all-gather, with a header.

    `islands.encode` makes one. `from_bytes` checks bytes from elsewhere: the version, a checksum,
    every field of the header, and that the body has exactly the bytes that follow from it. So
    nothing that decodes a message allocates more than a small multiple of its length. Nothing is
    unpickled.

    >>> import jax, jax.numpy as jnp
    >>> from dynamiq_jax import islands
    >>> message = islands.encode({"w": jnp.ones((512, 64))}, key=jax.random.key(0), method="bf16")
    >>> message.leaves
    (Leaf(name='w', shape=(512, 64), dtype='float32', bucket=0),)
    >>> Message.from_bytes(message.to_bytes()) == message
    True
    """

    leaves: tuple[Leaf, ...]
    formats: tuple[Format, ...]  # of each bucket
    # Buckets in order, then leaves that are sent as they are; see docs/wire_format.md.
    body: bytes = dataclasses.field(repr=False)

    @property
    def nbytes(self) -> int:
        """Bytes of the message, header included."""
        return len(self._head) + len(self.body)

    def to_bytes(self) -> bytes:
        """Return the bytes of the message."""
        return self._head + self.body

    @staticmethod
    def from_bytes(data: bytes | bytearray | memoryview) -> "Message":
        """Check and read a message.

        Args:
          data: what `to_bytes` returned, perhaps in another process or on another machine.

        Raises:
          ValueError: bytes that are no message, a part of one, altered, or of a newer version.
          TypeError: no bytes.
        """
        if not isinstance(data, bytes | bytearray | memoryview):
            raise TypeError(f"data is a {type(data).__name__}. Give the bytes of a message.")
        data = bytes(data)
        header, body = _checked(data)
        message = Message(*_parse_header(header), body)
        wanted = sum(part.num_bytes for part in message.parts())
        if len(message.body) != wanted:
            raise ValueError(
                f"the message has a body of {len(message.body)} bytes, but its header is of "
                f"{wanted}. It is damaged: send it again."
            )
        return message

    def parts(self) -> "Iterator[Part]":
        """Return the parts of the body, in order."""
        groups: list[list[Leaf]] = [[] for _ in self.formats]
        for leaf in self.leaves:
            if leaf.bucket is None:
                groups.append([leaf])
            else:
                groups[leaf.bucket].append(leaf)
        start = 0
        for leaves, form in itertools.zip_longest(groups, self.formats):
            part = Part(tuple(leaves), form, start)
            yield part
            start += part.num_bytes

    def arrays(self, part: "Part") -> list[NDArray[Any]]:
        """Return the arrays of a part of the body, as views of its bytes."""
        found, start = [], part.start
        for section in part.sections:
            found.append(np.frombuffer(self.body, section.dtype, section.size, start))
            start += section.num_bytes
        return found

    @functools.cached_property
    def _head(self) -> bytes:
        """Prefix and header."""
        columns = _Columns(
            names=[leaf.name for leaf in self.leaves],
            shapes=[list(leaf.shape) for leaf in self.leaves],
            dtypes=[leaf.dtype for leaf in self.leaves],
            buckets=[leaf.bucket for leaf in self.leaves],
            formats=[vars(form) for form in self.formats],
        )
        text = json.dumps(columns._asdict(), separators=(",", ":"))
        if len(text) > _MOST_HEADER:
            raise ValueError(
                f"the header of {len(self.leaves)} leaves has {len(text)} bytes, and that of a "
                f"message has at most {_MOST_HEADER}. Encode parts of the tree."
            )
        header = zlib.compress(text.encode(), 9)
        length = struct.pack("<I", len(header))
        digest = hashlib.sha256(length + header)
        digest.update(self.body)
        return _PREFIX.pack(MAGIC, MESSAGE_FORMAT, digest.digest(), len(header)) + header


class Part(NamedTuple):
    """A bucket in the body of a message, or a leaf that is sent as it is."""

    leaves: tuple[Leaf, ...]
    format: Format | None  # None of a leaf that is sent as it is
    start: int  # byte of the body

    @property
    def size(self) -> int:
        """Coordinates."""
        return sum(leaf.size for leaf in self.leaves)

    @property
    def sections(self) -> tuple[Section, ...]:
        """Arrays, in order."""
        if self.format is None:
            return (Section(dtype_of(self.leaves[0].dtype), self.size),)
        return self.format.sections(self.size)

    @property
    def num_bytes(self) -> int:
        """Bytes of all arrays."""
        return sum(section.num_bytes for section in self.sections)


def dtype_of(name: str) -> np.dtype[Any]:
    """Return a dtype by its name."""
    if name == "bfloat16":  # not one of NumPy's own
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


def _checked(data: bytes) -> tuple[bytes, bytes]:
    """Return the header of a message, as JSON, and its body.

    Raises:
      ValueError: no message, a part of one, an altered one, or one of a newer version.
    """
    if data[: len(MAGIC)] != MAGIC[: len(data)] or not data:
        raise ValueError(
            f"the data begins with {data[:8]!r}, not with {MAGIC!r}: it is no message. Give the "
            "bytes of islands.messages.Message.to_bytes."
        )
    if len(data) < _PREFIX.size:
        raise ValueError(f"the message ends after {len(data)} bytes. It is cut: send it again.")
    _, version, digest, length = _PREFIX.unpack_from(data)
    if version != MESSAGE_FORMAT:
        raise ValueError(
            f"the message is of version {version}, and this dynamiq-jax reads {MESSAGE_FORMAT}. "
            "Install the same version on both sides."
        )
    if hashlib.sha256(memoryview(data)[_HASHED_FROM:]).digest() != digest:
        raise ValueError(
            f"the checksum of the message of {len(data)} bytes is wrong. It is cut or altered: "
            "send it again."
        )
    start, inflating = _PREFIX.size + length, zlib.decompressobj()
    try:
        text = inflating.decompress(data[_PREFIX.size : start], _MOST_HEADER)
    except zlib.error as error:
        raise ValueError(f"the header of the message is damaged: {error}.") from None
    if not inflating.eof or inflating.unused_data:
        raise ValueError(
            f"the header of the message is damaged: {length} bytes of it are no whole header of at "
            f"most {_MOST_HEADER} bytes."
        )
    return text, data[start:]


def _parse_header(text: bytes) -> tuple[tuple[Leaf, ...], tuple[Format, ...]]:
    """Return leaves and formats of a header.

    Raises:
      ValueError: a header that is not possible.
    """
    try:
        columns = _Columns(**json.loads(text))
        rows = zip(*columns[:-1], strict=True)
        leaves = tuple(
            Leaf(name, tuple(shape), dtype, bucket) for name, shape, dtype, bucket in rows
        )
        formats = tuple(map(_format_of, columns.formats))
    except (KeyError, RecursionError, TypeError, UnicodeDecodeError, ValueError) as error:
        shown = f"{error}"[:200].rstrip(". ")
        raise ValueError(f"the header of the message is not possible: {shown}.") from None
    for leaf in leaves:
        if not _is_possible(leaf, len(formats)):
            raise ValueError(f"the message has a leaf that is not possible: {leaf!r:.200}.")
    if len({leaf.name for leaf in leaves}) < len(leaves):
        raise ValueError("the message has two leaves of one name.")
    filled = {leaf.bucket for leaf in leaves if leaf.size}
    if not filled >= {*range(len(formats))}:
        raise ValueError("the message has a bucket without values.")
    return leaves, formats


def _format_of(fields: dict[str, Any]) -> Format:
    lists_as_tuples = {
        name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()
    }
    return FORMATS[fields["method"]](**lists_as_tuples)


def _is_possible(leaf: Leaf, num_buckets: int) -> bool:
    in_bucket = type(leaf.bucket) is int and 0 <= leaf.bucket < num_buckets
    return (
        isinstance(leaf.name, str)
        and len(leaf.shape) <= _MOST_RANK
        and all(type(size) is int and 0 <= size <= _MOST_SIZE for size in leaf.shape)
        # NumPy refuses also an empty array whose other dimensions are too many.
        and math.prod(size or 1 for size in leaf.shape) <= _MOST_SIZE
        and leaf.dtype in DTYPES
        and (leaf.bucket is None or (in_bucket and leaf.dtype in _FLOATING))
    )
