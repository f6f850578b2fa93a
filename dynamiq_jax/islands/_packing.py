"""Trees as an island sends them: one message, or one for each of its devices."""

import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from numpy.typing import NDArray

from dynamiq_jax._inputs.compression import Choice, Compression
from dynamiq_jax._inputs.policy import UNCOMPRESSED
from dynamiq_jax.islands import _processes
from dynamiq_jax.islands._decode import decode
from dynamiq_jax.islands._records import Sent, SentPart
from dynamiq_jax.islands._shards import Shard, devices_of, parts_of
from dynamiq_jax.islands.merging import leaves_of
from dynamiq_jax.islands.messages import Message
from dynamiq_jax.methods import Method


class Piece(NamedTuple):
    """Message of what an island sends, and where its leaves belong."""

    message: Message
    shards: Sequence[Shard]  # in the order of the leaves

    def decoded(self) -> Iterator[tuple[Shard, NDArray[Any]]]:
        """Return the values of all shards."""
        values = map(np.asarray, decode(self.message).values())
        return zip(self.shards, values, strict=True)

    @property
    def dtypes(self) -> dict[Shard, str]:
        """Dtypes of all shards."""
        leaves = self.message.leaves
        return {shard: leaf.dtype for shard, leaf in zip(self.shards, leaves, strict=True)}


class Packed(NamedTuple):
    """Tree that an island sends, as far as this process sends it."""

    sent: Sent
    contents: Mapping[int, bytes]  # of the parts of this process, by their numbers


def method_of_parts(method: Choice, tree: Any) -> Choice:
    """Return a method with which parts of leaves are sent as its policy says of whole ones."""
    compression = Compression.of(method)
    if compression.policy.everywhere is not None:
        return method
    methods = dict(zip(leaves_of(tree), compression.policy.methods(tree), strict=True))

    def of_part(path: str, _: Any) -> Method | str:
        whole = path if path in methods else Shard.named(path).path
        return methods[whole] or UNCOMPRESSED

    return dataclasses.replace(compression, method=of_part)


def pack(island: str, weight: float, tree: Any, encoded: Callable[[Any, int], Message]) -> Packed:
    """Encode what a process sends of a tree, by a function of a part and its number."""
    if len(devices_of(tree)) == 1:
        return Packed(Sent(weight, island, encoded(tree, 0)), {})
    parts, contents = parts_of(tree), dict[int, bytes]()
    for number, shards in parts.items():
        # All on one device, whose program is compiled once for shards of the same shapes.
        local = {
            shard.name: jax.device_put(array, jax.local_devices()[0])
            for shard, array in shards.items()
            if array is not None
        }
        if local:
            contents[number] = encoded(local, number).to_bytes()
    own = {number: hashlib.sha256(content).digest() for number, content in contents.items()}
    digests = _processes.together(own, 1 + max(parts))
    listed = [SentPart(number, digests[number].hex(), tuple(of)) for number, of in parts.items()]
    return Packed(Sent(weight, island, None, tuple(listed)), contents)
