"""Rules that assign the rows of a batch to workers, for rows that belong together.

A split is any function `(rows, workers)` to the numbers of the rows of every worker. It is called
while a step is traced, and has a hash.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dynamiq_jax._core import check_integer

Split = Callable[[int, int], np.ndarray]


@dataclasses.dataclass(frozen=True)
class BlockSplit:
    """Split of a batch of stacked blocks: each worker gets its rows of every block.

    For losses that compare row `i` of one block with row `i` of another block, such as DPO, whose
    batches stack the chosen rows before the rejected ones: `split="blocks:2"`.

    Attributes:
      count: number of blocks of equal size along the split axis.
    """

    count: int

    def __post_init__(self) -> None:
        check_integer("count", self.count, 1)

    def __call__(self, rows: int, workers: int) -> np.ndarray:
        """Return the numbers of the rows of every worker: int [workers, rows // workers].

        Raises:
          ValueError: a block does not split over the workers.
        """
        if rows % (self.count * workers):
            raise ValueError(
                f"{self.count} blocks of {rows} rows in all do not split over {workers} workers. "
                f"Give a multiple of {self.count * workers} rows"
            )
        parts = np.arange(rows).reshape(self.count, workers, -1)
        return parts.swapaxes(0, 1).reshape(workers, -1)


@dataclasses.dataclass(frozen=True)
class GroupSplit:
    """Split of a batch of groups of neighboring rows, which stay whole.

    For losses that compare the rows of a group, such as GRPO with eight answers to each prompt:
    `split="groups:8"`. The rows of a worker are neighbors, as without a split. A number of
    rows that would cut groups is an error.

    Attributes:
      size: rows of a group.
    """

    size: int

    def __post_init__(self) -> None:
        check_integer("size", self.size, 1)

    def __call__(self, rows: int, workers: int) -> np.ndarray:
        """Return the numbers of the rows of every worker: int [workers, rows // workers].

        Raises:
          ValueError: a group would be cut.
        """
        if rows % (self.size * workers):
            raise ValueError(
                f"groups of {self.size} rows, {rows} rows in all, do not split over {workers} "
                f"workers. Give a multiple of {self.size * workers} rows"
            )
        return np.arange(rows).reshape(workers, -1)


_RULES: Mapping[str, Callable[[int], Split]] = {"blocks": BlockSplit, "groups": GroupSplit}


def rule_of(value: Any) -> Split:
    """Return a rule as given, or the rule of a name such as "blocks:2".

    Raises:
      TypeError: neither a name nor a function.
      ValueError: no such rule, or a rule that cannot be hashed.
    """
    remedy = (
        'Give "blocks:2", "groups:8" with numbers of your own, a function of the numbers of rows '
        "and of workers to the rows of every worker, or a dict from names of arguments to such."
    )
    if isinstance(value, str):
        name, _, number = value.partition(":")
        if name not in _RULES or not number.isdecimal():
            raise ValueError(f"split holds {value!r:.80}, which is no rule. {remedy}")
        return _RULES[name](int(number))
    if not callable(value):
        raise TypeError(f"split holds {value!r:.80}. {remedy}")
    try:
        hash(value)
    except TypeError:
        raise ValueError(
            f"split holds {value!r:.80}, which cannot be hashed. Give a function, or a frozen "
            "dataclass."
        ) from None
    return value


def order_of(split: Split | None, rows: int, workers: int) -> np.ndarray:
    """Return the numbers of the rows of every worker: int [workers, rows // workers].

    Args:
      split: a rule; None for neighboring rows.
      rows: of the batch, a multiple of the workers.
      workers: number of workers.

    Raises:
      ValueError: the rule refuses these numbers, or does not give each row to one worker.
    """
    neighbors = np.arange(rows).reshape(workers, -1)
    if split is None:
        return neighbors
    with jax.ensure_compile_time_eval():  # also the rows of a function of jnp are known here
        order = np.asarray(split(rows, workers))
    is_whole = np.issubdtype(order.dtype, np.integer) and order.shape == neighbors.shape
    if not is_whole or (np.sort(order, axis=None) != np.arange(rows)).any():
        raise ValueError(
            f"split={split!r:.80} returns {order!r:.80} for {rows} rows and {workers} workers. "
            f"Return an integer array of shape {neighbors.shape} in which each row is once"
        )
    return order


def take(array: Any, rows: np.ndarray, axis: int = 0) -> Array:
    """Return rows of an array along an axis, in the given order."""
    if rows.size == array.shape[axis] and (rows.reshape(-1) == np.arange(rows.size)).all():
        return array
    return jnp.asarray(array)[(slice(None),) * axis + (rows.reshape(-1),)]
