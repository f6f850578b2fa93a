"""Islands in threads of one process, and a store in memory that damages files."""

import concurrent.futures
import functools
import threading
from collections.abc import Callable

import jax
import numpy as np
import optax

from dynamiq_jax.islands import Islands
from tests.support.gradients import heavy_tailed

_LOCK = threading.Lock()
PARAMS = {"w": heavy_tailed(0, (40, 32)), "b": heavy_tailed(1, (7,))}
PLAIN = {"method": "exact", "outer": optax.sgd(1.0)}  # fields of rounds that are easily predicted


def moved(params, seed: int):
    """Parameters after local steps: others for each seed."""
    names = enumerate(sorted(params))
    change = {name: heavy_tailed(10 * seed + 2 + i, params[name].shape) for i, name in names}
    return jax.tree.map(np.add, jax.device_get(params), change)


def together(calls):
    """Results of functions that wait for each other."""
    with concurrent.futures.ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(60) for future in [pool.submit(call) for call in calls]]


def joined(transport, names="abc", **fields):
    """Islands and their first states. Each has a transport of its own if there is one per name."""
    transports = transport if isinstance(transport, dict) else dict.fromkeys(names, transport)
    islands = [
        Islands(transport=transports[n], name=n, **{"count": len(names), "poll": 0.005, **fields})
        for n in names
    ]
    return islands, together([functools.partial(i.join, PARAMS) for i in islands])


def exchanged(islands, states, seeds, weights=None):
    """States after a round, in which each island moves by its seed."""
    pairs = zip(states, seeds, strict=True)
    return ended(islands, states, [moved(s.reference, seed) for s, seed in pairs], weights)


def ended(islands, states, params, weights=None):
    """States after a round that ends with some parameters of each island."""
    weights = weights or [1.0] * len(islands)
    rows = zip(islands, params, states, weights, strict=True)
    return together([functools.partial(i.exchange, p, s, weight=w) for i, p, s, w in rows])


def near(one, other) -> bool:
    """Whether trees are equal up to the roundings of some sums."""
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(np.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in pairs)


def same(one, other) -> bool:
    """Whether trees are equal bit for bit."""
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(np.array_equal(a, b) for a, b in pairs)


class Memory:
    """A store in memory.

    Args:
      files: bytes by name, which views share.
      written: function of a name and its bytes to those that are stored.
      read: the same for those that are returned.
    """

    def __init__(
        self,
        files: dict[str, bytes] | None = None,
        written: Callable[[str, bytes], bytes] = lambda name, data: data,
        read: Callable[[str, bytes], bytes] = lambda name, data: data,
    ):
        self.files, self.written, self.read = {} if files is None else files, written, read

    def put(self, name: str, data: bytes) -> bool:
        with _LOCK:
            if name in self.files:
                return False
            self.files[name] = self.written(name, data)
            return True

    def get(self, name: str) -> bytes | None:
        data = self.files.get(name)
        return data if data is None else self.read(name, data)

    def names(self, folder: str) -> list[str]:
        inside = [n.removeprefix(folder + "/") for n in [*self.files] if n.startswith(folder + "/")]
        return sorted({name.split("/")[0] for name in inside})
