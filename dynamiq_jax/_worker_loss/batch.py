"""The batch of a call: the arrays that are split over the workers, and checks of their shapes."""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from dynamiq_jax._inputs.shards import names_of
from dynamiq_jax._worker_loss.arguments import SPLIT, Signature, unwrap_single
from dynamiq_jax._worker_loss.rows import order_of, take

P = PartitionSpec
_NAMED = 4  # arrays of one leading size in an error


def resolve_batch(
    signature: Signature,
    arrays: Sequence[Any],
    parameters: Sequence[str],
    axes: Mapping[str, int],
) -> Signature:
    """Return a signature with the specs of all arrays of the batch, after checks of their shapes.

    Args:
      signature: that of the call.
      arrays: those of the batch, in flattened order.
      parameters: names of the positional arguments, as far as known.
      axes: axes of the workers, and their sizes.

    Raises:
      ValueError: arrays without a spec have several leading sizes, or another one than those with
        a spec; a shape that does not fit its spec.
    """
    axis = unwrap_single(tuple(axes))
    default = P(axis)
    shapes = [np.shape(array) for array in arrays]
    names = signature.of_batch(signature.names)
    given: list[PartitionSpec | None] = signature.of_batch(signature.specs)
    assumed = [shape[0] for shape, spec in zip(shapes, given, strict=True) if spec is None]
    known = [
        shape[0] for shape, spec in zip(shapes, given, strict=True) if spec and names_of(spec[0])
    ]
    if len(set(assumed)) > 1 or (known and set(assumed) - set(known)):
        batch_sizes = known or [max(assumed, key=lambda size: (assumed.count(size), size))]
        proposed = [
            spec or (default if shape[0] in batch_sizes else P())
            for shape, spec in zip(shapes, given, strict=True)
        ]
        raise ValueError(
            f"Arrays to split over axis {axis!r} have different leading sizes: "
            f"{_by_size(names, shapes)}. An array that is not part of the batch, such as weights "
            "of classes, has to be whole on every worker. Say which arrays are split, with "
            "P = jax.sharding.PartitionSpec, such as "
            f"in_specs={_proposal(signature, parameters, proposed)}"
        )
    specs = [spec or default for spec in given]
    rules = signature.of_batch(signature.rules)
    for name, shape, spec, rule in zip(names, shapes, specs, rules, strict=True):
        _check_shape(name, shape, spec, axes)
        axis, workers = split_axis(spec, axes)
        try:
            order_of(rule, shape[axis], workers)
        except ValueError as error:
            raise ValueError(f"{name[0].upper()}{name[1:]} has shape {shape}: {error}.") from None
    return dataclasses.replace(signature, specs=_with_splits(signature, specs))


def split_axis(spec: PartitionSpec, axes: Mapping[str, int]) -> tuple[int, int]:
    """Return the first axis of an array that a spec splits, and over how many workers."""
    for number, dimension in enumerate(spec):
        if workers := names_of(dimension):
            return number, math.prod(axes[axis] for axis in workers)
    raise AssertionError(f"{spec} splits nothing")


def in_order_of_workers(
    signature: Signature, arrays: Sequence[Any], axes: Mapping[str, int]
) -> list[Any]:
    """Return the arrays of the batch with the rows of each worker as neighbors.

    Args:
      signature: of `resolve_batch`.
      arrays: those of the batch, in flattened order.
      axes: axes of the workers, and their sizes.
    """
    moved = []
    rules = signature.of_batch(signature.rules)
    for array, spec, rule in zip(arrays, signature.splits, rules, strict=True):
        axis, workers = split_axis(spec, axes)
        moved.append(take(array, order_of(rule, np.shape(array)[axis], workers), axis))
    return moved


def _with_splits(
    signature: Signature, splits: Sequence[PartitionSpec]
) -> tuple[PartitionSpec | None, ...]:
    """Return the specs of all leaves, with others of those of the batch."""
    left = iter(splits)
    return tuple(
        next(left) if role == SPLIT else spec
        for spec, role in zip(signature.specs, signature.roles, strict=True)
    )


