"""JAX: a seed of 1.5 or True from a configuration, which is rounded without a word or traced."""

import jax.numpy as jnp
import numpy as np

import dynamiq_jax as dq
from dynamiq_jax.training import LocalSGD

for seed in (1.5, True, "3", None):
    for make in (dq.all_reduce_gradients, lambda axis, seed: LocalSGD(axis_name=axis, seed=seed)):
        try:
            make("data", seed=seed)
        except ValueError as error:
            assert f"seed={seed!r}" in str(error) and "Give" in str(error), error
        else:
            raise AssertionError(f"seed={seed!r} was taken")
for step in (1.5, -1, 2**31):
    try:
        dq.all_reduce_gradients("data", start_step=step)
    except ValueError as error:
        assert f"start_step={step!r}" in str(error), error
    else:
        raise AssertionError(f"start_step={step!r} was taken")
for whole in (np.int64(3), jnp.int32(3), -1):
    dq.all_reduce_gradients("data", seed=whole)
