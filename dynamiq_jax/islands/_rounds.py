"""Rounds of a run: who came to one, and the decision that all islands follow."""

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax

from dynamiq_jax.islands import _processes
from dynamiq_jax.islands._packing import Packed, Piece
from dynamiq_jax.islands._records import Decision, Sent, SentPart, digest_of, opened, sealed
from dynamiq_jax.islands._shards import (
    Shard,
    Values,
    check_cover,
    check_inside,
    check_leaves,
    meet,
    needed,
    take_in,
)
from dynamiq_jax.islands._transports import Transport, logger
from dynamiq_jax.islands.merging import leaves_of
from dynamiq_jax.islands.messages import Message


class Change(NamedTuple):
    """Change of an island that counts in a round, as far as a process needs it."""

    weight: float
    pieces: list[Piece]


@dataclasses.dataclass(frozen=True)
class RoundFiles:
    """Files of rounds, read by an island.

    In its methods, `number` is a round, `of` the hash of the reference that a change began at, or
    "state", and `wanted` are the shards that this process holds.
    """

    transport: Transport
    name: str  # of the island
    deadline: float  # seconds to look again for what is damaged
    poll: float  # seconds between two looks
    secret: bytes | None  # of all islands

    def announced(self, number: int) -> list[str]:
        """Return the islands that have announced themselves for a round."""
        return self.transport.names(file_of("here", number))

    def is_decided(self, number: int) -> bool:
        """Return whether a round has a decision."""
        return self.transport.get(file_of("decision", number)) is not None

    def put(self, file: str, content: bytes) -> None:
        """Store the content of a file under its checksum, unless there is one."""
        self.transport.put(file, sealed(file, content, self.secret))

    def followed(
        self, number: int, reference: str, wanted: Sequence[Shard]
    ) -> tuple[Decision, list[Change]]:
        """Return the decision of a round that has one, and the changes that count.

        Islands repeat in their announcements the decision that they followed. So an island that
        finds the file of a decision damaged, or a change other than when it was decided, follows
        one that has gone on. If nobody has by the deadline, nobody can read it, and it is left out.

        Raises:
          RuntimeError: the decision is about another reference, or others have followed what this
            island cannot read, or a process of several cannot read it.
        """
        start, file = time.monotonic(), file_of("decision", number)
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
                        f"others {decision.reference}. Call join for theirs, with the same outer=."
                    )
                changes, damaged = self._changes(number, decision, wanted)
                if not damaged:
                    return decision, changes
            if not look:
                logger.warning("round %d: %s is read again: %s", number, file, damaged)
            elif copies or time.monotonic() - start >= self.deadline:
                break
            time.sleep(self.poll)
        if copies or jax.process_count() > 1:  # of which others may have read all
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
        return decision._replace(members=members, left_out=left_out), changes

    def decision(self, file: str) -> Decision:
        """Read a decision; ValueError if it is damaged."""
        return Decision.from_bytes(self._content(file))

    def sent(self, file: str, island: str) -> tuple[Sent, str]:
        """Read what an island has sent, and the digest of its file; ValueError if it is damaged."""
        data = self.transport.get(file)
        return Sent.from_bytes(opened(file, data, self.secret), island), digest_of(data or b"")

    def pieces(
        self, number: int, of: str, sent: Sent, wanted: Iterable[Shard] | None = None
    ) -> Iterator[Piece]:
        """Read what was sent, or those messages that have some of the wanted shards.

        Raises:
          ValueError: a part that is gone, damaged, or of other shards, or a shard that none has.
        """
        if sent.message is not None:
            leaves = sent.message.leaves
            yield Piece(sent.message, [Shard.whole(leaf.name, leaf.shape) for leaf in leaves])
            return
        if wanted is not None:
            check_cover([shard for part in sent.parts for shard in part.shards], wanted)
        for part in sent.parts:
            if wanted is None or meet(part.shards, wanted):
                yield self._piece(file_of("parts", number, of, sent.island, part.name), part)

    def _piece(self, file: str, part: SentPart) -> Piece:
        try:
            content = self._content(file)
            if digest_of(content) != part.digest:
                raise ValueError("it is another one than when it was sent.")
            message = Message.from_bytes(content)
            shards = [Shard.named(leaf.name) for leaf in message.leaves]
            shapes = [leaf.shape for leaf in message.leaves]
            if {*shards} != {*part.shards} or [shard.shape for shard in shards] != shapes:
                raise ValueError(
                    f"it has leaves {message.leaves!r:.200}, which were not announced."
                )
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from None
        return Piece(message, shards)

    def send(self, number: int, of: str, file: str, packed: Packed) -> None:
        """Store what this process sends; the leading one lists it in a file, after all parts."""
        sent, folder = packed.sent, file_of("parts", number, of, self.name)
        for part in sent.parts:
            if part.number in packed.contents:
                self.put(f"{folder}/{part.name}", packed.contents[part.number])
        if not _processes.leads():
            return
        names, start = {part.name for part in sent.parts}, time.monotonic()
        while names and names - {*self.transport.names(folder)}:
            if time.monotonic() - start >= self.deadline:
                logger.warning("round %d: parts of %r are not there in time", number, self.name)
                return
            time.sleep(self.poll)
        data = sealed(file, sent.to_bytes(), self.secret)
        if self.transport.put(file, data) or of == "state" or self.transport.get(file) == data:
            return
        text = (
            "round %d: %s is of another island of this name, or of this one before it started "
            "again. Each island needs a name of its own."
        )
        logger.warning(text, number, file)

    def state(self, number: int, like: Any) -> Values:
        """Read what this process holds of a stored state of the shapes and shardings of a tree.

        Raises:
          ValueError: a state that is damaged, or of other leaves.
        """
        sent, _ = self.sent(file_of("state", number), self.name)
        wanted, values, dtypes = needed(like), Values(), dict[Shard, str]()
        leaves = leaves_of(like)
        for part in sent.parts:  # also those that this process does not read
            check_inside(part.shards, leaves)
        for piece in self.pieces(number, "state", sent, wanted):
            dtypes |= piece.dtypes
            take_in(values, piece.decoded(), wanted)
        check_leaves(dtypes, leaves, wanted)
        return values

    def losses(self, number: int, names: Iterable[str]) -> dict[str, float]:
        """Return the losses that islands have told in a round."""
        found = {}
        for name in names:
            with contextlib.suppress(ValueError):  # told by none, or damaged
                found[name] = float(self._content(file_of("loss", number, name)))
        return found

    def forget(self, before: int) -> None:
        """Delete changes and states of the rounds before one. Decisions stay, for `history`."""
        for kind, depth in (("state", 0), ("change", 2), ("parts", 3)):
            for number in numbers_of(self.transport.names(kind)):
                if number < before:
                    self._delete(file_of(kind, number), depth)

    def _delete(self, name: str, depth: int) -> None:
        """Delete a file, or those in folders of folders."""
        if not depth:
            self.transport.delete(name)
            return
        for inside in self.transport.names(name):
            self._delete(f"{name}/{inside}", depth - 1)

    def _content(self, file: str) -> bytes:
        return opened(file, self.transport.get(file), self.secret)

    def _copies(self, number: int) -> list[Decision]:
        """Return the decision of a round as islands that have gone on repeat it."""
        found = []
        for name in self.announced(number + 1):
            with contextlib.suppress(ValueError):  # one that has just joined repeats none
                found.append(self.decision(file_of("here", number + 1, name)))
        return found

    def _changes(
        self, number: int, decision: Decision, wanted: Sequence[Shard]
    ) -> tuple[list[Change], dict[str, str]]:
        """Return the changes that count, and islands whose change is damaged, with the reason."""
        changes, damaged = list[Change](), dict[str, str]()
        for name, decided in decision.members.items():
            try:
                file = file_of("change", number, decision.reference, name)
                sent, digest = self.sent(file, name)
                if decided not in (None, digest):
                    raise ValueError("the file is another one than when it was decided.")
                pieces = self.pieces(number, decision.reference, sent, wanted)
                changes.append(Change(sent.weight, [*pieces]))
            except ValueError as error:
                damaged[name] = str(error)
        return changes, damaged


def numbers_of(names: Iterable[str]) -> list[int]:
    """Return the rounds among the names of a folder, where other files may lie."""
    return [int(name) for name in names if name.isdecimal()]


def file_of(kind: str, number: int, *names: str) -> str:
    """Return the file of a round, or a folder of some, such as "here/00000007" of that kind."""
    return "/".join((kind, f"{number:08}", *names))
