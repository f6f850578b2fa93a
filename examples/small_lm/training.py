"""Training: the loss, the data-parallel step, and what is measured beside it.

`data_parallel_step` is the part to take home. It is an ordinary JAX training step; compressing
its communication changes one line.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq

from .data import random_windows
from .model import ModelConfig, Transformer

Params = Any  # A pytree of arrays: what `nnx.split` leaves of a model beside its structure.
Method = dq.DynamiQ | dq.Exact
Step = Callable[..., tuple[Params, optax.OptState, jax.Array]]


def new_model(config: ModelConfig, seed: int = 0) -> tuple[nnx.GraphDef, Params]:
    """Initialises a transformer, apart into its structure and its parameters (float32)."""
    return nnx.split(Transformer(config, nnx.Rngs(seed)), nnx.Param)


def cross_entropy(model: Transformer, tokens: jax.Array) -> jax.Array:
    """Mean loss of predicting each token from those before it.

    Args:
        model: The network.
        tokens: int32 `[batch, context + 1]`.

    Returns:
        float32 scalar, in nats per token.
    """
    logits = model(tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def loss_of(structure: nnx.GraphDef) -> Callable[[Params, jax.Array], jax.Array]:
    """The loss as a pure function of parameters and tokens, which is what JAX differentiates."""
    return lambda params, tokens: cross_entropy(nnx.merge(structure, params), tokens)


def make_optimizer(learning_rate: float, steps: int) -> optax.GradientTransformation:
    """AdamW whose learning rate warms up over a tenth of the steps, then decays to zero."""
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=0.0, peak_value=learning_rate, warmup_steps=steps // 10, decay_steps=steps
    )
    # The usual b2 of 0.999 averages over more steps than there are here.
    return optax.adamw(schedule, b2=0.95)


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


def pretrain(
    structure: nnx.GraphDef,
    params: Params,
    corpus: np.ndarray,
    *,
    steps: int = 240,
    batch: int = 16,
    context: int = 128,
    learning_rate: float = 6e-3,
    seed: int = 0,
    on_step: Callable[[int, jax.Array], None] = lambda step, loss: None,
) -> Params:
    """Trains a new model on one device.

    Nothing is compressed here: one device takes the exact mean over the whole batch.

    Args:
        structure: Structure of the model.
        params: Its initial parameters.
        corpus: int32 `[length]`.
        steps: Number of updates.
        batch: Windows per update.
        context: Tokens per window.
        learning_rate: Peak learning rate.
        seed: Chooses the batches.
        on_step: Called after each step with its index and its loss.

    Returns:
        The trained parameters.
    """
    loss_fn = loss_of(structure)
    optimizer = make_optimizer(learning_rate, steps)
    opt_state = optimizer.init(params)

    @jax.jit
    def train_step(params, opt_state, tokens):
        loss, grads = jax.value_and_grad(loss_fn)(params, tokens)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    for step in range(steps):
        tokens = random_windows(corpus, count=batch, context=context, seed=seed, step=step)
        params, opt_state, loss = train_step(params, opt_state, jnp.asarray(tokens))
        on_step(step, loss)
    return params
