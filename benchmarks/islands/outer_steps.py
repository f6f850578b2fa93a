"""Rounds of islands in one process, for losses by rounds.

What an island sends is made by `islands.encode` and read by `islands.decode`, and its residual is
kept as `Islands` keeps it.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np
import optax

from dynamiq_jax.islands import decode, encode
from dynamiq_jax.islands.merging import take_outer_step

PLAIN = optax.sgd(1.0)


@dataclasses.dataclass(frozen=True)
class MessageSetting:
    """Messages and outer step of a run."""

    name: str
    method: Any
    decay: float | None = None  # of the residual; None for none
    outer: Any = PLAIN
    beside: bool = False  # whether the exchange of a round runs beside the next local steps


@dataclasses.dataclass(frozen=True)
class IslandTraining:
    """Local steps of islands that train a model."""

    count: int
    params: Any  # the first reference, as NumPy arrays
    init: Callable[[Any], Any]  # state of the local optimizer, from parameters
    # Parameters and state after the local steps of a round, from those before, the seed, the
    # number of the round, and that of the island.
    local: Callable[[Any, Any, int, int, int], tuple[Any, Any]]


def losses_of(
    rounds: Iterable[tuple[Any, float]], loss: Callable[[Any], Any], *, every: int
) -> tuple[list[float], float]:
    """Return losses after some rounds of `references`, and the bits of a coordinate."""
    losses, bits = list[float](), 0.0
    for number, (reference, sent) in enumerate(rounds, start=1):
        bits = sent
        if number % every == 0:
            losses.append(float(loss(reference)))
    return losses, bits


def references(
    training: IslandTraining, setting: MessageSetting, seed: int
) -> Iterator[tuple[Any, float]]:
    """Yield the reference after each round, and the bits of a coordinate of a message."""
    reference, count = training.params, training.count
    size = sum(leaf.size for leaf in jax.tree.leaves(reference))
    states = [training.init(reference) for _ in range(count)]
    residuals = [jax.tree.map(np.zeros_like, reference)] * count
    outer, pending = setting.outer.init(reference), list[Any]()
    starts, number = [reference] * count, 0
    while True:
        messages, moved = [], []
        for island, start in enumerate(starts):
            own, states[island] = training.local(start, states[island], seed, number, island)
            own = jax.device_get(own)
            if setting.beside:
                moved.append(jax.tree.map(np.subtract, own, start))
            wanted = jax.tree.map(
                lambda a, b, r: a - b + np.float32(setting.decay or 0) * r,
                start,
                own,
                residuals[island],
            )
            key = jax.random.key(seed * 10**6 + number * 100 + island)
            messages.append(encode(wanted, setting.method, key=key))
            sent = jax.device_get(decode(messages[-1], like=wanted))
            residuals[island] = jax.tree.map(np.subtract, wanted, sent)
            del own, wanted, sent  # those of a large model take gigabytes
        pending.append(decode(*messages, weights=[1 / count] * count, like=reference))
        if len(pending) > setting.beside:
            mean = pending.pop(0)
            reference, outer = take_outer_step(setting.outer, mean, outer, reference)
            reference = jax.device_get(reference)
        starts = [reference] * count
        if setting.beside:
            starts = [jax.tree.map(np.add, reference, move) for move in moved]
        number += 1
        yield reference, 8 * len(messages[-1].body) / size
