"""Options of a collective: everything about compression that a user can set."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from dynamiq_jax._buckets.policy import Policy, Rules
from dynamiq_jax._core import check_integer, check_number
from dynamiq_jax.methods import Method
from dynamiq_jax.topologies import Topology, resolve_topology

# Metrics that any method has, on request.
MEASURED = (
    "error",
    "worst_error",
    "worst_bucket",
    "sharing_gain",
    "idle_bucket",
    "norm",
    "non_finite",
    "bytes",
    "fallbacks",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Options of every collective, beside the method and the topology.

    >>> Options(exact_below=0)
    Options(exact_below=0, bucket_bytes=134217728, unrolled_buckets=8, max_error=None)
    """

    # Leaves of fewer elements stay exact: biases and scales of norms are a thousandth of the bytes
    # and the most sensitive.
    exact_below: int = 1024
    # Leaves of one dtype are compressed together, in buckets of at most this many bytes. A larger
    # leaf is cut along its first dimension, except by methods that use shapes. The compiler can
    # send one bucket while a backward pass still computes another. The default fills the messages
    # of a fast link. It is small enough for the first one to leave early in a backward pass.
    bucket_bytes: int = 2**27
    # Buckets, from the first that is sent on, that have a codec of their own in the compiled
    # program. The compiler can send them while a backward pass still computes. Further equal ones
    # share one codec in a loop, which waits for all of their leaves: compile time would grow with
    # their number otherwise.
    unrolled_buckets: int = 8
    # Largest vNMSE of the mean of a bucket in an all-reduce, estimated in every step from the exact
    # mean of a sample, which takes 1% of the bytes. A bucket that may exceed it is sent again,
    # exactly. None: no limit, and no estimate.
    max_error: float | None = None

    def __post_init__(self):
        check_integer("exact_below", self.exact_below, 0)
        check_integer("bucket_bytes", self.bucket_bytes, 1)
        check_integer("unrolled_buckets", self.unrolled_buckets, 0)
        if self.max_error is not None:
            check_number("max_error", self.max_error, 0, np.inf, "a vNMSE such as 0.1, or None")


@dataclasses.dataclass(frozen=True)
class Compression:
    """Methods, topology and options of one collective."""

    policy: Policy
    topology: Topology
    options: Options
    stateless: str = ""  # the function, if it cannot keep states of methods
    measures: bool = False  # whether metrics are asked for

    @property
    def estimates(self) -> bool:
        """True if errors are estimated."""
        return self.measures or self.options.max_error is not None

    def is_stateful(self, tree: Any) -> bool:
        """Return whether a method of a leaf of a tree carries state."""
        return any(method.is_stateful for method in self.policy.used(tree))

    def metrics(self, used: Sequence[Method]) -> tuple[str, ...]:
        """Return the names of the metrics of some methods."""
        names = [name for method in used for name in method.metrics]
        if self.measures:
            names += [name for method in used for name in method.details]
            names += MEASURED
        return tuple(dict.fromkeys(names))

    def check_state(self, method: Method) -> None:
        """Raise ValueError for a method whose state the function has nowhere to keep."""
        if self.stateless and method.is_stateful:
            raise ValueError(
                f"method={method!r} carries state from step to step, which dq.{self.stateless} "
                "cannot keep. Use dq.all_reduce_gradients inside jax.shard_map: its optimizer "
                "state holds it."
            )


def resolve(
    method: Method | str | Rules,
    topology: Topology | str,
    options: Options,
    *,
    stateless: str = "",
    measures: bool = False,
) -> Compression:
    """Resolve methods, a topology and options, given by name or by value.

    Args:
      method: method, its name, or a policy.
      topology: topology, or its name.
      options: options.
      stateless: name of the function, if it cannot keep states of methods.
      measures: whether metrics are asked for.

    Raises:
      ValueError: an unknown method or topology, a pattern that is not valid, or a method whose
        state cannot be kept.
      TypeError: options that are not `dq.Options`.
    """
    if not isinstance(options, Options):
        raise TypeError(f"options={options!r} are not options. Give dq.Options(exact_below=0).")
    how = Compression(Policy.of(method), resolve_topology(topology), options, stateless, measures)
    for each in how.policy.known:
        how.check_state(each)
    return how
