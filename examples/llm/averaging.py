"""Names of the ways to average gradients, as --method and --topology take them."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

import dynamiq_jax as dq

PSUM = "psum"
RING = "ring"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Averaging:
    """A way to average gradients over the workers.

    >>> Averaging(method="dynamiq:4", topology="butterfly").name
    'dynamiq:4:butterfly'
    """

    method: str  # PSUM for the exact `jax.lax.pmean`, or a name for `dq.methods.resolve_method`
    topology: str = RING  # a name for `dq.topologies.resolve_topology`; PSUM takes no other

    def __post_init__(self):
        if self.is_exact and self.topology != RING:
            raise ValueError(
                f"--topology is {self.topology}, but --method psum takes none. Remove it, or give "
                "--method exact for an exact mean on this topology."
            )
        for part in self.method.split(":")[1:]:
            if part in dq.topologies.TOPOLOGIES:
                raise ValueError(
                    f"--method is {self.method}, which names a topology. Give --topology {part} "
                    "instead."
                )
        try:
            if not self.is_exact:
                dq.methods.resolve_method(self.method)
        except ValueError as error:
            raise ValueError(f"--method: {error} Give psum for the exact mean.") from None
        try:
            dq.topologies.resolve_topology(self.topology)
        except ValueError as error:
            raise ValueError(f"--topology: {error}") from None

    @property
    def is_exact(self) -> bool:
        """True for the exact mean of JAX."""
        return self.method == PSUM

    @property
    def is_stateful(self) -> bool:
        """True if the method carries state from step to step."""
        return not self.is_exact and dq.methods.resolve_method(self.method).is_stateful

    @property
    def name(self) -> str:
        """The name in tables and plots."""
        return "exact (psum)" if self.is_exact else f"{self.method}:{self.topology}"

    def transformation(
        self, axis_name: str, seed: int, specs: Callable[[Any], Any]
    ) -> optax.GradientTransformation:
        """Build the transformation that averages gradients over a manual mesh axis.

        Args:
          axis_name: the axis.
          seed: seed of the rounding noise.
          specs: function from gradients to how they are cut over other axes.

        Returns:
          A transformation whose state is a `dq.AllReduceState`.
        """
        if not self.is_exact:
            return dq.all_reduce_gradients(
                axis_name,
                method=self.method,
                topology=self.topology,
                seed=seed,
                specs=specs,
                with_metrics=True,
            )

        def init(params: Any) -> dq.AllReduceState:
            return dq.AllReduceState(step=jnp.int32(0), method=())

        def update(
            grads: Any, state: dq.AllReduceState, params: Any = None
        ) -> tuple[Any, dq.AllReduceState]:
            return jax.lax.pmean(grads, axis_name), state._replace(step=state.step + 1)

        return optax.GradientTransformation(init, update)

    def wire_report(self, tree: Any, mesh: Mesh, specs: Any) -> dq.WireReport:
        """Report what each device sends over "data" for one mean of a tree.

        Args:
          tree: gradients, or their shapes.
          mesh: mesh with an axis "data".
          specs: how the gradients are cut over its other axes.

        Raises:
          ValueError: the method or the topology does not work with so many workers.
        """
        # `jax.lax.pmean` sends what an exact ring sends.
        method = "exact" if self.is_exact else self.method
        return dq.wire_report(
            tree,
            "data",
            mesh=mesh,
            specs=specs,
            method=method,
            topology=self.topology,
            with_metrics=not self.is_exact,
        )
