"""Megatron (Megatron-LM#205): small terms of bfloat16 gradients are lost in a bfloat16 sum."""

import jax
import jax.numpy as jnp

import dynamiq_jax as dq
from tests.reports.setup import on_workers

terms = jnp.array([256.0] + [1.0] * 7, jnp.bfloat16)[:, None]  # 256 + 1 is 256 in bfloat16
mean = on_workers(lambda g: dq.pmean(g, "data", key=jax.random.key(0)), terms)
assert (mean == jnp.bfloat16(263 / 8)).all(), mean
