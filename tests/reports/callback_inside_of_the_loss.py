"""JAX (jax#25887): a debug callback in a mapped loss, which may fail, vanish or run too often."""

import jax

import dynamiq_jax as dq
from tests.reports.setup import loss_fn, mesh_of, normal

w, x = normal(16, 8), normal(8, 16, seed=1)


def noisy_loss_fn(w, x):
    value = loss_fn(w, x)
    jax.debug.callback(lambda value: seen.append(float(value)), value)
    return value


for transform in ("shard_map", "vmap"):
    seen = []
    mean_loss_fn = dq.data_parallel(
        noisy_loss_fn, mesh=mesh_of(), axis_name="data", transform=transform
    )
    loss, _ = jax.value_and_grad(mean_loss_fn)(w, x)
    jax.effects_barrier()
    assert len(seen) == 2, (transform, seen)  # once for each worker
    assert abs(sum(seen) / 2 - loss) < 1e-5 * loss, (transform, seen, loss)
