"""Tables of the segments that are copied from some arrays to others."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple


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
        """Return the sources of some results, or the first one, and the copies from these alone.

        Args:
          results: numbers of the results.
        """
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
