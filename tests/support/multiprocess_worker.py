"""One process of test_multiprocess.py."""

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from tests.support.workers import STOCHASTIC, mesh_of

NUM_PROCESSES, LOCAL_DEVICES = 2, 2
KEY = 7


def sum_by(method, topology="ring"):
    def reduce(gradient, axis_name):
        key = jax.random.key(KEY)
        return dq.psum(gradient, axis_name, key=key, method=dq.Compression(method, topology))

    return reduce


def sum_in_halves(gradient, axis_name):
    """The sum again, as a reduce-scatter and a gather."""
    arguments = {"key": jax.random.key(KEY), "method": STOCHASTIC, "tiled": True}
    return dq.all_gather(dq.psum_scatter(gradient, axis_name, **arguments), axis_name, **arguments)


HIERARCHICAL = ("hosts", "local")
# name: (axes of the mesh, collective of a gradient)
CASES = {
    "ring": ("data", sum_by(STOCHASTIC)),
    "butterfly": ("data", sum_by(STOCHASTIC, topology="butterfly")),
    "all_to_all": ("data", sum_by(STOCHASTIC, topology="all_to_all")),
    "hierarchical": (HIERARCHICAL, sum_by(STOCHASTIC)),
    "halves": ("data", sum_in_halves),
}


def sums(rank: int, rows: np.ndarray) -> dict[str, np.ndarray]:
    """Sum rows over all devices, one a device, in every way of `CASES`: sums of its own devices."""
    mine = rows[rank * LOCAL_DEVICES : (rank + 1) * LOCAL_DEVICES]
    results = {}
    for name, (axes, reduce) in CASES.items():
        nested = mesh_of(hosts=NUM_PROCESSES, local=LOCAL_DEVICES)
        mesh = nested if axes == HIERARCHICAL else mesh_of(data=nested.size)
        stacked = jax.make_array_from_process_local_data(jax.NamedSharding(mesh, P(axes)), mine)
        mapped = jax.shard_map(
            lambda gradient, r=reduce, a=axes: r(gradient[0], a)[None],
            mesh=mesh,
            in_specs=P(axes),
            out_specs=P(axes),
        )
        shards = jax.jit(mapped)(stacked).addressable_shards
        results[name] = np.concatenate([np.asarray(shard.data) for shard in shards])
    return results
