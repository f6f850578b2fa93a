"""A data-parallel train step of flax and optax, as many programs have one.

It averages gradients by `jax.lax.pmean`, and imports nothing of dynamiq_jax: routes.py wraps it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from examples.llm.data import Rows
from examples.llm.model import Params

SumOfLosses = Callable[[Params, Rows], jax.Array]


class State(NamedTuple):
    """Parameters and the state of the optimizer."""

    params: Params
    optimizer: Any


def make_train_step(
    sum_of_losses: SumOfLosses,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    shardings: State,
) -> jax.stages.Wrapped:
    """Build the train step.

    Args:
      sum_of_losses: function of parameters and rows to the sum of the losses of all targets.
      optimizer: transformation from the mean gradient to the update.
      mesh: mesh with an axis "data". Its other axes are left to the compiler.
      shardings: shardings of the state.

    Returns:
      A jitted function of the state, which is donated, and rows `[batch, context]`, split over
      "data"; to the next state, and metrics: "loss", float32, the mean over all targets.
    """

    def train_step(state: State, rows: Rows) -> tuple[State, dict[str, jax.Array]]:
        # As varying parameters, they get the gradient of this worker's rows alone.
        params = jax.lax.pcast(state.params, "data", to="varying")
        loss, grads = jax.value_and_grad(sum_of_losses)(params, rows)
        targets = jnp.sum(rows.learned, dtype=jnp.float32)

        loss, targets, grads = jax.lax.pmean((loss, targets, grads), "data")

        # Workers have different numbers of targets. The quotient of two means over the workers is
        # the mean over the targets of all workers.
        targets = jnp.where(targets > 0, targets, 1.0)
        grads = jax.tree.map(lambda grad: grad / targets, grads)
        updates, optimizer_state = optimizer.update(grads, state.optimizer, state.params)
        params = optax.apply_updates(state.params, updates)
        return State(params, optimizer_state), {"loss": loss / targets}

    mapped = jax.shard_map(
        train_step,
        mesh=mesh,
        in_specs=(P(), P("data")),
        out_specs=(P(), P()),
        axis_names={"data"},
    )
    return jax.jit(mapped, donate_argnums=0, out_shardings=(shardings, None))