def _by_size(names: Sequence[str], shapes: Sequence[tuple[int, ...]]) -> str:
    parts = []
    for size in sorted({shape[0] for shape in shapes}, reverse=True):
        same = [
            f"{name} of shape {shape}"
            for name, shape in zip(names, shapes, strict=True)
            if shape[0] == size
        ]
        more = [f"{len(same) - _NAMED} more"] if len(same) > _NAMED else []
        parts.append(f"{size} ({', '.join(same[:_NAMED] + more)})")
    return " and ".join(parts)


def _check_shape(
    name: str, shape: tuple[int, ...], spec: PartitionSpec, axes: Mapping[str, int]
) -> None:
    subject = f"{name[0].upper()}{name[1:]} has shape {shape}"
    if len(spec) > len(shape):
        raise ValueError(
            f"{subject}, but in_specs gives it {spec}. Give a spec of at most {len(shape)} "
            "dimensions."
        )
    for number, (size, dimension) in enumerate(zip(shape, spec, strict=False)):
        used = names_of(dimension)
        workers = math.prod(axes[axis] for axis in used)
        if size % workers:
            place = f"axis {number}" if number else "leading axis"
            axis = unwrap_single(used)
            raise ValueError(
                f"{subject}, whose {place} does not split over the {workers} workers of axis "
                f"{axis!r}. Pad or trim the batch. If the array is not part of it, give "
                "P() for it in in_specs."
            )


def _proposal(
    signature: Signature, parameters: Sequence[str], specs: Sequence[PartitionSpec]
) -> str:
    """Return `in_specs` as Python code: a tuple, or a dict where keywords have arrays too."""
    leaves = _with_splits(signature, specs)
    args, kwargs = signature.structure.children()
    entries = [_text(part, own) for part, own in _parts(args, leaves)]
    by_name = {
        name: _text(part, own)
        for name, (part, own) in zip(
            kwargs.node_data()[1], _parts(kwargs, leaves[args.num_leaves :]), strict=True
        )
        if any(spec is not None for spec in own)
    }
    if not by_name:
        return f"({', '.join(entries)}{',' * (len(entries) == 1)})"
    positions = [*parameters[: len(entries)], *range(len(parameters), len(entries))]
    items = [*zip(positions, entries, strict=True), *by_name.items()]
    return "{" + ", ".join(f"{_quoted(where)}: {entry}" for where, entry in items) + "}"


def _parts(structure: Any, leaves: Sequence[Any]) -> Iterator[tuple[Any, Sequence[Any]]]:
    """Yield the structures of children, and the leaves of each."""
    for child in structure.children():
        yield child, leaves[: child.num_leaves]
        leaves = leaves[child.num_leaves :]


def _text(structure: Any, specs: Sequence[PartitionSpec | None]) -> str:
    """Return a tree of specs as Python code, with one for all leaves where they agree.

    None is for leaves that are whole with any spec, such as numbers.
    """
    given = {spec for spec in specs if spec is not None}
    if len(given) <= 1:
        spec = given.pop() if given else P()
        return f"P({', '.join(map(_quoted, spec))})"
    kind, keys = structure.node_data()
    parts = [_text(part, own) for part, own in _parts(structure, specs)]
    if kind is dict:
        items = zip(map(_quoted, keys), parts, strict=True)
        return "{" + ", ".join(f"{key}: {part}" for key, part in items) + "}"
    if kind is list:
        return f"[{', '.join(parts)}]"
    if kind is tuple:
        return f"({', '.join(parts)}{',' * (len(parts) == 1)})"
    return repr(jax.tree.unflatten(structure, specs)).replace("PartitionSpec(", "P(")


def _quoted(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(map(_quoted, value))})"
    return f'"{value}"' if isinstance(value, str) and value.isidentifier() else repr(value)
