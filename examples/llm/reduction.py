"""The mean gradient: compressed, as the first part of an optimizer, and measured now and then.

Over "data" gradients are reduced by dynamiq_jax. Along "fsdp" every device reduces its own part of
them, so that no gradient is ever whole on one device, or sent twice. That takes two maps: the
training step is manual over "data" and leaves "fsdp" to the compiler; around the reduction, a map
inside it makes "fsdp" manual too.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from dynamiq_jax._workshop.settings import Setting
from examples.llm.mesh import fsdp_specs
from pallas_kernels.compat import varying_axes


class ReductionState(NamedTuple):
    """State of `reduction`.

    Attributes:
        all_reduce: That of `dq.all_reduce_gradients`. The method's own, such as a residual, is
            another one on every device; they lie side by side along the first axis.
        norm: float32 scalar: norm of the last mean.
        vnmse: float32 scalar: its squared distance from the exact mean, relative to that one's
            square; NaN in a step that did not measure it.
    """

    all_reduce: dq.AllReduceState
    norm: jax.Array
    vnmse: jax.Array


# What each axis of the mesh cuts, for the map that makes it manual.
OVER_DATA = ReductionState(dq.AllReduceState(step=P(), method=P("data")), norm=P(), vnmse=P())
OVER_FSDP = dq.AllReduceState(step=P(), method=P("fsdp"))
PLACED = ReductionState(
    dq.AllReduceState(step=P(), method=P(("data", "fsdp"))), norm=P(), vnmse=P()
)


def reduction(setting: Setting, mesh: Mesh, seed: int) -> optax.GradientTransformationExtraArgs:
    """Averages gradients over "data". `init` and `update` run where that axis is manual.

    Args:
        setting: How; `jax.lax.pmean` if it names no method.
        mesh: Axes "data" and "fsdp".
        seed: Of the rounding noise.

    Returns:
        A transformation whose `update` takes `measure`, a bool scalar: whether to reduce exactly
        too and compare.
    """
    reduce = _transformation(setting, seed)

    def init(params: Any) -> ReductionState:
        specs = fsdp_specs(params, mesh)
        local = jax.shard_map(
            reduce.init, in_specs=(specs,), out_specs=OVER_FSDP, axis_names={"fsdp"}
        )
        return ReductionState(local(params), norm=jnp.float32(0), vnmse=jnp.float32(jnp.nan))

    def update(
        grads: Any, state: ReductionState, params: Any = None, *, measure: jax.Array, **_: Any
    ) -> tuple[Any, ReductionState]:
        def local(grads: Any, state: dq.AllReduceState) -> tuple[Any, dq.AllReduceState]:
            mean, state = reduce.update(grads, state)
            return jax.tree.map(_same_everywhere, mean, parts), state

        parts = fsdp_specs(grads, mesh)
        specs = parts, OVER_FSDP
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


def wire_report(setting: Setting, params: Any, mesh: Mesh) -> dq.WireReport:
    """What every device sends in one reduction.

    Args:
        setting: How it reduces.
        params: The parameters, or their shapes.
        mesh: Axes "data" and "fsdp".

    Raises:
        ValueError: The setting is not possible with so many workers.
    """
    workers, specs = mesh.shape["data"], fsdp_specs(params, mesh)
    parts = jax.tree.map(
        lambda leaf, spec: jax.ShapeDtypeStruct(
            jax.NamedSharding(mesh, spec).shard_shape(leaf.shape), jnp.float32
        ),
        params,
        specs,
    )
    # `jax.lax.pmean` sends what an exact ring does.
    method, topology = setting.method or dq.Exact(), setting.topology or "ring"
    return dq.wire_report(parts, workers, method=method, topology=topology)


def _transformation(setting: Setting, seed: int) -> optax.GradientTransformation:
    if setting.method is None or setting.topology is None:

        def init(params: Any) -> dq.AllReduceState:
            return dq.AllReduceState(step=jnp.int32(0), method=())

        def update(grads: Any, state: dq.AllReduceState, params: Any = None):
            return jax.lax.pmean(grads, "data"), state._replace(step=state.step + 1)

        return optax.GradientTransformation(init, update)
    return dq.all_reduce_gradients(
        "data", method=setting.method, topology=setting.topology, seed=seed
    )


def _same_everywhere(mean: jax.Array, spec: P) -> jax.Array:
    """A mean that is whole on all devices along "fsdp", as JAX wants it said: a method's state
    differs from device to device, but not the part of it that this one came from.
    """
    differs = "fsdp" in varying_axes(mean) and "fsdp" not in spec
    return jax.lax.pmax(mean, "fsdp") if differs else mean
