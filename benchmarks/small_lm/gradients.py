"""Per-worker gradients of the same fine-tuning, for any number of workers on one device.

Measuring a compressor needs real gradients more often than it needs a real network:

    corpora = load_corpora()
    structure, params = new_model(ModelConfig(corpora.vocabulary))
    params = pretrain(structure, params, corpora.source_code)
    for step, gradients in gradient_snapshots(structure, params, corpora.reference, workers=64):
        ...  # Each leaf is a NumPy array with the worker as its first axis.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from examples.llm.corpora import random_windows
from examples.llm.pretraining import Params, loss_of, make_optimizer


@partial(jax.jit, static_argnums=0)
def worker_gradients(structure: nnx.GraphDef, params: Params, batches: jax.Array) -> Params:
    """Gradient of every worker before any mean.

    Args:
        structure: Structure of the model.
        params: Its parameters, the same for all workers.
        batches: int32 `[workers, batch, context + 1]`.

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
    """Fine-tunes with the exact mean and yields the gradients met on the way.

    Args:
        structure: Structure of a pre-trained model.
        params: Its parameters.
        corpus: Text to fine-tune on, int32 `[length]`.
        workers: Number of workers whose gradients are yielded.
        training_workers: Number of workers that train, so that the model does not depend on how
            many are measured; the first of the measured ones see their batches.
        steps: Steps to stop at, counted from 0; training ends after the last.
        batch: Windows per worker and step.
        context: Tokens per window.
        learning_rate: Peak learning rate.
        seed: Chooses the batches.

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
        windows = random_windows(
            corpus, count=workers * batch, context=context, seed=seed, step=step
        )
        batches = jnp.asarray(windows.reshape(workers, batch, context + 1))
        return worker_gradients(structure, params, batches)

    for step in range(last + 1):
        if step in steps:
            yield step, jax.device_get(gradients_at(params, step, workers))
        stacked = gradients_at(params, step, training_workers)
        params, opt_state = update(params, opt_state, stacked)


def save_snapshots(path: Path, snapshots: Iterator[tuple[int, Params]]) -> None:
    """Writes snapshots to an `.npz` file, one entry `step/parameter` per leaf."""
    arrays = {}
    for step, gradients in snapshots:
        for names, leaf in nnx.to_flat_state(gradients):
            arrays["/".join(map(str, (step, *names)))] = leaf[...]
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, **arrays)
