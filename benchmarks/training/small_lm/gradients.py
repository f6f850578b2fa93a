"""Gradients of any number of workers that fine-tune the same model, on one device.

corpora = load_corpora()
structure, params = new_model(ModelConfig(corpora.vocabulary))
params = pretrain(structure, params, corpora.source_code)
for step, gradients in gradient_snapshots(structure, params, corpora.reference, workers=64):
    ...  # Each leaf is a NumPy array with the worker as its first axis.
"""

import functools
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from benchmarks.training.small_lm.corpora import worker_windows
from benchmarks.training.small_lm.pretraining import Params, loss_of, make_optimizer


@functools.partial(jax.jit, static_argnums=0)
def worker_gradients(structure: nnx.GraphDef, params: Params, batches: jax.Array) -> Params:
    """Compute the gradient of every worker.

    Args:
      structure: structure of the model.
      params: its parameters, the same for all workers.
      batches: int32 [workers, batch, context + 1].

    Returns:
      The tree of `params` with a leading axis of size `workers` on every leaf, float32.
    """
    gradient = jax.grad(loss_of(structure))
    # One worker after the other: the activations of 64 of them would not fit side by side.
    return jax.lax.map(lambda tokens: gradient(params, tokens), batches)


def gradient_snapshots(
    structure: nnx.GraphDef,
    params: Params,
    corpus: np.ndarray,
    *,
    workers: int,
    training_workers: int = 8,
    steps: Sequence[int] = (20, 100, 200),
    batch: int = 2,
    context: int = 128,
    learning_rate: float = 2e-3,
    seed: int = 0,
) -> Iterator[tuple[int, Params]]:
    """Fine-tune with the exact mean and yield the gradients of some steps.

    Args:
      structure: structure of a pre-trained model.
      params: its parameters.
      corpus: text to fine-tune on, int32 [length].
      workers: workers whose gradients are yielded.
      training_workers: workers that train, so that the model does not depend on how many are
        measured; the first of the measured ones see their batches.
      steps: steps to stop at, counted from 0; training ends after the last.
      batch: windows of each worker and step.
      context: tokens of a window.
      learning_rate: peak learning rate.
      seed: chooses the batches.

    Yields:
      The step, and the tree of stacked gradients (see `worker_gradients`) as NumPy arrays.
    """
    last = max(steps)
    optimizer = make_optimizer(learning_rate, last + 1)
    opt_state = optimizer.init(params)

    @jax.jit
    def update(params, opt_state, stacked):
        mean = jax.tree.map(lambda leaf: leaf.mean(axis=0), stacked)
        updates, opt_state = optimizer.update(mean, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    def gradients_at(params, step, workers):
        windows = worker_windows(
            corpus, workers=workers, batch=batch, context=context, seed=seed, step=step
        )
        return worker_gradients(structure, params, jnp.asarray(windows))

    for step in range(last + 1):
        if step in steps:
            yield step, jax.device_get(gradients_at(params, step, workers))
        stacked = gradients_at(params, step, training_workers)
        params, opt_state = update(params, opt_state, stacked)


def save_snapshots(path: Path, snapshots: Iterator[tuple[int, Params]]) -> None:
    """Write snapshots to an .npz file, an array STEP/PARAMETER for each leaf."""
    arrays = {}
    for step, gradients in snapshots:
        for names, leaf in nnx.to_flat_state(gradients):
            arrays["/".join(map(str, (step, *names)))] = leaf[...]
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, **arrays)
