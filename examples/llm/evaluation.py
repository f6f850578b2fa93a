"""How well a model predicts text that it was not trained on."""

from __future__ import annotations

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
    """Means over all targets of the held-out text.

    Attributes:
        evaluation_loss: Nats per token.
        perplexity: Its exponential: among how many tokens the model might as well have drawn.
        accuracy: Part of the tokens that the model finds most likely itself.
    """

    evaluation_loss: float
    perplexity: float
    accuracy: float


def evaluator(
    structure: nnx.GraphDef, rows: Rows, batch: int, mesh: Mesh
) -> Callable[[Params], Evaluation]:
    """Builds the evaluation.

    Args:
        structure: Structure of the model.
        rows: All held-out rows, as NumPy arrays.
        batch: Rows at once, a multiple of the number of devices.
        mesh: Axes "data" and "fsdp".

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
    # No gradients, nothing to compress: the compiler manages both axes.
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
