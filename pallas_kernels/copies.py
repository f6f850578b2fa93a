"""Copies of segments of some arrays to others, in one operation.

A tree of thousands of leaves is cut into vectors and joined again. As slices and concatenations,
these are several operations for each leaf, and XLA takes milliseconds to compile each of them. On
CPUs, all of them are one custom call of the native library, wherever a program may hold one.
"""

import collections
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from pallas_kernels import _native
from pallas_kernels._jax import compat
from pallas_kernels._jax.dependencies import never

_LARGEST = np.iinfo(np.uint32).max  # place that is an operand
_FEW = 2  # slices of an array that have kernels of their own


class Segment(NamedTuple):
    """Columns of a source that become columns of a result."""

    source: int
    start: int
    result: int
    at: int  # where they start in the result
    length: int


@dataclasses.dataclass(frozen=True)
class Table:
    """Static description of copies. Columns of a result without a source are zeros.

    No column of a source is copied twice, and none of a result is written twice. So the transpose
    of the copies is `reversed`.

    Raises:
      ValueError: a segment leaves its arrays, or overlaps another.
    """

    segments: tuple[Segment, ...] = dataclasses.field(repr=False)
    sources: tuple[int, ...]  # columns of each
    results: tuple[int, ...]

    def __post_init__(self) -> None:
        kept = [Segment(*segment) for segment in self.segments if segment[4]]
        kept.sort(key=lambda segment: (segment.result, segment.at))
        object.__setattr__(self, "segments", tuple(kept))
        _check([(one.source, one.start, one.length) for one in kept], self.sources, "source")
        _check([(one.result, one.at, one.length) for one in kept], self.results, "result")

    @functools.cached_property
    def by_result(self) -> list[list[Segment]]:
        """The segments of each result, in their order."""
        found: list[list[Segment]] = [[] for _ in self.results]
        for segment in self.segments:
            found[segment.result].append(segment)
        return found

    def only(self, results: Sequence[int]) -> tuple[list[int], "Table"]:
        """Return the sources that some results need, at least one, and the copies from these."""
        segments = [segment for number in results for segment in self.by_result[number]]
        used = sorted({segment.source for segment in segments}) or [0]
        of_source = {source: at for at, source in enumerate(used)}
        of_result = {result: at for at, result in enumerate(results)}
        moved = [
            s._replace(source=of_source[s.source], result=of_result[s.result]) for s in segments
        ]
        sources = tuple(self.sources[source] for source in used)
        return used, Table(tuple(moved), sources, tuple(self.results[n] for n in results))

    @property
    def reversed(self) -> "Table":
        """The copies back from the results to the sources."""
        turned = [Segment(s.result, s.at, s.source, s.start, s.length) for s in self.segments]
        return Table(tuple(turned), self.results, self.sources)


def _check(pieces: list[tuple[int, int, int]], columns: Sequence[int], side: str) -> None:
    """Check pieces of arrays of one side of a table: (array, start, length)."""
    last, written = -1, 0
    for number, start, length in sorted(pieces):
        if not 0 <= number < len(columns):
            raise ValueError(
                f"A segment is of {side} {number}. There are {len(columns)}: number them from 0."
            )
        if not (length > 0 and 0 <= start <= columns[number] - length):
            raise ValueError(
                f"A segment has columns {start} to {start + length} of {side} {number}, which has "
                f"{columns[number]} columns. Give a segment inside of them."
            )
        if number == last and start < written:
            raise ValueError(
                f"Segments overlap in {side} {number}, at column {start}. Each column may be in "
                "one of them."
            )
        last, written = number, start + length


def copy(sources: Sequence[Array], table: Table, *, fusible: bool = False) -> list[Array]:
    """Copy segments of some arrays to others.

    Args:
      sources: at least one array [rows, columns], all of the same rows and dtype.
      fusible: whether each piece is an operation that XLA may fuse with others, on CPUs too.

    Returns:
      One array [rows, columns] for each number of columns in `table.results`.
    """
    if not table.results:
        return []
    alike = compat.match_varying(list(sources), *sources)
    return _copy.bind(*alike, table=table, fusible=fusible)


def pad(values: Array, size: int) -> Array:
    """Pad a vector [at most size] with zeros at its end.

    XLA for CPUs computes each padded coordinate, which takes three times as long as a copy.
    """
    if values.size == size:
        return values
    table = Table((Segment(0, 0, 0, 0, values.size),), (values.size,), (size,))
    [padded] = copy([values.reshape(1, -1)], table)
    return padded.reshape(-1)


