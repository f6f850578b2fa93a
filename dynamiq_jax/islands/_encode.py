"""A tree to the bytes that a worker would send in an all-gather of it."""

import collections
import dataclasses
import functools
import numbers
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec

from dynamiq_jax._buckets.axes import Axes
from dynamiq_jax._buckets.buckets import Bucket, CutRules
from dynamiq_jax._buckets.cutting import as_vector
from dynamiq_jax._collectives.halves import AllGather
from dynamiq_jax._core import Axis
from dynamiq_jax._inputs import checks
from dynamiq_jax._inputs.compression import Choice, Compression
from dynamiq_jax._inputs.policy import paths_of
from dynamiq_jax._inputs.request import resolve
from dynamiq_jax._inputs.shards import Shards
from dynamiq_jax._plan.plan import make_plan
from dynamiq_jax._run.sample import fold_in_sample
from dynamiq_jax.islands import _gathered
from dynamiq_jax.islands._sparse import Sparse
from dynamiq_jax.islands.messages.formats import Format
from dynamiq_jax.islands.messages.message import DTYPES, FORMATS, Leaf, Message
from dynamiq_jax.methods import METHODS, ChunkedMethod, DynamiQ, Method
from pallas_kernels._jax.compat import override


@dataclasses.dataclass(frozen=True)
class _OneMessage(AllGather):
    """All-gather of which one worker's part is a message. Sizes are those of the parts of both."""

    @override
    def rules(self, compression: Compression) -> CutRules:
        return CutRules("in_order", into_parts=False, into_stripes=False, copies=2)


_COLLECTIVE = _OneMessage(Axes(Axis("message", 2)))


def encode(tree: Any, method: Choice = Compression(), *, key: Array | None = None) -> Message:
    """Encode a tree as a message, which can leave the program.

    Its body has the bytes that a worker sends in `all_gather` of its tree to one other worker. Its
    header has everything that a reader needs: `decode` of another process, or
    `islands.messages.decode`, which needs no JAX. A part of a tree is a tree too: each fragment of
    `training.LocalSGD.split` can be a message of its own.

    DynamiQ rounds with independent noise here, so that the errors of messages with different keys
    average out in a sum. For a message that no sum takes, `"dynamiq:4:rounding=nearest"` has about
    half the error, as in an all-gather. Other methods round to nearest. Where their messages are
    summed again and again, give `"blockint:4:rounding=stochastic"`, or 6 bits and more.

    Args:
      tree: pytree of arrays.
      method: how to compress; see `psum`. A message can hold `"dynamiq"`, `"bf16"`, `"exact"`,
        `"blockint"`, the MX formats, and `Sparse`, which takes small leaves too, where it is given
        alone.
      key: PRNG key of the rounding noise, another one for each message. None: it follows from a
        sample of the leaves.

    Returns:
      The message. Its method `to_bytes` returns bytes.

    Raises:
      ValueError: a method that no message can hold, leaves of the same path, a leaf that is too
        large for one bucket, or integers of 64 bits that need `jax_enable_x64`.
      TypeError: a leaf of a dtype that no message can hold, or one that is traced.

    >>> import jax.numpy as jnp
    >>> message = encode({"w": jnp.ones((512, 64))}, key=jax.random.key(0), method="dynamiq:4")
    >>> round(8 * message.nbytes / (512 * 64), 1)
    4.1
    """
    if isinstance(method, Sparse):  # exact leaves would be most of its bytes
        method = Compression(method, exact_below=0)
    request = resolve(method, stateless="islands.encode")
    _check_compression(request.compression)
    for each in request.compression.policy.used(tree):
        _format_of(each)  # raises if it is not possible
    names = paths_of(tree)
    checks.named_leaves(tree)  # raises for what is no array
    leaves = [_as_array(*leaf) for leaf in zip(names, jax.tree.leaves(tree), strict=True)]
    for name, count in collections.Counter(names).items():
        if count > 1:
            raise ValueError(f"tree has {count} leaves of the path {name!r}. Rename all but one.")
    plan = make_plan(
        _COLLECTIVE,
        tree,
        [(f"[{name!r}]", leaf) for name, leaf in zip(names, leaves, strict=True)],
        Shards({}, (PartitionSpec(),) * len(leaves)),
        request,
    )
    bucket_of = {i: number for number, bucket in enumerate(plan.buckets) for i in bucket.leaves}
    formats = tuple(_format_of(bucket.method) for bucket in plan.buckets)
    if key is None:
        key = fold_in_sample(jax.random.key(0), leaves, (), None)
    sent = _sent(leaves, checks.check_key(key, ()), tuple(map(_unbiased, plan.buckets)))
    body = [array for bucket in sent for array in bucket]
    body += [leaf for index, leaf in enumerate(leaves) if index not in bucket_of]
    return Message(
        leaves=tuple(
            Leaf(name, leaf.shape, str(leaf.dtype), bucket_of.get(index))
            for index, (name, leaf) in enumerate(zip(names, leaves, strict=True))
        ),
        formats=formats,
        body=b"".join(np.asarray(array).tobytes() for array in jax.device_get(body)),
    )


