"""Local SGD between jobs that come and go."""

import dataclasses
import functools
import hashlib
import json
import struct
import time
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import dynamiq_jax as dq
from dynamiq_jax.contrib.islands.transports import Transport
from dynamiq_jax.methods import Method
from dynamiq_jax.parts import (
    check_choice,
    check_flag,
    check_floating,
    check_integer,
    check_number,
    check_optimizer,
)

_LONGEST_NAME = 200  # bytes; of files it may have 255
_WEIGHT = struct.Struct("<d")  # before the message of a change


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
    transport as a message of `dynamiq_jax.encode`. A round ends when all of the round before, and
    all that have joined since, have sent their change, or when one has waited for `deadline`
    seconds. It then writes down who came: the first such decision counts. All take the weighted
    mean of those changes as the gradient of an outer step. So nobody waits longer than the
    deadline, and once for an island that is gone. No process has a special role.

    An island starts with `join`, also after a crash: from the last stored state, it repeats the
    outer steps since then. Each decision has a hash of reference and outer state, which every
    island compares with its own.

    The outer step is that of `training.LocalSGD`. Results are not bit-identical to it: an
    all-reduce rounds sums again, and here each change is rounded once.
    """

    transport: Transport
    name: str  # of this island, another one for each
    count: int = 1  # islands that the first round waits for
    deadline: float = 60.0  # seconds that an island waits for the others, from its own change on
    # Change that comes after the decision: "keep" adds it to the next one, "drop" forgets it.
    late: Literal["keep", "drop"] = "keep"
    # What the rounding of a change left out is added to the next one.
    feedback: bool = False
    # Takes the mean change (reference - parameters) as a gradient.
    outer: optax.GradientTransformation = optax.sgd(0.7, momentum=0.9, nesterov=True)
    method: Method | str = dq.DynamiQ(bits=4)
    store_every: int = 10  # rounds between two states that are stored for islands that join
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
        check_integer("store_every", self.store_every, 1)
        check_number("poll", self.poll, 0, float("inf"))
        check_integer("seed", self.seed, -(2**31), 2**32 - 1)
        check_optimizer("outer", self.outer, "optax.sgd(0.7, momentum=0.9, nesterov=True)")
        # Raises for a method that no message can hold: not after a round of local steps.
        dq.encode(np.zeros(1, np.float32), key=jax.random.key(0), method=self.method)

    def join(self, params: Any) -> IslandState:
        """Return the state of the run so far, and announce this island for its current round.

        Args:
          params: parameters of a new run, the same shapes on all islands. The first island that
            joins sets their values. Later ones get the reference.

        Raises:
          ValueError: a stored state of other parameters, or of another outer optimizer.
          TypeError: a leaf that is not floating.
        """
        no_changes = "of which islands average no changes. Give floating leaves alone."
        check_floating("params", params, no_changes)
        first = IslandState(0, params, self.outer.init(params), ())
        if not self.transport.names("state"):
            self._store(first)
        state = self._latest(first)
        state = self._caught_up(state._replace(residual=jax.tree.map(jnp.zeros_like, params)))
        self._announce(state.round)
        start = time.monotonic()
        while state.round == 0 and self._waits(start, len(self._expected(0)) < self.count):
            time.sleep(self.poll)
        return state

    def exchange(self, params: Any, state: IslandState, *, weight: float = 1.0) -> IslandState:
        """Send the change of a round, and take the outer steps since.

        Args:
          params: parameters after the local steps of this round, which began at
            `state.reference`.
          state: the state of `join` or of the exchange before.
          weight: share of this change in the mean, such as local steps or tokens.

        Returns:
          The state, a round later, or more if this island was late by more.

        Raises:
          RuntimeError: the islands hold other references than this one.
          ValueError: a weight that is not positive.
        """
        check_number("weight", weight, np.finfo(np.float64).tiny, 1e300, "a positive number")
        number = state.round
        wanted = jax.tree.map(_change, state.reference, params, state.residual)
        key = jax.random.fold_in(jax.random.key(self.seed), number)
        key = jax.random.fold_in(key, zlib.crc32(self.name.encode()))
        message = dq.encode(wanted, key=key, method=self.method)
        reference = _hash_of(state)
        folder = _folder_of(number, reference)
        data = _WEIGHT.pack(weight) + message.to_bytes()
        is_late = self.transport.get(f"decision/{number:08}") is not None
        stored = not is_late and self.transport.put(f"{folder}/{self.name}", data)
        members = self._decision(number, reference)
        # A name may be that of an island before a crash, whose change was another one.
        stored = stored or self.transport.get(f"{folder}/{self.name}") == data
        has_come = stored and self.name in members
        if has_come:
            left = _left(wanted, dq.decode(message, like=wanted)) if self.feedback else None
        else:
            left = wanted if self.late == "keep" else state.residual
        state = self._outer_step(state, reference, members)
        zeros = jax.tree.map(jnp.zeros_like, wanted)
        state = self._caught_up(state._replace(residual=zeros if left is None else left))
        self._announce(state.round)
        return state

    def _decision(self, number: int, reference: str) -> Sequence[str]:
        """Return the islands whose changes a round counts, once all came or the deadline is over.

        Raises:
          RuntimeError: the decision is about another reference.
        """
        name, folder = f"decision/{number:08}", _folder_of(number, reference)
        start, decision = time.monotonic(), self.transport.get(name)
        while decision is None:
            came = self.transport.names(folder)
            if not self._waits(start, bool(self._expected(number) - {*came})):
                mine = json.dumps({"reference": reference, "members": came})
                self.transport.put(name, mine.encode())
            else:
                time.sleep(self.poll)
            decision = self.transport.get(name)
        fields: Mapping[str, Any] = json.loads(decision)
        if fields["reference"] != reference:
            raise RuntimeError(
                f"round {number}: {self.name!r} holds the reference {reference}, and the others "
                f"{fields['reference']}. Call join for theirs."
            )
        members: Sequence[str] = fields["members"]
        return members

    def _outer_step(
        self, state: IslandState, reference: str, members: Sequence[str]
    ) -> IslandState:
        """Take the outer step of a round with the changes of some islands from its reference."""
        folder = _folder_of(state.round, reference)
        weights, messages = [], []
        for member in members:
            data = self.transport.get(f"{folder}/{member}")
            if data is None:
                raise RuntimeError(
                    f"{folder}/{member} is gone from the transport. Keep changes until a later "
                    "state is stored."
                )
            weights.append(_WEIGHT.unpack_from(data)[0])
            messages.append(dq.Message.from_bytes(data[_WEIGHT.size :]))
        shares = [weight / sum(weights) for weight in weights]
        mean = dq.decode(*messages, weights=shares, like=state.reference)
        after, outer = take_outer_step(self.outer, mean, state.outer, state.reference)
        state = state._replace(round=state.round + 1, reference=after, outer=outer)
        if state.round % self.store_every == 0 and self.name == members[0]:
            self._store(state)
        return state

    def _caught_up(self, state: IslandState) -> IslandState:
        """Take the outer steps of all rounds that are decided."""
        while self.transport.get(f"decision/{state.round:08}") is not None:
            reference = _hash_of(state)
            members = self._decision(state.round, reference)
            state = self._outer_step(state, reference, members)
        return state

    def _store(self, state: IslandState) -> None:
        """Store what is the same on all islands, for those that join."""
        shared = jax.device_get((state.reference, state.outer))
        message = dq.encode(shared, key=jax.random.key(0), method="exact")
        self.transport.put(f"state/{state.round:08}", message.to_bytes())

    def _latest(self, first: IslandState) -> IslandState:
        """Return the last state that is stored, of the structure of a first one."""
        name = max(self.transport.names("state"))
        data = self.transport.get(f"state/{name}")
        assert data is not None
        message = dq.Message.from_bytes(data)
        reference, outer = dq.decode(message, like=(first.reference, first.outer))
        return first._replace(round=int(name), reference=reference, outer=outer)

    def _announce(self, number: int) -> None:
        self.transport.put(f"here/{number:08}/{self.name}", b"")

    def _expected(self, number: int) -> set[str]:
        """Return the islands that a round waits for."""
        before = self.transport.get(f"decision/{number - 1:08}")
        stayed = json.loads(before)["members"] if before is not None else ()
        return {*stayed, *self.transport.names(f"here/{number:08}")}

    def _waits(self, start: float, lacks: bool) -> bool:
        return lacks and time.monotonic() - start < self.deadline


@functools.partial(jax.jit, static_argnums=0)
def take_outer_step(
    outer: optax.GradientTransformation, mean: Any, state: optax.OptState, before: Any
) -> tuple[Any, optax.OptState]:
    """Return the reference and the state of the outer optimizer after a mean change."""
    updates, state = outer.update(mean, state, before)
    return optax.apply_updates(before, updates), state


def hash_of(tree: Any) -> str:
    """Return a hash of the values of a tree."""
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(tree):
        digest.update(np.asarray(leaf).tobytes())
    return digest.hexdigest()[:16]


def _is_file_name(name: str) -> bool:
    """Return whether an island can have a name: transports store files under it."""
    is_plain = name.isprintable() and "/" not in name and name not in ("", ".", "..")
    return is_plain and len(name.encode()) <= _LONGEST_NAME


def _folder_of(number: int, reference: str) -> str:
    """Return where the changes of a round are that began at a reference, by its hash."""
    return f"change/{number:08}/{reference}"


def _change(before: Any, now: Any, residual: Any) -> Any:
    return before - now + residual


def _left(wanted: Any, applied: Any) -> Any:
    """Return what was not applied; nothing where that is not finite."""

    def left(wanted: Any, applied: Any) -> Any:
        rest = wanted - applied
        return jnp.where(jnp.isfinite(rest), rest, jnp.zeros_like(rest))

    return jax.tree.map(left, wanted, applied)


def _hash_of(state: IslandState) -> str:
    """Return a hash of everything that is the same on all islands."""
    return hash_of((np.int64(state.round), state.reference, state.outer))
