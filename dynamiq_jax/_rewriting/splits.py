"""Contractions of rows: along which dimensions of their operands the workers take parts."""

import itertools
from collections.abc import Callable, Sequence

from dynamiq_jax._rewriting.rows import REDUCTIONS, Row, Rows, follow
from pallas_kernels._jax import equations
from pallas_kernels._jax.equations import Equation


def contraction(equation: Equation, rows: Sequence[Rows]) -> list[Row] | None:
    """Return the dimension of each operand along which the workers do parts of a contraction.

    The result of the equation is the sum of its results for the parts of each worker. Both factors
    of a product have to hold rows: one alone may be a parameter that is split over the same axis.
    A result that holds rows is no sum.

    None of an operand: each worker takes all of it. No list: the equation contracts no rows.
    """
    rule = _CONTRACTIONS.get(equation.primitive.name)
    if rule is None:
        return None
    choices = itertools.product(*(each or (None,) for each in rows))  # one dimension of each
    found = next(filter(None, (rule(equation, each) for each in choices)), None)
    if found is None:
        return None
    # Rows that the contraction leaves, where all rows meet all rows.
    others = [
        tuple(dim for dim in dims if dim != each) if len(dims) > 1 else ()
        for dims, each in zip(rows, found, strict=True)
    ]
    return None if any(follow(equation, others)) else found


def splits_evenly(equation: Equation, split: Sequence[Row], workers: int) -> bool:
    """Return whether each worker has as many rows of a contraction as the others."""
    shapes = map(equations.shape_of, equation.invars)
    sizes = [shape[dim] for shape, dim in zip(shapes, split, strict=True) if dim is not None]
    return all(isinstance(size, int) and size % workers == 0 for size in sizes)


def may_contract(equation: Equation, rows: Sequence[Rows], are_lost: Sequence[bool]) -> bool:
    """Return whether an equation may contract rows, which are lost of an operand or of both."""
    match equation.primitive.name:
        case "dot_general":
            pairs = list(zip(*equation.params["dimension_numbers"][0], strict=True))
        case "conv_general_dilated":
            numbers = equation.params["dimension_numbers"]
            pairs = [(numbers.lhs_spec[1], numbers.rhs_spec[1])]
        case _:
            return False
    return all(are_lost) or any(
        (are_lost[1] and first in rows[0]) or (are_lost[0] and second in rows[1])
        for first, second in pairs
    )


def ends(equation: Equation) -> bool:
    """Return whether results of an equation may have no rows although nothing is lost."""
    return equation.primitive.name in REDUCTIONS | _CONTRACTIONS.keys()


def _contracted_product(equation: Equation, rows: Sequence[Row]) -> list[Row] | None:
    (left, right), _ = equation.params["dimension_numbers"]
    pairs = zip(left, right, strict=True)
    return next(([*pair] for pair in pairs if pair == (rows[0], rows[1])), None)


def _contracted_convolution(equation: Equation, rows: Sequence[Row]) -> list[Row] | None:
    """The gradient of a kernel: rows are the features of both operands, in one group."""
    numbers = equation.params["dimension_numbers"]
    features = [numbers.lhs_spec[1], numbers.rhs_spec[1]]
    in_groups = equation.params["feature_group_count"] > 1
    return features if not in_groups and features == [*rows] else None


def _contracted_sum(equation: Equation, rows: Sequence[Row]) -> list[Row] | None:
    return [rows[0]] if rows[0] in equation.params["axes"] else None


def _contracted_scatter(equation: Equation, rows: Sequence[Row]) -> list[Row] | None:
    """The gradient of an embedding: rows of updates at places in an operand without rows."""
    numbers = equation.params["dimension_numbers"]
    _, places, updates = equation.invars
    dim = rows[1]
    last = len(equations.shape_of(places)) - 1
    if rows[0] is not None or dim is None or dim >= last:
        return None
    if dim in numbers.scatter_indices_batching_dims:
        return None
    batch = [
        d for d in range(len(equations.shape_of(updates))) if d not in numbers.update_window_dims
    ]
    return [None, dim, batch[dim]]


def _contracted_groups(equation: Equation, rows: Sequence[Row]) -> list[Row] | None:
    """The gradient of one matrix for each group of rows. A parameter has no groups of rows."""
    numbers = equation.params["ragged_dot_dimension_numbers"]
    (left, right), _ = numbers.dot_dimension_numbers
    ragged = numbers.lhs_ragged_dimensions[0]
    if ragged not in left:
        return None
    pair = [ragged, right[list(left).index(ragged)]]
    holds = any(dim == each for dim, each in zip(pair, rows[:2], strict=True))
    return [*pair, None] if holds else None


_CONTRACTIONS: dict[str, Callable[[Equation, Sequence[Row]], list[Row] | None]] = {
    "conv_general_dilated": _contracted_convolution,
    "dot_general": _contracted_product,
    "ragged_dot_general": _contracted_groups,
    "reduce_sum": _contracted_sum,
    "scatter-add": _contracted_scatter,
}
