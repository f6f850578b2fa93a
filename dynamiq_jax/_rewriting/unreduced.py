"""Unreduced values of a program in its global view: sums over workers that are still to be done.

An unreduced value has a leading axis, which is split over the workers: the sum over it is the value
of the program. Whatever else the compiler splits, over other axes, it goes on to split.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import NamedSharding, PartitionSpec

from dynamiq_jax._inputs.shards import names_of, over
from dynamiq_jax._rewriting.rows import Row, WorkerAxis
from pallas_kernels._jax import compat, equations
from pallas_kernels._jax.equations import Atom, Equation

P = PartitionSpec
Terms = Array  # [workers, ...]
Tree = dict[str, Array]
Metrics = Mapping[str, Array]


Maker = Callable[[Equation, Sequence[Any], WorkerAxis], Callable[..., Any]]


def _shared(make: Maker) -> Maker:
    """Make one function of all equations that are alike, in the context of each."""

    @functools.wraps(make)
    def made(equation: Equation, setting: Sequence[Any], workers: WorkerAxis) -> Callable[..., Any]:
        literals = [getattr(atom, "val", None) for atom in equation.invars]
        # Bits, since the text of a number is rounded.
        values = [each if each is None else np.asarray(each).tobytes() for each in literals]
        types = [atom.aval for atom in (*equation.invars, *equation.outvars)]
        params = equation.params.items()
        alike = make, equation.primitive, *params, *types, *values, equation.ctx, *setting
        try:
            known = workers.functions.get(alike)
        except TypeError:  # a parameter without a hash
            return equations.in_context(equation, make(equation, setting, workers))
        if known is None:
            known = jax.jit(equations.in_context(equation, make(equation, setting, workers)))
            workers.functions[alike] = known
        return known

    return made


@_shared
def parts(
    equation: Equation, split: Sequence[Row], workers: WorkerAxis
) -> Callable[..., list[Terms]]:
    """Return the function of a contraction to the result of each worker for its rows, which are
    along the dimensions `split` of the operands.
    """
    in_parts = _scattered if equation.primitive.name == "scatter-add" else _contracted
    function = in_parts(equations.without_shardings(equation), split, workers)
    (out,) = equation.outvars
    like: Any = out.aval

    def varying(*operands: Array) -> list[Terms]:
        return compat.match_varying(function(*operands), like)  # over axes of a map around

    return _on_automatic_axes(varying, workers, [_spec_of_terms(out, workers)])


def _contracted(
    equation: Equation, split: Sequence[Row], workers: WorkerAxis
) -> Callable[..., list[Terms]]:
    """Return the function as one equation of each worker, for which no operand moves."""

    def of_worker(*operands: Array) -> list[Array]:
        if equation.primitive.name == "ragged_dot_general":
            dim, *_ = split
            assert dim is not None
            rows = operands[0].shape[dim]
            first = rows * lax.axis_index(workers.axis)
            operands = (*operands[:2], _sizes_among(operands[2], first, first + rows))
        return [out[None] for out in equations.bound(equation, operands)]

    specs = tuple(P() if dim is None else P(*[None] * dim, workers.axis) for dim in split)
    return _mapped(of_worker, workers, specs, P(workers.axis))


def _sizes_among(sizes: Array, first: Array, end: Array) -> Array:
    """Return the sizes of groups of successive rows, of the rows from `first` to `end` alone."""
    ends = jnp.cumsum(sizes, axis=-1, dtype=sizes.dtype)
    first, end = first.astype(sizes.dtype), end.astype(sizes.dtype)
    return jnp.clip(ends, first, end) - jnp.clip(ends - sizes, first, end)


def _scattered(
    equation: Equation, split: Sequence[Row], workers: WorkerAxis
) -> Callable[..., list[Terms]]:
    """Return the function as one equation of all workers.

    XLA's partitioner fails for a scatter of each worker where it splits two more axes.
    """

    def of_all(first: Array, *operands: Array) -> list[Terms]:
        is_first = jnp.arange(workers.count) == 0  # its terms hold the operand
        shape = (workers.count, *[1] * first.ndim)
        zero = jnp.zeros((), first.dtype)
        terms = _split(jnp.where(is_first.reshape(shape), first[None], zero), workers)
        rows = [_rows_of_each(v, dim, workers) for v, dim in zip(operands, split[1:], strict=True)]

        def of_one(*values: Array) -> list[Array]:
            return equations.bound(equation, values)

        made = jax.vmap(of_one, spmd_axis_name=workers.axis)(terms, *rows)
        return [_split(each, workers) for each in made]

    return of_all


def _rows_of_each(value: Array, dim: Row, workers: WorkerAxis) -> Array:
    """Return the rows of each worker: [workers, ..., rows, ...]."""
    assert dim is not None
    shape = value.shape
    rows = (workers.count, shape[dim] // workers.count)
    return _split(
        jnp.moveaxis(value.reshape(*shape[:dim], *rows, *shape[dim + 1 :]), dim, 0), workers
    )


@_shared
def linear(
    equation: Equation, are_terms: Sequence[bool], workers: WorkerAxis
) -> Callable[..., Sequence[Terms]]:
    """Return the function of an equation that is linear in unreduced values.

    It is of the inputs that are variables. Those that are no terms are the same for all workers.
    """
    out = _spec_of_terms(equation.outvars[0], workers)
    if equation.primitive.name == "reshard":
        return lambda terms: [jax.sharding.reshard(terms, NamedSharding(_mesh(workers), out))]
    is_constraint = equation.primitive.name == "sharding_constraint"
    bare = equations.without_shardings(equation)

    def function(*values: Array) -> list[Array]:
        return equations.bound(bare, equations.with_literals(equation, values))

    def mapped(*values: Array) -> list[Terms]:
        if is_constraint:
            spec = _without(equation.params["sharding"].spec, workers.axis)
            return [_split(values[0], workers, [*spec])]
        axes = [0 if each else None for each in are_terms]
        results = jax.vmap(function, axes)(*values)
        return [_split(each, workers) for each in results]

    return _on_automatic_axes(mapped, workers, [out])


def zeros(value: Array, workers: WorkerAxis) -> Terms:
    """Return the unreduced form of a value of zeros."""

    def make(value: Array) -> Terms:
        first = compat.match_varying(jnp.zeros((workers.count, *value.shape), value.dtype), value)
        return _split(first, workers)

    return _on_automatic_axes(make, workers, _spec_of_terms(value, workers))(value)


def of_all_turns(terms: Array, workers: WorkerAxis) -> Terms:
    """Return the unreduced form of what a loop has stacked: [turns, workers, ...]."""
    moved = jnp.moveaxis(terms, 1, 0)
    return moved if _mesh(workers).explicit_axes else _split(moved, workers)


def total(terms: Terms, result: Atom, workers: WorkerAxis) -> Array:
    """Return the value of the program, of the type of `result`, by a sum of the compiler."""

    def summed(terms: Terms) -> Array:
        return jnp.sum(terms, 0, dtype=terms.dtype)  # which small integers would not keep

    return _on_automatic_axes(summed, workers, _spec(result))(terms)


def reduced(
    reduce: Callable[[Tree], tuple[Tree, Metrics]],
    tree: Tree,
    results: Mapping[str, Atom],
    workers: WorkerAxis,
    parts: Mapping[str, int | None],
) -> tuple[Tree, Metrics]:
    """Reduce unreduced values.

    Args:
      reduce: function of the values of one worker, where the axis is manual, to sums and metrics.
      tree: unreduced values by name.
      results: values of the program, by their types.
      workers: the workers.
      parts: dimensions of which each worker gets its part, and None for values of which all have
        all. That dimension is the first one for `reduce`.
    """
    split = {name: part for name, part in parts.items() if part is not None}

    def of_worker(tree: Tree) -> tuple[Tree, Metrics]:
        sent: Tree = jax.tree.map(lambda terms: lax.squeeze(terms, (0,)), tree)
        sent |= {name: jnp.moveaxis(sent[name], part, 0) for name, part in split.items()}
        totals, metrics = reduce(sent)
        parts = {name: jnp.moveaxis(totals[name], 0, part) for name, part in split.items()}
        return totals | parts, metrics

    specs = jax.tree.map(_spec, results)
    out_specs = jax.tree.map(lambda _: P(), results)
    out_specs |= {name: P(*[None] * part, workers.axis) for name, part in split.items()}
    function = _mapped(of_worker, workers, (P(workers.axis),), (out_specs, P()))
    outcome: tuple[Tree, Metrics] = _on_automatic_axes(function, workers, (specs, P()))(tree)
    return outcome


def placed(total: Array, spec: PartitionSpec | None, workers: WorkerAxis) -> Array:
    """Return a sum with a spec over axes that the compiler manages, if it is given one."""
    mesh = _mesh(workers)
    if spec is None or mesh.explicit_axes:
        return total
    return lax.with_sharding_constraint(total, NamedSharding(mesh, spec))


def _mapped(function: Any, workers: WorkerAxis, in_specs: Any, out_specs: Any) -> Any:
    """Map a function over the workers, which the compiler goes on to split over other axes."""

    def mapped(*values: Any) -> Any:
        return jax.shard_map(
            function,
            mesh=_mesh(workers),
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names={workers.axis},
            check_vma=False,
        )(*values)

    return mapped


def _split(terms: Array, workers: WorkerAxis, others: Sequence[Any] | None = None) -> Terms:
    """Split terms over the workers, and over other axes as the compiler likes or as given."""
    if others is None:
        others = [P.UNCONSTRAINED] * (terms.ndim - 1)
    mesh = _mesh(workers)
    return lax.with_sharding_constraint(terms, NamedSharding(mesh, P(workers.axis, *others)))


def _mesh(workers: WorkerAxis) -> Any:
    """Return the mesh around if it has the workers, or else theirs."""
    around = jax.sharding.get_abstract_mesh()
    return around if around.shape.get(workers.axis) == workers.count else workers.mesh


def _on_automatic_axes(function: Any, workers: WorkerAxis, specs: Any) -> Any:
    """Return a function in which the compiler manages axes that are explicit around it, where its
    results have `specs`.
    """

    def placed(*values: Any) -> Any:
        mesh = _mesh(workers)
        if not (explicit := mesh.explicit_axes):
            return function(*values)
        shardings = jax.tree.map(
            lambda spec: NamedSharding(mesh, over(spec, explicit)),
            specs,
            is_leaf=lambda s: isinstance(s, P),
        )
        return jax.sharding.auto_axes(function, axes=explicit, out_sharding=shardings)(*values)

    return placed


def _spec(value: Any) -> PartitionSpec:
    """Return the spec in the type of a value; an empty one on automatic axes."""
    sharding = getattr(getattr(value, "aval", value), "sharding", None)
    return P(*getattr(sharding, "spec", ()))


def _spec_of_terms(value: Any, workers: WorkerAxis) -> PartitionSpec:
    """Return the spec of the unreduced form of a value, from the type of the value."""
    return P(workers.axis, *_without(_spec(value), workers.axis))


def _without(spec: PartitionSpec, axis: str) -> PartitionSpec:
    return P(
        *(
            each
            if each is None or each is P.UNCONSTRAINED
            else tuple(name for name in names_of(each) if name != axis) or None
            for each in spec
        )
    )
