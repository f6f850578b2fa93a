"""Transfers of a scheduled program, and the instructions that run while they are under way."""

import dataclasses
from collections.abc import Callable, Iterator

from benchmarks.gpu import h200_model as h200

COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")


@dataclasses.dataclass(frozen=True)
class Transfer:
    """One collective."""

    bytes: int  # of the results, all times
    times: int
    in_loop: bool
    covered: int  # instructions of some kind between start and end
    scope: str  # the name that JAX gave it


def transfers_of(
    program: h200.Program, covers: Callable[[h200.Instruction], bool]
) -> Iterator[Transfer]:
    """Yield the collectives of a program.

    Args:
      program: the program.
      covers: whether an instruction counts, if it runs between the start of a transfer and its end.
    """
    turns = {i.body: i.turns for rows in program.computations.values() for i in rows if i.body}
    for name, rows in program.computations.items():
        times = turns.get(name, 1)
        for first, start in enumerate(rows):
            kind = start.opcode.removesuffix("-start")
            if kind not in COLLECTIVES:
                continue
            end = first
            if start.opcode != kind:  # else nothing runs meanwhile
                end = next(
                    index
                    for index, row in enumerate(rows)
                    if row.opcode == f"{kind}-done" and start.name in row.operands
                )
            yield Transfer(
                bytes=times * h200.size_of(rows[end].shape),
                times=times,
                in_loop=name in turns,
                covered=sum(map(covers, rows[first + 1 : end])),
                scope=start.scope,
            )
