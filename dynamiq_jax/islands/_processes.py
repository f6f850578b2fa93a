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
    return int(multihost_utils.broadcast_one_to_all(np.int32(value)))


def all_agree(holds: bool) -> bool:
    """Return whether something holds in all processes."""
    return bool(np.all(multihost_utils.process_allgather(np.bool(holds))))


def together(rows: Mapping[int, bytes], count: int) -> dict[int, bytes]:
    """Return rows of 32 bytes of all processes, by their numbers. Each row is of one process."""
    own = np.zeros((count, 32), np.int32)
    for number, row in rows.items():
        own[number] = np.frombuffer(row, np.uint8)
    found = np.sum(multihost_utils.process_allgather(own), axis=0).astype(np.uint8)
    return {number: row.tobytes() for number, row in enumerate(found)}
