"""NCCL: thousands of tensors of a single number, each with a message of its own."""

import jax
import jax.numpy as jnp

import dynamiq_jax as dq

tree = {f"scale_{n}": jnp.float32(n) for n in range(2000)}
assert dq.wire_report(tree, 4).bytes_per_worker == 2 * 3 * 4 * 2000 // 4, "bytes of one message"
program = jax.make_jaxpr(
    lambda t: dq.pmean(t, "data", key=jax.random.key(0)), axis_env=[("data", 4)]
)(tree)
assert str(program).count("psum") < 10, "there is a sum for each number"
