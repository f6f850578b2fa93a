"""Local SGD between jobs that come and go."""

import dataclasses
import functools
import time
import zlib
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dynamiq_jax._core import (
    check_choice,
    check_flag,
    check_integer,
    check_number,
    check_optimizer,
)
from dynamiq_jax._inputs.checks import check_floating
from dynamiq_jax._inputs.compression import Choice
from dynamiq_jax.islands._decode import decode
from dynamiq_jax.islands._encode import encode
from dynamiq_jax.islands._records import Change, Decision, RoundNotes, digest_of, opened, sealed
from dynamiq_jax.islands._rounds import RoundFiles, change_file, decision_file, logger, loss_file
from dynamiq_jax.islands._sparse import Sparse
from dynamiq_jax.islands._transports import Transport
from dynamiq_jax.islands.merging import (
    check_weight,
    checked_norm,
    clipped,
    copies,
    hash_of,
    leaves_of,
    take_outer_step,
    too_large,
    wide,
)
from dynamiq_jax.islands.messages import Message
from dynamiq_jax.methods import DynamiQ

_LONGEST_NAME = 200  # bytes; of files it may have 255


class IslandState(NamedTuple):
    """State of an island: a plain pytree. All of it but `residual` is the same on all islands."""

    round: int  # outer steps taken
    reference: Any  # parameters after the last outer step: the model to evaluate and to keep
    outer: optax.OptState
    residual: Any  # what the others have not received of this island, like `reference`


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)  # optimizers cannot be compared
class Islands:
    """Local SGD (DiLoCo) between jobs, each a JAX program of its own, that come and go.

        islands = Islands(transport=SharedFolder("/shared/run-1"), name="east", count=3)
        state = islands.join(params)
        while state.round < rounds:
            params = state.reference
            for _ in range(20):
                ...  # local steps
            state = islands.exchange(params, state)

    In each round, every island trains alone from the reference and hands its change to the
    transport as a message of `islands.encode`. A round ends when all of the round before, and
    all that have joined since, have sent their change, or when one has waited for `deadline`
    seconds. It then writes down whose changes count: the first such decision holds. All take the
    weighted mean of those changes as the gradient of an outer step. So nobody waits longer than the
    deadline, and once for an island that is gone. No process has a special role.

    A change does not count if its file is damaged or of other leaves, if it holds NaN or Inf, if
    its norm is 0 or above `norm_limit` times the median of the others, or if it copies another. The
    decision names its island and the reason, and each island logs them as a warning of the logger
    `dynamiq_jax.islands`. If no change counts, the reference stays.

    An island starts with `join`, also after a crash: from the last stored state that is whole, it
    repeats the outer steps since then. Each decision has a hash of reference and outer state, which
    every island compares with its own, and a digest of each change that counts.

    The outer step is that of `training.LocalSGD`. Results are not bit-identical to it: an
    all-reduce rounds sums again, and here each change is rounded once.
    """

    transport: Transport
    name: str  # of this island, another one for each
    count: int = 1  # islands that the first round waits for
    deadline: float = 60.0  # seconds that an island waits for the others, from its own change on
    # Change that comes after the decision: "keep" adds it to the next one, "drop" forgets it.
    late: Literal["keep", "drop"] = "keep"
    # What a message leaves out of a change is added to the next one, in float32: its rounding, and
    # with `Sparse` most of it.
    feedback: bool = False
    decay: float = 1.0  # factor of what is added
    at_least: int = 1  # changes without which no round is decided, however long that takes
    # Seconds that an island waits for others after the first `at_least`; None: up to the deadline.
    grace: float | None = None
    # Whether changes with norms above the median are scaled to the median.
    clip: bool = False
    # Share of the coordinates that two sparse changes may have in common; 1 for no limit.
    overlap: float = 0.95
    # Of all islands: files without its signature (HMAC-SHA256) are left out. None: no signatures.
    secret: bytes | None = dataclasses.field(default=None, repr=False)
    # Largest norm of a change over the median of those that came; inf for none.
    norm_limit: float = 1000.0
    # Takes the mean change (reference - parameters) as a gradient.
    outer: optax.GradientTransformation = optax.sgd(0.7, momentum=0.9, nesterov=True)
    method: Choice = DynamiQ(bits=4)  # of messages; see `encode`
    store_every: int = 10  # rounds between two states that are stored for islands that join
    # Rounds whose changes and states stay in the store, two times `store_every` or more; None: all.
    # An island that is late by more has to join again.
    keep_rounds: int | None = None
    poll: float = 0.05  # seconds between two looks at the transport
    seed: int = 0  # of the rounding noise

    def __post_init__(self):
        if not _is_file_name(self.name):
            raise ValueError(
                f"name={self.name!r:.80} is not possible: files have it. Give a printable "
                f"name of at most {_LONGEST_NAME} bytes, without '/', other than '.' and '..'."
            )
        check_integer("count", self.count, 1)
        check_number("deadline", self.deadline, 0, float("inf"))
        check_choice("late", self.late, ("keep", "drop"))
        check_flag("feedback", self.feedback)
        check_number("decay", self.decay, 0, 1)
        check_integer("at_least", self.at_least, 1)
        if self.grace is not None:
            check_number("grace", self.grace, 0, float("inf"))
        check_flag("clip", self.clip)
        check_number("overlap", self.overlap, 0, 1)
        if self.secret is not None and not (isinstance(self.secret, bytes) and self.secret):
            raise TypeError(
                "secret is not bytes, or none at all. Give some, such as 32 random ones."
            )
        if isinstance(self.method, Sparse) and not self.feedback:
            raise ValueError(
                f"method={self.method!r} loses most of each change without feedback=True. Give it."
            )
        check_number("norm_limit", self.norm_limit, 1, float("inf"))
        check_integer("store_every", self.store_every, 1)
        if self.keep_rounds is not None:
            check_integer("keep_rounds", self.keep_rounds, 2 * self.store_every)
            if not hasattr(self.transport, "delete"):
                raise TypeError(
                    f"keep_rounds={self.keep_rounds!r} needs a transport with a function delete, "
                    f"and {type(self.transport).__name__} has none. See islands.Transport."
                )
        check_number("poll", self.poll, 0, float("inf"))
        check_integer("seed", self.seed, -(2**31), 2**32 - 1)
        check_optimizer("outer", self.outer, "optax.sgd(0.7, momentum=0.9, nesterov=True)")
        # Raises for a method that no message can hold: not after a round of local steps.
        encode(np.zeros(1, np.float32), key=jax.random.key(0), method=self.method)

    @property
    def _rounds(self) -> RoundFiles:
        return RoundFiles(self.transport, self.name, self.deadline, self.poll, self.secret)

    def join(self, params: Any) -> IslandState:
        """Return the state of the run so far, and announce this island for its current round.

        Args:
          params: parameters of a new run, the same shapes on all islands. The first island that
            joins sets their values. Later ones get the reference.

        Raises:
          ValueError: no stored state is whole and of these parameters and this outer optimizer.
          RuntimeError: a change or a decision since the stored state is damaged.
          TypeError: a leaf that is not floating.
        """
        no_changes = "of which islands average no changes. Give floating leaves alone."
        check_floating("params", params, no_changes)
        first = IslandState(0, params, self.outer.init(wide(params)), ())
        if not self.transport.names("state"):
            self._store(first)
        state = self._latest(first)
        zeros = jax.tree.map(jnp.zeros_like, wide(params))
        state = self._caught_up(state._replace(residual=zeros))
        self.transport.put(f"here/{state.round:08}/{self.name}", b"")
        start = time.monotonic()
        while state.round == 0 and self._waits(start, len(self._rounds.announced(0)) < self.count):
            time.sleep(self.poll)
        return state

    def exchange(
        self, params: Any, state: IslandState, *, weight: float = 1.0, loss: float | None = None
    ) -> IslandState:
        """Send the change of a round, and take the outer steps since.

        Args:
          params: parameters after the local steps of this round, which began at
            `state.reference`.
          state: the state of `join` or of the exchange before.
          weight: share of this change in the mean, such as local steps or tokens.
          loss: of this island, for `dynamiq-jax islands`; None not to tell it.

        Returns:
          The state, a round later, or more if this island was late by more. A change that was left
          out for its values is forgotten.

        Raises:
          RuntimeError: the islands hold other references than this one, or have read what this one
            cannot.
          ValueError: a weight that is not positive, or parameters of other leaves than the
            reference.
        """
        check_weight("weight", weight)
        if leaves_of(params) != leaves_of(state.reference):
            raise ValueError(
                f"params have leaves {leaves_of(params)!r:.200}, and the reference "
                f"{leaves_of(state.reference)!r:.200}. Give parameters like the reference: a local "
                "step that promotes them has to cast its result."
            )
        wanted = _change(state.reference, params, state.residual, self.decay)
        key = jax.random.fold_in(jax.random.key(self.seed), state.round)
        key = jax.random.fold_in(key, zlib.crc32(self.name.encode()))
        message = encode(wanted, key=key, method=self.method)
        reference = _hash_of(state)
        file = change_file(state.round, reference, self.name)
        data = sealed(file, Change(weight, message).to_bytes(), self.secret)
        if self.transport.get(decision_file(state.round)) is None:
            if loss is not None:
                told = loss_file(state.round, self.name)
                self.transport.put(told, sealed(told, repr(float(loss)).encode(), self.secret))
            self.transport.put(file, data)
            self._decide(state, reference)
        state, decision = self._step(state, reference)
        left: Any = None
        # A name may be that of an island before a crash, whose change was another one.
        if decision.members.get(self.name) == digest_of(data):
            if self.feedback:
                left = _left(wanted, decode(message, like=wanted))
        elif self.name not in decision.left_out or self.transport.get(file) != data:
            left = wanted if self.late == "keep" else state.residual
        zeros = jax.tree.map(jnp.zeros_like, wanted)
        return self._caught_up(state._replace(residual=zeros if left is None else left))

    def _decide(self, state: IslandState, reference: str) -> None:
        """Wait until a round has a decision, or write it once all came or the deadline is over."""
        folder, file = change_file(state.round, reference), decision_file(state.round)
        try:
            before = self._rounds.decision(decision_file(state.round - 1))
            stayed = {*before.members, *before.left_out}
        except ValueError:  # none before the first round
            stayed = set()
        start, told, reached = time.monotonic(), 1, None
        while self.transport.get(file) is None:
            came, waited = self.transport.names(folder), time.monotonic() - start
            if len(came) >= self.at_least and reached is None:
                reached = waited
            lacks = bool({*stayed, *self._rounds.announced(state.round)} - {*came})
            ends = np.inf if reached is None else self.deadline
            if reached is not None and self.grace is not None:
                ends = min(ends, reached + self.grace)
            if waited >= ends or (reached is not None and not lacks):
                decision = self._judged(state, reference, came, waited)
                self.transport.put(file, sealed(file, decision.to_bytes(), self.secret))
                continue
            if waited >= told * self.deadline:
                text = (
                    "round %d: %d of %d changes came in %.0f s. It is decided when they are there."
                )
                logger.warning(text, state.round, len(came), self.at_least, waited)
                told += 1
            time.sleep(self.poll)

    def _judged(
        self, state: IslandState, reference: str, came: Sequence[str], waited: float
    ) -> Decision:
        """Return the decision about the changes that came."""
        norms, digests, left_out = dict[str, float](), dict[str, str](), dict[str, str]()
        leaves, messages = leaves_of(wide(state.reference)), dict[str, Message]()
        sizes = dict[str, int]()
        for name in came:
            try:
                file = change_file(state.round, reference, name)
                change, digests[name] = self._rounds.change(file)
                norms[name] = checked_norm(change.message, leaves)
                messages[name], sizes[name] = change.message, change.message.nbytes
            except ValueError as error:
                left_out[name] = str(error)
        left_out |= too_large(norms, self.norm_limit)
        left_out |= copies(
            {name: of for name, of in messages.items() if name not in left_out}, self.overlap
        )
        members = {name: digest for name, digest in digests.items() if name not in left_out}
        factors = clipped({name: norms[name] for name in members}) if self.clip else {}
        notes = RoundNotes(self.name, waited, sizes, self._rounds.losses(state.round, came))
        return Decision(reference, members, left_out, factors, notes._asdict())

    def _step(self, state: IslandState, reference: str) -> tuple[IslandState, Decision]:
        """Take the outer step of a round that is decided."""
        number = state.round
        decision, changes = self._rounds.followed(number, reference)
        for name, reason in decision.left_out.items():
            file = change_file(number, reference, name)
            text = "round %d: the change of %r is left out. %s: %s"
            logger.warning(text, number, name, file, reason)
        after, outer = state.reference, state.outer
        if changes:
            total = sum(change.weight for change in changes)
            pairs = zip(decision.members, changes, strict=True)
            mean = decode(
                *(change.message for change in changes),
                weights=[c.weight / total * decision.factors.get(name, 1) for name, c in pairs],
                like=state.reference,
            )
            after, outer = take_outer_step(self.outer, mean, outer, after)
        state = state._replace(round=number + 1, reference=after, outer=outer)
        if state.round % self.store_every == 0 and self.name == next(iter(decision.members), None):
            self._store(state)
            if self.keep_rounds is not None:
                self._rounds.forget(state.round - self.keep_rounds)
        file = f"here/{state.round:08}/{self.name}"
        self.transport.put(file, sealed(file, decision.to_bytes(), self.secret))
        return state, decision

    def _caught_up(self, state: IslandState) -> IslandState:
        """Take the outer steps of all rounds that are decided."""
        while self.transport.get(decision_file(state.round)) is not None:
            state, _ = self._step(state, _hash_of(state))
        return state

    def _store(self, state: IslandState) -> None:
        """Store what is the same on all islands, for those that join."""
        shared = jax.device_get((state.reference, state.outer))
        message = encode(shared, key=jax.random.key(0), method="exact")
        file = f"state/{state.round:08}"
        self.transport.put(file, sealed(file, message.to_bytes(), self.secret))

    def _latest(self, first: IslandState) -> IslandState:
        """Return the last stored state that can be read, of the structure of a first one."""
        problems = []
        for name in sorted(self.transport.names("state"), reverse=True):
            file = f"state/{name}"
            try:
                message = Message.from_bytes(opened(file, self.transport.get(file), self.secret))
                reference, outer = decode(message, like=(first.reference, first.outer))
                return first._replace(round=int(name), reference=reference, outer=outer)
            except ValueError as error:
                problems.append(f"{file}: {error}")
                logger.warning("a state is left out. %s", problems[-1])
        raise ValueError(
            f"no stored state can be read. {problems[0]} Give the parameters and the outer "
            "optimizer of the run, or start it anew in another place."
        )

    def _waits(self, start: float, lacks: bool) -> bool:
        return lacks and time.monotonic() - start < self.deadline


def _is_file_name(name: str) -> bool:
    """Return whether an island can have a name: transports store files under it."""
    is_plain = name.isprintable() and "/" not in name and name not in ("", ".", "..")
    return is_plain and len(name.encode()) <= _LONGEST_NAME


@functools.partial(jax.jit, static_argnames="decay")
def _change(reference: Any, params: Any, residual: Any, decay: float) -> Any:
    """Return what an island has to send, float32 where leaves are narrower."""

    def change(before: Any, now: Any, left: Any) -> Any:
        return before - now + left * np.array(decay, left.dtype)

    return jax.tree.map(change, wide(reference), wide(params), residual)


def _left(wanted: Any, applied: Any) -> Any:
    """Return what was not applied; nothing where that is not finite."""

    def left(wanted: Any, applied: Any) -> Any:
        rest = wanted - applied
        return jnp.where(jnp.isfinite(rest), rest, jnp.zeros_like(rest))

    return jax.tree.map(left, wanted, applied)


def _hash_of(state: IslandState) -> str:
    """Return a hash of everything that is the same on all islands."""
    return hash_of((np.int64(state.round), state.reference, state.outer))
