"""Vectors that are cut into many pieces, and pieces that are joined to vectors."""

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

import jax.numpy as jnp
from jax import Array

from pallas_kernels.copies import Segment, Table, copy, slices

# Segments of which each is an operation of its own, which XLA may fuse with others.
_FEW = 8
# Coordinates of a piece for which a fused operation is no faster.
_SHORT = 2**13
# Coordinates of results of one operation. Its sources and its results are in memory together.
_TOGETHER = 2**20


def cut(rows: Array, sizes: Iterable[int]) -> list[Array]:
    """Cut an array [rows, columns] into pieces of `sizes` columns, from the first column on."""
    return copied([rows], _pieces(rows.shape[1], tuple(sizes)))


def join(pieces: Sequence[Array], columns: int | None = None) -> Array:
    """Join arrays [rows, columns] along their columns, padded with zeros to `columns`."""
    sizes = tuple(piece.shape[1] for piece in pieces)
    [joined] = copied(pieces, _pieces(columns or sum(sizes), sizes).reversed)
    return joined


def _pieces(columns: int, sizes: tuple[int, ...]) -> Table:
    """Return the copies of an array to pieces of `sizes` columns, one behind the other."""
    segments = [
        Segment(0, end - size, number, 0, size)
        for number, (end, size) in enumerate(zip(itertools.accumulate(sizes), sizes, strict=True))
    ]
    return Table(tuple(segments), (columns,), sizes)


def as_vector(rows: Sequence[Array], multiple: int) -> Array:
    """Join arrays [rows, columns] to one vector, with each row padded to a multiple.

    Methods take float32, to which float64 is cast.
    """
    columns = sum(each.shape[1] for each in rows)
    joined = join(rows, columns + -columns % multiple)
    return joined.astype(jnp.float32 if joined.dtype == jnp.float64 else joined.dtype).reshape(-1)


def copied(sources: Sequence[Array], table: Table) -> list[Array]:
    """Copy segments of arrays [rows, columns] of one dtype to others.

    Operations are few, or such that XLA fuses them with others.
    """
    sizes = [len(segments) for segments in table.by_result]
    pieces = [number for number, size in enumerate(sizes) if size <= 1]
    are_short = sum(table.results[number] for number in pieces) <= _SHORT * len(pieces)
    apart = [] if are_short else [*pieces]
    joined = [number for number, size in enumerate(sizes) if size > 1]
    results: dict[int, Array] = {}

    def run(function: Callable[..., list[Array]], numbers: Sequence[int]) -> None:
        used, part = table.only(numbers)
        made = function([sources[source] for source in used], part)
        results.update(zip(numbers, made, strict=True))

    for batch in (*_batches(table, joined), *_batches(table, pieces if are_short else [])):
        if sum(sizes[number] for number in batch) > _FEW:
            run(copy, batch)
        else:
            apart += batch
    if apart:
        are_few = sum(sizes[number] for number in apart) <= _FEW
        run(slices if are_few else functools.partial(copy, fusible=True), apart)
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
