"""Processes of one island: what they have to do alike. All of them call each function."""

from collections.abc import Mapping

import jax
import numpy as np
from jax.experimental import multihost_utils


def leads() -> bool:
    """Return whether this process decides and tells for its island."""
    return jax.process_index() == 0


def of_leader(value: int) -> int:
    """Return the number that the leading process has, in all of them."""
    if jax.process_count() == 1:
        return value
    return int(multihost_utils.broadcast_one_to_all(np.int32(value)))


def all_agree(holds: bool) -> bool:
    """Return whether something holds in all processes."""
    if jax.process_count() == 1:
        return holds
    return bool(np.all(multihost_utils.process_allgather(np.bool(holds))))


def together(rows: Mapping[int, bytes], count: int) -> dict[int, bytes]:
    """Return rows of bytes of all processes, by their numbers.

    Args:
      rows: those of this process, of 32 bytes each.
      count: number of all rows; each is of one process.
    """
    if jax.process_count() == 1:
        return dict(rows)
    own = np.zeros((count, 32), np.int32)
    for number, row in rows.items():
        own[number] = np.frombuffer(row, np.uint8)
    found = np.sum(multihost_utils.process_allgather(own), axis=0).astype(np.uint8)
    return {number: row.tobytes() for number, row in enumerate(found)}
