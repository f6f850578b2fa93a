"""The loss of a language model: of a train step, and over all rows that are held out."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from examples.llm.data import Rows, place
from examples.llm.model import Params

LOGITS_AT_ONCE = 128  # positions of each row


def sum_of_losses(structure: nnx.GraphDef, params: Params, rows: Rows) -> jax.Array:
    """Sum the loss over all targets to learn, float32 in nats; rows are `[batch, context]`.

    Logits take the memory of hundreds of layers where the vocabulary is large. They are computed
    for some positions at a time, and again in the backward pass.
    """
    model = nnx.merge(structure, params)
    features = model.features(rows.tokens, positions=rows.positions, segments=rows.segments)

    def in_parts(field: jax.Array) -> jax.Array:
        missing = -field.shape[1] % LOGITS_AT_ONCE
        field = jnp.pad(field, [(0, 0), (0, missing)] + [(0, 0)] * (field.ndim - 2))
        parts = field.reshape(len(field), -1, LOGITS_AT_ONCE, *field.shape[2:])
        return jnp.moveaxis(parts, 1, 0)

    @jax.checkpoint
    def loss(part: tuple[jax.Array, ...]) -> jax.Array:
        x, targets, learned = part
        losses = optax.softmax_cross_entropy_with_integer_labels(model.logits(x), targets)
        return jnp.sum(losses, where=learned)

    parts = tuple(map(in_parts, (features, rows.targets, rows.learned)))
    return jnp.sum(jax.lax.map(loss, parts))


def mean_loss(structure: nnx.GraphDef, params: Params, rows: Rows) -> jax.Array:
    """Average the loss over all targets to learn; see `sum_of_losses`."""
    targets = jnp.sum(rows.learned, dtype=jnp.float32)
    return sum_of_losses(structure, params, rows) / jnp.maximum(targets, 1.0)


def evaluator(
    structure: nnx.GraphDef, rows: Rows, batch: int, mesh: Mesh
) -> Callable[[Params], float]:
    """Build a function of parameters to the mean loss over all targets of rows, in nats.

    The mesh takes `batch` rows at once, a multiple of its devices.
    """
    missing = -len(rows.tokens) % batch
    padded = Rows(*(np.pad(field, ((0, missing), (0, 0))) for field in rows))
    starts = range(0, len(padded.tokens), batch)
    batches = [place(padded, np.arange(start, start + batch), mesh) for start in starts]
    # There are no gradients to compress, so the compiler manages both axes.
    summed = jax.jit(
        lambda params, rows: sum_of_losses(structure, params, rows),
        out_shardings=NamedSharding(mesh, P()),
    )
    count = int(rows.learned.sum())
    return lambda params: sum(float(summed(params, rows)) for rows in batches) / count
