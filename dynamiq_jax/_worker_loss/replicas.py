"""Replicas of all workers in a global view, stacked along a leading axis of every array.

The program is one `jax.jit`. Only the collective runs where the workers' axes are manual.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dynamiq_jax._buckets import order
from dynamiq_jax._buckets.axes import AxisName, axes_of_mesh, axis_names, find_axes
from dynamiq_jax._collectives.all_reduce import AllReduce
from dynamiq_jax._inputs.options import Compression
from dynamiq_jax._inputs.shards import (
    check_whole,
    context_or_automatic,
    is_explicit,
    leaf_specs,
    managed_axes,
    over,
)
from dynamiq_jax._run.driver import run
from dynamiq_jax._run.sample import key_of
from dynamiq_jax._worker_loss.casts import Cast
from pallas_kernels._jax import compat

P = PartitionSpec


@dataclasses.dataclass(frozen=True, eq=False)  # specs cannot be hashed
class Replicas:
    """Replicas of a tree for each worker of some axes, and the settings of their sum."""

    mesh: Mesh | None  # None for the mesh of the context
    axis_name: AxisName
    compression: Compression
    specs: Any  # split of one replica over other axes; see `find_shards`

    def __post_init__(self) -> None:
        axes_of_mesh(self.axis_name, self._mesh)  # raises if it is not possible

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the axes of workers."""
        return axis_names(self.axis_name)

    @property
    def count(self) -> int:
        """Number of workers."""
        return math.prod(self._mesh.shape[name] for name in self.names)

    def stack(self, tree: Any) -> Any:
        """Broadcast a tree to [workers, *shape], each replica on the devices of its worker."""
        check_whole("tree", tree)
        leaves, structure = jax.tree.flatten(tree)
        given = [None] * len(leaves) if self.specs is None else leaf_specs(tree, self.specs)
        stacked = [self._stack(leaf, spec) for leaf, spec in zip(leaves, given, strict=True)]
        return jax.tree.unflatten(structure, stacked)

    def all_reduce(self, stacked: Any, key: Array, *, mean: bool) -> tuple[Any, dict[str, Array]]:
        """Sum or average replicas, and return a tree without the leading axis, and metrics.

        Leaves of dtype float0 are not sent.
        """
        leaves, structure = jax.tree.flatten(stacked)
        sent = {n: leaf for n, leaf in enumerate(leaves) if leaf.dtype != jax.dtypes.float0}

        def local(
            sent: dict[int, Array], whole: tuple[Array, Array | None]
        ) -> tuple[dict[int, Array], dict[str, Array], Array | None]:
            key, token = whole
            order.remember(token)
            own = [
                sent[n][0] if n in sent else np.zeros(np.shape(leaf)[1:], leaf.dtype)
                for n, leaf in enumerate(leaves)
            ]
            outcome = run(
                AllReduce(find_axes(self.axis_name), mean=mean),
                jax.tree.unflatten(structure, own),
                key,
                self.compression,
                specs=self.specs,
            )
            results, token = jax.tree.leaves(outcome.tree), order.last_token()
            for name in self.names:  # each worker has its own token
                token = compat.same_over(token, name)
            return {n: results[n] for n in sent}, dict(outcome.metrics), token

        mapped = self._on_workers(local, P(self.names))
        reduced, metrics, token = mapped(sent, (key, order.last_token()))
        order.remember(token)
        results = [
            reduced.get(n, np.zeros(np.shape(leaf)[1:], jax.dtypes.float0))
            for n, leaf in enumerate(leaves)
        ]
        return jax.tree.unflatten(structure, results), metrics

    def broadcast(
        self,
        tree: Any,
        key: Array | None,
        salt: Array | None = None,
        ticket: Array | None = None,
        *,
        mean: bool,
    ) -> tuple[Any, Array | None]:
        """Stack a tree, with a transpose that is `all_reduce`; see `Cast.__call__`."""
        cast = Cast(
            spread=self.stack,
            sum=lambda stacked, key: self.all_reduce(stacked, key, mean=mean)[0],
            key_of=self._key_of,
        )
        return cast(tree, key, salt, ticket)

    def _key_of(self, tree: Any) -> Array:
        """Return a PRNG key from a sample of a tree, the same as each worker would compute."""
        leaves, structure = jax.tree.flatten(tree)
        arrays = {n: leaf for n, leaf in enumerate(leaves) if leaf.dtype != jax.dtypes.float0}

        def local(arrays: dict[int, Array], _: tuple[()]) -> Array:
            own = [arrays.get(n, leaf) for n, leaf in enumerate(leaves)]
            return key_of(jax.tree.unflatten(structure, own), self.specs)

        return self._on_workers(local, P())(arrays, ())

    def _on_workers(self, function: Callable[..., Any], in_spec: PartitionSpec) -> Any:
        """Map a function of split arrays and of whole values to results that all workers share."""
        return jax.shard_map(
            function,
            mesh=context_or_automatic(self.mesh),
            in_specs=(in_spec, P()),
            out_specs=P(),
            axis_names=set(self.names),
        )

    def _stack(self, leaf: Any, spec: PartitionSpec | None) -> Array:
        if spec is None and is_explicit():
            spec = jax.typeof(leaf).sharding.spec
        rest = (P.UNCONSTRAINED,) * np.ndim(leaf)
        if spec is not None:
            rest = tuple(over(spec, set(managed_axes(self._mesh)) - set(self.names)))
        stacked = jnp.broadcast_to(leaf, (self.count, *np.shape(leaf)))
        return place(stacked, self.mesh, P(self.names, *rest))

    @property
    def _mesh(self) -> Any:
        return context_or_automatic(self.mesh) or jax.sharding.get_abstract_mesh()


def place(array: Array, mesh: Mesh | None, spec: PartitionSpec) -> Array:
    """Split an array over axes of a mesh, or of the context if it has explicit axes."""
    if is_explicit():
        return jax.sharding.reshard(array, spec)
    automatic = context_or_automatic(mesh)
    return lax.with_sharding_constraint(
        array, spec if automatic is None else NamedSharding(automatic, spec)
    )
