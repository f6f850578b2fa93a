"""One process of test_multiprocess.py: `python multiprocess_worker.py PORT RANK INPUT OUTPUT`.

Sums the rows of INPUT (.npy) over processes that have two CPU devices each, one row a device, in
every way of `CASES`, and writes what its own devices got to OUTPUT (.npz).
"""

import sys

import jax
import numpy as np
from jax import Array
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from dynamiq_jax.topologies import AllToAll, Butterfly, Ring
from tests.support.workers import TWO_CLASSES

NUM_PROCESSES, LOCAL_DEVICES = 2, 2
KEY = 7
# name: (axes of the mesh, options)
CASES = {
    "default": (("data",), {}),
    "ring": (("data",), {"method": TWO_CLASSES, "topology": Ring()}),
    "butterfly": (("data",), {"method": TWO_CLASSES, "topology": Butterfly()}),
    "all_to_all": (("data",), {"method": TWO_CLASSES, "topology": AllToAll()}),
    "bf16": (("data",), {"method": dq.BF16()}),
    "hierarchical": (("hosts", "local"), {"method": TWO_CLASSES}),
}


def reduce(name: str, gradient: Array) -> Array:
    """The sum of one case; inside shard_map or vmap with the case's axes."""
    axes, options = CASES[name]
    axis_name = axes[0] if len(axes) == 1 else axes
    return dq.psum(gradient, axis_name, key=jax.random.key(KEY), **options)


def main(port: str, rank: int, source: str, target: str) -> None:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_num_cpu_devices", LOCAL_DEVICES)
    jax.distributed.initialize(f"127.0.0.1:{port}", NUM_PROCESSES, rank, initialization_timeout=60)
    rows = np.load(source)
    mine = rows[rank * LOCAL_DEVICES : (rank + 1) * LOCAL_DEVICES]
    results = {}
    for name, (axes, _) in CASES.items():
        shape = (
            (NUM_PROCESSES * LOCAL_DEVICES,) if len(axes) == 1 else (NUM_PROCESSES, LOCAL_DEVICES)
        )
        mesh = jax.make_mesh(shape, axes, axis_types=(AxisType.Auto,) * len(axes))
        stacked = jax.make_array_from_process_local_data(jax.NamedSharding(mesh, P(axes)), mine)
        mapped = jax.shard_map(
            lambda gradient, name=name: reduce(name, gradient[0])[None],
            mesh=mesh,
            in_specs=P(axes),
            out_specs=P(axes),
        )
        shards = jax.jit(mapped)(stacked).addressable_shards
        results[name] = np.concatenate([np.asarray(shard.data) for shard in shards])
    np.savez(target, **results)
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4])
