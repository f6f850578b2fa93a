"""JAX (jax#25887): a debug callback in a loss, which may fail, vanish or run too often."""

import jax

from tests.reports.setup import gradient, loss_fn, mesh_of, normal

w, x = normal(64, 32), normal(8, 64, seed=1)


def noisy_loss_fn(w, x):
    value = loss_fn(w, x)
    jax.debug.callback(lambda value: seen.append(float(value)), value)
    return value


seen = []
gradient(noisy_loss_fn, mesh_of())(w, x)
jax.effects_barrier()
assert len(seen) == 1, seen  # the program is one of all workers
assert abs(seen[0] - loss_fn(w, x)) < 1e-5 * seen[0], (seen, loss_fn(w, x))
