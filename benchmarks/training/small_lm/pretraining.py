"""Pre-training on one device: the loss, the optimizer and the loop."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from benchmarks.training.small_lm.corpora import random_windows

Params = Any  # A pytree of arrays: what `nnx.split` leaves of a model beside its structure.


def cross_entropy(model: nnx.Module, tokens: jax.Array) -> jax.Array:
    """Return the mean loss of predicting each token from those before it.

    Args:
      model: the network.
      tokens: int32 `[batch, context + 1]`.

    Returns:
      float32 scalar, in nats per token.
    """
    logits = model(tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def loss_of(structure: nnx.GraphDef) -> Callable[[Params, jax.Array], jax.Array]:
    """Return the loss as a pure function of parameters and tokens, which JAX differentiates."""
    return lambda params, tokens: cross_entropy(nnx.merge(structure, params), tokens)


def evaluator(structure: nnx.GraphDef, tokens: np.ndarray) -> Callable[[Params], float]:
    """Return a function that evaluates parameters on the first device, in nats a token."""
    loss = jax.jit(loss_of(structure))
    return lambda params: float(loss(jax.device_put(params, jax.devices()[0]), jnp.asarray(tokens)))


def adamw(learning_rate: optax.ScalarOrSchedule) -> optax.GradientTransformation:
    """Build AdamW with a shorter average than the usual b2 of 0.999, for runs of few steps."""
    return optax.adamw(learning_rate, b2=0.95)


def make_optimizer(
    learning_rate: float,
    steps: int,
    rule: Callable[[optax.Schedule], optax.GradientTransformation] = adamw,
) -> optax.GradientTransformation:
    """Build an optimizer whose learning rate rises over a tenth of the steps and decays to zero."""
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=0.0, peak_value=learning_rate, warmup_steps=steps // 10, decay_steps=steps
    )
    return rule(schedule)


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
    """Train a new model on one device, where there is nothing to compress.

    Args:
      structure: structure of the model.
      params: its initial parameters.
      corpus: int32 `[length]`.
      steps: number of updates.
      batch: windows per update.
      context: tokens per window.
      learning_rate: peak of the learning rate.
      seed: seed of the batches.
      on_step: called after each step with its index and its loss.

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
