"""A train step of optax on global arrays, as JAX's guide on sharding has it.

Under `jax.jit`, the compiler splits the work by the shardings of the arguments, and sums gradients
where they split the rows. It imports nothing of dynamiq_jax: routes.py wraps it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax

from examples.llm.data import Rows
from examples.llm.model import Params

LossFn = Callable[[Params, Rows], jax.Array]


class State(NamedTuple):
    """Parameters and the state of the optimizer."""

    params: Params
    optimizer: Any


TrainStep = Callable[[State, Rows], tuple[State, dict[str, jax.Array]]]


def make_init(optimizer: optax.GradientTransformation) -> Callable[[Params], State]:
    """Build the function from parameters to the state before the first step."""

    def init(params: Params) -> State:
        return State(params, optimizer.init(params))

    return init


def make_train_step(loss_fn: LossFn, optimizer: optax.GradientTransformation) -> TrainStep:
    """Build the train step: from the state and rows to the next state and metrics.

    The metrics are "loss", float32, before the update.
    """

    def train_step(state: State, rows: Rows) -> tuple[State, dict[str, jax.Array]]:
        loss, grads = jax.value_and_grad(loss_fn)(state.params, rows)
        updates, optimizer_state = optimizer.update(grads, state.optimizer, state.params)
        params = optax.apply_updates(state.params, updates)
        return State(params, optimizer_state), {"loss": loss}

    return train_step
