"""Exchanges that run beside local steps: each change counts once, and nobody waits for a store."""

import threading

import jax
import numpy as np
import pytest

from dynamiq_jax.islands import Islands, Sparse
from tests.support.islands import PARAMS, PLAIN, Memory, joined, moved, near, same, together

FIELDS = {**PLAIN, "deadline": float("inf")}


def rounds_of(island, state, seeds):
    """Take rounds whose exchanges run beside the next: the last state, and changes by round."""
    params, exchange, changes = state.reference, None, []
    for seed in seeds:
        start, params = params, moved(params, seed)
        if exchange is not None:
            state = exchange.result()
        exchange = island.start_exchange(params, state)
        changes.append(jax.tree.map(np.subtract, params, start))
        params = exchange.params
    return exchange.result(), changes


def test_an_island_alone_goes_on_as_without_exchanges():
    (island,), (state,) = joined(Memory(), "a", **FIELDS)
    alone = PARAMS
    for seed in range(4):
        alone = moved(alone, seed)
    state, _ = rounds_of(island, state, range(4))
    assert state.round == 4 and near(state.reference, alone) and near(state.start, alone)


@pytest.mark.parametrize("count", (2, 3))
def test_each_change_counts_once(count):
    """The reference is the start and the mean of all changes. The next round begins where this
    island's own change is in, and those of the others are not.
    """
    islands, states = joined(Memory(), "abc"[:count], **FIELDS)
    seeds = [range(10 * n, 10 * n + 4) for n in range(count)]
    calls = [lambda n=n: rounds_of(islands[n], states[n], seeds[n]) for n in range(count)]
    ends = together(calls)
    assert all(same(state[:3], ends[0][0][:3]) for state, _ in ends)
    every = [change for _, changes in ends for change in changes]
    total = jax.tree.map(lambda *leaves: sum(leaves) / count, *every)
    assert near(ends[0][0].reference, jax.tree.map(np.add, PARAMS, total))
    before = [change for _, changes in ends for change in changes[:-1]]
    reference = jax.tree.map(lambda p, *leaves: p + sum(leaves) / count, PARAMS, *before)
    for state, changes in ends:
        assert near(state.start, jax.tree.map(np.add, reference, changes[-1]))


def test_what_a_sparse_message_leaves_out_is_sent_later():
    fields = {**FIELDS, "method": Sparse(keep=64, gain=1.0), "feedback": True}
    (island,), (state,) = joined(Memory(), "a", **fields)
    state, changes = rounds_of(island, state, range(5))
    total = jax.tree.map(lambda *leaves: sum(leaves), *changes)
    for name in PARAMS:
        sent = state.reference[name] - PARAMS[name]
        assert np.any(state.residual[name])
        np.testing.assert_allclose(sent - state.residual[name], total[name], rtol=1e-3, atol=1e-5)


def test_an_exchange_waits_for_nothing_before_its_result():
    gate = threading.Event()

    def slowly(name, data):
        if name.startswith("change/"):
            gate.wait()
        return data

    (island,), (state,) = joined(Memory(written=slowly), "a", **FIELDS)
    exchange = island.start_exchange(moved(PARAMS, 1), state)
    assert not exchange.done() and same(exchange.params, moved(PARAMS, 1))
    gate.set()
    first = exchange.result()
    assert exchange.done() and exchange.result() is first and first.round == 1


def test_errors_of_the_store_come_from_the_result():
    def down(name, data):
        if name.startswith("change/"):
            raise ConnectionError("the store is down")
        return data

    (island,), (state,) = joined(Memory(written=down), "a", **FIELDS)
    exchange = island.start_exchange(moved(PARAMS, 1), state)
    with pytest.raises(ConnectionError, match="the store is down"):
        exchange.result()
    with pytest.raises(ValueError, match="weight=0"):
        island.start_exchange(moved(PARAMS, 1), state, weight=0)


def test_an_island_that_was_late_goes_on_at_its_own_change():
    """Its change is kept, and the rounds of the others are in its reference."""
    fields = {**FIELDS, "deadline": 0, "count": 1}
    store = Memory()
    (quick,), (state,) = joined(store, "a", **fields)
    slow = Islands(transport=store, name="b", poll=0.002, **fields)
    behind = slow.join(PARAMS)
    for seed in (1, 2):
        state = quick.exchange(moved(state.reference, seed), state)
    exchange = slow.start_exchange(moved(PARAMS, 3), behind)
    found = exchange.result()
    assert found.round == 2 and same(found.reference, state.reference)
    assert near(found.residual, jax.tree.map(np.subtract, PARAMS, moved(PARAMS, 3)))
    after = slow.start_exchange(exchange.params, found)  # nothing but what was kept
    moves = jax.tree.map(np.subtract, moved(PARAMS, 3), PARAMS)
    assert near(after.result().reference, jax.tree.map(np.add, state.reference, moves))
