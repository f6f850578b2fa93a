"""Interface of collectives: layout of leaves, and transfer of a bucket of them."""

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from dynamiq_jax._buckets import scopes
from dynamiq_jax._buckets.axes import Axes
from dynamiq_jax._buckets.buckets import Bucket, CutRules
from dynamiq_jax._core.naming import spelled
from dynamiq_jax._inputs import checks
from dynamiq_jax._inputs.compression import Compression
from dynamiq_jax.methods import Method, Reduced, State

Leaves = dict[int, Any]  # index in the flattened tree to leaf


@dataclasses.dataclass(frozen=True)
class Collective(abc.ABC):
    """A kind of collective over the workers of some axes."""

    axes: Axes
    # In a backward pass the gradients of the last leaves are available first.
    last_first: bool = dataclasses.field(default=True, kw_only=True)

    # Folded into the key, so that different kinds with the same key have different noise.
    salt: ClassVar[int | None] = None

    def check_method(self, method: Method) -> None:
        """Raise ValueError for a method that this collective cannot use."""
        return None

    def check(self, name: str, leaf: Any, spec: PartitionSpec) -> None:
        """Raise ValueError for a leaf whose shape or shards this collective cannot use."""
        return None

    def check_values(self, name: str, leaf: Array) -> None:
        """Raise ValueError for a leaf that is summed already, or that is no term of a sum."""
        if jnp.issubdtype(leaf.dtype, jnp.inexact):
            checks.check_not_state(name, self.axes.names)
            checks.check_not_reduced(name, leaf, self.axes.names)

    def planned(self, leaf: Any) -> Any:
        """Return the leaf as the plan counts it: anything with `shape` and `dtype`."""
        return leaf

    @abc.abstractmethod
    def rules(self, compression: Compression) -> CutRules:
        """Return how leaves are cut into buckets.

        Law: each coordinate is in one bucket, whatever the rules.
        """

    @property
    def result_rows(self) -> int:
        """Rows of the result, one for each worker whose values are in it."""
        return 1

    def rows(self, leaf: Array) -> Array:
        """Reshape a leaf to [rows, coordinates], one row for each worker that gets a part."""
        return leaf.reshape(1, -1)

    def multiple(self, bucket: Bucket) -> int:
        """Return the multiple of coordinates that rows of a bucket are padded to."""
        return 1

    def shape(self, leaf: Array) -> tuple[int, ...]:
        """Return the shape of the result of a leaf; by default that of the leaf.

        Law: that of `restore`, and of the collective of `jax.lax` of the same name.
        """
        return leaf.shape

    def result_spec(self, leaf: Array, spec: PartitionSpec) -> PartitionSpec:
        """Return how the result of a leaf is split over the axes of its shards."""
        return spec

    def restore(self, rows: Array, leaf: Array) -> Array:
        """Reshape result rows, [rows, coordinates], to the result of a leaf.

        Law: of `rows(leaf)` it is the leaf, or the parts of all workers that are like it.
        """
        return rows.reshape(self.shape(leaf))

    @abc.abstractmethod
    def exact(self, leaves: Leaves, token: Array | None = None) -> tuple[Leaves, list[Array]]:
        """Run the exact collective once a token is available.

        Law: the values of the collective of `jax.lax` of the same name.

        Returns:
          Results by index, and what arrived: an array of each message.
        """

    @abc.abstractmethod
    def send(self, bucket: Bucket, flat: Array, key: Array, state: State) -> Reduced:
        """Run the compressed collective of a bucket: rows that `restore` takes, of all leaves.

        Law: those of `exact`, up to the error of the method.
        """

    def transfer(self, bucket: Bucket, flat: Array, key: Array, state: State) -> Reduced:
        """Run `send` under the name of the method, which profiles show."""
        with scopes.scope(spelled(bucket.method)):
            return self.send(bucket, flat, key, state)

    def summary(
        self, buckets: Sequence[Bucket], measured: Sequence[Any], exact_leaves: Sequence[Any]
    ) -> dict[str, Array]:
        """Return requested metrics of all buckets, float32 scalars, from `Reduced.measured`."""
        return {}
