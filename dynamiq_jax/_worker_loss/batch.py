"""The batch of a call: the arrays that are split over the workers, and checks of their shapes."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from dynamiq_jax._inputs.shards import names_of
from dynamiq_jax._worker_loss.roles import SPLIT, ArgumentLeaf, unwrap_single
from dynamiq_jax._worker_loss.rows import Split, order_of, take

P = PartitionSpec
_NAMED = 4  # arrays of one leading size in an error


def resolve_batch(
    leaves: Sequence[ArgumentLeaf],
    structure: Any,
    parameters: Sequence[str],
    axes: Mapping[str, int],
) -> list[ArgumentLeaf]:
    """Return the leaves of a call with the specs of the batch, after checks of its shapes.

    Args:
      leaves: leaves of all arguments, in flattened order.
      structure: structure of `(args, kwargs)`.
      parameters: names of the positional arguments, as far as known.
      axes: axes of the workers, and their sizes.

    Raises:
      ValueError: arrays without a spec have several leading sizes, or another one than arrays with
        a spec; a shape that does not fit its spec.
    """
    default = P(unwrap_single(tuple(axes)))
    _check_leading_sizes(leaves, structure, parameters, default)
    resolved = [
        leaf._replace(spec=leaf.spec or default) if leaf.role == SPLIT else leaf for leaf in leaves
    ]
    for leaf in resolved:
        if leaf.role == SPLIT:
            _check_shape(leaf, axes)
    return resolved


def split_axis(spec: PartitionSpec, axes: Mapping[str, int]) -> tuple[int, int]:
    """Return the first axis of an array that a spec splits, and over how many workers."""
    for number, dimension in enumerate(spec):
        if workers := names_of(dimension):
            return number, math.prod(axes[axis] for axis in workers)
    raise AssertionError(f"{spec} splits nothing")


def in_order_of_workers(
    arrays: Sequence[Any],
    specs: Sequence[PartitionSpec],
    rules: Sequence[Split | None],
    axes: Mapping[str, int],
) -> list[Any]:
    """Return the arrays of the batch with the rows of each worker as neighbors.

    Args:
      arrays: arrays of the batch, in flattened order.
      specs: spec of each array.
      rules: rule of the rows of each array.
      axes: axes of the workers, and their sizes.
    """
    moved = []
    for array, spec, rule in zip(arrays, specs, rules, strict=True):
        axis, workers = split_axis(spec, axes)
        moved.append(take(array, order_of(rule, np.shape(array)[axis], workers), axis))
    return moved


def _check_leading_sizes(
    leaves: Sequence[ArgumentLeaf],
    structure: Any,
    parameters: Sequence[str],
    default: PartitionSpec,
) -> None:
    """Raise ValueError for arrays without a spec that cannot all be parts of one batch."""
    batch = [leaf for leaf in leaves if leaf.role == SPLIT]
    rows = [np.shape(leaf.value)[0] for leaf in batch]
    assumed = [size for size, leaf in zip(rows, batch, strict=True) if leaf.spec is None]
    known = [
        size for size, leaf in zip(rows, batch, strict=True) if leaf.spec and names_of(leaf.spec[0])
    ]
    if len(set(assumed)) <= 1 and not (known and set(assumed) - set(known)):
        return
    batch_sizes = known or [max(assumed, key=lambda size: (assumed.count(size), size))]

    def proposed(leaf: ArgumentLeaf) -> PartitionSpec | None:
        if leaf.role != SPLIT or leaf.spec:
            return leaf.spec
        return default if np.shape(leaf.value)[0] in batch_sizes else P()

    shapes = [np.shape(leaf.value) for leaf in batch]
    proposal = _proposal(structure, parameters, [proposed(leaf) for leaf in leaves])
    raise ValueError(
        f"Arrays to split over axis {default[0]!r} have different leading sizes: "
        f"{_by_size([leaf.name for leaf in batch], shapes)}. An array that is not part of the "
        "batch, such as weights of classes, has to be whole on every worker. Say which arrays are "
        f"split, with P = jax.sharding.PartitionSpec, such as in_specs={proposal}"
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


def _check_shape(leaf: ArgumentLeaf, axes: Mapping[str, int]) -> None:
    """Raise ValueError for an array of the batch that its spec or its rule does not split."""
    shape, spec = np.shape(leaf.value), leaf.spec
    assert spec is not None
    subject = f"{leaf.name[0].upper()}{leaf.name[1:]} has shape {shape}"
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
    axis, workers = split_axis(spec, axes)
    try:
        order_of(leaf.rule, shape[axis], workers)
    except ValueError as error:
        raise ValueError(f"{subject}: {error}.") from None


def _proposal(
    structure: Any, parameters: Sequence[str], leaves: Sequence[PartitionSpec | None]
) -> str:
    """Return `in_specs` as Python code: a tuple, or a dict where keywords have arrays too."""
    args, kwargs = structure.children()
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
