"""Rounds of a run as its store has them: for people, not for islands."""

from typing import NamedTuple

from dynamiq_jax._core import check_integer
from dynamiq_jax.islands._records import Decision, RoundNotes, opened
from dynamiq_jax.islands._rounds import file_of, numbers_of
from dynamiq_jax.islands._transports import Transport


class RoundRecord(NamedTuple):
    """A round that is decided, or the one that runs."""

    number: int
    here: tuple[str, ...]  # islands that announced themselves
    decision: Decision | None  # None of the round that runs, or of one that is damaged
    notes: RoundNotes
    problem: str = ""  # of a decision that cannot be read


def history(
    transport: Transport, secret: bytes | None = None, last: int | None = None
) -> list[RoundRecord]:
    """Return the rounds of a run in order.

    Args:
      transport: store of the run.
      secret: of its islands, if they have one.
      last: number of rounds from the end; None for all.

    Raises:
      ValueError: there is no run in the store.
    """
    if last is not None:
        check_integer("last", last, 1)
    numbers = {*numbers_of([*transport.names("here"), *transport.names("decision")])}
    if not numbers:
        raise ValueError("there is no run of islands. Give the place that they share.")
    found = []
    for number in sorted(numbers)[-(last or len(numbers)) :]:
        here, file = transport.names(file_of("here", number)), file_of("decision", number)
        decision, problem = None, ""
        if (data := transport.get(file)) is not None:
            try:
                decision = Decision.from_bytes(opened(file, data, secret))
            except ValueError as error:
                problem = str(error)
        notes = RoundNotes.of({} if decision is None else decision.notes)
        found.append(RoundRecord(number, tuple(here), decision, notes, problem))
    return found
