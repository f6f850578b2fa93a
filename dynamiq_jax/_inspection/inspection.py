"""Collectives and mistakes of a train step, as a table."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from dynamiq_jax._buckets import scopes
from dynamiq_jax._core.text import aligned, format_bytes
from dynamiq_jax._inspection.collectives import CompiledCollective
from dynamiq_jax._inspection.findings import Finding
from dynamiq_jax._rewriting.report import CompressReport
from pallas_kernels._jax.compat import override

_HEADINGS = ("what", "over", "link", "type", "messages", "sent", "by a host", "where")


class Row(NamedTuple):
    """Collectives of a program that have everything but their sizes in common."""

    what: str  # the method of compressed ones
    over: str  # axes
    link: str
    type: str  # of the values on the wire
    messages: int  # that each device sends in a step; 0 if they travel with those of another row
    bytes: float  # the same
    bytes_of_host: float | None  # that a host sends to others, at most; None if not known
    where: str  # line of the source
    in_branch: bool  # whether they may not run at all

    @property
    def is_compressed(self) -> bool:
        """True for messages of compressed leaves."""
        return self.what.startswith("compressed")


@dataclasses.dataclass(frozen=True)
class Inspection:
    """Collectives of a train step, and mistakes that were found in it.

    As text, it is a table of the collectives, and a paragraph for each mistake.
    """

    rows: tuple[Row, ...]  # the largest first
    findings: tuple[Finding, ...]
    is_compiled: bool = True  # False if a mistake is an error of the step itself
    steps: tuple[CompressReport, ...] = ()  # sums of steps that `dq.compress` made

    @property
    def bytes_compressed(self) -> float:
        """Bytes that each device sends for compressed leaves, in every step."""
        return sum(row.bytes for row in self._rows_of_every_step if row.is_compressed)

    @property
    def bytes_exact(self) -> float:
        """All other bytes that each device sends in every step."""
        return sum(row.bytes for row in self._rows_of_every_step if not row.is_compressed)

    @property
    def bytes_in_branches(self) -> float:
        """Bytes of all branches, such as the phases of a schedule, of which a step runs some."""
        return sum(row.bytes for row in self.rows if row.in_branch)

    @property
    def bytes_of_host(self) -> float | None:
        """Bytes that a host sends to others in every step: of each row, the host that sends most.

        None where hosts are not known.
        """
        known = [row.bytes_of_host for row in self._rows_of_every_step]
        return None if None in known else sum(filter(None, known))

    @property
    def _rows_of_every_step(self) -> list[Row]:
        return [row for row in self.rows if not row.in_branch]

    @override
    def __str__(self) -> str:
        table = aligned([_HEADINGS, *map(_texts, self.rows)]) if self.rows else []
        lines = [*table, *[""][: len(table)], self.summary]
        lines += [f"{finding.kind}: {finding.text}" for finding in self.findings]
        lines += [f"\n{step}" for step in self.steps]
        return "\n".join(lines)

    @property
    def summary(self) -> str:
        """Sentence about the bytes and the number of mistakes."""
        if not self.is_compiled:
            sent = "The step raises an error."
        elif not self.rows:
            sent = "This program has no collectives."
        else:
            sent = (
                f"In a step, each device sends {format_bytes(self.bytes_compressed)} compressed "
                f"and {format_bytes(self.bytes_exact)} exact"
            )
            if at_most := self.bytes_in_branches:
                sent += f", and at most {format_bytes(at_most)} in branches that may not run"
            if self.bytes_of_host is not None:
                sent += f". Each host sends {format_bytes(self.bytes_of_host)} to others"
            sent += "."
        count = len(self.findings)
        mistakes = ("No mistake found.", "One mistake found:")[count] if count < 2 else ""
        return f"{sent} {mistakes or f'{count} mistakes found:'}"


def _texts(row: Row) -> tuple[str, ...]:
    """Return the columns of a row as text, as `_HEADINGS` names them."""
    sent = format_bytes(row.bytes) + (" at most" if row.in_branch else "")
    messages = f"{row.messages:,}" if row.messages else "joined"
    by_host = "" if row.bytes_of_host is None else format_bytes(row.bytes_of_host)
    return (row.what, row.over, row.link, row.type, messages, sent, by_host, row.where)


def rows_of(collectives: Iterable[CompiledCollective]) -> tuple[Row, ...]:
    """Join collectives that differ in nothing but their sizes."""
    groups: dict[Row, list[CompiledCollective]] = {}
    for one in collectives:
        over = ", ".join(one.axes or ()) or f"groups of {len(one.groups[0])}"
        types = "+".join(one.dtypes)
        alike = Row(_what(one), over, one.link, types, 0, 0.0, None, one.place, one.in_branch)
        groups.setdefault(alike, []).append(one)
    rows = [
        row._replace(
            messages=sum(one.times for one in members),
            bytes=sum(one.bytes for one in members),
            bytes_of_host=_most([one.bytes_of_hosts for one in members]),
        )
        for row, members in groups.items()
    ]
    return tuple(sorted(rows, key=lambda row: -row.bytes))


def _most(of_hosts: Sequence[tuple[float, ...] | None]) -> float | None:
    """Return the sum of the host that sends most; None if one of the collectives is not known."""
    known = [sent for sent in of_hosts if sent is not None]
    return max(map(sum, zip(*known, strict=True))) if len(known) == len(of_hosts) else None


_PARTS: Mapping[str, str] = {
    scopes.EXACT: "exact leaves",
    scopes.FAST: "exact, fast axes",
    scopes.ESTIMATE: "estimate of the error",
    scopes.STATES: "check of states",
    scopes.FALLBACK: "exact, above max_error",
}


def _what(one: CompiledCollective) -> str:
    if not one.labels:
        return one.opcode
    innermost = one.labels[-1]
    return _PARTS.get(innermost, f"compressed, {innermost}")
