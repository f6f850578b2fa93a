"""Average gradients over the mesh, and measure the error of the mean now and then.

The training step is manual over "data" and leaves "fsdp" to the compiler. Along "fsdp", each device
averages its own part of the gradients, so that no gradient is ever whole on one device or sent
twice: `specs` tells the library how they are cut.
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

    all_reduce: dq.AllReduceState
    norm: jax.Array  # float32 scalar: norm of the last mean
    vnmse: jax.Array  # float32 scalar: vNMSE of the last mean; NaN if it was not measured


# How a map over "data" splits the state: that of the method, such as a residual, differs.
OVER_DATA = ReductionState(
    dq.AllReduceState(step=P(), method=P("data"), metrics=P()), norm=P(), vnmse=P()
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
    reduce = averaging.transformation("data", seed, lambda tree: fsdp_specs(tree, mesh))

    def init(params: Any) -> ReductionState:
        return ReductionState(reduce.init(params), norm=jnp.float32(0), vnmse=jnp.float32(jnp.nan))

    def update(
        grads: Any, state: ReductionState, params: Any = None, *, measure: jax.Array, **_: Any
    ) -> tuple[Any, ReductionState]:
        mean, after = reduce.update(grads, state.all_reduce)
        vnmse = jax.lax.cond(
            measure,
            lambda: dq.vnmse(mean, jax.lax.pmean(grads, "data")),
            lambda: jnp.float32(jnp.nan),
        )
        return mean, ReductionState(after, norm=optax.tree.norm(mean), vnmse=vnmse)

    return optax.GradientTransformationExtraArgs(init, update)


def state_specs(state: ReductionState, mesh: Mesh) -> ReductionState:
    """Return how a state lies on the mesh.

    States of buckets that are cut over "fsdp" lie side by side, those of all devices; of a bucket
    that is whole on each device there is one for each worker.
    """

    def spec(leaf: Any) -> P:
        return P(("data", "fsdp")) if leaf.shape[0] == mesh.size else P("data")

    method = jax.tree.map(spec, state.all_reduce.method)
    placed = state.all_reduce._replace(
        step=P(), method=method, metrics=dict.fromkeys(state.all_reduce.metrics, P())
    )
    return ReductionState(placed, norm=P(), vnmse=P())


def wire_report(averaging: Averaging, params: Any, mesh: Mesh) -> dq.WireReport:
    """Report what each device sends over "data" in one reduction.

    Args:
      averaging: how to average.
      params: the parameters, or their shapes.
      mesh: mesh with axes "data" and "fsdp".

    Raises:
      ValueError: the method or the topology does not work with so many workers.
    """
    gradients = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32), params)
    return averaging.wire_report(gradients, mesh, fsdp_specs(params, mesh))
