"""Everything that is known about a train step, from which mistakes are found."""

import dataclasses
from typing import NamedTuple

from dynamiq_jax._inspection.collectives import CompiledCollective
from dynamiq_jax._inspection.flow import Flow
from dynamiq_jax._plan.recording import TracedCollective


class Argument(NamedTuple):
    """Array that a train step is called with."""

    path: str
    shape: tuple[int, ...]
    split_over: tuple[str, ...]  # axes of the mesh, of more than one device


class Traced(NamedTuple):
    """Facts about a step that its trace has, and its compiled text has not."""

    written: str = ""  # text of the program before optimization
    records: tuple[TracedCollective, ...] = ()  # of collectives of this library
    arguments: tuple[Argument, ...] = ()
    flow: Flow | None = None  # of the sums of the records; None if not known


@dataclasses.dataclass(frozen=True)
class Evidence:
    """Facts about a program."""

    collectives: tuple[CompiledCollective, ...]
    records: tuple[TracedCollective, ...] = ()  # none in a file of HLO
    arguments: tuple[Argument, ...] = ()
    flow: Flow | None = None
    workers: tuple[str, ...] = ()  # axes of workers, as a user says; empty if not said
