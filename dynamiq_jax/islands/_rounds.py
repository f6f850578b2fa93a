"""Rounds of a run: who came to one, and the decision that all islands follow."""

import contextlib
import dataclasses
import itertools
import logging
import time
from collections.abc import Iterable

from dynamiq_jax.islands._records import Change, Decision, digest_of, opened
from dynamiq_jax.islands._transports import Transport

logger = logging.getLogger("dynamiq_jax.islands")


@dataclasses.dataclass(frozen=True)
class RoundFiles:
    """Files of rounds, read by an island."""

    transport: Transport
    name: str  # of the island
    deadline: float  # seconds to look again for what is damaged
    poll: float  # seconds between two looks
    secret: bytes | None  # of all islands

    def announced(self, number: int) -> list[str]:
        """Return the islands that have announced themselves for a round."""
        return self.transport.names(f"here/{number:08}")

    def followed(self, number: int, reference: str) -> tuple[Decision, list[Change]]:
        """Return the decision of a round that has one, and the changes that count.

        Islands repeat in their announcements the decision that they followed. So an island that
        finds the file of a decision damaged, or a change other than when it was decided, follows
        one that has gone on. If nobody has by the deadline, nobody can read it, and it is left out.

        Raises:
          RuntimeError: the decision is about another reference, or others have followed what this
            island cannot read.
        """
        start, file = time.monotonic(), decision_file(number)
        for look in itertools.count():
            copies, changes = self._copies(number) if look else [], list[Change]()
            try:
                decisions = [self.decision(file), *copies]
            except ValueError as error:
                decisions, damaged = copies, {file: str(error)}
            for decision in decisions:
                if decision.reference != reference:
                    raise RuntimeError(
                        f"round {number}: {self.name!r} holds the reference {reference}, and the "
                        f"others {decision.reference}. Call join for theirs."
                    )
                changes, damaged = self._changes(number, decision)
                if not damaged:
                    return decision, changes
            if not look:
                logger.warning("round %d: %s is read again: %s", number, file, damaged)
            elif copies or time.monotonic() - start >= self.deadline:
                break
            time.sleep(self.poll)
        if copies:
            raise RuntimeError(
                f"round {number}: {self.name!r} cannot read what others have followed: "
                f"{damaged!r:.300}. Call join once a state of a later round is stored."
            )
        if not decisions:
            logger.warning("round %d: no change counts. %s: %s", number, file, damaged[file])
            return Decision(reference, {}, {}), []
        (decision,) = decisions
        members = {name: of for name, of in decision.members.items() if name not in damaged}
        left_out = {**decision.left_out, **damaged}
        left = Decision(reference, members, left_out, decision.factors, decision.notes)
        return left, changes

    def decision(self, file: str) -> Decision:
        """Read a decision; ValueError if it is damaged."""
        return Decision.from_bytes(opened(file, self.transport.get(file), self.secret))

    def change(self, file: str) -> tuple[Change, str]:
        """Read a change, and the digest of its file; ValueError if it is damaged."""
        data = self.transport.get(file)
        return Change.from_bytes(opened(file, data, self.secret)), digest_of(data or b"")

    def losses(self, number: int, names: Iterable[str]) -> dict[str, float]:
        """Return the losses that islands have told in a round."""
        found = {}
        for name in names:
            file = loss_file(number, name)
            with contextlib.suppress(ValueError):  # told by none, or damaged
                found[name] = float(opened(file, self.transport.get(file), self.secret))
        return found

    def forget(self, before: int) -> None:
        """Delete changes and states of the rounds before one. Decisions stay, for `history`."""
        transport = self.transport
        for state in _before(transport.names("state"), before):
            transport.delete(f"state/{state}")
        for number in _before(transport.names("change"), before):
            for reference in transport.names(f"change/{number}"):
                folder = f"change/{number}/{reference}"
                for name in transport.names(folder):
                    transport.delete(f"{folder}/{name}")

    def _copies(self, number: int) -> list[Decision]:
        """Return the decision of a round as islands that have gone on repeat it."""
        found = []
        for name in self.announced(number + 1):
            with contextlib.suppress(ValueError):  # one that has just joined repeats none
                found.append(self.decision(f"here/{number + 1:08}/{name}"))
        return found

    def _changes(self, number: int, decision: Decision) -> tuple[list[Change], dict[str, str]]:
        """Return the changes that count, and islands whose change is damaged, with the reason."""
        changes, damaged = list[Change](), dict[str, str]()
        for name, decided in decision.members.items():
            try:
                change, digest = self.change(change_file(number, decision.reference, name))
                if decided not in (None, digest):
                    raise ValueError("the file is another one than when it was decided.")
                changes.append(change)
            except ValueError as error:
                damaged[name] = str(error)
        return changes, damaged


def _before(names: Iterable[str], number: int) -> list[str]:
    """Return the names of rounds before one."""
    return [name for name in names if name.isdecimal() and int(name) < number]


def decision_file(number: int) -> str:
    """Return the file of the decision about a round."""
    return f"decision/{number:08}"


def loss_file(number: int, name: str) -> str:
    """Return the file of the loss of an island in a round."""
    return f"loss/{number:08}/{name}"


def change_file(number: int, reference: str, name: str = "") -> str:
    """Return the file of the change of an island, or the folder of all that began at a reference.

    Args:
      number: the round.
      reference: hash of the state that the change began at.
      name: of the island.
    """
    return f"change/{number:08}/{reference}/{name}".rstrip("/")
