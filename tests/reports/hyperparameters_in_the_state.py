"""optax#412: inject_hyperparams makes arrays of all numbers of a transformation.

Then the seed and the first step of the all-reduce are traced too.
"""

import jax
import optax

import dynamiq_jax as dq
from tests.reports.setup import loss_fn, normal, train_step

w, x = normal(64, 32), normal(8, 64, seed=1)
reduction = optax.inject_hyperparams(dq.all_reduce_gradients)(axis_name="data", method="bf16")
whole = optax.inject_hyperparams(
    lambda rate: optax.chain(dq.all_reduce_gradients("data", method="bf16"), optax.sgd(rate))
)(rate=0.1)
for tx, rate in ((optax.chain(reduction, optax.sgd(0.1)), 0.1), (whole, 0.1)):
    after, _ = train_step(tx, loss_fn)(w, tx.init(w), x)
    assert dq.vnmse((w - after) / rate, jax.grad(loss_fn)(w, x)) < 1e-4, "another update"
