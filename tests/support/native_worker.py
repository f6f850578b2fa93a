"""One of two processes of test_native_default.py, which may lack the native codec."""

import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from pallas_kernels import operations
from pallas_kernels._native.build import SWITCH
from tests.support.gradients import of_workers
from tests.support.workers import TWO_WIDTHS

NUM_PROCESSES, SIZE, STEPS = 2, 256 * 150 + 7, 3


def trained(rank: int, topology: str, is_native: bool) -> dict[str, Any]:
    """Take steps with the other process: the parameters, and the backend that ran the codec."""
    os.environ[SWITCH] = str(int(is_native))
    mesh = jax.make_mesh((NUM_PROCESSES,), ("data",), axis_types=(AxisType.Auto,))

    def step(params, gradient):
        key = jax.random.key(1)
        # The next gradient depends on the bits of the sum.
        method = dq.Compression(TWO_WIDTHS, topology)
        mean = dq.pmean(gradient[0] + jnp.sin(params), "data", method, key=key)
        return params - np.float32(0.1) * mean

    def steps(gradient):
        params = jax.lax.fori_loop(0, STEPS, lambda _, p: step(p, gradient), jnp.zeros(SIZE))
        return params[None]

    mapped = jax.shard_map(
        steps, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False
    )
    mine = of_workers(0, NUM_PROCESSES, SIZE)[rank : rank + 1]
    stacked = jax.make_array_from_process_local_data(NamedSharding(mesh, P("data")), mine)
    params = np.asarray(jax.jit(mapped)(stacked).addressable_shards[0].data)[0]
    return {"params": params, "default": operations.default_backend()}
