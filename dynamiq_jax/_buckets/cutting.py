"""Vectors that are cut into many pieces, and pieces that are joined to vectors."""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from jax import Array

from pallas_kernels.copies import copy
from pallas_kernels.segments import Segment, Table
from pallas_kernels.slices import slices

# Segments of which each is an operation of its own, which XLA may fuse with others.
_FEW = 8
# Coordinates of a piece for which a fused operation is no faster.
_SHORT = 2**13
# Coordinates of results of one operation. Its sources and its results are in memory together.
_TOGETHER = 2**20


def cut(rows: Array, sizes: Iterable[int]) -> list[Array]:
    """Cut an array [rows, columns] into pieces of some columns, from its first one on.

    Args:
      rows: the array.
      sizes: columns of the pieces. The array may have more than all of them.
    """
    sizes = tuple(sizes)
    ends = np.cumsum(sizes, dtype=np.int64).tolist()
    segments = [
        Segment(0, end - size, number, 0, size)
        for number, (end, size) in enumerate(zip(ends, sizes, strict=True))
    ]
    return copied([rows], Table(tuple(segments), (rows.shape[1],), sizes))


def join(pieces: Sequence[Array], columns: int | None = None) -> Array:
    """Join arrays [rows, columns] along their columns.

    Args:
      pieces: the arrays.
      columns: columns of the result, which ends with zeros; by default as many as in all pieces.
    """
    sizes = tuple(piece.shape[1] for piece in pieces)
    ends = np.cumsum(sizes, dtype=np.int64).tolist()
    segments = [
        Segment(number, 0, 0, end - size, size)
        for number, (end, size) in enumerate(zip(ends, sizes, strict=True))
    ]
    [joined] = copied(pieces, Table(tuple(segments), sizes, (columns or ends[-1],)))
    return joined


def copied(sources: Sequence[Array], table: Table) -> list[Array]:
    """Copy segments of arrays to others, in few operations or in ones that XLA fuses with others.

    A result that is a whole source is that source.

    Args:
      sources: arrays [rows, columns], all of the same rows and dtype.
      table: what is copied where.
    """
    by_result: list[list[Segment]] = [[] for _ in table.results]
    for segment in table.segments:
        by_result[segment.result].append(segment)
    joined = [number for number, segments in enumerate(by_result) if len(segments) > 1]
    pieces = [number for number, segments in enumerate(by_result) if len(segments) <= 1]
    are_short = sum(table.results[number] for number in pieces) <= _SHORT * len(pieces)
    results: dict[int, Array] = {}
    for numbers, fusible in ((joined, False), (pieces, not are_short)):
        for batch in [numbers] if fusible else _batches(table, numbers):
            segments = [segment for number in batch for segment in by_result[number]]
            used = sorted({segment.source for segment in segments}) or [0]
            of_source = {source: at for at, source in enumerate(used)}
            of_result = {number: at for at, number in enumerate(batch)}
            part = Table(
                tuple(
                    s._replace(source=of_source[s.source], result=of_result[s.result])
                    for s in segments
                ),
                tuple(table.sources[source] for source in used),
                tuple(table.results[number] for number in batch),
            )
            given = [sources[source] for source in used]
            few = len(segments) <= _FEW
            made = slices(given, part) if few else copy(given, part, fusible=fusible)
            results |= dict(zip(batch, made, strict=True))
    return [results[number] for number in range(len(table.results))]


def _batches(table: Table, numbers: Sequence[int]) -> Iterator[list[int]]:
    """Yield the numbers of the results of each operation."""
    batch: list[int] = []
    size = 0
    for number in numbers:
        if batch and size + table.results[number] > _TOGETHER:
            yield batch
            batch, size = [], 0
        batch.append(number)
        size += table.results[number]
    if batch:
        yield batch
