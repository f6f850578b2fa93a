"""Bytes of a message that parts of its values depend on."""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax


class ByteSpans(NamedTuple):
    """Bytes of a message that each group of its terms is decoded from.

    Groups have equally many consecutive terms. Bytes count through the arrays of a payload,
    in the order of the flattened tree. A span that stops where it starts holds no byte.
    """

    starts: Array  # int32 [groups, spans]
    stops: Array  # int32 [groups, spans]: the byte after the last one
    size: int  # at least the bytes of all groups, those they share counted for each of them

    def side_by_side(self) -> "ByteSpans":
        """Return the spans of a message that has the bytes of a group next to each other."""
        sizes = jnp.sum(self.stops - self.starts, axis=1, keepdims=True, dtype=jnp.int32)
        stops = jnp.cumsum(sizes, axis=0, dtype=jnp.int32)
        return ByteSpans(stops - sizes, stops, self.size)

    @staticmethod
    def of_sections(groups: int, sizes: Sequence[int]) -> "ByteSpans":
        """Return the spans of a message of sections, each of which holds group after group.

        Args:
          groups: number of groups.
          sizes: bytes of a group in each section, in the order of the sections.
        """
        before = jnp.asarray(groups * np.cumsum([0, *sizes])[:-1], jnp.int32)[None, :]
        of_group = jnp.asarray(sizes, jnp.int32)[None, :]
        index = lax.broadcasted_iota(jnp.int32, (groups, len(sizes)), 0)
        starts = before + index * of_group
        return ByteSpans(starts, starts + of_group, groups * sum(sizes))
