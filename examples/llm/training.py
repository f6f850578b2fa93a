"""The train step: gradients travel compressed, in one line of the optimizer.

The step is manual over "data" and leaves "fsdp" to the compiler. Along "fsdp", each device averages
its own part of the gradients, so that no gradient is ever whole on one device or sent twice.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from examples.llm.data import Rows, place
from examples.llm.model import Params

LOGITS_AT_ONCE = 128  # positions of each row
WHOLE_BELOW = 1024  # elements: to cut the weight of a norm would save nothing


class State(NamedTuple):
    """What a run carries from step to step."""

    params: Params
    optimizer: Any  # of optax: first that of the mean over the workers, a `dq.AllReduceState`


# How a map over "data" splits the state. That of a method, such as a residual, is the worker's own.
_SPECS = State(P(), (dq.AllReduceState(step=P(), method=P("data"), metrics=P()), P()))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """Hyperparameters of a run."""

    method: str | dict[str, str] = "exact"  # or methods by pattern of the parameter's path
    topology: str = "ring"
    steps: int
    learning_rate: float  # the peak, after a rise over a tenth of the steps
    seed: int = 0  # of the batches and of the rounding noise

    def optimizer(self, mesh: Mesh) -> optax.GradientTransformation:
        """Build the transformation from one worker's gradients to the update of all workers."""
        rise = round(0.1 * self.steps)
        schedule = optax.warmup_cosine_decay_schedule(
            init_value=self.learning_rate / (rise + 1),  # A rate of zero would waste a step.
            peak_value=self.learning_rate,
            warmup_steps=rise,
            decay_steps=self.steps,
            end_value=0.1 * self.learning_rate,
        )
        return optax.chain(
            # The line that compresses. `jax.lax.pmean` of the gradients would do the same exactly.
            dq.all_reduce_gradients(
                "data",
                method=self.method,
                topology=self.topology,
                seed=self.seed,
                specs=lambda gradients: fsdp_specs(gradients, mesh),
                with_metrics=True,
            ),
            optax.chain(
                # The mean is clipped: the gradients of single workers have other norms.
                optax.clip_by_global_norm(1.0),
                self.update_rule(schedule),
            ),
        )

    def update_rule(self, schedule: optax.Schedule) -> optax.GradientTransformation:
        """Build the transformation from the mean gradient to the update: AdamW."""
        return optax.adamw(
            schedule,
            b2=0.95,
            weight_decay=0.01,
            mask=lambda params: jax.tree.map(lambda leaf: leaf.ndim > 1, params),
        )


def fsdp_specs(tree: Any, mesh: Mesh) -> Any:
    """Choose how arrays are cut over "fsdp": along the longest axis that divides evenly.

    The choice depends on the shape alone: moments of an optimizer are cut like their parameters.
    """
    parts = mesh.shape["fsdp"]

    def spec(leaf: Any) -> P:
        even = [axis for axis, size in enumerate(leaf.shape) if size % parts == 0]
        if not even or math.prod(leaf.shape) < WHOLE_BELOW:
            return P()
        longest = max(even, key=lambda axis: leaf.shape[axis])
        return P(*[None] * longest, "fsdp")

    return jax.tree.map(spec, tree)


def on_mesh(specs: Any, mesh: Mesh) -> Any:
    """Return the shardings of a tree of `PartitionSpec`."""
    is_spec = lambda leaf: isinstance(leaf, P)  # noqa: E731
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=is_spec)


def loss_of_rows(structure: nnx.GraphDef, params: Params, rows: Rows) -> jax.Array:
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
    reduction, rest = state.optimizer
    # States of buckets that are cut over "fsdp" lie side by side, those of all devices; of a bucket
    # that is whole on each device there is one for each worker.
    method = jax.tree.map(
        lambda leaf: P(("data", "fsdp")) if leaf.shape[0] == mesh.size else P("data"),
        reduction.method,
    )
    metrics = dict.fromkeys(reduction.metrics, P())
    placed = dq.AllReduceState(step=P(), method=method, metrics=metrics)
    specs = State(fsdp_specs(state.params, mesh), (placed, fsdp_specs(rest, mesh)))
    shardings = on_mesh(specs, mesh)
    abstract = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        state,
        shardings,
    )
    return jax.jit(mapped, donate_argnums=0, out_shardings=shardings), abstract


def train_step(
    structure: nnx.GraphDef,
    optimizer: optax.GradientTransformation,
    abstract: State,
    mesh: Mesh,
) -> jax.stages.Wrapped:
    """Build the training step.

    Args:
      structure: structure of the model.
      optimizer: that of the recipe.
      abstract: shapes and shardings of the state.
      mesh: mesh with axes "data" and "fsdp".

    Returns:
      A compiled function of the state, which is donated, and rows `[batch, context]`, split over
      the mesh; to the next state, and metrics: "loss" in nats a target, and those of the library.
    """

    def step(state: State, rows: Rows) -> tuple[State, dict[str, jax.Array]]:
        # All workers hold the same parameters. JAX would therefore sum their gradients over the
        # workers, uncompressed. Marked as varying, they give the gradient of this worker's rows.
        params = jax.lax.pcast(state.params, "data", to="varying")
        targets = jax.lax.psum(jnp.sum(rows.learned, dtype=jnp.int32), "data")

        loss, grads = jax.value_and_grad(lambda p: loss_of_rows(structure, p, rows))(params)
        # Workers have different numbers of targets. Divided by the mean of these numbers, rather
        # than by its own one, their gradients average to that of the mean over all targets.
        scale = mesh.shape["data"] / jnp.maximum(targets, 1).astype(jnp.float32)
        grads = jax.tree.map(lambda grad: grad * scale, grads)
        updates, after = optimizer.update(grads, state.optimizer, state.params)
        metrics = {"loss": jax.lax.pmean(loss * scale, "data"), **after[0].metrics}
        return State(optax.apply_updates(state.params, updates), after), metrics

    mapped = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(_SPECS, P("data")),
        out_specs=(_SPECS, P()),
        axis_names={"data"},
    )
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    return jax.jit(mapped, donate_argnums=0, out_shardings=(shardings, NamedSharding(mesh, P())))


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
        lambda params, rows: loss_of_rows(structure, params, rows),
        out_shardings=NamedSharding(mesh, P()),
    )
    count = int(rows.learned.sum())
    return lambda params: sum(float(summed(params, rows)) for rows in batches) / count
