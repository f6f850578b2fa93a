"""Rows of a batch, followed through the equations of a program.

Where rows are split over workers, an equation that contracts them is a sum over the workers. Which
dimensions of a value hold rows is a hint: a contraction may be done in parts along any dimension.
So a lost hint costs bytes, and a wrong one time, but neither changes a result.

A value has several such dimensions where all rows meet all rows, as in a contrastive loss. The
compiler can split the first one alone.
"""

import dataclasses
import itertools
import math
import operator
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from jax.sharding import AbstractMesh, Mesh

from pallas_kernels._jax import equations
from pallas_kernels._jax.equations import Equation

Rows = tuple[int, ...]  # the dimensions of a value that hold rows
Row = int | None  # one of them


@dataclasses.dataclass(frozen=True)
class WorkerAxis:
    """Axis of a mesh over which the compiler splits rows, among one worker for each place."""

    axis: str
    mesh: Mesh | AbstractMesh
    # Functions of equations, by what they depend on: JAX traces once those that are alike.
    functions: dict[Hashable, Callable[..., Any]] = dataclasses.field(
        default_factory=dict, compare=False, repr=False
    )

    @property
    def count(self) -> int:
        """Number of workers."""
        size: int = self.mesh.shape[self.axis]
        return size


# Results have the dimensions of the operands, but for some that are left out.
REDUCTIONS = {
    *("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or"),
    *("reduce_xor", "argmax", "argmin"),
}


def follow(equation: Equation, rows: Sequence[Rows]) -> list[Rows]:
    """Return the rows of the results of an equation without programs, given those of operands."""
    if not any(rows):
        return [()] * len(equation.outvars)
    firsts = [each[0] if each else None for each in rows]
    found: list[Rows] = [() if e is None else (e,) for e in _followed(equation, firsts)]
    for operand, dims in enumerate(rows):
        for dim in dims:
            alone = [dim if each == operand else None for each in range(len(rows))]
            if alone == firsts:
                continue  # as above
            for i, other in enumerate(_followed(equation, alone)):
                found[i] = _joined(found[i], other, equations.shape_of(equation.outvars[i]))
    return found


def _joined(rows: Rows, other: Row, shape: tuple[int, ...]) -> Rows:
    """Add a dimension with as many rows. Others may be of a parameter that is split alike."""
    if other is None or other in rows or (rows and shape[other] != shape[rows[0]]):
        return rows
    return (*rows, other)


def _followed(equation: Equation, rows: Sequence[Row]) -> list[Row]:
    name, found = equation.primitive.name, None
    if name in _UNARY_RULES:
        if rows[0] is not None:
            found = _UNARY_RULES[name](equation, rows[0])
    elif any(each is not None for each in rows):
        rule = _RULES.get(name, _scattered if name.startswith("scatter") else _same_place)
        found = rule(equation, rows)
    return found if isinstance(found, list) else [found] * len(equation.outvars)


def _same_place(equation: Equation, rows: Sequence[Row]) -> list[Row]:
    """Results of the rank of an operand, with a dimension of the same size at the same place."""
    found: list[Row] = []
    for out in equation.outvars:
        shape = equations.shape_of(out)
        candidates = (
            each
            for atom, each in zip(equation.invars, rows, strict=True)
            if each is not None
            and len(shape) == len(equations.shape_of(atom))
            and shape[each] == equations.shape_of(atom)[each]
        )
        found.append(next(candidates, None))
    return found


def _broadcast(equation: Equation, row: int) -> Row:
    dim = equation.params["broadcast_dimensions"][row]
    before = equations.shape_of(equation.invars[0])[row]
    return dim if equations.shape_of(equation.outvars[0])[dim] == before else None


def _reshaped(equation: Equation, row: int) -> Row:
    """Rows stay together where the outer dimensions do: they are split, or joined with others."""
    before = equations.shape_of(equation.invars[0])
    after = equations.shape_of(equation.outvars[0])
    outer, size = math.prod(before[:row]), before[row]
    for dim, others in enumerate(itertools.accumulate(after, operator.mul, initial=1)):
        if dim == len(after) or others != outer or after[dim] <= 1:
            continue
        if size and (after[dim] % size == 0 or size % after[dim] == 0):
            return dim
    return None


def _expanded(equation: Equation, row: int) -> Row:
    for new in sorted(equation.params["dimensions"]):
        row += new <= row
    return row


def _without(dimensions: Sequence[int], row: int) -> Row:
    """Return where a dimension is after some are left out."""
    return None if row in dimensions else row - sum(each < row for each in dimensions)


def _stacked(equation: Equation, rows: Sequence[Row]) -> Row:
    """Return the dimension of the first operand with rows, behind a new one."""
    row = next(each for each in rows if each is not None)
    return row + (equation.params["axis"] <= row)


def _rest(atom: Any, *others: Sequence[int]) -> list[int]:
    """Return the dimensions of a value that are not among others."""
    return [d for d in range(len(equations.shape_of(atom))) if all(d not in o for o in others)]


def _product(equation: Equation, rows: Sequence[Row]) -> Row:
    """Dimensions of a batch come first, then the free ones of the left and the right operand."""
    contracted, batches = equation.params["dimension_numbers"]
    free = len(batches[0])
    for operand, dim, summed, batch in zip(equation.invars, rows, contracted, batches, strict=True):
        kept = _rest(operand, summed, batch)
        if dim in batch:
            return list(batch).index(dim)
        if dim in kept:
            return free + kept.index(dim)
        free += len(kept)
    return None


