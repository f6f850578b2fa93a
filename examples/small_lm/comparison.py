"""The comparison: two fine-tuning runs that differ in their mean gradient and in nothing else."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import fmean, median

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from .data import random_windows
from .training import (
    Method,
    Params,
    Step,
    compression_error,
    data_parallel_step,
    loss_of,
    make_optimizer,
)

MEASURE_EVERY = 20
LAST_STEPS = 20

State = tuple[Params, optax.OptState]


@dataclass
class Run:
    """What one fine-tuning run recorded.

    Attributes:
        train_loss: Loss of every step.
        evaluation_loss: Held-out loss by the number of steps taken before it.
        seconds: Duration of every step.
    """

    train_loss: list[float] = field(default_factory=list)
    evaluation_loss: dict[int, float] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)

    @property
    def final_train_loss(self) -> float:
        """Mean over the last steps, since a single batch is noisy."""
        return fmean(self.train_loss[-LAST_STEPS:])

    @property
    def final_evaluation_loss(self) -> float:
        """Held-out loss of the fine-tuned model."""
        return self.evaluation_loss[max(self.evaluation_loss)]

    @property
    def step_seconds(self) -> float:
        """Typical duration of a step: the median is blind to the first one, which compiles."""
        return median(self.seconds)


def finetune_twice(
    structure: nnx.GraphDef,
    params: Params,
    corpus: np.ndarray,
    held_out: np.ndarray,
    mesh: Mesh,
    *,
    method: Method,
    topology: str,
    steps: int,
    batch: int,
    learning_rate: float,
    seed: int,
    on_step: Callable[[int, float, float], None] = lambda step, exact, compressed: None,
) -> tuple[Run, Run, dict[int, float]]:
    """Fine-tunes with the exact and the compressed mean, in turns, from the same weights.

    Args:
        structure: Structure of a pre-trained model.
        params: Its parameters.
        corpus: Text to fine-tune on, int32 `[length]`.
        held_out: Text to evaluate on, int32 `[windows, context + 1]`; `windows` is a multiple
            of the number of workers.
        mesh: The workers, one axis named "data".
        method: How the second run compresses its gradients.
        topology: The path of the compressed gradients from worker to worker.
        steps: Number of updates in each run.
        batch: Windows per worker and step.
        learning_rate: Peak learning rate.
        seed: Chooses the batches and the randomness of compression.
        on_step: Called after each step with its index, the exact and the compressed run's loss.

    Returns:
        The exact run, the compressed run, and the vNMSE of the compressed mean by step.
    """
    optimizer = make_optimizer(learning_rate, steps)
    exact_step = data_parallel_step(structure, optimizer, mesh, method=None)
    compressed_step = data_parallel_step(
        structure, optimizer, mesh, method=method, topology=topology
    )
    error_of_mean = compression_error(structure, mesh, method=method, topology=topology)
    evaluate = jax.jit(loss_of(structure))

    replicated, split = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    context = held_out.shape[1] - 1
    held_out = jax.device_put(held_out, split)
    start = (params, optimizer.init(params))
    # Steps donate their state, so each run needs a copy of its own.
    exact_state = jax.device_put(jax.tree.map(jnp.copy, start), replicated)
    compressed_state = jax.device_put(jax.tree.map(jnp.copy, start), replicated)
    exact, compressed, vnmse = Run(), Run(), {}

    for step in range(steps):
        windows = random_windows(
            corpus, count=mesh.size * batch, context=context, seed=seed, step=step
        )
        tokens = jax.device_put(windows, split)
        # All workers share the key. It is new in every step: repeated rounding decisions would
        # add up over the steps instead of averaging out.
        key = jax.random.fold_in(jax.random.key(seed), step)
        if step % MEASURE_EVERY == 0:
            exact.evaluation_loss[step] = float(evaluate(exact_state[0], held_out))
            compressed.evaluation_loss[step] = float(evaluate(compressed_state[0], held_out))
            vnmse[step] = float(error_of_mean(compressed_state[0], tokens, key))
        exact_state = _timed(exact, exact_step, exact_state, tokens, key)
        compressed_state = _timed(compressed, compressed_step, compressed_state, tokens, key)
        on_step(step, exact.train_loss[-1], compressed.train_loss[-1])
    exact.evaluation_loss[steps] = float(evaluate(exact_state[0], held_out))
    compressed.evaluation_loss[steps] = float(evaluate(compressed_state[0], held_out))
    return exact, compressed, vnmse


def _timed(run: Run, step: Step, state: State, tokens: jax.Array, key: jax.Array) -> State:
    """Takes one step, waits for it and records its loss and duration."""
    begin = time.perf_counter()
    params, opt_state, loss = step(*state, tokens, key)
    # Waiting costs nothing here and is more than a matter of timing: several steps in flight
    # on virtual CPU devices would compete for the few threads their collectives need.
    jax.block_until_ready((params, loss))
    run.seconds.append(time.perf_counter() - begin)
    run.train_loss.append(float(loss))
    return params, opt_state
