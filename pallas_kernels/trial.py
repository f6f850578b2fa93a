"""Inputs on which backends are compared: hard rows, places of chosen widths, and messages.

Everything is NumPy, and the same on every machine: no compiler takes part in making it.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from numpy.typing import NDArray

from pallas_kernels.backend import Backend, Operation
from pallas_kernels.codec import (
    MAX_WIDTH,
    SUPER_GROUP_SIZE,
    Allocation,
    Layout,
    LocalRows,
    Places,
    Quantizer,
)
from pallas_kernels.codec.rounding import mix

CHUNK = 1  # that is encoded: neither the first nor the last
_SEED: Any = np.array([0x12345678, 0x9ABCDEF0], np.uint32)
# Name of a call to the operation that it calls.
CALLS: Mapping[str, Operation] = {
    "statistics": Backend.statistics,
    "compress": Backend.hop,
    "hop": Backend.hop,
    "hop of several": Backend.hop,
    "decompress_accumulate": Backend.decompress_accumulate,
    "decompress": Backend.decompress,
    "order": Backend.sort,
    "widths": Backend.solve,
    "energies": Backend.energies,
    "scales of sums": Backend.scaled_sums,
    "decompress of sums": Backend.decompress_sums,
}
# With this one, no other rounding of single operations changes the message of `first_use`.
_STREAM = 4
_WORDS, _SPREAD = 5000, np.uint32(857_999)  # words that are sorted, and a step between two
_UNUSED = 3  # units of a message that no row needs: a backend has to clear them

Row = NDArray[np.float32]


class OperationCall(NamedTuple):
    """One call of an operation."""

    operation: Operation  # such as `Backend.hop`
    arrays: tuple[Any, ...]
    static: dict[str, Any]

    def by(self, backend: Backend) -> Any:
        """Run the call by a backend, with messages of bytes."""
        result = backend.run(self.operation, *self.arrays, **self.static)
        # The sums themselves are those of `decompress_accumulate`.
        return result[1] if self.operation is Backend.scaled_sums else result


@dataclasses.dataclass(frozen=True)
class Trial:
    """A bucket of three chunks, and the rows of another worker whose messages arrive."""

    layout: Layout
    widths: NDArray[np.int32]  # of all places of a chunk, the same in each
    local: LocalRows
    other: LocalRows

    def send(self, backend: Backend) -> Any:
        """Return the first messages of the other worker, of all chunks, by a backend."""
        nothing: Any = np.zeros((0, self.layout.payload_bytes), np.uint8)
        first: Any = np.int32(0)

        @jax.jit
        def send_chunks(other: LocalRows, chunks: Any) -> Any:
            def hop(chunk: Any) -> Any:
                return backend.hop(nothing, other, chunk, first, layout=self.layout)

            return jax.lax.map(hop, chunks)

        return send_chunks(self.other, np.arange(self.layout.num_chunks, dtype=np.int32))

    def calls(self, messages: Any) -> dict[str, OperationCall]:
        """Return a call of every operation, by name, on messages of all chunks.

        Those of other chunks are decoded as well as those of the chunk: its widths are theirs.
        """
        local, chunk, first, second = self.local, np.int32(CHUNK), np.int32(0), np.int32(1)
        chunks, rows = local.places.order.shape
        energies = np.arange(rows * chunks, dtype=np.int32)[::-1].reshape(chunks, rows) % 999
        table = np.tile(np.arange(rows, dtype=np.int32)[::-1], (chunks, 1))
        arrays = {
            "statistics": (local.rows,),
            "compress": (messages[:0], local, chunk, first),
            "hop": (messages[:1], local, chunk, second),
            "hop of several": (messages[:2], local, chunk, second),
            "decompress_accumulate": (messages[:2], local, chunk),
            "decompress": (messages, local.places),
            "order": (np.random.default_rng(0).permutation(_WORDS).astype(np.uint32) * _SPREAD,),
            "widths": (-np.sort(-energies, axis=1),),
            "energies": (messages,),
            "scales of sums": (messages[:1], local, chunk),
            "decompress of sums": (messages, local.places, table),
        }
        without_layout = "statistics", "order"
        return {
            name: OperationCall(
                operation, arrays[name], {} if name in without_layout else {"layout": self.layout}
            )
            for name, operation in CALLS.items()
        }


def _with(row: Row, at: int | slice, value: Any) -> Row:
    changed = row.copy()
    changed[at] = value
    return changed


HARD: Mapping[str, Callable[[Row], Row]] = {
    "zeros": np.zeros_like,
    "many zeros": lambda row: _with(row, slice(None, None, 3), 0),
    "tiny": lambda row: row * np.float32(1e-25),
    "NaN": lambda row: _with(row, 7, np.nan),
    "Inf": lambda row: _with(row, 100, np.inf),
    "subnormal": lambda row: (row.astype(np.float64) * 1e-40).astype(np.float32),
    "huge": lambda row: _with(row, 0, 2.0**127),
    "alike": lambda row: np.full_like(row, row[0]),
    "-Inf": lambda row: _with(row, 50, -np.inf),
    "outliers": lambda row: _with(row, slice(31, 33), (-0.0, 1e30)),
}


def make_trial(
    quantizer: Quantizer,
    widths: Sequence[int],
    *,
    dtype: Any = np.float32,
    hard: Sequence[str] = tuple(HARD),
    dense_width: int = MAX_WIDTH,
    apart: int = 1,
) -> Trial:
    """Make a trial.

    Args:
      widths: widths of the places of a chunk, in any order.
      dtype: of the local rows.
      hard: names of `HARD`; in each chunk, every third place is hard in one of these ways.
      dense_width: rows of wider codes have eight values, and zeros elsewhere.
      apart: places between the hard rows of both workers.
    """
    ordered = np.sort(np.asarray(widths, np.int32))[::-1]
    rows, chunks = len(ordered), 3
    layout = Layout(
        size=SUPER_GROUP_SIZE * chunks * rows - 100,
        num_chunks=chunks,
        code_bits=(int(ordered.sum()) + _UNUSED) / rows,
        allocation=Allocation(tuple(sorted({int(width) for width in ordered})), 1.0),
        quantizer=quantizer,
    )
    # Places of a chunk follow one another in steps that have no factor in common with the rows.
    step = next(number for number in (11, 13, 17, 19) if (chunks * rows) % number)
    count = chunks * rows
    order: Any = (np.arange(count, dtype=np.int32) * step % count).reshape(chunks, rows)
    of_planes = (ordered[:, None] > np.arange(MAX_WIDTH)).sum(axis=0)
    starts = np.concatenate([[0], np.cumsum(of_planes)]).astype(np.int32)
    repeated: Any = (np.ascontiguousarray(np.tile(each, (chunks, 1))) for each in (ordered, starts))
    places = Places(order, *repeated)
    sparse = order[:, ordered > dense_width].reshape(-1)

    def rows_of(worker: int) -> Any:
        made = _rows(chunks * rows, worker)
        made[sparse] *= np.arange(SUPER_GROUP_SIZE) % 32 == 5
        for number, place in enumerate(range(apart * worker, rows, 3)):
            for index in order[:, place]:
                made[index] = HARD[hard[number % len(hard)]](made[index])
        with np.errstate(over="ignore"):
            return made.astype(dtype)

    local, other = (LocalRows(rows_of(worker), places, _SEED) for worker in range(2))
    return Trial(layout, ordered, local, other)


def _rows(count: int, worker: int) -> NDArray[np.float32]:
    """Draw rows of different magnitudes, with small values more often than large ones."""

    def uniform(shape: tuple[int, ...], stream: int) -> NDArray[np.float64]:
        words = np.arange(np.prod(shape), dtype=np.uint32) + np.uint32((_STREAM + stream) << 24)
        return np.asarray(mix(words), np.float64).reshape(shape) / 2**32 - 0.5  # type: ignore[arg-type]

    drawn = uniform((count, SUPER_GROUP_SIZE), 1 + worker)
    values = drawn * drawn * drawn  # the same on every machine: a power may not be
    octaves = np.round(16 * uniform((count, 1), 0))  # the same of all workers
    return np.asarray(np.exp2(octaves) * values, np.float32)
