"""One of two processes of test_first_use.py, whose kernels may have a fault."""

import warnings
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from tests.support.broken_backends import BROKEN, backend, choose
from tests.support.gradients import of_workers

NUM_PROCESSES, SIZE = 2, 4096
METHOD = dq.DynamiQ(bits=6.0, widths=(4, 8))


def reduce(gradient):
    return dq.psum(gradient, "data", key=jax.random.key(1), method=METHOD)


def summed(rank: int, fault: str) -> dict[str, Any]:
    """Sum gradients with the other process: the result, the warnings and the error."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        choose(patch, backend() if fault == "nothing" else BROKEN[fault][0])
        mesh = jax.make_mesh((NUM_PROCESSES,), ("data",), axis_types=(AxisType.Auto,))
        mapped = jax.shard_map(
            lambda gradient: reduce(gradient[0])[None],
            mesh=mesh,
            in_specs=P("data"),
            out_specs=P("data"),
        )
        mine = of_workers(0, NUM_PROCESSES, SIZE)[rank : rank + 1]
        stacked = jax.make_array_from_process_local_data(jax.NamedSharding(mesh, P("data")), mine)
        result, error = np.zeros(0), ""
        try:
            result = np.asarray(jax.jit(mapped)(stacked).addressable_shards[0].data)[0]
        except RuntimeError as raised:
            error = str(raised)
    texts = [str(warning.message) for warning in caught if warning.category is UserWarning]
    return {"result": result, "error": error, "warnings": texts}
