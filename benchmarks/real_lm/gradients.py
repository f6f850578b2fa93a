"""Gradients of workers that fine-tune a language model, each on rows of its own."""

import re
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
from flax import nnx
from jax.sharding import SingleDeviceSharding
from numpy.typing import NDArray

from benchmarks.real_lm.texts import Text, rows
from examples.llm import checkpoint
from examples.llm.data import Rows
from examples.llm.loss import sum_of_losses
from examples.llm.model import abstract_decoder

LAYER = re.compile(r"layers\.(\d+)")
KINDS = ("embedding", "attention", "mlp", "norm")
Gradient = dict[str, NDArray[np.float32]]  # of one worker, by the name of the tensor


def kind_of(name: str) -> str:
    """Return the kind of a tensor."""
    marks = {"embed_tokens": "embedding", "lm_head": "embedding", "attn": "attention", "mlp": "mlp"}
    return next((kind for mark, kind in marks.items() if mark in name), "norm")


def layer_of(name: str) -> int | None:
    """Return the layer of a tensor, None for the embedding and the last norm."""
    found = LAYER.search(name)
    return int(found[1]) if found else None


def worker_gradients(
    folder: Path, text: Text, *, workers: int, batch: int, context: int
) -> Iterator[Gradient]:
    """Yield the gradient of each worker for the mean loss of all, as the fine-tuning example does.

    The first workers see the same rows however many there are.

    Args:
      folder: checkpoint of the model.
      text: kind of text.
      workers: number of workers.
      batch: rows of each worker.
      context: tokens of a row.
    """
    config = checkpoint.read_config(folder)
    structure, shapes = abstract_decoder(config)
    params = checkpoint.load(folder, config, SingleDeviceSharding(jax.devices()[0]))
    names = [name for name, _ in checkpoint.named_leaves(shapes)]
    own = rows(folder, text, count=workers * batch, context=context)
    # Tokens of conversations count where the assistant speaks: workers have different numbers.
    scale = workers / own.learned.sum()

    @jax.jit
    def gradient(params: nnx.State, rows: Rows) -> nnx.State:
        grads = jax.grad(lambda p: sum_of_losses(structure, p, rows))(params)
        return jax.tree.map(lambda leaf: leaf * scale, grads)

    for worker in range(workers):
        part = Rows(*(field[worker * batch : (worker + 1) * batch] for field in own))
        leaves = jax.tree.leaves(gradient(params, part))
        yield dict(zip(names, map(np.asarray, leaves), strict=True))
