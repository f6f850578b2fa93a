"""optax: labels choose an optimizer for each part of a model, and one part is frozen."""

import optax

import dynamiq_jax as dq
from tests.reports.setup import normal, train_step

params, x = {"head": normal(64, 32), "base": normal(64, 32, seed=1)}, normal(8, 64, seed=2)


def loss_fn(params, x):
    return ((x @ (params["head"] + params["base"])) ** 2).mean()


tx = optax.partition(
    {
        "train": optax.chain(dq.all_reduce_gradients("data", method="bf16"), optax.sgd(0.1)),
        "freeze": optax.set_to_zero(),
    },
    {"head": "train", "base": "freeze"},
)
after, _ = train_step(tx, loss_fn)(params, tx.init(params), x)
assert (after["base"] == params["base"]).all(), "a frozen part has moved"
assert (after["head"] != params["head"]).any(), "the trained part has not"
assert loss_fn(after, x) < loss_fn(params, x), "the loss has not fallen"
