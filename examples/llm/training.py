"""The training step of data-parallel workers, each of which may spread its parameters over devices.

The step is manual over the mesh axis "data", where gradients are compressed, and leaves "fsdp" to
the compiler.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from examples.llm.averaging import Averaging
from examples.llm.mesh import fsdp_specs, on_mesh
from examples.llm.packing import Rows
from examples.llm.reduction import OVER_DATA, ReductionState, reduction, state_specs

Params = Any  # A pytree of arrays: what `nnx.split` leaves of a model beside its structure.


class State(NamedTuple):
    """State that changes from step to step."""

    params: Params  # float32; the model may compute in a copy of fewer bits
    optimizer: tuple[ReductionState, optax.OptState]  # of the reduction, then of clipping and AdamW


class Report(NamedTuple):
    """Measurements of one step, all scalars."""

    loss: jax.Array  # float32: mean over the targets of all workers, before the update
    norm: jax.Array  # float32: norm of the mean gradient, before clipping
    vnmse: jax.Array  # float32: vNMSE of the mean gradient; NaN unless measured
    tokens: jax.Array  # int32: tokens that were read, without padding
    compression: dict[str, jax.Array]  # float32: metrics of the library; none of the exact mean


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """Hyperparameters of a run."""

    averaging: Averaging
    steps: int  # updates in the whole run
    learning_rate: float  # the peak
    warmup: float = 0.1  # share of the steps in which the learning rate rises
    weight_decay: float = 0.01  # of AdamW, on matrices
    clip: float = 1.0  # largest norm of the mean gradient
    seed: int = 0  # of the batches and of the rounding noise

    def schedule(self) -> optax.Schedule:
        """Build the learning rate by step: a linear rise, then a cosine to a tenth of the peak."""
        rise = round(self.warmup * self.steps)
        return optax.warmup_cosine_decay_schedule(
            init_value=self.learning_rate / (rise + 1),  # A rate of zero would waste a step.
            peak_value=self.learning_rate,
            warmup_steps=rise,
            decay_steps=self.steps,
            end_value=0.1 * self.learning_rate,
        )

    def update_rule(self) -> optax.GradientTransformation:
        """Build the transformation from the mean gradient to an update: clipping, then AdamW."""
        return optax.chain(
            optax.clip_by_global_norm(self.clip),
            optax.adamw(
                self.schedule(),
                b2=0.95,
                weight_decay=self.weight_decay,
                mask=lambda params: jax.tree.map(lambda leaf: leaf.ndim > 1, params),
            ),
        )

    def optimizer(self, mesh: Mesh) -> optax.GradientTransformationExtraArgs:
        """Build the transformation from one worker's gradients to the update of all workers."""
        # The mean is clipped: the gradients of single workers have other norms.
        return optax.chain(reduction(self.averaging, mesh, self.seed), self.update_rule())


def loss_and_hits(
    structure: nnx.GraphDef, params: Params, rows: Rows
) -> tuple[jax.Array, jax.Array]:
    """Sum the loss and the correct predictions over all targets to learn.

    Args:
      structure: structure of the model.
      params: its parameters.
      rows: rows `[batch, context]`.

    Returns:
      The loss in nats, float32, and the number of targets that were the most likely token, int32.
    """
    model = nnx.merge(structure, params)
    logits = model(rows.tokens, positions=rows.positions, segments=rows.segments)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, rows.targets)
    hits = (jnp.argmax(logits, axis=-1) == rows.targets) & rows.learned
    return jnp.sum(losses, where=rows.learned), jnp.sum(hits, dtype=jnp.int32)


def state_shardings(state: State, mesh: Mesh) -> State:
    """Return the shardings of a state.

    Parameters and moments are cut over "fsdp". A method's state lies on its own device.
    """
    reduction_state, rest = state.optimizer
    optimizer = state_specs(reduction_state, mesh), fsdp_specs(rest, mesh)
    specs = State(fsdp_specs(state.params, mesh), optimizer)
    return on_mesh(specs, mesh)


def initial_state(
    optimizer: optax.GradientTransformationExtraArgs, shapes: Params, mesh: Mesh
) -> tuple[Callable[[Params], State], State]:
    """Build the function that makes the state before the first step, each part on its devices.

    Args:
      optimizer: optimizer of the recipe.
      shapes: shapes of the parameters.
      mesh: mesh with axes "data" and "fsdp".

    Returns:
      A function of float32 parameters, which are donated; and the shapes and shardings of its
      result.
    """

    def start(params: Params) -> State:
        return State(params, optimizer.init(params))

    mapped = jax.shard_map(
        start,
        mesh=mesh,
        in_specs=P(),
        out_specs=State(P(), (OVER_DATA, P())),
        axis_names={"data"},
    )
    state = jax.eval_shape(mapped, shapes)
    shardings = state_shardings(state, mesh)
    abstract = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        state,
        shardings,
    )
    return jax.jit(mapped, donate_argnums=0, out_shardings=shardings), abstract


def train_step(
    structure: nnx.GraphDef,
    optimizer: optax.GradientTransformationExtraArgs,
    abstract: State,
    mesh: Mesh,
) -> Callable[[State, Rows, jax.Array], tuple[State, Report]]:
    """Build the training step.

    Args:
      structure: structure of the model.
      optimizer: optimizer of the recipe.
      abstract: shapes and shardings of the state.
      mesh: mesh with axes "data" and "fsdp".

    Returns:
      A compiled function `(state, rows, measure)` to the next state and the report. The state is
      donated. Rows are `[micro_batches, batch, context]`, the batch split over the mesh; `measure`
      is a bool scalar: measure the vNMSE.
    """
    workers = mesh.shape["data"]

    def step(state: State, rows: Rows, measure: jax.Array) -> tuple[State, Report]:
        # All workers hold the same parameters. JAX would therefore sum their gradients over the
        # workers, uncompressed. Marked as varying, they give the gradient of this worker's rows.
        params = jax.lax.pcast(state.params, "data", to="varying")
        targets = jax.lax.psum(jnp.sum(rows.learned, dtype=jnp.int32), "data")
        tokens = jax.lax.psum(jnp.sum(rows.segments > 0, dtype=jnp.int32), "data")

        def add_micro_batch(total, rows):
            def loss(params):
                return loss_and_hits(structure, params, rows)[0]

            return jax.tree.map(jnp.add, total, jax.value_and_grad(loss)(params)), None

        zero = jax.lax.pcast(jnp.float32(0), "data", to="varying")
        nothing = (zero, jax.tree.map(jnp.zeros_like, params))
        (loss, grads), _ = jax.lax.scan(add_micro_batch, nothing, rows)
        # Workers have different numbers of targets. Divided by the mean of these numbers, rather
        # than by its own one, their gradients average to that of the mean over all targets.
        scale = workers / jnp.maximum(targets, 1).astype(jnp.float32)
        grads = jax.tree.map(lambda grad: grad * scale, grads)
        updates, after = optimizer.update(grads, state.optimizer, state.params, measure=measure)
        report = Report(
            loss=jax.lax.pmean(loss * scale, "data"),
            norm=after[0].norm,
            vnmse=after[0].vnmse,
            tokens=tokens,
            compression=dict(after[0].all_reduce.metrics),
        )
        return State(optax.apply_updates(state.params, updates), after), report

    over_data = State(P(), (OVER_DATA, P()))
    mapped = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(over_data, P(None, "data"), P()),
        out_specs=(over_data, P()),
        axis_names={"data"},
    )
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    replicated = jax.NamedSharding(mesh, P())
    return jax.jit(mapped, donate_argnums=0, out_shardings=(shardings, Report(*[replicated] * 5)))
