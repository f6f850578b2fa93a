"""Segments that are copied by slices, as XLA has them."""

import collections
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from pallas_kernels._jax import compat
from pallas_kernels._jax.dependencies import never
from pallas_kernels.segments import Table

_LARGEST = np.iinfo(np.uint32).max  # place that is an operand
_FEW = 2  # slices of an array that have kernels of their own


def slices(sources: Sequence[Array], table: Table, *, share_kernels: bool = False) -> list[Array]:
    """Copy segments of some arrays to others by slices and concatenations.

    XLA may fuse them with what comes before and after. XLA for CPUs compiles each static slice to a
    kernel of its own, in some 30 ms. It compiles equal kernels once. With `share_kernels`, the
    places of many slices of one array are operands, and all of one length share a kernel.

    Args:
      sources: at least one array [rows, columns], all of the same rows and dtype.
      table: what is copied where.
      share_kernels: whether places are operands.

    Returns:
      One array [rows, columns] for each number of columns in `table.results`.
    """
    uses = collections.Counter(segment.source for segment in table.segments)
    of_operands = {
        number: _Places(sources[number])
        for number, count in uses.items()
        if share_kernels and count > _FEW and sources[number].size
    }
    rows, dtype = len(sources[0]), sources[0].dtype
    results = []
    for columns, segments in zip(table.results, table.by_result, strict=True):
        parts, end = [], 0
        for source, start, _, at, length in segments:
            if at > end:
                parts.append(lax.full((rows, at - end), 0, dtype))
            whole = length == table.sources[source]
            places = of_operands.get(source)
            if whole:
                parts.append(sources[source])
            elif places is None:
                parts.append(lax.slice_in_dim(sources[source], start, start + length, axis=1))
            else:
                parts.append(places.slice(start, length))
            end = at + length
        after = columns - end
        if len(parts) == 1 and after:
            parts = [lax.pad(parts[0], np.zeros((), dtype), ((0, 0, 0), (0, after, 0)))]
        elif after or not parts:
            parts.append(lax.full((rows, after), 0, dtype))
        results.append(parts[0] if len(parts) == 1 else lax.concatenate(parts, 1))
    return compat.match_varying(results, sources[0])


class _Places:
    """Slices of one array at places that the compiler does not know."""

    def __init__(self, source: Array):
        self._source, self._zero = source, never(source).astype(np.uint32)

    def slice(self, start: int, length: int) -> Array:
        if start >= _LARGEST:
            return lax.slice_in_dim(self._source, start, start + length, axis=1)
        # The compiler cannot tell which one of the two numbers the index picks. A constant of one
        # number would become a part of the kernel.
        place = jnp.asarray(np.array([start, start + 1], np.uint32))
        place = lax.squeeze(lax.dynamic_slice(place, (self._zero,), (1,)), (0,))
        sizes = (len(self._source), length)
        return lax.dynamic_slice(self._source, (np.uint32(0), place), sizes)
