"""Record of the plans of all collectives that are traced, for `inspect`."""

import contextlib
import contextvars
from collections.abc import Iterator
from typing import NamedTuple

from dynamiq_jax._buckets.plan import Plan


class Record(NamedTuple):
    """Collective that was traced, as one device sees it."""

    axes: tuple[str, ...]  # slowest first
    num_workers: int  # of the slow axis
    mesh: tuple[tuple[str, int], ...]  # names and sizes of all axes; empty inside jax.vmap
    names: tuple[str, ...]  # of leaves
    shapes: tuple[tuple[int, ...], ...]  # of a device's shards of leaves
    dtypes: tuple[str, ...]
    plan: Plan
    exact_bytes: tuple[int, ...]  # that each worker sends for each exact leaf of the plan


_records: contextvars.ContextVar[list[Record] | None] = contextvars.ContextVar(
    "records", default=None
)


@contextlib.contextmanager
def recording() -> Iterator[list[Record]]:
    """Collect records of the collectives that are traced in this context."""
    records: list[Record] = []
    token = _records.set(records)
    try:
        yield records
    finally:
        _records.reset(token)


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Collect no records in this context."""
    token = _records.set(None)
    try:
        yield
    finally:
        _records.reset(token)


def is_recording() -> bool:
    """Return whether somebody collects records."""
    return _records.get() is not None


def record(new: Record) -> None:
    """Add a record, unless an equal one is there: JAX traces some functions twice."""
    records = _records.get()
    if records is not None and new not in records:
        records.append(new)