def slices(sources: Sequence[Array], table: Table, *, share_kernels: bool = False) -> list[Array]:
    """Compute `copy` by slices and concatenations, which XLA may fuse with what is around them.

    XLA for CPUs compiles each static slice to a kernel of its own, in some 30 ms. It compiles equal
    kernels once. With `share_kernels`, the places of many slices of one array are operands, and all
    of one length share a kernel.
    """
    uses = collections.Counter(segment.source for segment in table.segments)
    zeros = {  # that the compiler does not know
        number: never(sources[number]).astype(np.uint32)
        for number, count in uses.items()
        if share_kernels and count > _FEW and sources[number].size
    }

    def piece(number: int, start: int, length: int) -> Array:
        source = sources[number]
        if length == source.shape[1]:
            return source
        if number not in zeros or start >= _LARGEST:
            return lax.slice_in_dim(source, start, start + length, axis=1)
        # The compiler cannot tell which one of the two numbers the index picks. A constant of one
        # number would become a part of the kernel.
        place = jnp.asarray(np.array([start, start + 1], np.uint32))
        place = lax.squeeze(lax.dynamic_slice(place, (zeros[number],), (1,)), (0,))
        return lax.dynamic_slice(source, (np.uint32(0), place), (len(source), length))

    rows, dtype = len(sources[0]), sources[0].dtype
    results = []
    for columns, segments in zip(table.results, table.by_result, strict=True):
        parts, end = [], 0
        for number, start, _, at, length in segments:
            if at > end:
                parts.append(lax.full((rows, at - end), 0, dtype))
            parts.append(piece(number, start, length))
            end = at + length
        after = columns - end
        if len(parts) == 1 and after:
            parts = [lax.pad(parts[0], np.zeros((), dtype), ((0, 0, 0), (0, after, 0)))]
        elif after or not parts:
            parts.append(lax.full((rows, after), 0, dtype))
        results.append(parts[0] if len(parts) == 1 else lax.concatenate(parts, 1))
    return compat.match_varying(results, sources[0])


def _abstract(*sources: Any, table: Table, fusible: bool) -> list[Any]:
    if len(sources) != len(table.sources):
        raise ValueError(
            f"There are {len(sources)} sources, and the table is of {len(table.sources)}. Give as "
            "many."
        )
    first = sources[0]
    for number, (source, columns) in enumerate(zip(sources, table.sources, strict=True)):
        if (source.shape, source.dtype) != ((*first.shape[:1], columns), first.dtype):
            raise ValueError(
                f"Source {number} is {source.str_short()}. The table is of one [rows, {columns}], "
                f"with the rows and the dtype of source 0, which is {first.str_short()}."
            )
    return [first.update(shape=(first.shape[0], n), weak_type=False) for n in table.results]


def _transpose(cotangents: Sequence[Any], *sources: Any, table: Table, fusible: bool) -> list[Any]:
    given = [ad.instantiate_zeros(cotangent) for cotangent in cotangents]
    back = copy(given, table.reversed, fusible=fusible) if given else []
    return [c if ad.is_undefined_primal(s) else None for s, c in zip(sources, back, strict=True)]


def _batch(
    values: Sequence[Any], dimensions: Sequence[Any], *, table: Table, fusible: bool
) -> tuple[list[Array], list[int]]:
    size = next(v.shape[d] for v, d in zip(values, dimensions, strict=True) if d is not None)
    stacked = [
        jnp.broadcast_to(value, (size, *value.shape)) if d is None else jnp.moveaxis(value, d, 0)
        for value, d in zip(values, dimensions, strict=True)
    ]
    rows = stacked[0].shape[1]
    results = copy([s.reshape(size * rows, s.shape[2]) for s in stacked], table, fusible=fusible)
    return [r.reshape(size, rows, r.shape[1]) for r in results], [0] * len(results)


def _run(*sources: Array, **static: Any) -> list[Array]:
    with jax.disable_jit(False):  # a jitted function would come back to here without an end
        return _jitted(*sources, **static)


def _sliced(*sources: Array, table: Table, fusible: bool, share_kernels: bool) -> list[Array]:
    return slices(sources, table, share_kernels=share_kernels)


def _lower_for_cpus(context: Any, *values: Any, table: Table, fusible: bool) -> Sequence[Any]:
    has_bytes = jax.dtypes.itemsize_bits(context.avals_in[0].dtype) >= 8
    in_one = has_bytes and not fusible
    if in_one and compat.may_hold_custom_calls(context) and _native.why_not_here() is None:
        segments = np.array(table.segments, np.int64).reshape(-1)
        return jax.ffi.ffi_lowering(_native.target("copies"))(context, *values, table=segments)
    return _by_shared_kernels(context, *values, table=table, fusible=fusible)


_copy = Primitive("copy_pieces")
_copy.multiple_results = True
_jitted = jax.jit(_copy.bind, static_argnames=("table", "fusible"))
_copy.def_impl(_run)
_copy.def_abstract_eval(_abstract)
ad.deflinear2(_copy, _transpose)
batching.primitive_batchers[_copy] = _batch
_by_slices, _by_shared_kernels = (
    mlir.lower_fun(functools.partial(_sliced, share_kernels=shared), multiple_results=True)
    for shared in (False, True)
)
mlir.register_lowering(_copy, _by_slices)
mlir.register_lowering(_copy, _lower_for_cpus, platform="cpu")
