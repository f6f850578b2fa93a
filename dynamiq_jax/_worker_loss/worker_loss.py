"""A loss function, how workers share its arguments, and how its gradients are sent."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh, PartitionSpec

from dynamiq_jax._buckets.axes import AxisName, axes_of_mesh, axis_names
from dynamiq_jax._inputs.options import Compression
from dynamiq_jax._worker_loss import aux as auxiliary
from dynamiq_jax._worker_loss.in_specs import check_axes
from dynamiq_jax._worker_loss.roles import Roles, with_gaps_filled
from dynamiq_jax._worker_loss.transforms import Transform, WorkerMap

P = PartitionSpec


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)  # specs cannot be hashed
class WorkerLoss:
    """A loss function, how workers share its arguments, and how its gradients are sent."""

    loss_fn: Callable[..., Any]
    roles: Roles
    has_aux: bool
    aux: Any  # roles of aux, as a user gives them
    num_targets: Callable[..., Array] | None
    mesh: Mesh
    axis_name: AxisName
    specs: Any  # as a user gives them
    compression: Compression
    transform: Transform
    check_vma: bool | None

    def __post_init__(self) -> None:
        axes_of_mesh(self.axis_name, self.mesh)  # raises if it is not possible
        check_axes(self.roles.in_specs, self.workers.axes)
        auxiliary.check_roles(self.aux, self.has_aux)
        self.workers.check()

    @functools.cached_property
    def workers(self) -> WorkerMap:
        """Map over the workers, by the transformation that runs a loss for each."""
        return WorkerMap(self.mesh, axis_names(self.axis_name), self.transform, self.check_vma)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the axes of workers, for collectives beside the loss function."""
        return self.workers.names

    @property
    def axes(self) -> dict[str, int]:
        """Axes of workers, and their sizes."""
        return {name: self.mesh.shape[name] for name in self.workers.axes}

    def targets(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Array:
        """Return the number of targets of a call of the loss, 1 without `num_targets`."""
        if self.num_targets is None:
            return jnp.float32(1)
        args, kwargs = with_gaps_filled(self.loss_fn, args, kwargs)
        count = jnp.asarray(self.num_targets(*args, **kwargs))
        if count.shape != ():
            raise ValueError(
                f"num_targets returns an array of shape {count.shape}. Return the number of all "
                "targets, such as its sum."
            )
        return count.astype(jnp.float32)

    @functools.cached_property
    def programs(self) -> Callable[[Callable[..., Any], Any], Callable[..., Any]]:
        """Cache of the compiled programs of plans, which are forgotten with this loss."""
        return functools.lru_cache(maxsize=256)(compiled)

    @property
    def value_spec(self) -> Any:
        """Specs of a value over the workers: all of it is the same on them, but for rows."""
        return (P(), *self.aux_spec) if self.aux is not None else P()

    @property
    def aux_spec(self) -> Any:
        """Specs of what a user gets besides the loss: a tuple of aux, if there is any."""
        return (auxiliary.out_specs(self.aux, self.workers.axes),) if self.aux is not None else P()


def compiled(program: Callable[..., Any], plan: Any) -> Callable[..., Any]:
    """Compile a program of a plan, a function of the plan and of arrays."""
    return jax.jit(functools.partial(program, plan))
