"""An all-reduce of one bucket, by a method alone."""

import functools
from collections.abc import Callable
from typing import Any

import jax

from dynamiq_jax.methods import Method
from tests.support.workers import call_on, simulated


@functools.cache
def reducing(method: Method, size: int, num_workers: int) -> Callable[..., Any]:
    """All-reduce of one bucket on a ring: `(key, stacked vectors)` to totals and applied values."""
    call = call_on(size, num_workers, feedback=True)

    def local(key: jax.Array, values: Any) -> Any:
        reduced = method.all_reduce(values, call, key, ())
        return reduced.total, reduced.applied

    return simulated(local)
