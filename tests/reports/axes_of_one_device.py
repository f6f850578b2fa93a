"""Megatron: the same script on one host or on hosts with one device, so that an axis has size 1."""

import jax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from tests.reports.setup import normal

gradients = normal(2, 2048)
for shape in ((1, 2), (2, 1)):
    mesh = jax.make_mesh(
        shape, ("hosts", "local"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:2]
    )
    axes = ("hosts", "local")
    mean = jax.jit(
        jax.shard_map(
            lambda g, axes=axes: dq.pmean(g[0], axes, key=jax.random.key(0), method="bf16"),
            mesh=mesh,
            in_specs=P(axes),
            out_specs=P(),
        )
    )(gradients)
    assert dq.vnmse(mean, gradients.mean(0)) < 1e-4, shape
