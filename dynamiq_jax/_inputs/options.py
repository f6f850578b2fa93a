"""Options of a collective, and their resolution with methods and a topology."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np

from dynamiq_jax._core import (
    MOST_IN_BUCKET,
    check_choice,
    check_flag,
    check_integer,
    check_number,
)
from dynamiq_jax._inputs.policy import Policy, Rules
from dynamiq_jax._inputs.schedule import Schedule
from dynamiq_jax.methods import Method
from dynamiq_jax.topologies import Topology, resolve_topology

Bucketing = Literal["auto", "striped", "in_order"]
RESET_STATES = "reset_states"  # metric of methods with state: share of workers with foreign states
# Metrics that any method has, on request.
MEASURED = (
    "error",
    "row_error",
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

    >>> Options(exact_below=0).exact_below
    0
    """

    # Leaves of fewer elements stay exact: biases and scales of norms are a thousandth of the bytes
    # and the most sensitive.
    exact_below: int = 1024
    # Leaves of one dtype are compressed together, in buckets of at most about this many bytes. The
    # default fills the messages of a fast link. It is small enough for the first bucket to leave
    # early in a backward pass, and for a second copy of it in memory. The largest possible
    # number is 7 * 2^28, since programs count coordinates and bytes of messages in int32.
    bucket_bytes: int = 2**27
    # Content of a bucket, where there are several.
    # "striped" is a like share of every leaf, so that bits go where the whole tree needs them. All
    # buckets are alike. They share one compiled codec, and wait for all gradients.
    # "in_order" is neighboring leaves, so that the compiler can send one bucket while a backward
    # pass still computes another one. All buckets have the same bits for a coordinate. A leaf that
    # is larger than a bucket is cut along its first dimension.
    # "auto" is striped where the hops of the topology are a loop, as in the default ring, under
    # which nothing else runs. It is in order on TPUs, where stripes take more time than the codec,
    # on other topologies, in an all-gather, and where methods use shapes.
    bucketing: Bucketing = "auto"
    # Buckets in order, from the first that is sent on, that have a codec of their own in the
    # compiled program. The compiler can send them while a backward pass still computes. Further
    # equal ones share one codec in a loop, which waits for all of their leaves: compile time would
    # grow with their number otherwise.
    unrolled_buckets: int = 8
    # Largest vNMSE of the mean of a bucket in an all-reduce, estimated in every step from the exact
    # mean of a sample, which takes 1% of the bytes. A bucket that may exceed it is sent again,
    # exactly. With None, there is no limit and no estimate.
    max_error: float | None = None
    # Whether the processes of `jax.distributed` compare each collective that they trace, before
    # they run it. A difference is an error on all processes. The comparison costs some milliseconds
    # while a step is traced, and nothing in a step or with one process. Processes wait up to 10
    # seconds for each other, and then go on with a warning.
    check_agreement: bool = True

    def __post_init__(self):
        check_integer("exact_below", self.exact_below, 0)
        check_integer("bucket_bytes", self.bucket_bytes, 1, MOST_IN_BUCKET)
        check_choice("bucketing", self.bucketing, get_args(Bucketing))
        check_integer("unrolled_buckets", self.unrolled_buckets, 0)
        check_flag("check_agreement", self.check_agreement)
        if self.max_error is not None:
            check_number("max_error", self.max_error, 0, np.inf, "a vNMSE such as 0.1, or None")


@dataclasses.dataclass(frozen=True)
class Compression:
    """Methods, topology and options of one collective."""

    policy: Policy
    topology: Topology
    options: Options
    stateless: str = ""  # name of a function that cannot keep states of methods
    measures: bool = False  # whether the function returns metrics
    # Values of the caller, by name, that have to be the same in all processes; see `agreement`.
    settings: tuple[tuple[str, Any], ...] = ()

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
        names += [RESET_STATES for method in used if method.is_stateful]
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
    settings: Mapping[str, Any] | None = None,
) -> Compression:
    """Resolve methods, a topology and options, given by name or by value.

    Args:
      method: method, its name, or a policy.
      topology: topology, or its name.
      options: options.
      stateless: name of a function that cannot keep states of methods; otherwise empty.
      measures: whether the function returns metrics.
      settings: values of the caller, by name, that have to be the same in all processes.

    Raises:
      ValueError: an unknown method or topology, a schedule, a pattern that is not valid, or a
        method whose state cannot be kept.
      TypeError: options that are not `dq.Options`.
    """
    if not isinstance(options, Options):
        fields = options if isinstance(options, dict) else {"exact_below": 0}
        given = ", ".join(f"{name}={value!r}" for name, value in fields.items())
        raise TypeError(f"options={options!r:.80} are not options. Give dq.Options({given:.200}).")
    if isinstance(method, Schedule):
        raise ValueError(
            f"method={method!r:.200} is a schedule, which needs the step: dq.all_reduce_gradients "
            "alone takes one. Give the method of one phase, such as schedule.methods[0]."
        )
    given = tuple((settings or {}).items())
    compression = Compression(
        Policy.of(method), resolve_topology(topology), options, stateless, measures, given
    )
    for each in compression.policy.known:
        compression.check_state(each)
    return compression
