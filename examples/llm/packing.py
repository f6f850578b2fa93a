"""Documents packed into rows of one length, so that little computation is spent on padding."""

import bisect
from collections.abc import Iterable
from typing import NamedTuple, Self

import numpy as np

from examples.llm.encoding import Encoded


class Rows(NamedTuple):
    """Rows of tokens, all `[rows, context]`."""

    tokens: np.ndarray  # int32: inputs of the model
    targets: np.ndarray  # int32: the token after each input, in the same document
    learned: np.ndarray  # bool: targets that count in the loss
    # int32: the document of each token within its row, from 1; 0 is padding. Tokens attend within
    # their segment only.
    segments: np.ndarray
    positions: np.ndarray  # int32: position within the segment, from 0

    @classmethod
    def empty(cls, count: int, context: int) -> Self:
        """Return rows of padding."""
        shape = (count, context)
        kinds = (np.int32, np.int32, np.bool_, np.int32, np.int32)
        return cls(*(np.zeros(shape, kind) for kind in kinds))

    def evenly(self, count: int) -> Self:
        """Return at most `count` rows, evenly spaced, since rows are sorted by length of pieces."""
        rows = len(self.tokens)
        chosen = np.arange(min(count, rows)) * rows // min(count, rows)
        return type(self)(*(field[chosen] for field in self))


def pack(documents: Iterable[Encoded], context: int) -> Rows:
    """Pack documents into rows.

    A document of more than `context` tokens is cut into pieces, each with positions of its own.
    Pieces go where they fit most tightly, the longest first. Every token to learn is the target of
    exactly one position, except the first of a document, which nothing predicts. Pieces with
    nothing to learn are left out.

    Args:
      documents: the documents.
      context: tokens per row.

    Returns:
      The rows, which depend on the arguments alone.

    Raises:
      ValueError: there is nothing to learn.
    """
    pieces = [piece for document in documents for piece in _cut(document, context)]
    pieces = [piece for piece in pieces if piece.learned[1:].any()]
    if not pieces:
        raise ValueError(
            "The data has nothing to learn: every document is shorter than two tokens, or a chat "
            "without an answer of the assistant. Give other --data."
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
    """Cut a document into pieces of at most `context + 1` tokens.

    The last token of a piece is the first of the next: a target here, an input there.
    """
    for start in range(0, len(document.ids) - 1, context):
        window = slice(start, start + context + 1)
        yield Encoded(document.ids[window], document.learned[window])


def _place(lengths: list[int], context: int) -> list[tuple[int, int]]:
    """Choose a row and a start in it for pieces of decreasing length.

    Each piece goes into the row with the least space that is enough (best fit decreasing).
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
