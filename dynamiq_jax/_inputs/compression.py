"""Compression: one choice of how a collective compresses, for all functions of this library."""

import dataclasses
from typing import Any, Literal, get_args

import jax
import numpy as np

from dynamiq_jax._core import MOST_IN_BUCKET, check_choice, check_flag, check_integer, check_number
from dynamiq_jax._core.naming import field_names, spelled
from dynamiq_jax._inputs.policy import Policy, Rules
from dynamiq_jax.methods import DynamiQ, Method, known_methods
from dynamiq_jax.topologies import TOPOLOGIES, Topology, resolve_topology
from pallas_kernels._jax.compat import override

Bucketing = Literal["auto", "striped", "in_order"]


@dataclasses.dataclass(frozen=True)
class Compression:
    """Choose a method, a topology, and what else a compressed collective takes.

    Every function takes it as `method`. There, a method, a name, a policy or a text stands for the
    compression with defaults for everything else:

        dq.pmean(grads, "data", "dynamiq:4:butterfly")
        dq.pmean(grads, "data", dq.Compression("dynamiq:4", "butterfly", max_error=0.1))

    Two of them compare equal if they do the same, however they are written.

    Raises:
      ValueError: an unknown method or topology, two topologies, or a pattern that is not valid.
      TypeError: a field of the wrong kind.

    >>> Compression("dynamiq:4:butterfly")
    Compression(method=DynamiQ(bits=4), topology=Butterfly())
    >>> Compression("dynamiq:4:butterfly") == Compression("dynamiq:4", "butterfly")
    True
    """

    # Method, or a name such as "dynamiq:5", "paper:4" or "qgz", with fields and a topology as the
    # command line takes them: "dynamiq:5:rounding=nearest:butterfly". Or a policy, which gives each
    # leaf its own method: patterns of paths, of which the first match counts, such as
    # {"embedding": "dynamiq:6", "norm|bias": "uncompressed", ".*": "dynamiq:5"}, or a function of
    # a path, such as "layers/0/kernel", and the leaf to a method. Leaves that are "uncompressed"
    # are sent by the collectives of JAX. The method "exact" sends float32 along the topology.
    method: Method | str | Rules | Policy = DynamiQ()
    # Route of the chunks, or its name, such as "ring" or "all_to_all". None: as the text of
    # `method` says, and otherwise a ring.
    topology: Topology | str | None = None
    _: dataclasses.KW_ONLY
    # How the leaves are split over axes of the mesh that the compiler manages, so that each device
    # compresses its own shards: a tree of PartitionSpec or NamedSharding like the leaves, a prefix
    # of it, such as the shardings of the parameters, or a function from the tree to specs. P() is
    # for whole leaves on every device. Axes that are manual already or have one device do not
    # count. Specs are needed only where the compiler manages an axis of several devices. Explicit
    # axes are part of the types of leaves.
    specs: Any = None
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
        method, route = self.method, None
        if isinstance(method, str):
            method, route = split_route(method)
        if route is not None and self.topology is not None:
            raise ValueError(
                f"method={self.method!r} and topology={self.topology!r} both give a topology. Give "
                "one."
            )
        policy = method if isinstance(method, Policy) else Policy.of(method)
        object.__setattr__(self, "method", policy.everywhere or policy)
        topology = next(each for each in (self.topology, route, "ring") if each is not None)
        object.__setattr__(self, "topology", resolve_topology(topology))

    @staticmethod
    def of(method: "Choice") -> "Compression":
        """Return a compression as given, or the compression of a method, a text or a policy."""
        return method if isinstance(method, Compression) else Compression(method)

    @property
    def policy(self) -> Policy:
        """Method of each leaf."""
        return self.method if isinstance(self.method, Policy) else Policy.of(self.method)

    @property
    def route(self) -> Topology:
        """Topology, which is never a name."""
        return resolve_topology(self.topology or "ring")

    @override
    def __repr__(self) -> str:
        default = Compression()
        texts = [
            f"{name}={spelled(value) if isinstance(value, Method | Topology) else repr(value)}"
            for name, value in vars(self).items()
            if value != getattr(default, name)
        ]
        return f"Compression({', '.join(texts)})"

    @override
    def __hash__(self) -> int:
        names = [field.name for field in dataclasses.fields(self) if field.name != "specs"]
        leaves, structure = jax.tree.flatten(self.specs)
        return hash((*(getattr(self, name) for name in names), tuple(leaves), structure))


# What every function takes as `method`.
Choice = Method | str | Rules | Compression


def split_route(text: str) -> tuple[str, str | None]:
    """Return the texts of the method and of the topology, of which the second may be missing.

    A field that only the topology has belongs to it.

    Raises:
      ValueError: several topologies.

    >>> split_route("ef+dynamiq:4:butterfly:rounding=nearest")
    ('ef+dynamiq:4:rounding=nearest', 'butterfly')
    """
    name, *parts = text.split(":")
    named = [part for part in parts if part in TOPOLOGIES]
    if len(named) > 1:
        raise ValueError(f"method={text!r} gives several topologies: {named}. Give one.")
    route, known, inner = (*named, "ring")[0], known_methods(), name.rpartition("+")[2]
    of_both = field_names(known[inner]) if inner in known else set()
    ours = field_names(TOPOLOGIES[route]) - of_both
    of_route = [part for part in parts if part.partition("=")[0] in ours]
    of_method = [part for part in parts if part not in (*named, *of_route)]
    if not named and not of_route:
        return text, None
    return ":".join([name, *of_method]), ":".join([route, *of_route])
