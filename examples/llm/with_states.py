"""The route for methods that carry states, and for metrics of each step: an optax transformation.

`dq.all_reduce_gradients` stands in front of the optimizer, and the train step is the program of a
worker, in `jax.shard_map`. The state of a method, such as a residual, is the worker's own.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from examples.llm.data import Rows
from examples.llm.loss import sum_of_losses
from examples.llm.model import Params
from examples.llm.recipe import Recipe
from examples.llm.sharding import fsdp_specs
from examples.llm.train_step import State, TrainStep, make_init, make_train_step

# How a map over "data" splits the state.
_SPECS = State(P(), (dq.AllReduceState(step=P(), method=P("data"), metrics=P()), P()))


def averaging(
    optimizer: optax.GradientTransformation, recipe: Recipe, mesh: Mesh
) -> optax.GradientTransformation:
    """Put the average over the workers before an optimizer."""
    average = dq.all_reduce_gradients(
        "data",
        method=dq.Compression(
            recipe.method, recipe.topology, specs=lambda gradients: fsdp_specs(gradients, mesh)
        ),
        seed=recipe.seed,
        with_metrics=True,
    )
    return optax.chain(average, optimizer)


def make_init_of_workers(
    optimizer: optax.GradientTransformation, mesh: Mesh
) -> Callable[[Params], State]:
    """Build the function from parameters to the state of all workers."""
    init = make_init(optimizer)
    return jax.shard_map(init, mesh=mesh, in_specs=P(), out_specs=_SPECS, axis_names={"data"})


def make_step_of_workers(
    structure: nnx.GraphDef, optimizer: optax.GradientTransformation, mesh: Mesh
) -> TrainStep:
    """Build the train step, whose metrics are the loss and those of `dq.all_reduce_gradients`."""

    def train_step(state: State, rows: Rows) -> tuple[State, dict[str, jax.Array]]:
        # Workers have different numbers of targets: the mean of these losses over the workers is
        # the mean over all targets.
        targets = jax.lax.pmean(jnp.sum(rows.learned, dtype=jnp.float32), "data")

        def loss_fn(params: Params, rows: Rows) -> jax.Array:
            return sum_of_losses(structure, params, rows) / jnp.maximum(targets, 1.0)

        state, metrics = make_train_step(loss_fn, optimizer)(state, rows)
        average, _ = state.optimizer
        return state, {"loss": jax.lax.pmean(metrics["loss"], "data"), **average.metrics}

    return jax.shard_map(
        train_step,
        mesh=mesh,
        in_specs=(_SPECS, P("data")),
        out_specs=(_SPECS, P()),
        axis_names={"data"},
        check_vma=False,  # Gradients are those of this worker's rows.
    )


def state_specs(state: State, mesh: Mesh) -> State:
    """Choose how the state of all workers is cut over both axes of the mesh."""
    average, rest = state.optimizer
    # States of buckets that are cut over "fsdp" lie side by side, those of all devices; of a bucket
    # that is whole on each device there is one for each worker.
    method = jax.tree.map(
        lambda leaf: P(("data", "fsdp")) if leaf.shape[0] == mesh.size else P("data"),
        average.method,
    )
    metrics = dict.fromkeys(average.metrics, P())
    average = dq.AllReduceState(step=P(), method=method, metrics=metrics)
    return State(fsdp_specs(state.params, mesh), (average, fsdp_specs(rest, mesh)))
