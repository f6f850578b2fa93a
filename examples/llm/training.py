"""The training step: data-parallel workers, each of which may spread its parameters over devices.

It is manual over the axis "data" of the mesh, where gradients are compressed, and leaves "fsdp" to
the compiler.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from dynamiq_jax._workshop.settings import Setting
from examples.llm.mesh import fsdp_specs, on_mesh
from examples.llm.packing import Rows
from examples.llm.reduction import OVER_DATA, PLACED, ReductionState, reduction

Params = Any  # A pytree of arrays: what `nnx.split` leaves of a model beside its structure.


class State(NamedTuple):
    """All that changes from step to step.

    Attributes:
        params: float32: what is trained; a model computes in a copy of fewer bits.
        optimizer: State of the gradients' mean, a compressor's residuals among it, and that of
            the clipped norm and AdamW.
    """

    params: Params
    optimizer: tuple[ReductionState, optax.OptState]


class Report(NamedTuple):
    """What one step tells, all scalars.

    Attributes:
        loss: float32: mean over the targets of all workers, before the update.
        norm: float32: of the mean gradient, before clipping.
        vnmse: float32: error of that mean; NaN unless measured.
        tokens: int32: tokens that were read, padding not counted.
    """

    loss: jax.Array
    norm: jax.Array
    vnmse: jax.Array
    tokens: jax.Array


@dataclass(frozen=True)
class Recipe:
    """How to train.

    Attributes:
        setting: How gradients are averaged.
        steps: Updates in the whole run.
        learning_rate: Its peak.
        warmup: Part of the steps in which it rises.
        weight_decay: Of AdamW, on matrices.
        clip: Largest norm of the mean gradient.
        seed: Chooses batches and rounding noise.
    """

    setting: Setting
    steps: int
    learning_rate: float
    warmup: float = 0.1
    weight_decay: float = 0.01
    clip: float = 1.0
    seed: int = 0

    def schedule(self) -> optax.Schedule:
        """Learning rate by step: a linear rise, then a cosine to a tenth."""
        rise = round(self.warmup * self.steps)
        return optax.warmup_cosine_decay_schedule(
            init_value=self.learning_rate / (rise + 1),  # From zero, a step would be wasted.
            peak_value=self.learning_rate,
            warmup_steps=rise,
            decay_steps=self.steps,
            end_value=0.1 * self.learning_rate,
        )

    def optimizer(self, mesh: Mesh) -> optax.GradientTransformationExtraArgs:
        """Gradients of one worker to an update that is the same on all."""
        # Clipping comes after the mean: the norm of one worker's gradient is not that of the mean.
        rest = optax.chain(
            optax.clip_by_global_norm(self.clip),
            optax.adamw(
                self.schedule(),
                b2=0.95,
                weight_decay=self.weight_decay,
                mask=lambda params: jax.tree.map(lambda leaf: leaf.ndim > 1, params),
            ),
        )
        return optax.chain(reduction(self.setting, mesh, self.seed), rest)


def loss_and_hits(
    structure: nnx.GraphDef, params: Params, rows: Rows
) -> tuple[jax.Array, jax.Array]:
    """Sums over all targets to learn.

    Args:
        structure: Structure of the model.
        params: Its parameters.
        rows: Rows `[batch, context]`.

    Returns:
        The loss in nats, float32, and how many of the most likely tokens were right, int32.
    """
    model = nnx.merge(structure, params)
    logits = model(rows.tokens, positions=rows.positions, segments=rows.segments)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, rows.targets)
    hits = (jnp.argmax(logits, axis=-1) == rows.targets) & rows.learned
    return jnp.sum(losses, where=rows.learned), jnp.sum(hits, dtype=jnp.int32)


def state_shardings(state: State, mesh: Mesh) -> State:
    """Where a state lives: parameters and moments in parts, a method's state with its device."""
    reduction_state, rest = state.optimizer
    placed = jax.tree.map(
        lambda spec, part: jax.tree.map(lambda _: spec, part),
        PLACED,
        reduction_state,
        is_leaf=lambda leaf: isinstance(leaf, P),
    )
    specs = State(fsdp_specs(state.params, mesh), (placed, fsdp_specs(rest, mesh)))
    return on_mesh(specs, mesh)


def initial_state(
    optimizer: optax.GradientTransformationExtraArgs, shapes: Params, mesh: Mesh
) -> tuple[Callable[[Params], State], State]:
    """Builds the state before the first step, each part on its devices.

    Args:
        optimizer: That of the recipe.
        shapes: Shapes of the parameters.
        mesh: Axes "data" and "fsdp".

    Returns:
        A function of float32 parameters, which are donated, and the shapes and shardings of what
        it returns.
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
    """Builds the step that `mesh` runs.

    Args:
        structure: Structure of the model.
        optimizer: That of the recipe.
        abstract: Shapes and shardings of the state.
        mesh: Axes "data" and "fsdp".

    Returns:
        A compiled function `(state, rows, measure)` to the next state, whose own is donated, and
        the report. Rows are `[micro_batches, batch, context]`, the batch split over the mesh;
        `measure` is a bool scalar, whether to measure the vNMSE.
    """
    workers = mesh.shape["data"]

    def step(state: State, rows: Rows, measure: jax.Array) -> tuple[State, Report]:
        # JAX knows that all workers hold the same parameters, and would sum gradients over them by
        # itself, uncompressed. Marked as varying, they give the gradient of this worker's rows.
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
        # Workers have different numbers of targets. Divided by their mean rather than by each
        # worker's own, gradients average to that of the mean over all targets.
        scale = workers / jnp.maximum(targets, 1).astype(jnp.float32)
        grads = jax.tree.map(lambda grad: grad * scale, grads)
        updates, after = optimizer.update(grads, state.optimizer, state.params, measure=measure)
        report = Report(
            loss=jax.lax.pmean(loss * scale, "data"),
            norm=after[0].norm,
            vnmse=after[0].vnmse,
            tokens=tokens,
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
    return jax.jit(mapped, donate_argnums=0, out_shardings=(shardings, Report(*[replicated] * 4)))
