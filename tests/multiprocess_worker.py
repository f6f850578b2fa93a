"""One process of test_multiprocess.py: `python multiprocess_worker.py PORT RANK INPUT OUTPUT`.

Sums the rows of INPUT (.npy, one row for each process) over processes that have one CPU device
each, and writes what this rank got to OUTPUT.
"""

import sys

import jax
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq


def main(port: str, rank: int, source: str, target: str) -> None:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    gradients = np.load(source)
    num_processes = len(gradients)
    jax.distributed.initialize(f"127.0.0.1:{port}", num_processes, rank, initialization_timeout=60)
    mesh = jax.make_mesh((num_processes,), ("data",), axis_types=(AxisType.Auto,))
    stacked = jax.make_array_from_process_local_data(
        jax.NamedSharding(mesh, P("data")), gradients[rank : rank + 1]
    )

    def local(gradient):
        return dq.psum(gradient[0], "data", key=jax.random.key(7))[None]

    mapped = jax.shard_map(local, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    (shard,) = jax.jit(mapped)(stacked).addressable_shards
    np.save(target, np.asarray(shard.data)[0])
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4])
