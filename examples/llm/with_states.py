"""The route for methods that carry states, and for metrics of each step: an optax transformation.

The step is that of train_step.py without its `pmean` of the gradients: the optimizer averages them.
A state of a method, such as a residual, is the worker's own.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from examples.llm.data import Rows
from examples.llm.model import Params
from examples.llm.recipe import Recipe
from examples.llm.sharding import fsdp_specs, on_mesh, placed
from examples.llm.train_step import State, SumOfLosses

# How a map over "data" splits the state.
_SPECS = State(P(), (dq.AllReduceState(step=P(), method=P("data"), metrics=P()), P()))


def averaging(
    optimizer: optax.GradientTransformation, recipe: Recipe, mesh: Mesh
) -> optax.GradientTransformation:
    """Put the average over the workers before an optimizer."""
    average = dq.all_reduce_gradients(
        "data",
        method=recipe.method,
        topology=recipe.topology,
        seed=recipe.seed,
        specs=lambda gradients: fsdp_specs(gradients, mesh),
        with_metrics=True,
    )
    return optax.chain(average, optimizer)


def initial_state(
    optimizer: optax.GradientTransformation, shapes: Params, mesh: Mesh
) -> tuple[Callable[[Params], State], State]:
    """Build the function that makes the state before the first step, each part on its devices.

    Returns:
      A function of float32 parameters, which are donated; and the shapes and shardings of its
      result.
    """

    def start(params: Params) -> State:
        return State(params, optimizer.init(params))

    mapped = jax.shard_map(start, mesh=mesh, in_specs=P(), out_specs=_SPECS, axis_names={"data"})
    state = jax.eval_shape(mapped, shapes)
    average, rest = state.optimizer
    # States of buckets that are cut over "fsdp" lie side by side, those of all devices; of a bucket
    # that is whole on each device there is one for each worker.
    method = jax.tree.map(
        lambda leaf: P(("data", "fsdp")) if leaf.shape[0] == mesh.size else P("data"),
        average.method,
    )
    metrics = dict.fromkeys(average.metrics, P())
    cut = dq.AllReduceState(step=P(), method=method, metrics=metrics)
    specs = State(fsdp_specs(state.params, mesh), (cut, fsdp_specs(rest, mesh)))
    shardings = on_mesh(specs, mesh)
    return jax.jit(mapped, donate_argnums=0, out_shardings=shardings), placed(state, shardings)


def make_train_step(
    sum_of_losses: SumOfLosses,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    shardings: State,
) -> jax.stages.Wrapped:
    """Build the train step; see `make_train_step` of train_step.py.

    Its metrics are the loss and those of `dq.all_reduce_gradients`.
    """

    def train_step(state: State, rows: Rows) -> tuple[State, dict[str, jax.Array]]:
        params = jax.lax.pcast(state.params, "data", to="varying")
        loss, grads = jax.value_and_grad(sum_of_losses)(params, rows)
        targets = jax.lax.pmean(jnp.sum(rows.learned, dtype=jnp.float32), "data")
        targets = jnp.where(targets > 0, targets, 1.0)
        grads = jax.tree.map(lambda grad: grad / targets, grads)
        updates, optimizer_state = optimizer.update(grads, state.optimizer, state.params)
        params = optax.apply_updates(state.params, updates)
        metrics = {"loss": jax.lax.pmean(loss, "data") / targets, **optimizer_state[0].metrics}
        return State(params, optimizer_state), metrics

    mapped = jax.shard_map(
        train_step,
        mesh=mesh,
        in_specs=(_SPECS, P("data")),
        out_specs=(_SPECS, P()),
        axis_names={"data"},
    )
    return jax.jit(mapped, donate_argnums=0, out_shardings=(shardings, None))
