"""Data-parallel training of the small language model."""

from collections.abc import Callable

import jax
import optax
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from benchmarks.small_lm.model import ModelConfig, Transformer
from dynamiq_jax.methods import Method
from dynamiq_jax.topologies import Topology
from examples.llm.pretraining import Params, loss_of

Step = Callable[..., tuple[Params, optax.OptState, jax.Array]]


def new_model(config: ModelConfig, seed: int = 0) -> tuple[nnx.GraphDef, Params]:
    """Initialize a transformer; return its structure and its parameters (float32)."""
    return nnx.split(Transformer(config, nnx.Rngs(seed)), nnx.Param)


def abstract_model(config: ModelConfig) -> tuple[nnx.GraphDef, Params]:
    """Return the structure of a transformer, and the shapes of its parameters."""
    return nnx.split(nnx.eval_shape(lambda: Transformer(config, nnx.Rngs(0))), nnx.Param)


def data_parallel_step(
    structure: nnx.GraphDef,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    *,
    method: Method | str | None,
    topology: Topology | str = "ring",
) -> Step:
    """Build the training step that a mesh runs.

    Args:
      structure: structure of the model.
      optimizer: optimizer that takes the mean gradient.
      mesh: mesh with one axis, "data".
      method: how to compress gradients; None for `jax.lax.pmean`.
      topology: how compressed gradients travel.

    Returns:
      A compiled function `(params, opt_state, tokens, key) -> (params, opt_state, loss)`. `tokens`
      is the batch of all workers, int32 [workers * batch, context + 1]; `key` is a typed PRNG key,
      new in every step. The first two arguments are donated.
    """
    loss_fn = loss_of(structure)

    def step(params, opt_state, tokens, key):
        # The type of the parameters says that all workers hold the same: their gradients would
        # already be summed over the workers, exactly. Marked as varying, they yield the gradient of
        # this worker's own batch, which can be compressed.
        own = jax.lax.pcast(params, "data", to="varying")
        loss, grads = jax.value_and_grad(loss_fn)(own, tokens)
        if method is None:
            grads = jax.lax.pmean(grads, "data")
        else:
            grads = dq.pmean(grads, "data", key=key, method=method, topology=topology)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, jax.lax.pmean(loss, "data")

    sharded = jax.shard_map(
        step, mesh=mesh, in_specs=(P(), P(), P("data"), P()), out_specs=(P(), P(), P())
    )
    return jax.jit(sharded, donate_argnums=(0, 1))
