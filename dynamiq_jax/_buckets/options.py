"""Options of a collective: everything about compression that a user can set."""

import dataclasses
from collections.abc import Callable
from typing import Any

from dynamiq_jax._core import check_integer
from dynamiq_jax.methods import Method, resolve_method
from dynamiq_jax.topologies import Topology, resolve_topology


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Options of every collective, beside the method and the topology.

    >>> Options(exact_below=0)
    Options(mask=None, exact_below=0, bucket_bytes=134217728, unrolled_buckets=8)
    """

    # Leaves that are compressed: pytree of bools like the tree (a prefix suffices), or a function
    # from the tree to one. Leaves marked False stay exact.
    mask: Any | Callable[[Any], Any] | None = None
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

    def __post_init__(self):
        check_integer("exact_below", self.exact_below, 0)
        check_integer("bucket_bytes", self.bucket_bytes, 1)
        check_integer("unrolled_buckets", self.unrolled_buckets, 0)


@dataclasses.dataclass(frozen=True)
class Compression:
    """Method, topology and options of one collective."""

    method: Method
    topology: Topology
    options: Options


def resolve(method: Method | str, topology: Topology | str, options: Options) -> Compression:
    """Resolve a method, a topology and options, given by name or by value.

    Raises:
      ValueError: an unknown method or topology.
      TypeError: options that are not `dq.Options`.
    """
    if not isinstance(options, Options):
        raise TypeError(f"options={options!r} are not options. Give dq.Options(exact_below=0).")
    return Compression(resolve_method(method), resolve_topology(topology), options)