def _ragged_product(equation: Equation, rows: Sequence[Row]) -> Row:
    """Dimensions of the result are those of a batch, of the groups, and as of any product."""
    numbers = equation.params["ragged_dot_dimension_numbers"]
    (left, right), (batch, right_batch) = numbers.dot_dimension_numbers
    if rows[0] is None or rows[0] in left:
        return None
    if rows[0] in batch:
        return list(batch).index(rows[0])
    kept = _rest(equation.invars[0], left, batch)
    of_right = _rest(equation.invars[1], right, right_batch, numbers.rhs_group_dimensions)
    rank = len(equations.shape_of(equation.outvars[0]))
    return rank - len(kept) - len(of_right) + kept.index(rows[0])


def _convolution(equation: Equation, rows: Sequence[Row]) -> Row:
    numbers = equation.params["dimension_numbers"]
    if rows[0] is not None and rows[0] == numbers.lhs_spec[0]:
        return numbers.out_spec[0]
    if rows[1] is not None and rows[1] == numbers.rhs_spec[0]:
        return numbers.out_spec[1]
    return None


def _gathered(equation: Equation, rows: Sequence[Row]) -> Row:
    """Slices of the first operand at the places of the second, whose last dimension is a place."""
    numbers = equation.params["dimension_numbers"]
    result = equations.shape_of(equation.outvars[0])
    batch = _rest(equation.outvars[0], numbers.offset_dims)
    if rows[1] is not None and rows[1] < len(equations.shape_of(equation.invars[1])) - 1:
        return batch[rows[1]]
    if rows[0] is None:
        return None
    if rows[0] in numbers.operand_batching_dims:
        place = numbers.operand_batching_dims.index(rows[0])
        return batch[numbers.start_indices_batching_dims[place]]
    whole = equations.shape_of(equation.invars[0])
    kept = _rest(equation.invars[0], numbers.collapsed_slice_dims, numbers.operand_batching_dims)
    if rows[0] not in kept:
        return None
    dim = numbers.offset_dims[kept.index(rows[0])]
    return dim if result[dim] == whole[rows[0]] else None


def _scattered(equation: Equation, rows: Sequence[Row]) -> Row:
    """Results have the shape of the first operand."""
    numbers = equation.params["dimension_numbers"]
    if rows[0] is not None:
        return rows[0]
    if rows[1] in numbers.scatter_indices_batching_dims:
        place = numbers.scatter_indices_batching_dims.index(rows[1])
        return numbers.operand_batching_dims[place]
    return None


def _updated_slice(equation: Equation, rows: Sequence[Row]) -> Row:
    """The result has the shape of the first operand, of which the second is a part."""
    if rows[0] is not None:
        return rows[0]
    if rows[1] is None:
        return None
    sizes = [equations.shape_of(atom)[rows[1]] for atom in equation.invars[:2]]
    return rows[1] if sizes[0] == sizes[1] else None


def _concatenated(equation: Equation, rows: Sequence[Row]) -> list[Row]:
    """Rows of several arrays are more rows, such as two views of a batch."""
    dim = equation.params["dimension"]
    return [dim] if all(each == dim for each in rows) else _same_place(equation, rows)


def _cut(equation: Equation, row: int) -> list[Row]:
    """A half or a third of the rows may be those of a view."""
    size = equations.shape_of(equation.invars[0])[row]
    parts = (equations.shape_of(out)[row] for out in equation.outvars)
    return [row if part > 1 and size % part == 0 else None for part in parts]


def _summed(equation: Equation, rows: Sequence[Row]) -> list[Row]:
    """A sum in a `jax.vmap` is over numbers of dimensions."""
    dims = [axis for axis in equation.params["axes"] if isinstance(axis, int)]
    return [None if row is None else _without(dims, row) for row in rows]


# Of operands of which the first alone holds rows: functions of the dimension.
_UNARY_RULES: dict[str, Callable[[Equation, int], Row | list[Row]]] = {
    **dict.fromkeys(REDUCTIONS, lambda e, row: _without(e.params["axes"], row)),
    "broadcast_in_dim": _broadcast,
    "expand_dims": _expanded,
    "reshape": _reshaped,
    "slice": _cut,
    "split": _cut,
    "squeeze": lambda e, row: _without(e.params["dimensions"], row),
    "transpose": lambda e, row: e.params["permutation"].index(row),
    "unstack": lambda e, row: _without([e.params["axis"]], row),
}
_RULES: dict[str, Callable[[Equation, Sequence[Row]], Row | list[Row]]] = {
    "concatenate": _concatenated,
    "conv_general_dilated": _convolution,
    "dot_general": _product,
    "dynamic_slice": lambda e, rows: _same_place(e, [rows[0], *[None] * (len(rows) - 1)]),
    "dynamic_update_slice": _updated_slice,
    "gather": _gathered,
    "psum": _summed,
    "ragged_dot_general": _ragged_product,
    "stack": _stacked,
}


def rows_of_spec(spec: Any, axis: str) -> Rows:
    """Return the dimension that a spec splits over an axis, if there is one."""
    for dim, names in enumerate(spec):
        if names == axis or (isinstance(names, tuple) and axis in names):
            return (dim,)
    return ()
