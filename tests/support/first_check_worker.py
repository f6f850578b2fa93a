"""One process of test_check_in_processes.py."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq

NUM_PROCESSES = 2
ROWS, IN, OUT = 16, 12, 24
# Over the processes go the workers, or the shards of the parameters.
AXES = {
    "workers": (("data", "fsdp"), AxisType.Auto),
    "shards": (("fsdp", "data"), AxisType.Auto),
    "workers on explicit axes": (("data", "fsdp"), AxisType.Explicit),
}


def squares(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.mean(jnp.tanh(x @ w) ** 2, axis=1)


def mean(w: jax.Array, x: jax.Array) -> jax.Array:
    return squares(w, x).mean()


def total(w: jax.Array, x: jax.Array) -> jax.Array:
    return squares(w, x).sum()


def with_rows(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    own = squares(w, x)
    return own.mean(), own


LOSSES: dict[str, tuple[Any, dict[str, Any]]] = {
    "mean": (mean, {}),
    "sum": (total, {}),
    "rows": (with_rows, {"has_aux": True, "aux": "rows"}),
    "wrong role": (with_rows, {"has_aux": True, "aux": "mean"}),
}


def error_of(loss: str, over: str, transform: str) -> str:
    names, kind = AXES[over]
    mesh = jax.make_mesh((2, 2), names, axis_types=(kind, kind))
    rng = np.random.default_rng(0)

    def placed(shape: tuple[int, int], spec: P) -> jax.Array:
        values = rng.normal(size=shape).astype(np.float32)
        sharding = NamedSharding(mesh, spec)
        return jax.make_array_from_callback(shape, sharding, lambda index: values[index])

    loss_fn, options = LOSSES[loss]
    wrapped = dq.data_parallel(
        loss_fn, mesh=mesh, axis_name="data", transform=transform, specs=P(None, "fsdp"), **options
    )
    try:
        dq.check_data_parallel(
            wrapped, placed((IN, OUT), P(None, "fsdp")), placed((ROWS, IN), P("data"))
        )
    except ValueError as error:
        return str(error)
    return ""


def errors_of(rank: int, cases: Sequence[tuple[str, str, str]]) -> dict[tuple[str, str, str], str]:
    """Return the error of each case: a loss, the axes it is over and a transformation. It may be
    empty.
    """
    return {case: error_of(*case) for case in cases}
