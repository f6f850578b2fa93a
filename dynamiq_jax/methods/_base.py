"""Interface of compression methods, which are independent of the topology."""

import abc
import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import jax
from jax import Array

from dynamiq_jax._core import Axis, ChunkCodec, LocalChunks, Payload, WireCost, as_chunks
from dynamiq_jax._core.naming import spelled
from dynamiq_jax.topologies import Gathered, Scattered, Topology, gather
from pallas_kernels._jax.compat import override
from pallas_kernels.codec import SUPER_GROUP_SIZE

State = Any  # pytree of arrays that a method carries between steps; () if none
Shapes = tuple[tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """Static description of one collective on one bucket."""

    size: int  # coordinates of the bucket; in an all-gather, once gathered
    axis: Axis
    topology: Topology  # an all-gather does not use it
    collective: Literal["all_reduce", "psum_scatter", "all_gather"] = "all_reduce"
    # Shapes of the leaves in the bucket, if the method uses them; None for a part of leaves.
    shapes: Shapes | None = None
    feedback: bool = False  # whether the method returns `Reduced.applied`

    @property
    def num_workers(self) -> int:
        """Workers of the axis."""
        return self.axis.size

    @property
    def num_chunks(self) -> int:
        """Chunks of the bucket, one for each worker."""
        return self.num_workers

    @property
    def is_consecutive(self) -> bool:
        """True if chunk c has to hold the c-th part of the coordinates.

        In an all-reduce a method may assign coordinates to chunks in any order.
        """
        return self.collective != "all_reduce"

    @property
    def first_chunk(self) -> Array | int:
        """Index of the first chunk that this worker holds; in an all-gather, of the only one."""
        return self.axis.index if self.collective == "all_gather" else 0

    def local_chunks(self, values: Array, multiple_of: int = 1) -> LocalChunks:
        """Cut the values of this worker into chunks, each a multiple of some coordinates."""
        held = 1 if self.collective == "all_gather" else self.num_chunks
        return LocalChunks(as_chunks(values, held, multiple_of), self.size, self.first_chunk)

    def of_size(self, size: int) -> "Call":
        """Return the call for another vector of the same workers."""
        return dataclasses.replace(self, size=size, shapes=None)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Reduced:
    """Result of the all-reduce of one bucket: a pytree."""

    total: Array  # float32 [size], bit-identical on all workers
    token: Array  # float32 [1 or more], available once all has arrived, before it is decoded
    state: State = ()  # for the next step
    applied: Array | None = None  # float32 [size]: this worker's values as they entered the sum
    metrics: Mapping[str, Array] = dataclasses.field(default_factory=dict)  # see `Method.metrics`
    measured: Any = ()  # pytree of a collective that estimates errors; methods leave it empty


@dataclasses.dataclass(frozen=True, kw_only=True)
class Method(abc.ABC):
    """A compression method.

    Subclasses are frozen, keyword-only dataclasses that validate their fields. The laws of its
    methods, of two workers whose sum has one compression of each value and one of each sum:

    >>> import jax.numpy as jnp
    >>> from dynamiq_jax.methods import BF16
    >>> from dynamiq_jax.topologies import Ring
    >>> call, key = Call(size=512, axis=Axis("data", 2), topology=Ring()), jax.random.key(0)
    >>> BF16().wire_cost(call).payload_bytes  # of one of two chunks
    512
    >>> local = lambda flat: BF16().all_reduce(flat, call, key, ()).total
    >>> total = jax.vmap(local, axis_name="data")(jnp.ones((2, 512)))
    >>> bool((total == 2).all())  # on both workers
    True
    """

    @property
    def is_stateful(self) -> bool:
        """True for methods that carry state from step to step."""
        return False

    @property
    def state_kind(self) -> str:
        """Kind of the state: methods of one kind can take over each other's states.

        By default, only equal methods have one kind. A method whose state depends on some of its
        fields alone overrides this property. The shapes of states are compared as well.
        """
        return spelled(self)

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of the float32 scalars in `Reduced.metrics`, the same on all workers."""
        return ()

    @property
    def details(self) -> tuple[str, ...]:
        """Names of further metrics, which are computed with `with_metrics=True` alone."""
        return ()

    @property
    def uses_shapes(self) -> bool:
        """True for methods that take the leaves of a bucket as matrices, not as one vector."""
        return False

    @property
    def granule(self) -> int:
        """Coordinates that stay together: each worker's part is a multiple of this number."""
        return SUPER_GROUP_SIZE

    @abc.abstractmethod
    def wire_cost(self, call: Call) -> WireCost:
        """Return the bytes of a bucket.

        Law: the collectives of the compiled program send as many, in every topology.
        """

    def init_state(self, call: Call) -> State:
        """Return the state of a bucket before the first step."""
        return ()

    @abc.abstractmethod
    def all_reduce(self, flat: Array, call: Call, key: Array, state: State) -> Reduced:
        """Sum a bucket over the axis.

        Law: all workers hold the same bits of the total, and NaN and Inf of any worker surface at
        their coordinates at least. A state that comes out can go in.

        Args:
          flat: local values, float [size].
          call: bucket, axis and topology.
          key: typed PRNG key, the same on all workers.
          state: from `init_state` or the step before.
        """


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChunkedMethod(Method):
    """A method of one round and no state: a codec of chunks."""

    @property
    def portable(self) -> "ChunkedMethod":
        """The method whose codec decodes payloads to the same bits on all hardware.

        Its codec need not encode. By default it is the method itself.
        """
        return self

    @abc.abstractmethod
    def bind(self, values: Array, call: Call, key: Array) -> ChunkCodec:
        """Return the codec of a bucket, after exchanging statistics if there are any.

        Law: what the codec decodes follows from payloads and from what all workers exchanged.

        Args:
          values: local values, float [size]; in an all-gather the part of this worker.
          call: bucket, axis and topology.
          key: typed PRNG key, the same on all workers.
        """

    @override
    def all_reduce(self, flat: Array, call: Call, key: Array, state: State) -> Reduced:
        codec, applied = self.bind(flat, call, key), None
        if call.feedback:
            # The same codec: another one would exchange its statistics again. The turn is after
            # all turns of the topology, whose rounding noise it must not repeat.
            applied, codec = codec.rounded(call.num_workers + call.axis.index)
        gathered = call.topology.all_reduce(codec, call.axis)
        metrics = {**codec.metrics(), **self.measure(gathered.payloads, call)}
        return Reduced(gathered.decode(), gathered.token, applied=applied, metrics=metrics)

    def measure(self, payloads: Payload, call: Call) -> Mapping[str, Array]:
        """Return the metrics of an all-reduce from the payloads of all sums, stacked."""
        return {}

    def reduce_scatter(self, flat: Array, call: Call, key: Array) -> Scattered:
        """Sum a bucket over the axis, each worker its own part.

        `flat` holds one part for each worker, each a multiple of `granule` for each of its chunks.
        """
        return call.topology.reduce_scatter(self.bind(flat, call, key), call.axis)

    def all_gather(self, part: Array, call: Call, key: Array) -> Gathered:
        """Gather the parts of all workers, float [size / num_workers], a multiple of `granule`."""
        codec = self.bind(part, call, key)
        return gather(codec, codec.compress(call.axis.index, 0), call.axis)
