"""Decisions about rounds: when one is made, and whose changes count."""

import dataclasses
import time
from collections.abc import Iterator, Sequence

import numpy as np

from dynamiq_jax.islands._records import Decision, RoundNotes, Sent
from dynamiq_jax.islands._rounds import RoundFiles, file_of
from dynamiq_jax.islands._shards import Shard, check_leaves
from dynamiq_jax.islands._transports import logger
from dynamiq_jax.islands.merging import Findings, Leaves, clipped, copies, examine, too_large
from dynamiq_jax.islands.messages import Message


@dataclasses.dataclass(frozen=True)
class Judge:
    """Rules by which an island decides a round; see the fields of `Islands`."""

    files: RoundFiles
    at_least: int
    grace: float | None
    clip: bool
    overlap: float
    norm_limit: float

    def decide(self, number: int, reference: str, leaves: Leaves) -> None:
        """Wait until a round has a decision, or write it once all came or the deadline is over."""
        files = self.files
        folder, file = file_of("change", number, reference), file_of("decision", number)
        try:
            before = files.decision(file_of("decision", number - 1))
            stayed = {*before.members, *before.left_out}
        except ValueError:  # none before the first round
            stayed = set()
        start, tell_at, reached = time.monotonic(), files.deadline, np.inf
        grace = np.inf if self.grace is None else self.grace
        while not files.is_decided(number):
            came, waited = files.transport.names(folder), time.monotonic() - start
            if len(came) >= self.at_least:
                reached = min(reached, waited)
            lacks = bool({*stayed, *files.announced(number)} - {*came})
            ends = min(max(reached, files.deadline), reached + grace)
            if waited >= ends or (waited >= reached and not lacks):
                decision = self._judged(number, reference, leaves, came, waited)
                files.put(file, decision.to_bytes())
                continue
            if waited >= tell_at:
                text = (
                    "round %d: %d of %d changes came in %.0f s. It is decided when they are there."
                )
                logger.warning(text, number, len(came), self.at_least, waited)
                tell_at = 2 * waited + 0.1  # seldom, also if no time is given
            time.sleep(files.poll)

    def _judged(
        self, number: int, reference: str, leaves: Leaves, came: Sequence[str], waited: float
    ) -> Decision:
        """Return the decision about the changes that came."""
        files, folder = self.files, file_of("change", number, reference)
        found, digests, left_out = dict[str, Findings](), dict[str, str](), dict[str, str]()
        sizes = dict[str, int]()
        for name in came:
            try:
                sent, digests[name] = files.sent(f"{folder}/{name}", name)
                found[name], sizes[name] = self._examined(number, reference, leaves, sent)
            except ValueError as error:
                left_out[name] = str(error)
        norms = {name: change.norm for name, change in found.items()}
        left_out |= too_large(norms, self.norm_limit)
        counting = {name: change for name, change in found.items() if name not in left_out}
        left_out |= copies(counting, self.overlap)
        members = {name: digest for name, digest in digests.items() if name not in left_out}
        factors = clipped({name: norms[name] for name in members}) if self.clip else {}
        notes = RoundNotes(files.name, waited, sizes, files.losses(number, came))
        return Decision(reference, members, left_out, factors, notes._asdict())

    def _examined(
        self, number: int, reference: str, leaves: Leaves, sent: Sent
    ) -> tuple[Findings, int]:
        """Return what a change is like, and its bytes. Of its parts, one is in memory at a time."""
        dtypes, sizes = dict[Shard, str](), list[int]()

        def messages() -> Iterator[Message]:
            for piece in self.files.pieces(number, reference, sent):
                sizes.append(piece.message.nbytes)
                dtypes.update(piece.dtypes)
                yield piece.message

        found = examine(messages(), None if sent.parts else leaves)
        check_leaves(dtypes, leaves)
        return found, sum(sizes)
