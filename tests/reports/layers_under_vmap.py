"""haiku: layers that are stacked and mapped over: a collective is inside of a second vmap."""

import jax

import dynamiq_jax as dq
from tests.reports.setup import normal, on_workers

layers = normal(2, 3, 1024)  # workers, layers


def mean_of_layers(g):
    return jax.vmap(lambda g: dq.pmean(g, "data", key=jax.random.key(0), method="mxfp8"))(g)


def mean_of_each(g):
    return [dq.pmean(g[n], "data", key=jax.random.key(0), method="mxfp8") for n in range(3)]


mapped, each = on_workers(mean_of_layers, layers), on_workers(mean_of_each, layers)
for n in range(3):
    assert (mapped[:, n] == each[n]).all(), n
