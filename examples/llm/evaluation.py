"""Evaluation of a model on held-out text."""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from examples.llm.batches import place
from examples.llm.packing import Rows
from examples.llm.training import Params, loss_and_hits


class Evaluation(NamedTuple):
    """Means over all targets of the held-out text."""

    evaluation_loss: float  # nats per token
    perplexity: float  # its exponential
    accuracy: float  # share of the targets that the model finds most likely


def evaluator(
    structure: nnx.GraphDef, rows: Rows, batch: int, mesh: Mesh
) -> Callable[[Params], Evaluation]:
    """Build the evaluation of a model.

    Args:
      structure: structure of the model.
      rows: all held-out rows, as NumPy arrays.
      batch: rows at once, a multiple of the number of devices.
      mesh: mesh with axes "data" and "fsdp".

    Returns:
      A function of the parameters.
    """
    missing = -len(rows.tokens) % batch
    padding = Rows.empty(missing, rows.tokens.shape[1])
    padded = Rows(*(np.concatenate(pair) for pair in zip(rows, padding, strict=True)))
    batches = [
        place(padded, np.arange(start, start + batch), mesh)
        for start in range(0, len(padded.tokens), batch)
    ]
    count = int(rows.learned.sum())
    replicated = NamedSharding(mesh, P())
    # There are no gradients to compress, so the compiler manages both axes.
    sums = jax.jit(
        lambda params, rows: loss_and_hits(structure, params, rows),
        out_shardings=(replicated, replicated),
    )

    def evaluate(params: Params) -> Evaluation:
        loss, hits = 0.0, 0
        for rows in batches:
            part, right = jax.device_get(sums(params, rows))
            loss, hits = loss + float(part), hits + int(right)
        mean = loss / count
        return Evaluation(mean, math.exp(min(mean, 700.0)), hits / count)

    return evaluate
