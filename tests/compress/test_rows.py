"""Rows through equations: where they come out, each row is taken as all others are."""

import jax
import numpy as np
import pytest
from jax import lax

from dynamiq_jax._rewriting.rows import follow
from pallas_kernels._jax import equations
from tests.compress.global_forms import labels, normal


def in_rows(function):
    """Apply a function to each row of its operands, as JAX writes it: in batches."""
    return jax.vmap(function)


def convolved(x, kernel):
    return lax.conv_general_dilated(
        x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "OHWI", "NHWC")
    )


def places(*shape):
    return labels(*shape, below=4)


def taken(x, i):
    return lax.dynamic_index_in_dim(x, i, keepdims=False)


def put(x, i, v):
    return x.at[i].set(v)


X = normal(6, 4, 8)
# A function, its operands with the dimensions that hold rows, and those of the results.
CASES = {
    "a function of elements": (lax.tanh, [(X, 1)], [1]),
    "two operands": (lax.mul, [(X, 1), (normal(6, 4, 8), 1)], [1]),
    "cumulative sum": (lambda x: lax.cumsum(x, 2), [(X, 1)], [1]),
    "sum over a dimension in front": (lambda x: lax.reduce_sum(x, (0,)), [(X, 1)], [0]),
    "sum over a dimension behind": (lambda x: lax.reduce_sum(x, (2,)), [(X, 1)], [1]),
    "largest over the rows": (lambda x: lax.reduce_max(x, (1,)), [(X, 1)], [None]),
    "place of the largest": (lambda x: lax.argmax(x, 0, np.int32), [(X, 1)], [0]),
    "broadcast": (lambda x: lax.broadcast_in_dim(x, (3, 6, 4, 8), (1, 2, 3)), [(X, 1)], [2]),
    "broadcast of one row": (
        lambda x: lax.broadcast_in_dim(x, (5, 4), (0, 1)),
        [(normal(1, 4), 0)],
        [None],
    ),
    "more dimensions": (lambda x: lax.expand_dims(x, (0, 3)), [(X, 1)], [2]),
    "fewer dimensions": (lambda x: lax.squeeze(x, (0, 2)), [(normal(1, 4, 1), 1)], [0]),
    "split rows": (lambda x: lax.reshape(x, (6, 2, 2, 8)), [(X, 1)], [1]),
    "joined with dimensions behind": (lambda x: lax.reshape(x, (6, 32)), [(X, 1)], [1]),
    "batches joined with sequences": (lambda x: lax.reshape(x, (24, 8)), [(X, 0)], [0]),
    "joined with dimensions in front": (lambda x: lax.reshape(x, (24, 8)), [(X, 1)], [None]),
    "transposed": (lambda x: lax.transpose(x, (1, 2, 0)), [(X, 1)], [0]),
    "half of other dimensions": (lambda x: lax.slice_in_dim(x, 0, 3), [(X, 1)], [1]),
    "a part of the rows": (lambda x: lax.slice_in_dim(x, 0, 3, axis=1), [(X, 1)], [None]),
    "halves of the rows": (lambda x: lax.split(x, (2, 2), axis=1), [(X, 1)], [1, 1]),
    "unequal parts of the rows": (lambda x: lax.split(x, (1, 3), axis=1), [(X, 1)], [None, None]),
    "two views": (lambda x, y: lax.concatenate((x, y), 0), [(X, 0), (normal(6, 4, 8), 0)], [0]),
    "more features": (lambda x, y: lax.concatenate((x, y), 2), [(X, 1), (X, 1)], [1]),
    "free dimension on the left": (
        lambda x, w: lax.dot_general(x, w, (((2,), (0,)), ((), ()))),
        [(X, 1), (normal(8, 5), None)],
        [1],
    ),
    "free dimension on the right": (
        lambda w, x: lax.dot_general(w, x, (((0,), (2,)), ((), ()))),
        [(normal(8, 5, 2), None), (X, 1)],
        [3],
    ),
    "product in batches": (
        lambda x, y: lax.dot_general(x, y, (((2,), (2,)), ((0, 1), (0, 1)))),
        [(X, 1), (X, 1)],
        [1],
    ),
    "contracted": (
        lambda x, y: lax.dot_general(x, y, (((1,), (0,)), ((), ()))),
        [(X, 1), (normal(4, 5), 0)],
        [None],
    ),
    "groups of rows": (
        lambda x, w, sizes: lax.ragged_dot(x, w, sizes),
        [(normal(6, 8), 0), (normal(2, 8, 5), None), (np.array([4, 2], np.int32), None)],
        [0],
    ),
    "images": (convolved, [(normal(4, 6, 6, 3), 0), (normal(5, 3, 3, 3), None)], [0]),
    "kernels": (convolved, [(normal(4, 6, 6, 3), None), (normal(5, 3, 3, 3), 0)], [3]),
    "slice at a place": (lambda x: lax.dynamic_slice(x, (1, 0, 0), (2, 4, 8)), [(X, 1)], [1]),
    "update of a part": (
        lambda x, v: lax.dynamic_update_slice(x, v, (1, 0, 0)),
        [(X, 1), (normal(2, 4, 8), 1)],
        [1],
    ),
    "update of some rows": (
        lambda x, v: lax.dynamic_update_slice(x, v, (0, 1, 0)),
        [(X, 1), (normal(6, 2, 8), 1)],
        [1],
    ),
    "a table": (in_rows(lambda i: normal(9, 5)[i]), [(places(6), 0)], [0]),
    "slices of a table": (
        lambda x, i: jax.vmap(taken, (None, 0))(x, i),
        [(normal(9, 5, 3), 1), (np.array([2, 4]), None)],
        [1],
    ),
    "one place of each row": (in_rows(taken), [(normal(6, 4), 0), (places(6), 0)], [0]),
    "one update of each row": (
        in_rows(put),
        [(normal(6, 4), 0), (places(6), 0), (normal(6), 0)],
        [0],
    ),
}
# Rows are split, joined with others, or of other groups in another order.
IN_PARTS = {
    "split rows",
    "halves of the rows",
    "two views",
    "groups of rows",
    "update of some rows",
}.union(name for name in CASES if "joined" in name)
# Operands of which the hint alone is not enough: their rows are known from the others.
NOT_ALONE = {"two views": (0, 1), "one update of each row": (2,), "update of some rows": (1,)}


