"""Dense layers on several meshes, and buckets that are alike."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import dynamiq_jax as dq

P = PartitionSpec
LAYERS, WIDTH, HIDDEN, ROWS = 8, 1024, 4096, 16_384  # rows of the whole batch

# Devices by axis, and how the first matrix of a layer is split; the second one is split crosswise.
MESHES: dict[str, tuple[dict[str, int], PartitionSpec]] = {
    "data 2": ({"data": 2}, P()),
    "data 2 x fsdp 4": ({"data": 2, "fsdp": 4}, P("fsdp", None)),
    "data 4 x fsdp 2": ({"data": 4, "fsdp": 2}, P("fsdp", None)),
    "data 2 x fsdp 2 x tensor 2": ({"data": 2, "fsdp": 2, "tensor": 2}, P("fsdp", "tensor")),
}
FORMS = ("exact", "pmean", "pcast", "data_parallel", "all_reduce_gradients")


@dataclasses.dataclass(frozen=True)
class Case:
    """A training step of dense layers: mesh, and how gradients are summed."""

    mesh: str  # of MESHES
    form: str  # of FORMS
    bucket_bytes: int = dq.Options().bucket_bytes

    def lower(self) -> Any:
        """Lower the training step for virtual devices."""
        sizes, first = MESHES[self.mesh]
        count = math.prod(sizes.values())
        mesh = jax.make_mesh(
            tuple(sizes.values()),
            tuple(sizes),
            axis_types=(AxisType.Auto,) * len(sizes),
            devices=jax.devices()[:count],
        )
        specs = [first, P(*reversed(first))] * LAYERS
        placed = [NamedSharding(mesh, spec) for spec in specs]
        step = jax.jit(
            _step(self, mesh, specs),
            in_shardings=(placed, NamedSharding(mesh, P("data")), None),
            out_shardings=placed,
            donate_argnums=0,
        )
        matrices = [
            jax.ShapeDtypeStruct((WIDTH, HIDDEN), jnp.float32),
            jax.ShapeDtypeStruct((HIDDEN, WIDTH), jnp.float32),
        ] * LAYERS
        x = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
        return step.lower(matrices, x, jax.eval_shape(lambda: jax.random.key(0)))


@dataclasses.dataclass(frozen=True)
class Buckets:
    """A `pmean` of leaves of one bucket each, on four workers."""

    count: int
    bucketing: Literal["auto", "in_order"] = "auto"
    bucket_bytes: int = 2**27

    def lower(self) -> Any:
        """Lower the mean for virtual devices."""
        mesh = jax.make_mesh(
            (4,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4]
        )
        leaf = jax.ShapeDtypeStruct((self.bucket_bytes // 4,), jnp.float32)
        tree = {str(number): leaf for number in range(self.count)}
        options = dq.Options(bucket_bytes=self.bucket_bytes, bucketing=self.bucketing)

        def local(tree: Any) -> Any:
            return dq.pmean(tree, "data", key=jax.random.key(0), options=options)

        mapped = jax.shard_map(local, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
        return jax.jit(mapped).lower(tree)


def _loss(matrices: list[Array], x: Array) -> Array:
    for into, out in zip(matrices[::2], matrices[1::2], strict=True):
        x = x + jnp.tanh(x @ into) @ out
    return jnp.mean(x**2)


def _step(case: Case, mesh: Any, specs: list[PartitionSpec]) -> Callable[..., Any]:
    arguments: dict[str, Any] = {
        "specs": specs,
        "options": dq.Options(bucket_bytes=case.bucket_bytes),
    }

    def local(matrices: list[Array], x: Array, key: Array) -> list[Array]:
        if case.form == "pcast":

            def mean_loss(matrices: list[Array]) -> Array:
                own = dq.pcast(matrices, "data", to="varying", key=key, **arguments)
                return lax.pmean(_loss(own, x), "data")

            return jax.grad(mean_loss)(matrices)
        grads = jax.grad(_loss)(lax.pcast(matrices, "data", to="varying"), x)
        if case.form == "pmean":
            return dq.pmean(grads, "data", key=key, **arguments)
        if case.form == "all_reduce_gradients":
            reduce = dq.all_reduce_gradients("data", **arguments)
            return reduce.update(grads, reduce.init(matrices))[0]
        return lax.pmean(grads, "data")

    mapped = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(P(), P("data"), P()),
        out_specs=P(),
        axis_names={"data"},
    )
    mean_loss = dq.data_parallel(_loss, mesh=mesh, axis_name="data", **arguments)

    def step(matrices: list[Array], x: Array, key: Array) -> list[Array]:
        if case.form == "data_parallel":
            grads = jax.grad(mean_loss)(matrices, x)
        else:
            grads = mapped(matrices, x, key)
        return jax.tree.map(lambda old, grad: old - 0.1 * grad, matrices, grads)

    return step
