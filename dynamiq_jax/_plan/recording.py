"""Record of the plans of all collectives that are traced, for `inspect`."""

import contextlib
import contextvars
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import jax
from jax.ad_checkpoint import checkpoint_name

from dynamiq_jax._buckets import exact
from dynamiq_jax._plan.plan import Plan

_MARK = "dynamiq_jax"


class TracedCollective(NamedTuple):
    """Collective that was traced, as one device sees it."""

    plan: Plan
    mesh: tuple[tuple[str, int], ...]  # names and sizes of all axes; empty inside jax.vmap

    @property
    def axes(self) -> tuple[str, ...]:
        """Names of the axes, slowest first."""
        return self.plan.collective.axes.names

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


def record(plan: Plan) -> int | None:
    """Add a record of a plan, unless an equal one is there: JAX traces some functions twice.

    Returns:
      The number of the record; None if nobody collects records.
    """
    records = _records.get()
    if records is None:
        return None
    new = TracedCollective(plan, tuple(jax.sharding.get_abstract_mesh().shape.items()))
    if new not in records:
        records.append(new)
    return records.index(new)


Part = Literal["terms", "sum"]


def mark(number: int | None, part: Part, leaves: Sequence[Any]) -> list[Any]:
    """Name the leaves of a recorded collective, or their sums, in the traced program.

    The number is that of the record; None for one that nobody collects.
    """
    if number is None:
        return list(leaves)
    return [
        checkpoint_name(leaf, f"{_MARK}.{part}.{number}.{index}")
        if leaf.dtype != jax.dtypes.float0
        else leaf
        for index, leaf in enumerate(leaves)
    ]


def marked(name: str) -> tuple[Part, int, int] | None:
    """Parse a name that `mark` made: part, number of the record, index of the leaf."""
    match = re.fullmatch(rf"{_MARK}\.(terms|sum)\.(\d+)\.(\d+)", name)
    return match and ("terms" if match[1] == "terms" else "sum", int(match[2]), int(match[3]))


def record_step(report: Callable[[], Any]) -> None:
    """Add the report of a step whose sums are compressed, unless an equal one is there."""
    records = _records.get()
    if records is not None and (new := report()) not in records.steps:
        records.steps.append(new)
