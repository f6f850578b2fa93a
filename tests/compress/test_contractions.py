"""Contractions of rows in parts: each worker has the result for its rows, on any mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from dynamiq_jax._rewriting import unreduced
from dynamiq_jax._rewriting.contractions import contraction
from dynamiq_jax._rewriting.rows import WorkerAxis, follow
from pallas_kernels._jax import equations
from tests.compress.global_forms import labels, normal

MESHES = ({"data": 4}, {"data": 2, "fsdp": 2}, {"data": 2, "fsdp": 2, "model": 2})


def convolved(x, g):
    """The gradient of a strided kernel."""
    kernel = jnp.zeros((3, 3, 4, 8))

    def forward(kernel):
        return lax.conv_general_dilated(
            x, kernel, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    return jax.vjp(forward, kernel)[1](g)[0]


def grouped(x, g, sizes):
    """The gradient of one matrix for each group of rows."""
    matrices = jnp.zeros((3, 8, 4))
    return jax.vjp(lambda matrices: lax.ragged_dot(x, matrices, sizes), matrices)[1](g)[0]


# Functions of operands, the name of the equation that contracts rows, and operands with the
# dimensions that hold rows.
CASES = {
    "product": (lambda x, g: x.T @ g, "dot_general", (normal(16, 8), normal(16, 4)), (0, 0)),
    "product in batches": (
        lambda x, g: jnp.einsum("hbk,hbf->hkf", x, g),
        "dot_general",
        (normal(2, 16, 8), normal(2, 16, 4)),
        (1, 1),
    ),
    "product over two dimensions": (
        lambda x, g: jnp.einsum("btk,btf->kf", x, g),
        "dot_general",
        (normal(16, 3, 8), normal(16, 3, 4)),
        (0, 0),
    ),
    "sum": (lambda x: jnp.sum(x, (0, 2)), "reduce_sum", (normal(16, 8, 4),), (0,)),
    "convolution": (
        convolved,
        "conv_general_dilated",
        (normal(16, 8, 8, 4), normal(16, 4, 4, 8)),
        (0, 0),
    ),
    "scatter": (
        lambda table, places, g: table.at[places].add(g),
        "scatter-add",
        (normal(8, 4), labels(16, below=8), normal(16, 4)),
        (None, 0, 0),
    ),
    "scatter of sequences": (
        lambda table, places, g: table.at[places].add(g),
        "scatter-add",
        (normal(8, 4), labels(16, 3, below=8), normal(16, 3, 4)),
        (None, 0, 0),
    ),
    "groups": (
        grouped,
        "ragged_dot_general",
        (normal(16, 8), normal(16, 4), jnp.array([5, 0, 9], jnp.int32)),
        (0, 0, None),
    ),
}


def traced_contraction(function, name, operands, dims):
    """The equation of a function that contracts rows, the rows of its operands, and their values.

    The equation of the backward pass comes behind one of the same name.
    """
    traced = jax.make_jaxpr(function)(*operands)
    program = traced.jaxpr
    variables = [*program.constvars, *program.invars]
    values = dict(zip(variables, [*traced.consts, *operands], strict=True))
    rows = {v: () if d is None else (d,) for v, d in zip(program.invars, dims, strict=True)}
    for equation in program.eqns:
        of_each = [rows.get(a, ()) if equations.is_variable(a) else () for a in equation.invars]
        given = [values[a] if equations.is_variable(a) else a.val for a in equation.invars]
        if equation.primitive.name == name:
            last = equation, of_each, given
        rows.update(zip(equation.outvars, follow(equation, of_each), strict=True))
        values.update(zip(equation.outvars, equations.bound(equation, given), strict=True))
    return last


@pytest.mark.sampled(2)
@pytest.mark.parametrize("sizes", MESHES, ids=len)
@pytest.mark.parametrize("case", CASES)
def test_each_worker_has_the_result_for_its_rows(case, sizes):
    function, name, operands, dims = CASES[case]
    equation, rows, values = traced_contraction(function, name, operands, dims)
    mesh = jax.make_mesh(
        tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes)
    )
    workers = WorkerAxis("data", mesh)
    split = contraction(equation, rows)
    assert [d is not None for d in split] == [bool(each) for each in rows]
    # Rows are split over both of the first axes, and the last dimension over the last one.
    over_rows = tuple(sizes)[:2]
    last = tuple(sizes)[-1] if len(sizes) > 2 else None

    def spec(value, dim):
        others = [
            last if i == value.ndim - 1 and value.shape[i] > 3 else None for i in range(value.ndim)
        ]
        return P(*(over_rows if i == dim else other for i, other in enumerate(others)))

    placed = [
        jax.device_put(v, NamedSharding(mesh, spec(v, d)))
        for v, d in zip(values, split, strict=True)
    ]
    (terms,) = jax.jit(unreduced.parts(equation, split, workers))(*placed)
    assert terms.sharding.spec[0] == "data"
    (whole,) = equations.bound(equation, values)
    np.testing.assert_allclose(jnp.sum(terms, 0), whole, rtol=1e-5, atol=1e-5)
    (of_one,) = jax.jit(unreduced.parts(equation, split, workers))(
        *of_first(placed, split, workers.count)
    )
    np.testing.assert_allclose(of_one[0], terms[0], rtol=1e-5, atol=1e-5)
    assert np.all(of_one[1:] == 0)
    assert np.abs(terms[1:]).max() > 0.1


def of_first(values, split, workers):
    """Operands in which no worker but the first has rows that count."""

    def kept(value, dim):
        if dim is None or not jnp.issubdtype(value.dtype, jnp.floating):
            return value
        is_first = jnp.arange(value.shape[dim]) < value.shape[dim] // workers
        shape = [-1 if i == dim else 1 for i in range(value.ndim)]
        return jnp.where(is_first.reshape(shape), value, 0)

    return [kept(value, dim) for value, dim in zip(values, split, strict=True)]


def test_a_sum_that_leaves_rows_is_none():
    """Of all rows against all rows, as of the columns of a contrastive loss."""
    (equation,) = jax.make_jaxpr(lambda x: lax.reduce_sum(x, (0,)))(normal(16, 16)).eqns
    assert contraction(equation, [(0,)]) == [0]
    assert contraction(equation, [(0, 1)]) is None
