"""Routes from a recipe to a train step whose gradients travel compressed.

`dq.compress` wraps the train step as it is. The others are for comparison, and for what it cannot
do: `dq.data_parallel` wraps the loss, and `dq.all_reduce_gradients` is in with_states.py.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh

import dynamiq_jax as dq
from examples.llm import with_states
from examples.llm.data import Rows
from examples.llm.loss import loss_of_rows
from examples.llm.model import Params
from examples.llm.recipe import Recipe
from examples.llm.sharding import fsdp_spec, fsdp_specs, on_mesh, placed
from examples.llm.train_step import State, make_train_step


class Trainer(NamedTuple):
    """Everything that a run trains with."""

    start: Callable[[Params], State]  # from float32 parameters, which are donated
    abstract: State  # shapes and shardings of the state
    step: jax.stages.Wrapped  # from the state and rows to the next state and metrics
    bytes_sent: int  # by each device in a step, for gradients


def make_trainer(recipe: Recipe, structure: nnx.GraphDef, shapes: Params, mesh: Mesh) -> Trainer:
    """Build the trainer of a recipe.

    Args:
      recipe: hyperparameters.
      structure: structure of the model.
      shapes: shapes of its parameters.
      mesh: mesh with axes "data" and "fsdp".

    Raises:
      ValueError: a name of the recipe is not known, or its method carries a state, and its route
        has no place for one.
    """
    sum_of_losses = functools.partial(loss_of_rows, structure)
    optimizer, route = recipe.optimizer(), recipe.chosen_route
    report = dq.wire_report(
        shapes,
        "data",
        mesh=mesh,
        specs=fsdp_specs(shapes, mesh),
        method="uncompressed" if route == "exact" else recipe.method,
        topology=recipe.topology,
        with_metrics=route == "all_reduce_gradients",
    )
    if route == "all_reduce_gradients":
        optimizer = with_states.averaging(optimizer, recipe, mesh)
        start, abstract = with_states.initial_state(optimizer, shapes, mesh)
        shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
        step = with_states.make_train_step(sum_of_losses, optimizer, mesh, shardings)
        return Trainer(start, abstract, step, report.bytes_per_worker)

    def first(params: Params) -> State:
        return State(params, optimizer.init(params))

    state = jax.eval_shape(first, shapes)
    shardings = on_mesh(fsdp_specs(state, mesh), mesh)
    if route == "data_parallel":
        step = data_parallel_step(sum_of_losses, optimizer, mesh, shardings, recipe)
    else:
        step = make_train_step(sum_of_losses, optimizer, mesh, shardings)
    if route == "compress":
        # With --fsdp 1 and defaults, this is `step = dq.compress(step, "data")`.
        step = dq.compress(
            step,
            "data",
            method=recipe.method,
            topology=recipe.topology,
            specs=lambda each: fsdp_spec(each.shape, mesh),
        )
    start = jax.jit(first, donate_argnums=0, out_shardings=shardings)
    return Trainer(start, placed(state, shardings), step, report.bytes_per_worker)


def data_parallel_step(
    sum_of_losses: Callable[[Params, Rows], jax.Array],
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    shardings: State,
    recipe: Recipe,
) -> jax.stages.Wrapped:
    """Build a train step of `jax.jit` alone, whose loss `dq.data_parallel` wraps."""

    def targets(params: Params, rows: Rows) -> jax.Array:
        return jnp.sum(rows.learned, dtype=jnp.float32)

    def loss_fn(params: Params, rows: Rows) -> jax.Array:
        return sum_of_losses(params, rows) / jnp.maximum(targets(params, rows), 1.0)

    mean_loss_fn = dq.data_parallel(
        loss_fn,
        mesh=mesh,
        axis_name="data",
        num_targets=targets,
        method=recipe.method,
        topology=recipe.topology,
        specs=lambda params: fsdp_specs(params, mesh),
    )

    def train_step(state: State, rows: Rows) -> tuple[State, dict[str, jax.Array]]:
        loss, grads = jax.value_and_grad(mean_loss_fn)(state.params, rows)
        updates, optimizer_state = optimizer.update(grads, state.optimizer, state.params)
        params = optax.apply_updates(state.params, updates)
        return State(params, optimizer_state), {"loss": loss}

    return jax.jit(train_step, donate_argnums=0, out_shardings=(shardings, None))
