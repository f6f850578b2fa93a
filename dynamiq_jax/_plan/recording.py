"""Record of the plans of all collectives that are traced, for `inspect`."""

import contextlib
import contextvars
from collections.abc import Iterator
from typing import NamedTuple

import jax

from dynamiq_jax._buckets import exact
from dynamiq_jax._plan.plan import Plan


class Record(NamedTuple):
    """Collective that was traced, as one device sees it."""

    plan: Plan
    mesh: tuple[tuple[str, int], ...]  # names and sizes of all axes; empty inside jax.vmap

    @property
    def axes(self) -> tuple[str, ...]:
        """Names of the axes, slowest first."""
        return self.plan.collective.axes.names

    @property
    def num_workers(self) -> int:
        """Workers of the slow axis."""
        return self.plan.collective.axes.slow.size

    @property
    def names(self) -> tuple[str, ...]:
        """Paths of the leaves."""
        return self.plan.names

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of a device's shards of the leaves."""
        return tuple(part.shape for part in self.plan.parts)

    @property
    def exact_bytes(self) -> tuple[int, ...]:
        """Bytes that each worker sends for each exact leaf of the plan."""
        axes, parts = self.plan.collective.axes, self.plan.parts
        return tuple(exact.bytes_sent(axes, [parts[index]]) for index, _ in self.plan.exact)


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


def is_recording() -> bool:
    """Return whether somebody collects records."""
    return _records.get() is not None


def record(plan: Plan) -> None:
    """Add a record of a plan, unless an equal one is there: JAX traces some functions twice."""
    records = _records.get()
    if records is None:
        return
    new = Record(plan, tuple(jax.sharding.get_abstract_mesh().shape.items()))
    if new not in records:
        records.append(new)