@functools.partial(jax.jit, static_argnames="buckets")
def _sent(leaves: Sequence[Array], key: Array, buckets: tuple[Bucket, ...]) -> list[list[Array]]:
    """Return the arrays that a worker sends, by bucket."""
    assert _COLLECTIVE.salt is not None
    key, found = jax.random.fold_in(key, _COLLECTIVE.salt), []
    for number, bucket in enumerate(buckets):
        rows = [_COLLECTIVE.rows(leaves[index]) for index in bucket.leaves]
        part = as_vector(rows, _COLLECTIVE.multiple(bucket))
        assert isinstance(bucket.method, ChunkedMethod)
        found.append(_gathered.sent(bucket.method, part, jax.random.fold_in(key, number)))
    return found


def _unbiased(bucket: Bucket) -> Bucket:
    """Return a bucket whose method has noise, if it leaves the rounding open."""
    method = bucket.method
    if isinstance(method, DynamiQ) and method.rounding is None:
        method = dataclasses.replace(method, rounding="independent")
    return dataclasses.replace(bucket, method=method)


def _format_of(method: Method) -> Format:
    """Return the format of a bucket: the fields that a reader needs."""
    if isinstance(method, Sparse):
        return method.format
    for name, form in FORMATS.items():
        if type(method) is METHODS.get(name):
            fields = {field.name for field in dataclasses.fields(form)} - {"method"}
            assert isinstance(method, ChunkedMethod)
            sent = method.portable  # whose widths are those of the message
            return form(method=name, **{field: _plain(getattr(sent, field)) for field in fields})
    raise ValueError(
        f"method={method!r} cannot be in a message. Give one of "
        f"{sorted({*FORMATS} & {*METHODS})}, or an islands.Sparse."
    )


def _plain(value: Any) -> Any:
    """Return a number, which may be one of NumPy, as one of Python."""
    if isinstance(value, numbers.Integral):
        return int(value)
    return float(value) if isinstance(value, numbers.Real) else value


def _check_compression(compression: Compression) -> None:
    """Raise ValueError for options that have no meaning in a message."""
    if compression.bucketing == "striped":
        raise ValueError(
            "bucketing='striped' is not possible in a message, whose buckets hold whole leaves. "
            "Leave it out."
        )
    if compression.specs is not None:
        raise ValueError(
            f"specs={compression.specs!r:.200} are of a collective on a mesh, and a message holds "
            "whole leaves. Leave them out."
        )
    if compression.max_error is not None:
        raise ValueError(
            f"max_error={compression.max_error!r} limits the error of an all-reduce, and a message "
            "is none. Leave it out."
        )


def _as_array(name: str, leaf: Any) -> Array:
    """Return a leaf as an array of JAX, of the same values; raise for what no message can hold."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        raise TypeError(f"tree[{name!r}] is a shape without values. Give an array.")
    is_numpy = isinstance(leaf, np.ndarray | np.generic)
    array = jnp.asarray(np.asarray(leaf, leaf.dtype.newbyteorder("=")) if is_numpy else leaf)
    if is_numpy and leaf.dtype.kind in "iu" and not np.array_equal(array, leaf):
        raise ValueError(
            f"tree[{name!r}] has dtype {leaf.dtype} and numbers that {array.dtype} does not hold. "
            "Call jax.config.update('jax_enable_x64', True), or give smaller ones."
        )
    if isinstance(array, jax.core.Tracer):
        raise TypeError(
            f"tree[{name!r}] is traced, and has no bytes. Call islands.encode outside of jax.jit."
        )
    if str(array.dtype) not in DTYPES:
        raise TypeError(
            f"tree[{name!r}] has dtype {array.dtype}, which no message can hold. Give one of "
            f"{DTYPES}."
        )
    return array