def followed(function, operands, dims):
    """The dimensions that hold rows of the results."""
    found = through(
        jax.make_jaxpr(function)(*operands), [() if dim is None else (dim,) for dim in dims]
    )
    return [dims[0] if dims else None for dims in found]


def through(traced, rows):
    """The rows of the results of a program, with those of functions inside."""
    program, _ = equations.opened(traced)
    known = dict(zip(program.invars, rows, strict=True))
    for equation in program.eqns:
        of_each = [known.get(a, ()) if equations.is_variable(a) else () for a in equation.invars]
        inside = list(equations.programs_in(equation)) if equation.primitive.name == "jit" else []
        results = through(inside[0], of_each) if inside else follow(equation, of_each)
        known.update(zip(equation.outvars, results, strict=True))
    return [known.get(out, ()) for out in program.outvars]


@pytest.mark.parametrize("name", CASES)
def test_rows_come_out_where_they_went(name):
    function, given, expected = CASES[name]
    operands, dims = zip(*given, strict=True)
    assert followed(function, operands, dims) == expected
    results = function(*operands)
    if name not in IN_PARTS:
        moved = function(*map(in_another_order, operands, dims))
        for result, other, dim in zip(
            *map(jax.tree.leaves, (results, moved)), expected, strict=True
        ):
            if dim is not None:
                np.testing.assert_allclose(other, in_another_order(result, dim), rtol=1e-5)


def in_another_order(value, dim):
    """A value with its rows in another order."""
    if dim is None:
        return value
    order = np.random.default_rng(0).permutation(np.shape(value)[dim])
    return np.take(np.asarray(value), order, dim)


@pytest.mark.parametrize("name", CASES)
def test_rows_of_one_operand_are_enough(name):
    function, given, expected = CASES[name]
    operands, dims = zip(*given, strict=True)
    for i, dim in enumerate(dims):
        if dim is not None:
            alone = [dim if j == i else None for j in range(len(dims))]
            found = followed(function, operands, alone)
            is_lost = i in NOT_ALONE.get(name, ())
            assert found == ([None] * len(expected) if is_lost else expected), i


@pytest.mark.parametrize(
    "name, operands, rows, expected",
    [
        ("similarities", (normal(6, 8), normal(6, 8)), [(0,), (0,)], (0, 1)),
        ("a parameter that is split alike", (normal(6, 8), normal(5, 8)), [(0,), (0,)], (0,)),
        ("more similarities", (normal(6, 6), normal(6, 6)), [(0, 1), (0,)], (0, 1)),
        ("more similarities", (normal(6, 6), normal(6, 6)), [(0,), (1, 0)], (0, 1)),
    ],
)
def test_several_dimensions_hold_rows_where_all_rows_meet_all_rows(name, operands, rows, expected):
    def similarities(x, y):
        return lax.dot_general(x, y, (((1,), (1,)), ((), ())))

    traced = jax.make_jaxpr(lax.add if name.startswith("more") else similarities)(*operands)
    assert through(traced, rows) == [expected]
