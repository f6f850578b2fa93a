"""Training: the loss, the data-parallel step, and what is measured beside it.

`data_parallel_step` is the part to take home. It is an ordinary JAX training step; compressing
its communication changes one line.
"""

from collections.abc import Callable

import jax
import optax
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from benchmarks.small_lm.model import ModelConfig, Transformer
from examples.llm.pretraining import Params, loss_of

Method = dq.DynamiQ | dq.Exact
Step = Callable[..., tuple[Params, optax.OptState, jax.Array]]


def new_model(config: ModelConfig, seed: int = 0) -> tuple[nnx.GraphDef, Params]:
    """Initialises a transformer, apart into its structure and its parameters (float32)."""
    return nnx.split(Transformer(config, nnx.Rngs(seed)), nnx.Param)


def data_parallel_step(
    structure: nnx.GraphDef,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    *,
    method: Method | None,
    topology: str = "ring",
) -> Step:
    """Builds the training step that `mesh` runs.

    Args:
        structure: Structure of the model.
        optimizer: Turns the mean gradient into an update.
        mesh: One axis, named "data".
        method: How to compress the gradients; None for JAX's own exact mean.
        topology: The path of the compressed gradients from worker to worker.

    Returns:
        A compiled function `(params, opt_state, tokens, key) -> (params, opt_state, loss)`.
        `tokens` is the batch of all workers, int32 `[workers * batch, context + 1]`; `key` is a
        typed PRNG key, new in every step. The first two arguments are donated.
    """
    loss_fn = loss_of(structure)

    def step(params, opt_state, tokens, key):
        # Each worker holds the same parameters, and JAX knows it: differentiating them would
        # return gradients already summed over the workers, exactly. Marked as varying, they
        # yield the gradient of this worker's own share, which is what there is to compress.
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
