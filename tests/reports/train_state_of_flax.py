"""flax: TrainState.apply_gradients inside of a mapped step, whose optimizer has the all-reduce."""

import jax
import optax
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from tests.reports.setup import loss_fn, mesh_of, normal

x = normal(8, 64, seed=1)


def loss(params, x):
    return loss_fn(params["w"], x)


tx = optax.chain(dq.all_reduce_gradients("data", method="bf16"), optax.adam(1e-2))
state = TrainState.create(apply_fn=None, params={"w": normal(64, 32)}, tx=tx)


@jax.jit
def train_step(state, x):
    def step(state, x):
        return state.apply_gradients(grads=jax.grad(loss)(state.params, x))

    specs = (P(), P("data"))
    mapped = jax.shard_map(step, mesh=mesh_of(), in_specs=specs, out_specs=P(), check_vma=False)
    return mapped(state, x)


before = loss(state.params, x)
for _ in range(3):
    state = train_step(state, x)
assert train_step._cache_size() <= 2, "the step was compiled again"
assert state.step == 3 and state.opt_state[0].step == 3, "steps were not counted"
assert loss(state.params, x) < before, "the loss has not fallen"
