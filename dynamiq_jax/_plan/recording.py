"""Record of the plans of all collectives that are traced, for `inspect`."""

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax

from dynamiq_jax._buckets import exact
from dynamiq_jax._plan.plan import Plan


class TracedCollective(NamedTuple):
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


class Records(list[TracedCollective]):
    """Collectives that were traced, and the sums of steps that `compress` made of others."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Any] = []  # reports


_records: contextvars.ContextVar[Records | None] = contextvars.ContextVar("records", default=None)


@contextlib.contextmanager
def recording() -> Iterator[Records]:
    """Collect records of the collectives that are traced in this context."""
    records = Records()
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
    new = TracedCollective(plan, tuple(jax.sharding.get_abstract_mesh().shape.items()))
    if new not in records:
        records.append(new)


def record_step(report: Callable[[], Any]) -> None:
    """Add the report of a step whose sums are compressed, unless an equal one is there."""
    records = _records.get()
    if records is not None and (new := report()) not in records.steps:
        records.steps.append(new)
