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
FORMS = ("exact", "compress", "pmean", "all_reduce_gradients")


@dataclasses.dataclass(frozen=True)
class Case:
    """A training step of dense layers: mesh, and how gradients are summed."""

    mesh: str  # of MESHES
    form: str  # of FORMS
    bucket_bytes: int = dq.Compression().bucket_bytes

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
        options = dq.Compression(bucket_bytes=self.bucket_bytes)
        step: Any = jax.jit(
            _step(_gradients(self.form, mesh, specs, options)),
            in_shardings=(placed, NamedSharding(mesh, P("data"))),
            out_shardings=placed,
            donate_argnums=0,
        )
        if self.form == "compress":
            step = dq.compress(step, "data", method=options)
        matrices = [
            jax.ShapeDtypeStruct((WIDTH, HIDDEN), jnp.float32),
            jax.ShapeDtypeStruct((HIDDEN, WIDTH), jnp.float32),
        ] * LAYERS
        x = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
        return step.lower(matrices, x)


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
        options = dq.Compression(bucket_bytes=self.bucket_bytes, bucketing=self.bucketing)

        def local(tree: Any) -> Any:
            return dq.pmean(tree, "data", key=jax.random.key(0), method=options)

        mapped = jax.shard_map(local, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
        return jax.jit(mapped).lower(tree)


def _loss(matrices: list[Array], x: Array) -> Array:
    for into, out in zip(matrices[::2], matrices[1::2], strict=True):
        x = x + jnp.tanh(x @ into) @ out
    return jnp.mean(x**2)


def _gradients(
    form: str, mesh: Any, specs: list[PartitionSpec], options: dq.Compression
) -> Callable[..., list[Array]]:
    """Return a function of matrices and rows to mean gradients."""
    grad_fn = jax.grad(_loss)
    if form in ("exact", "compress"):
        return grad_fn

    def local(matrices: list[Array], x: Array) -> list[Array]:
        grads = grad_fn(lax.pcast(matrices, "data", to="varying"), x)
        if form == "pmean":
            key = jax.random.key(0)
            return dq.pmean(
                grads, "data", key=key, method=dataclasses.replace(options, specs=specs)
            )
        reduce = dq.all_reduce_gradients("data", method=dataclasses.replace(options, specs=specs))
        return reduce.update(grads, reduce.init(matrices))[0]

    return jax.shard_map(
        local, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), axis_names={"data"}
    )


def _step(gradients: Callable[..., list[Array]]) -> Callable[..., list[Array]]:
    """Return a step of gradient descent."""

    def step(matrices: list[Array], x: Array) -> list[Array]:
        return jax.tree.map(lambda old, grad: old - 0.1 * grad, matrices, gradients(matrices, x))

    return step
