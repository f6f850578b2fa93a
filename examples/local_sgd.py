"""Local SGD (DiLoCo): four workers train alone, and average their changes every ten steps."""

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq

mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
local_sgd = dq.training.LocalSGD(axis_name="data", every=10, method="dynamiq:4")
optimizer = optax.adamw(1e-2)
keys = jax.random.split(jax.random.key(0), 3)
params = {
    "hidden": jax.random.normal(keys[0], (32, 256)) / 32**0.5,
    "out": jax.random.normal(keys[1], (256, 16)) / 256**0.5,
}
teacher = jax.random.normal(keys[2], (32, 16))


def loss_fn(params, x):
    return jnp.mean((jnp.tanh(x @ params["hidden"]) @ params["out"] - jnp.tanh(x @ teacher)) ** 2)


def init(params):  # every worker has its own copy: a leading axis, split over the workers
    own = jax.lax.pcast((params, optimizer.init(params)), "data", to="varying")
    return jax.tree.map(lambda leaf: leaf[None], own), local_sgd.init(params)


def train_step(workers, state, x):
    params, opt_state = jax.tree.map(lambda leaf: leaf[0], workers)
    updates, opt_state = optimizer.update(jax.grad(loss_fn)(params, x), opt_state, params)
    params, state = local_sgd.update(optax.apply_updates(params, updates), state)
    return jax.tree.map(lambda leaf: leaf[None], (params, opt_state)), state


specs = (P("data"), local_sgd.state_specs)
workers, state = jax.jit(jax.shard_map(init, mesh=mesh, in_specs=P(), out_specs=specs))(params)
step = jax.jit(jax.shard_map(train_step, mesh=mesh, in_specs=(*specs, P("data")), out_specs=specs))
for number in range(200):
    x = jax.random.normal(jax.random.fold_in(jax.random.key(1), number), (4 * 64, 32))
    workers, state = step(workers, state, x)

test = jax.random.normal(jax.random.key(2), (1024, 32))
before, after = float(loss_fn(params, test)), float(loss_fn(state.reference, test))
print(f"loss {before:.2f}, then {after:.2f}")  # loss 1.25, then 0.03
(report,) = local_sgd.wire_report(params, 4)
exact = dq.wire_report(params, 4, method="bf16").bytes_per_worker
print(f"{10 * exact / report.bytes_per_worker:.0f} times fewer bytes")  # 40 times fewer bytes
