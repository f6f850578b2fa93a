"""optax: tools that find arrays like parameters in a state, by an `init` of placeholders."""

import jax
import jax.numpy as jnp
import optax

import dynamiq_jax as dq

params = {"w": jnp.ones((4, 4))}
tx = optax.chain(dq.all_reduce_gradients("data"), optax.adam(1e-3))
state = tx.init(params)
marked = optax.tree_utils.tree_map_params(tx, lambda leaf: leaf + 7, state)
assert jax.tree.structure(marked) == jax.tree.structure(state)
assert marked[0].step == 0, "the step of the all-reduce is no parameter"
assert (marked[1][0].mu["w"] == 7).all(), "the moments of Adam were not found"
assert optax.tree_utils.tree_get(state, "step") == 0, "the step is not found by its name"
