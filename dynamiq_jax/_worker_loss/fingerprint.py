"""Numbers that tell calls of a function apart: by their order, and by the bits of arguments."""

import collections
import hashlib
import threading
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend.core import get_opaque_trace_state

from dynamiq_jax._run.sample import bits_of, hash_of
from pallas_kernels._jax.own_thread import is_traced
from pallas_kernels.codec.rounding import mix

_TRACES = 64  # traces whose calls a thread counts, open ones and closed ones


class _Calls(threading.local):
    """Numbers of calls in the last traces of a thread, by name of the function."""

    def __init__(self) -> None:
        self.of_traces: collections.deque[tuple[Any, collections.Counter[str]]]
        self.of_traces = collections.deque(maxlen=_TRACES)


_calls = _Calls()


def salt_of_call(called: str) -> np.uint32:
    """Return a number for a call of a function, different for each of its calls in one trace.

    The number is the same in all processes that trace the same program. Outside of any trace it is
    the number of a first call, so that a call can be repeated.

    Args:
      called: name of the function, such as a loss, and its static arguments.
    """
    here = get_opaque_trace_state()
    counts = next((counts for trace, counts in _calls.of_traces if trace == here), None)
    if counts is None:
        counts = collections.Counter[str]()
        if is_traced():
            _calls.of_traces.append((here, counts))
    number = counts[called]
    counts[called] += 1
    digest = hashlib.sha256(f"{number} {called}".encode()).digest()
    return np.frombuffer(digest, "<u4")[0]


def word_of(leaves: Sequence[Array], axis_names: Sequence[str]) -> Array:
    """Return a hash of all bits, uint32, of arrays whose parts are on the workers of some axes."""
    words = [mix(hash_of(bits_of(leaf), np.uint32(number))) for number, leaf in enumerate(leaves)]
    word = sum(words, start=jnp.uint32(0))
    for axis in axis_names:
        place = mix(lax.axis_index(axis).astype(jnp.uint32) + np.uint32(1))
        word = lax.psum(mix(word ^ place), axis)
    return word
