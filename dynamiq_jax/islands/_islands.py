"""Local SGD between jobs that come and go."""

import contextlib
import dataclasses
import time
import zlib
from typing import Any, Literal

import jax
import numpy as np
import optax

from dynamiq_jax._core import check_choice, check_flag, check_integer, check_number, check_optimizer
from dynamiq_jax._inputs.checks import check_floating
from dynamiq_jax._inputs.compression import Choice, Compression
from dynamiq_jax.islands import _processes
from dynamiq_jax.islands._arithmetic import (
    change_of,
    delete,
    in_memory,
    on_all,
    on_devices,
    placed,
    rest_of,
    went_on,
    zeros_like,
)
from dynamiq_jax.islands._deciding import Judge
from dynamiq_jax.islands._encode import encode
from dynamiq_jax.islands._packing import method_of_parts, pack
from dynamiq_jax.islands._pending import PendingExchange
from dynamiq_jax.islands._records import LONGEST_NAME, Decision, digest_of, is_file_name, sealed
from dynamiq_jax.islands._rounds import RoundFiles, file_of, numbers_of
from dynamiq_jax.islands._shards import Values, as_arrays, assembled, needed, take_in
from dynamiq_jax.islands._sparse import Sparse
from dynamiq_jax.islands._state import IslandState, Outgoing, Transferred, hash_of_state
from dynamiq_jax.islands._transports import Transport, logger
from dynamiq_jax.islands.merging import check_weight, leaves_of, take_outer_step, wide
from dynamiq_jax.islands.messages import Message
from dynamiq_jax.methods import DynamiQ


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

    An island may be a job of several processes with leaves that are split over their devices. Then
    each process sends and reads its own shards, and all call `join`, `exchange` and `result` of
    `start_exchange` together.

    The outer step is that of `training.LocalSGD`. Results are not bit-identical to it: an
    all-reduce rounds sums again, and here each change is rounded once.
    """

    transport: Transport
    name: str  # of this island, another one for each
    count: int = 1  # islands that the first round waits for
    deadline: float = 60.0  # seconds that an island waits for the others, from its own change on
    # Change that comes after the decision: "keep" adds it to the next one, times `decay`, and
    # "drop" forgets it.
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
    # Memory that holds states: of the devices of the parameters, or of their hosts, from where they
    # come to the devices for the arithmetic of an exchange alone.
    state_on: Literal["device", "host"] = "device"
    # Whether an exchange frees the outer state and the residual of the state that it is given, when
    # it has the next ones. The reference stays.
    donate: bool = False
    poll: float = 0.05  # seconds between two looks at the transport
    seed: int = 0  # of the rounding noise

    def __post_init__(self):
        if not is_file_name(self.name):
            raise ValueError(
                f"name={self.name!r:.80} is not possible: files have it. Give a printable "
                f"name of at most {LONGEST_NAME} bytes, without '/', that begins with no '.'."
            )
        if not all(hasattr(self.transport, name) for name in ("put", "get", "names")):
            raise TypeError(
                f"transport={self.transport!r:.80} is no store. Give one, such as "
                "islands.SharedFolder('/shared/run-1')."
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
        check_choice("state_on", self.state_on, ("device", "host"))
        check_flag("donate", self.donate)
        check_number("poll", self.poll, 0, float("inf"))
        check_integer("seed", self.seed, -(2**31), 2**32 - 1)
        check_optimizer("outer", self.outer, "optax.sgd(0.7, momentum=0.9, nesterov=True)")
        # Raises for a method that no message can hold: not after a round of local steps.
        compression = Compression.of(self.method)
        methods: tuple[Any, ...] = compression.policy.known or ("uncompressed",)
        for one in (dataclasses.replace(compression, method=method) for method in methods):
            encode(np.zeros(1, np.float32), key=jax.random.key(0), method=one)

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
        params = on_devices(as_arrays(params))
        first = IslandState(0, params, on_all(self.outer.init(wide(params)), params), ())
        if not _processes.of_leader(bool(self.transport.names("state"))):
            self._store(first)
        state = self._latest(first)
        state = self._caught_up(state._replace(residual=zeros_like(wide(params))))
        state = self._at_rest(state)
        if _processes.leads():
            self.transport.put(file_of("here", state.round, self.name), b"")
        ends = time.monotonic() + self.deadline
        while state.round == 0 and len(self._rounds.announced(0)) < self.count:
            if time.monotonic() >= ends:
                break
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
        outgoing = self._outgoing(params, state, weight, loss)
        return self._finished(outgoing, self._transferred(outgoing))

    def start_exchange(
        self, params: Any, state: IslandState, *, weight: float = 1.0, loss: float | None = None
    ) -> PendingExchange:
        """Send the change of a round while the next local steps run.

            exchange = islands.start_exchange(params, state)
            params = exchange.params
            ...  # local steps
            state = exchange.result()
            exchange = islands.start_exchange(params, state)

        The changes of the others arrive a round later. The next local steps begin at the reference
        plus this island's own change, which is not in the reference yet, like those of Eager
        Updates (arXiv 2502.12996). Each change counts once.

        Args and errors are those of `exchange`; errors of the transfer come from `result`.

        Returns:
          The exchange. The next one begins after its `result`.
        """
        outgoing = self._outgoing(params, state, weight, loss)
        going_on, reference = params, outgoing.state.reference
        if outgoing.start is not reference:
            going_on = went_on(*on_devices((params, outgoing.start, reference)))
        start = self._at_rest(going_on)

        def finish(transferred: Transferred) -> IslandState:
            return self._finished(outgoing, transferred)._replace(start=start)

        return PendingExchange(going_on, lambda: self._transferred(outgoing), finish)

    def _outgoing(
        self, params: Any, state: IslandState, weight: float, loss: float | None
    ) -> Outgoing:
        """Encode the change of a round."""
        check_weight("weight", weight)
        if loss is not None and not isinstance(np.asarray(loss).item(), int | float):
            raise TypeError(f"loss={loss!r:.80} is not a number. Give one, or None.")
        if leaves_of(params) != leaves_of(state.reference):
            raise ValueError(
                f"params have leaves {leaves_of(params)!r:.200}, and the reference "
                f"{leaves_of(state.reference)!r:.200}. Give parameters like the reference: a local "
                "step that promotes them has to cast its result."
            )
        state = IslandState(state.round, *map(as_arrays, state[1:]))  # of a checkpoint: of NumPy
        start = state.reference if state.start is None else state.start
        wanted = change_of(*on_devices((start, params, state.residual)), self.decay)
        key = jax.random.fold_in(jax.random.key(self.seed), state.round)
        key = jax.random.fold_in(key, zlib.crc32(self.name.encode()))
        method = method_of_parts(self.method, wanted)

        def encoded(tree: Any, part: int) -> Message:
            own = jax.random.fold_in(key, part) if part else key
            return encode(tree, key=own, method=method)

        packed = pack(self.name, weight, wanted, encoded)
        reference = hash_of_state(on_devices(state))
        return Outgoing(state, reference, start, self._at_rest(wanted), packed, loss)

    def _at_rest(self, tree: Any) -> Any:
        """Return a tree in the memory that holds states."""
        return in_memory("pinned_host", tree) if self.state_on == "host" else tree

    def _transferred(self, outgoing: Outgoing) -> Transferred:
        """Send the change of a round, wait for the decision, and read what counts.

        Nothing here runs on several devices: it may run beside the train step.
        """
        number, reference = outgoing.state.round, outgoing.reference
        file = file_of("change", number, reference, self.name)
        data = sealed(file, outgoing.packed.sent.to_bytes(), self.secret)
        if not self._rounds.is_decided(number):
            if outgoing.loss is not None and _processes.leads():
                told = repr(float(outgoing.loss)).encode()
                self._rounds.put(file_of("loss", number, self.name), told)
            self._rounds.send(number, reference, file, outgoing.packed)
            if _processes.leads():
                rules = self.at_least, self.grace, self.clip, self.overlap, self.norm_limit
                judge = Judge(self._rounds, *rules)
                judge.decide(number, reference, leaves_of(outgoing.wanted))
            while not self._rounds.is_decided(number):
                time.sleep(self.poll)
        decision, mean = self._incoming(outgoing.state, reference)
        fate: Literal["counts", "late", "left out"] = "late"
        applied = Values()
        # A name may be that of an island before a crash, whose change was another one.
        if decision.members.get(self.name) == digest_of(data):
            fate = "counts"
            if self.feedback:
                wanted = needed(outgoing.wanted)
                sent = self._rounds.pieces(number, reference, outgoing.packed.sent, wanted)
                for piece in sent:
                    take_in(applied, piece.decoded(), wanted)
        # A change that others could read is left out for its values; any other one is kept.
        elif self.name in decision.left_out and self.transport.get(file) == data:
            with contextlib.suppress(ValueError):  # of a part that is not there as it was sent
                if all(self._rounds.pieces(number, reference, outgoing.packed.sent)):
                    fate = "left out"
        return Transferred(decision, mean, fate, applied)

    def _finished(self, outgoing: Outgoing, transferred: Transferred) -> IslandState:
        """Take the outer steps of a round whose transfers are done, and of those since."""
        before, wanted = outgoing.state, on_devices(outgoing.wanted)
        state = self._step(on_devices(before), transferred.decision, transferred.mean)
        left = None
        if transferred.fate == "counts" and self.feedback:
            left = rest_of(wanted, assembled(wanted, transferred.applied))
        elif transferred.fate == "late":
            left = wanted if self.late == "keep" else before.residual
        residual = zeros_like(wanted) if left is None else on_devices(left)
        state = state._replace(residual=residual, start=None)
        if self.donate:
            delete((before.outer, before.residual), but=state)
        after: IslandState = self._at_rest(self._caught_up(state))
        return after

    def _incoming(self, state: IslandState, reference: str) -> tuple[Decision, Values | None]:
        """Return the decision of a round, and the mean change; None if no change counts."""
        wanted = needed(state.reference)
        decision, changes = self._rounds.followed(state.round, reference, wanted)
        for name, reason in decision.left_out.items():
            file = file_of("change", state.round, reference, name)
            text = "round %d: the change of %r is left out. %s: %s"
            logger.warning(text, state.round, name, file, reason)
        mean = Values()
        total = sum(change.weight for change in changes)
        for name, change in zip(decision.members, changes, strict=True):
            factor = change.weight / total * decision.factors.get(name, 1)
            for piece in change.pieces:
                take_in(mean, piece.decoded(), wanted, factor)
        return decision, mean if changes else None

    def _step(self, state: IslandState, decision: Decision, mean: Values | None) -> IslandState:
        """Take the outer step of a round."""
        if mean is not None:
            change = assembled(wide(state.reference), mean)
            after = take_outer_step(self.outer, change, state.outer, state.reference)
            reference, outer = jax.tree.map(placed, after, (state.reference, state.outer))
            state = state._replace(reference=reference, outer=outer)
        state = state._replace(round=state.round + 1)
        if state.round % self.store_every == 0 and self.name == next(iter(decision.members), None):
            self._store(state)
            if self.keep_rounds is not None and _processes.leads():
                self._rounds.forget(state.round - self.keep_rounds)
        if _processes.leads():
            self._rounds.put(file_of("here", state.round, self.name), decision.to_bytes())
        return state

    def _caught_up(self, state: IslandState) -> IslandState:
        """Take the outer steps of all rounds that are decided."""
        while _processes.of_leader(self._rounds.is_decided(state.round)):
            state = self._step(state, *self._incoming(state, hash_of_state(state)))
        return state

    def _store(self, state: IslandState) -> None:
        """Store what is the same on all islands, for those that join."""

        def encoded(tree: Any, _: int) -> Message:
            return encode(tree, key=jax.random.key(0), method="exact")

        packed = pack(self.name, 1.0, (state.reference, state.outer), encoded)
        self._rounds.send(state.round, "state", file_of("state", state.round), packed)

    def _latest(self, first: IslandState) -> IslandState:
        """Return the last stored state that can be read, of the structure of a first one."""
        like, problems = (first.reference, first.outer), []
        # Also the first one, which a list that lags does not have yet.
        numbers = iter(sorted({0, *numbers_of(self.transport.names("state"))}, reverse=True))
        while (number := _processes.of_leader(next(numbers, -1))) >= 0:
            values = Values()
            try:
                values = self._rounds.state(number, like)
            except ValueError as error:
                problems.append(f"{file_of('state', number)}: {error}")
                logger.warning("a state is left out. %s", problems[-1])
            if _processes.all_agree(bool(values)):
                reference, outer = assembled(like, values)
                return first._replace(round=number, reference=reference, outer=outer)
        raise ValueError(
            f"no stored state can be read. {problems[0]} Give the parameters and the outer "
            "optimizer of the run, or start it anew in another place."
        )
