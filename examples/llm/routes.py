"""Routes from a recipe to a train step whose gradients travel compressed.

`dq.compress` wraps the jitted train step as it is. `dq.all_reduce_gradients`, in with_states.py,
has a place for the states of methods and for metrics.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
from flax import nnx
from jax.sharding import Mesh

import dynamiq_jax as dq
from examples.llm import with_states
from examples.llm.loss import mean_loss
from examples.llm.model import Params
from examples.llm.recipe import Recipe
from examples.llm.sharding import fsdp_specs, on_mesh, placed
from examples.llm.train_step import State, make_init, make_train_step


class Trainer(NamedTuple):
    """Everything that a run trains with."""

    start: Callable[[Params], State]  # from float32 parameters, which are donated
    abstract: State  # shapes and shardings of the state
    step: jax.stages.Wrapped  # from the state, which is donated, and rows; see `make_train_step`
    bytes_sent: int  # by each device in a step, for gradients; at least, where the compiler sums


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
    optimizer, has_states = recipe.optimizer(), recipe.chosen_route == "all_reduce_gradients"
    if has_states:
        optimizer = with_states.averaging(optimizer, recipe, mesh)
        init = with_states.make_init_of_workers(optimizer, mesh)
        train_step = with_states.make_step_of_workers(structure, optimizer, mesh)
    else:
        init = make_init(optimizer)
        train_step = make_train_step(functools.partial(mean_loss, structure), optimizer)
    state = jax.eval_shape(init, shapes)
    specs = with_states.state_specs(state, mesh) if has_states else fsdp_specs(state, mesh)
    shardings = on_mesh(specs, mesh)
    start = jax.jit(init, donate_argnums=0, out_shardings=shardings)
    step = jax.jit(train_step, donate_argnums=0, out_shardings=(shardings, None))
    if not has_states and not recipe.is_exact:
        # With defaults, this is `step = dq.compress(step, "data")`.
        step = dq.compress(step, "data", method=dq.Compression(recipe.method, recipe.topology))
    report = dq.wire_report(
        shapes,
        "data",
        mesh=mesh,
        method=dq.Compression(
            "uncompressed" if recipe.is_exact else recipe.method,
            recipe.topology,
            specs=fsdp_specs(shapes, mesh),
        ),
        with_metrics=has_states,
    )
    return Trainer(start, placed(state, shardings), step, report.bytes_per_worker)
