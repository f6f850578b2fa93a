"""Documents in rows of one length, several to a row, so that no compute goes into padding."""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from examples.llm.encoding import Encoded


class Rows(NamedTuple):
    """Rows of tokens, all `[rows, context]`.

    Attributes:
        tokens: int32: what the model reads.
        targets: int32: the token after each of them, in the same document.
        learned: bool: targets that count in the loss.
        segments: int32: which document of the row a token is of, from 1; 0 is padding. Tokens
            attend within their segment only.
        positions: int32: place within the segment, from 0.
    """

    tokens: np.ndarray
    targets: np.ndarray
    learned: np.ndarray
    segments: np.ndarray
    positions: np.ndarray

    @staticmethod
    def empty(count: int, context: int) -> Rows:
        """Rows of padding."""
        shape = (count, context)
        kinds = (np.int32, np.int32, np.bool_, np.int32, np.int32)
        return Rows(*(np.zeros(shape, kind) for kind in kinds))

    def evenly(self, count: int) -> Rows:
        """At most `count` of the rows, evenly spaced: they are sorted by the length of pieces."""
        rows = len(self.tokens)
        chosen = np.arange(min(count, rows)) * rows // min(count, rows)
        return Rows(*(field[chosen] for field in self))


def pack(documents: Iterable[Encoded], context: int) -> Rows:
    """Packs documents into rows.

    A document of more than `context` tokens is cut into pieces, each with positions of its own.
    Pieces are put where they fit most tightly, longest first. Every token to learn is the target
    of exactly one place, but for the first of a document, which nothing predicts; pieces without
    any are left out.

    Args:
        documents: The documents.
        context: Tokens per row.

    Returns:
        The rows; which piece is where depends on the arguments alone.

    Raises:
        ValueError: There is nothing to learn.
    """
    pieces = [piece for document in documents for piece in _cut(document, context)]
    pieces = [piece for piece in pieces if piece.learned[1:].any()]
    if not pieces:
        raise ValueError(
            "The data has nothing to learn: every document is shorter than two tokens, or a chat "
            "in which no assistant speaks. Give other --data."
        )
    pieces.sort(key=lambda piece: -len(piece.ids))
    placed = _place([len(piece.ids) - 1 for piece in pieces], context)
    rows = Rows.empty(1 + max(row for row, _ in placed), context)
    segment = np.zeros(len(rows.tokens), np.int32)
    for piece, (row, start) in zip(pieces, placed, strict=True):
        segment[row] += 1
        length = len(piece.ids) - 1
        here = row, slice(start, start + length)
        rows.tokens[here], rows.targets[here] = piece.ids[:-1], piece.ids[1:]
        rows.learned[here] = piece.learned[1:]
        rows.segments[here], rows.positions[here] = segment[row], np.arange(length)
    return rows


def _cut(document: Encoded, context: int) -> Iterable[Encoded]:
    """Pieces of at most `context + 1` tokens. The last token of one is the first of the next: a
    target here, and there what is read.
    """
    for start in range(0, len(document.ids) - 1, context):
        window = slice(start, start + context + 1)
        yield Encoded(document.ids[window], document.learned[window])


def _place(lengths: list[int], context: int) -> list[tuple[int, int]]:
    """A row and a place in it for pieces of decreasing length: the row with the least space that
    is enough (best fit decreasing).
    """
    spaces: list[tuple[int, int]] = []  # (tokens left, row), sorted
    placed, count = [], 0
    for length in lengths:
        found = bisect.bisect_left(spaces, (length, 0))
        if found < len(spaces):
            space, row = spaces.pop(found)
        else:
            space, row = context, count
            count += 1
        placed.append((row, context - space))
        bisect.insort(spaces, (space - length, row))
    return placed
