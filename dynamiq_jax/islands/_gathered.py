"""Record of the arrays that one worker sends in an all-gather, and its decoder."""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import Array

from dynamiq_jax._core import Axis
from dynamiq_jax.methods import Call, ChunkedMethod
from dynamiq_jax.topologies import Ring
from pallas_kernels._jax.compat import override


@dataclasses.dataclass(frozen=True, eq=False)
class _Alone(Axis):
    """Axis of one worker. A function takes each array that is gathered, and returns the result."""

    gathers: Callable[[Array], Array]

    @property
    @override
    def index(self) -> Array:
        return jnp.zeros((), jnp.int32)

    @override
    def gather(self, value: Array, *, tiled: bool = False) -> Array:
        gathered = self.gathers(value)
        return gathered if tiled else gathered[None]


def sent(method: ChunkedMethod, part: Array, key: Array) -> list[Array]:
    """Return the arrays that a worker sends of a bucket in an all-gather, in order.

    Its part is float [size], a multiple of `method.granule`. The key, a typed one, makes the noise.
    """
    arrays: list[Array] = []

    def record(value: Array) -> Array:
        arrays.append(value)
        return value

    method.all_gather(part, _call(part.size, record), key)
    return arrays


def received(method: ChunkedMethod, size: int, arrays: Sequence[Array]) -> Array:
    """Decode the arrays of `sent` to float32 [size], the same bits on all hardware."""
    *statistics, payload = arrays
    remaining = iter(statistics)
    # The codec of zeros decodes: it takes everything about the values from what it gathers.
    call = _call(size, lambda value: next(remaining))
    codec = method.portable.bind(jnp.zeros(size, jnp.float32), call, jax.random.key(0))
    return codec.decompress(payload[None])


def _call(size: int, gathers: Callable[[Array], Array]) -> Call:
    axis = _Alone("alone", 1, gathers)
    return Call(size=size, axis=axis, topology=Ring(), collective="all_gather")
