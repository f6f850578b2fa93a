"""orbax: parameters with slashes, spaces and umlauts in names, which become names of files."""

import pathlib
import tempfile

import flax.serialization
import jax
import orbax.checkpoint as ocp
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from tests.reports.setup import mesh_of, normal

params = {"größe/ä b.c": normal(64, 32), "x": {"y/z": normal(64, 32)}, "": normal(64, 32)}
for _ in range(40):
    params = {"a_layer_with_a_rather_long_name": params}
tx = dq.all_reduce_gradients("data", method="ef+bf16")
specs = dq.AllReduceState(step=P(), method=P("data"), metrics=P())
init = jax.shard_map(tx.init, mesh=mesh_of(), in_specs=P(), out_specs=specs)
state = jax.jit(init)(params)
assert all(name.isascii() and len(name) < 100 and "/" not in name for name in state.method)
as_bytes = flax.serialization.to_bytes(state)
with tempfile.TemporaryDirectory() as folder, ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(pathlib.Path(folder) / "state", state)
    checkpointer.wait_until_finished()
    restored = checkpointer.restore(pathlib.Path(folder) / "state", state)
for again in (restored, flax.serialization.from_bytes(state, as_bytes)):
    assert jax.tree.structure(again) == jax.tree.structure(state), "another structure"
