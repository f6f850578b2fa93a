"""Average gradients over the mesh, and measure the error of the mean now and then.

`dynamiq_jax` averages over the axis "data". Along "fsdp", each device averages its own part of the
gradients, so that no gradient is ever whole on one device or sent twice. This takes two nested
maps: the training step is manual over "data" and leaves "fsdp" to the compiler; around the
reduction, a second map makes "fsdp" manual too.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from examples.llm.averaging import Averaging
from examples.llm.mesh import fsdp_specs


class ReductionState(NamedTuple):
    """State of `reduction`."""

    # The method's state, such as a residual, differs between devices: those of all devices lie
    # side by side along the first axis of each array.
    all_reduce: dq.AllReduceState
    norm: jax.Array  # float32 scalar: norm of the last mean
    vnmse: jax.Array  # float32 scalar: vNMSE of the last mean; NaN if it was not measured


# How each map splits the state over the axes that it makes manual, and how both together do.
ALL_REDUCE_OVER_FSDP = dq.AllReduceState(step=P(), method=P("fsdp"), metrics=P())
OVER_DATA = ReductionState(
    dq.AllReduceState(step=P(), method=P("data"), metrics=P()), norm=P(), vnmse=P()
)
PLACED = ReductionState(
    dq.AllReduceState(step=P(), method=P(("data", "fsdp")), metrics=P()), norm=P(), vnmse=P()
)


def reduction(averaging: Averaging, mesh: Mesh, seed: int) -> optax.GradientTransformationExtraArgs:
    """Build the transformation that averages gradients over "data".

    Its `init` and `update` run where "data" is manual.

    Args:
      averaging: how to average.
      mesh: mesh with axes "data" and "fsdp".
      seed: seed of the rounding noise.

    Returns:
      A transformation whose `update` takes `measure`, a bool scalar: also take the exact mean and
      measure the vNMSE.
    """
    reduce = averaging.transformation("data", seed)

    def init(params: Any) -> ReductionState:
        local = jax.shard_map(
            reduce.init,
            in_specs=(fsdp_specs(params, mesh),),
            out_specs=ALL_REDUCE_OVER_FSDP,
            axis_names={"fsdp"},
        )
        return ReductionState(local(params), norm=jnp.float32(0), vnmse=jnp.float32(jnp.nan))

    def update(
        grads: Any, state: ReductionState, params: Any = None, *, measure: jax.Array, **_: Any
    ) -> tuple[Any, ReductionState]:
        parts = fsdp_specs(grads, mesh)

        def local(grads: Any, state: dq.AllReduceState) -> tuple[Any, dq.AllReduceState]:
            mean, after = reduce.update(grads, state)
            if averaging.is_stateful:
                mean = jax.tree.map(_as_replicated, mean, parts)
            # Each device has metrics of its own parts.
            return mean, after._replace(metrics=jax.lax.pmean(after.metrics, "fsdp"))

        specs = parts, ALL_REDUCE_OVER_FSDP
        mean, after = jax.shard_map(local, in_specs=specs, out_specs=specs, axis_names={"fsdp"})(
            grads, state.all_reduce
        )
        vnmse = jax.lax.cond(
            measure,
            lambda: dq.vnmse(mean, jax.lax.pmean(grads, "data")),
            lambda: jnp.float32(jnp.nan),
        )
        return mean, ReductionState(after, norm=optax.tree.norm(mean), vnmse=vnmse)

    return optax.GradientTransformationExtraArgs(init, update)


def wire_report(averaging: Averaging, params: Any, mesh: Mesh) -> dq.WireReport:
    """Report what each device sends over "data" in one reduction.

    Args:
      averaging: how to average.
      params: the parameters, or their shapes.
      mesh: mesh with axes "data" and "fsdp".

    Raises:
      ValueError: the method or the topology does not work with so many workers.
    """
    parts = jax.tree.map(
        lambda leaf, spec: jax.ShapeDtypeStruct(
            jax.NamedSharding(mesh, spec).shard_shape(leaf.shape), jnp.float32
        ),
        params,
        fsdp_specs(params, mesh),
    )
    return averaging.wire_report(parts, mesh.shape["data"])


def _as_replicated(mean: jax.Array, spec: P) -> jax.Array:
    """Mark a mean that is whole on each device of "fsdp" as the same on all of them.

    It is the same, but its type says that it varies, since it depends on the method's state, and
    the states of other leaves differ between these devices.
    """
    return mean if "fsdp" in spec else jax.lax.pmax(mean, "fsdp")
