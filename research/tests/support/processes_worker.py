"""One process of test_processes.py: collectives that differ, or that one is late for."""

import contextlib
import functools
import unittest.mock
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

import dynamiq_jax as dq
from dynamiq_jax._check import exchange
from dynamiq_research import LossyChannel, LossyCollectives, Pipelined, moshpit_mean
from tests.support.agreement_worker import LONG, Case, case, outcome, tree_of
from tests.support.late_worker import along, errors_of, in_map


@contextlib.contextmanager
def without_agreement():
    with unittest.mock.patch.object(exchange.Exchange, "agree", lambda *args, **how: None):
        yield


def pipelined(name: str, half: str, **fields: Any) -> Any:
    step = Pipelined(optimizer=optax.sgd(0.1), axis_name="data", **fields)
    params = {name: jnp.ones((16, 256))}
    state = step.init(params)
    with contextlib.nullcontext() if half == "gather" else without_agreement():
        updated = step.gather(state)
    return updated.params if half == "gather" else step.scatter(tree_of(name), updated).shards


def moshpit(name: str, **arguments: Any) -> Any:
    key = jax.random.key(0)
    return moshpit_mean(tree_of(name), ("data",), key=key, **arguments)


def lossy(name: str, broadcast: bool, rate: float) -> Any:
    channel = LossyChannel(rate=rate)
    step = LossyCollectives(axis_name="data", channel=channel)
    tree, key = tree_of(name), jax.random.key(0)
    if broadcast:
        return step.broadcast(step.own_parts(tree), tree, key=key)
    return step.scatter_mean(tree, key=key)


DIFFERING: dict[str, Case] = {
    "first half": case(
        pipelined, {"half": "scatter", "seed": 1}, {"half": "scatter", "seed": 2}, "seed", "1", "2"
    ),
    "second half": case(
        pipelined,
        {"half": "gather", "clip_norm": 1.0},
        {"half": "gather"},
        "clip_norm",
        "1",
        "None",
    ),
    "grid": case(moshpit, {"method": "mxfp8"}, {"method": "mxfp4"}, "method", "MXFP8", "MXFP4"),
    **{
        name: case(
            lossy,
            {"broadcast": is_broadcast, "rate": 0.1},
            {"broadcast": is_broadcast, "rate": 0.2},
            "channel.rate",
            "0.1",
            "0.2",
        )
        for name, is_broadcast in (("lossy sum", False), ("lossy broadcast", True))
    },
}

LATE: dict[str, Callable[[Mesh], Any]] = {
    "pmean, thc": along(dq.pmean, method="thc"),
    "Pipelined, first half": in_map(lambda: pipelined("w", "scatter")),
    "Pipelined, second half": in_map(lambda: pipelined("w", "gather")),
    "moshpit_mean": in_map(lambda: moshpit("w", method="mxfp8")),
    "LossyCollectives": in_map(lambda: lossy("w", broadcast=False, rate=0.1)),
    "LossyCollectives.broadcast": in_map(lambda: lossy("w", broadcast=True, rate=0.1)),
}


def differing_errors(rank: int, number: int) -> dict[str, Any]:
    """Run cases in which the last process runs another collective than all others."""
    exchange.PATIENCE = exchange.SHORT_PATIENCE = LONG
    differs = rank == number - 1
    return {
        name: outcome(functools.partial(one if differs else others, name))
        for name, (one, others, _) in DIFFERING.items()
    }


def late_errors(rank: int) -> dict[str, str | None]:
    return errors_of(rank, LATE)
