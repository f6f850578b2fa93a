"""Unreduced values of a program in its global view: sums over workers that are still to be done.

An unreduced value has a leading axis, which is split over the workers: the sum over it is the value
of the program. Whatever else the compiler splits, over other axes, it goes on to split.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import NamedSharding, PartitionSpec

from dynamiq_jax._rewriting.contractions import Workers
from dynamiq_jax._rewriting.rows import Rows
from pallas_kernels._jax import equations
from pallas_kernels._jax.equations import Equation

P = PartitionSpec
Terms = Array  # [workers, ...]


def parts(
    equation: Equation, split: Sequence[Rows], workers: Workers
) -> Callable[..., list[Terms]]:
    """Return the function of a contraction to the result of each worker for its rows.

    Args:
      equation: the contraction.
      split: the dimension of each operand that holds rows.
      workers: the workers.
    """

    def of_worker(*operands: Array) -> list[Array]:
        if equation.primitive.name == "scatter-add":  # the operand is a term of the first worker
            is_first = lax.axis_index(workers.axis) == 0
            operands = jnp.where(is_first, operands[0], 0), *operands[1:]
        return [out[None] for out in equations.bound(equation, operands)]

    specs = tuple(P() if dim is None else P(*[None] * dim, workers.axis) for dim in split)
    return lambda *operands: _mapped(of_worker, workers, specs, P(workers.axis))(*operands)


def linear(
    function: Callable[..., Sequence[Any]], are_terms: Sequence[bool], workers: Workers
) -> Callable[..., Sequence[Terms]]:
    """Return a function that is linear in unreduced values, which it maps over the workers.

    Args:
      function: the function of one worker.
      are_terms: the inputs that are unreduced; others are the same for all workers.
      workers: the workers.
    """
    axes = [0 if each else None for each in are_terms]

    def mapped(*values: Array) -> list[Terms]:
        results = jax.vmap(function, axes, spmd_axis_name=workers.axis)(*values)
        return [_split(each, workers) for each in results]

    return mapped


def zeros(value: Array, workers: Workers) -> Terms:
    """Return the unreduced form of a value of zeros."""
    return _split(jnp.zeros((workers.count, *value.shape), value.dtype), workers)


def of_all_turns(terms: Array, workers: Workers) -> Terms:
    """Return the unreduced form of what a loop has stacked: [turns, workers, ...]."""
    return _split(jnp.moveaxis(terms, 1, 0), workers)


def reduced(
    reduce: Callable[[Mapping[str, Array]], Mapping[str, Array]],
    tree: Mapping[str, Terms],
    workers: Workers,
    out_specs: Mapping[str, PartitionSpec] | PartitionSpec = P(),
) -> Mapping[str, Array]:
    """Reduce unreduced values.

    Args:
      reduce: function of the values of one worker, where the axis is manual.
      tree: unreduced values by name.
      workers: the workers.
      out_specs: split of the results over the workers, of a sum whose parts are scattered.
    """

    def of_worker(tree: Mapping[str, Terms]) -> Mapping[str, Array]:
        return reduce({name: terms[0] for name, terms in tree.items()})

    return _mapped(of_worker, workers, (P(workers.axis),), out_specs)(tree)


def _mapped(function: Any, workers: Workers, in_specs: Any, out_specs: Any) -> Any:
    """Map a function over the workers, which the compiler goes on to split over other axes."""
    around = jax.sharding.get_abstract_mesh()
    return jax.shard_map(
        function,
        mesh=None if around.axis_names else workers.mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names={workers.axis},
        check_vma=False,
    )


def _split(terms: Array, workers: Workers) -> Terms:
    spec = P(workers.axis, *[P.UNCONSTRAINED] * (terms.ndim - 1))
    around = jax.sharding.get_abstract_mesh()
    mesh = around if around.axis_names else workers.mesh
    return lax.with_sharding_constraint(terms, NamedSharding(mesh, spec))
