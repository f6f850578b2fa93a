"""Data-parallel gradients without a `shard_map` of one's own."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dynamiq_jax._api import modules
from dynamiq_jax._api.arguments import DIFFERENTIATED, SPLIT, Roles, Signature, sort
from dynamiq_jax._api.collectives import pmean, refuse_state
from dynamiq_jax._buckets.axes import AxisName, axis_names
from dynamiq_jax._buckets.options import Compression, Options, resolve
from dynamiq_jax._buckets.shards import context_or_automatic, is_explicit, leaf_specs
from dynamiq_jax.methods import DynamiQ, Method
from dynamiq_jax.topologies import Topology
from pallas_kernels import compat

P = PartitionSpec


def value_and_grad(
    loss_fn: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    *,
    mesh: Mesh,
    axis_name: AxisName,
    method: Method | str = DynamiQ(),
    topology: Topology | str = "ring",
    has_aux: bool = False,
    num_targets: Callable[..., Array] | None = None,
    replicated_argnums: int | Sequence[int] = (),
    replicated_argnames: str | Sequence[str] = (),
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    specs: Any = None,
    options: Options = Options(),
) -> Callable[..., Any]:
    """Return a data-parallel `jax.value_and_grad` that averages gradients compressed.

        grad_fn = dq.value_and_grad(loss_fn, mesh=mesh, axis_name="data")
        loss, grads = grad_fn(params, batch, key=key)

    Arguments in `argnums` (flax linen parameters, an nnx module or state, any pytree) are the same
    on all workers, and their floating leaves are differentiated. They may be sharded over other
    axes of the mesh, which are left to the compiler: gradients are sharded alike, and every device
    sends its own shards. All other arrays are split along their leading axis. `loss_fn` gets the
    part of its worker and should return a mean over it. Numbers, scalars and PRNG keys are the same
    on all workers, and so are strings and other values that are not arrays.

    Gradients of an nnx module are the `nnx.State` of its `nnx.Param`s, as `nnx.value_and_grad`
    returns them. The module gets its state back: counters of random streams go on, and statistics
    are averaged. Each worker has dropout of its own.

    The result is the mean of the workers' means. If workers have different numbers of targets
    (padding, masks), this is not the mean over all targets. Then give `num_targets`.

    Args:
      loss_fn: `loss_fn(params, *batch)` to a scalar, or to `(scalar, aux)` with `has_aux`.
      argnums: position or positions to differentiate.
      mesh: mesh with the axis.
      axis_name: axis of the mesh to split over, or several with the slowest link first; see `psum`.
      method: compression method; see `psum`.
      topology: route of the chunks; see `psum`.
      has_aux: whether `loss_fn` returns `(loss, aux)`; aux is a pytree of arrays, averaged exactly
        over the workers (metrics, not outputs per example).
      num_targets: function of the arguments of `loss_fn` to the number of targets that its mean is
        over, a scalar. Losses, aux and gradients of workers are weighted by it.
      replicated_argnums: positions of further arguments that every worker gets whole, such as a
        table.
      replicated_argnames: names of keyword arguments that every worker gets whole.
      static_argnums: positions of arguments that are compile-time constants, as for `jax.jit`.
      static_argnames: names of such keyword arguments.
      specs: how the differentiated argument is split over other axes of the mesh; see `psum`. For
        several positions, a tuple of such. By default as the arrays are placed that the result is
        called with, or as their types say. Inside `jax.jit` neither is known: give specs there, if
        the mesh has further axes.
      options: gradients that stay exact, and the size of buckets.

    Returns:
      A function of the arguments of `loss_fn` and `key`, a PRNG key, that returns `(loss, grads)`
      or `((loss, aux), grads)`: the loss averaged exactly, the gradients averaged compressed, all
      the same on all workers. Leaves that are not floating have gradients of dtype float0.

    Raises:
      ValueError: the mesh has no such axis; the method carries state; or when called, a leading
        axis does not divide by the axis size, or an argument is missing.
    """
    names = axis_names(axis_name)
    if not names or not set(names) <= set(mesh.axis_names):
        raise ValueError(
            f"axis_name={axis_name!r} is not an axis of the mesh. Give one of {mesh.axis_names}."
        )
    how = resolve(method, topology, options)
    refuse_state(how.method, "value_and_grad")
    positions = _as_tuple(argnums)
    in_order = tuple(sorted(positions))
    roles = Roles(
        argnums=in_order,
        whole=(*_as_tuple(replicated_argnums), *_as_tuple(replicated_argnames)),
        static=(*_as_tuple(static_argnums), *_as_tuple(static_argnames)),
    )
    work = _Work(loss_fn, has_aux, num_targets, mesh, axis_name, how)

    def value_and_grad_fn(*args: Any, key: Array, **kwargs: Any) -> Any:
        _check_positions(roles, len(args), kwargs)
        signature, arrays = sort(args, kwargs, roles)
        parted, _ = signature.rebuild(arrays)
        trees = signature.differentiated(parted)
        if specs is None:
            found = _placed(trees, mesh)
        else:
            given = (specs,) if isinstance(argnums, int) else specs
            found = tuple(leaf_specs(trees, tuple(given[positions.index(n)] for n in in_order)))
        _check_divides(signature, arrays[SPLIT], work)
        value, grads, rests = _run(work, signature, found, arrays, key)
        for (where, _), rest in zip(signature.graphs, rests, strict=True):
            modules.update(_at(where, args, kwargs), rest)
        by_position = dict(zip(in_order, _like(trees, grads), strict=True))
        found_grads = tuple(by_position[position] for position in positions)
        return value, found_grads[0] if isinstance(argnums, int) else found_grads

    return value_and_grad_fn


@dataclasses.dataclass(frozen=True, eq=False)  # masks cannot be hashed
class _Work:
    """Choices of a user, the same at every call."""

    loss_fn: Callable[..., Any]
    has_aux: bool
    num_targets: Callable[..., Array] | None
    mesh: Mesh
    axis_name: AxisName
    how: Compression

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the axes."""
        return axis_names(self.axis_name)

    @property
    def num_workers(self) -> int:
        """Number of workers."""
        return math.prod(self.mesh.shape[name] for name in self.names)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _run(
    work: _Work,
    signature: Signature,
    specs: tuple[PartitionSpec, ...] | None,
    arrays: dict[str, list[Any]],
    key: Array,
) -> tuple[Any, list[Array], list[Any]]:
    """Compute the value, gradients of the differentiated leaves, and the rest of modules."""
    mapped = jax.shard_map(
        lambda arrays, key: _local(work, signature, specs, arrays, key),
        mesh=context_or_automatic(work.mesh),
        in_specs=({role: P(work.names) if role == SPLIT else P() for role in arrays}, P()),
        out_specs=P(),
        axis_names=set(work.names),
    )
    if is_explicit():
        split = [jax.typeof(leaf).sharding.spec for leaf in arrays[DIFFERENTIATED]]
        mapped = jax.sharding.auto_axes(mapped, out_sharding=(P(), split, P()))
    return mapped(arrays, key)


def _local(
    work: _Work,
    signature: Signature,
    specs: tuple[PartitionSpec, ...] | None,
    arrays: dict[str, list[Any]],
    key: Array,
) -> tuple[Any, list[Array], list[Any]]:
    """Run on one worker, of whose batch `arrays` holds a part."""
    worker = lax.axis_index(work.names)
    parted, named = signature.rebuild(arrays)

    def arguments(differentiated: list[Array]) -> tuple[list[Any], dict[str, Any]]:
        args, kwargs = signature.rebuild(arrays | {DIFFERENTIATED: differentiated})
        for where, graph in signature.graphs:
            container: Any = args if isinstance(where, int) else kwargs
            parts = container[where]
            container[where] = modules.merge(graph, parts.params, parts.rest, worker)
        return args, kwargs

    def loss_of(differentiated: list[Array]) -> tuple[Array, Any]:
        args, kwargs = arguments(differentiated)
        result = work.loss_fn(*args, **kwargs)
        loss, aux = result if work.has_aux else (result, None)
        if work.num_targets is not None:
            share = _share(work, jnp.asarray(work.num_targets(*args, **kwargs)))
            loss, aux = jax.tree.map(share, (loss, aux))
        rests = [
            modules.rest_of(_at(where, args, kwargs), _at(where, parted, named).rest, work.names)
            for where, _ in signature.graphs
        ]
        return loss, (aux, rests)

    # Otherwise jax.grad sums over the axis itself, exactly.
    own = compat.vary_over(arrays[DIFFERENTIATED], work.names)
    (loss, (aux, rests)), floating = jax.value_and_grad(loss_of, has_aux=True)(own)
    value = jax.tree.map(lambda leaf: lax.pmean(leaf, work.names), (loss, aux))
    trees = signature.differentiated(parted)
    grads: Any = _like(trees, floating)
    placed: Any = None
    if specs is not None:
        placed = jax.tree.unflatten(jax.tree.structure(trees), specs)
    if len(trees) == 1:  # names in errors and masks are those of the tree
        grads, placed = grads[0], placed and placed[0]
    how = work.how
    tree = pmean(
        grads,
        work.axis_name,
        key=key,
        method=how.method,
        topology=how.topology,
        specs=placed,
        options=how.options,
    )
    means = [leaf for leaf in jax.tree.leaves(tree) if leaf.dtype != jax.dtypes.float0]
    return value if work.has_aux else value[0], means, rests


def _share(work: _Work, targets: Array) -> Callable[[Array], Array]:
    """Return a function that weights what a mean over workers is taken of."""
    targets = lax.stop_gradient(targets.astype(jnp.float32))
    weight = targets * np.float32(work.num_workers) / lax.psum(targets, work.names)
    return lambda value: value * weight.astype(value.dtype)


def _like(trees: tuple[Any, ...], floating: Sequence[Array]) -> tuple[Any, ...]:
    """Put gradients of floating leaves into trees; others are float0."""
    left = iter(floating)

    def gradient(leaf: Any) -> Any:
        is_floating = jnp.issubdtype(jnp.result_type(leaf), jnp.floating)
        return next(left) if is_floating else np.zeros(np.shape(leaf), jax.dtypes.float0)

    return jax.tree.map(gradient, trees)


def _at(where: int | str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return args[where] if isinstance(where, int) else kwargs[where]


def _placed(trees: tuple[Any, ...], mesh: Mesh) -> tuple[PartitionSpec, ...] | None:
    """Return how leaves are placed on the mesh; None where a tracer does not show it."""
    explicit = is_explicit()
    found = []
    for leaf in jax.tree.leaves(trees):
        if explicit:
            found.append(jax.typeof(leaf).sharding.spec)
        elif isinstance(leaf, jax.core.Tracer):
            return None
        else:
            sharding = getattr(leaf, "sharding", None)
            if isinstance(sharding, NamedSharding) and sharding.mesh.shape == mesh.shape:
                found.append(sharding.spec)
            else:
                found.append(P())
    return tuple(found)


def _as_tuple(given: Any) -> tuple[Any, ...]:
    return (given,) if isinstance(given, int | str) else tuple(given)


def _check_positions(roles: Roles, count: int, kwargs: Mapping[str, Any]) -> None:
    given = {
        "argnums": roles.argnums,
        "replicated_argnums": [where for where in roles.whole if isinstance(where, int)],
        "static_argnums": [where for where in roles.static if isinstance(where, int)],
    }
    for argument, positions in given.items():
        for position in positions:
            if not 0 <= position < count:
                raise ValueError(
                    f"{argument} names position {position}, but there are {count} arguments. Give "
                    f"positions from 0 to {count - 1}."
                )
    for name in (where for where in (*roles.whole, *roles.static) if isinstance(where, str)):
        if name not in kwargs:
            raise ValueError(
                f"replicated_argnames or static_argnames names {name!r}, but the keyword arguments "
                f"are {sorted(kwargs)}. Give their names."
            )
    used = [*roles.argnums, *roles.whole, *roles.static]
    for where in used:
        if used.count(where) > 1:
            raise ValueError(
                f"Argument {where!r} is given twice in argnums, replicated_ and static_ arguments. "
                "Give it once."
            )


def _check_divides(signature: Signature, split: Sequence[Any], work: _Work) -> None:
    names = (
        name for name, role in zip(signature.names, signature.roles, strict=True) if role == SPLIT
    )
    for name, leaf in zip(names, split, strict=True):
        shape = np.shape(leaf)
        if shape[0] % work.num_workers:
            raise ValueError(
                f"{name[0].upper()}{name[1:]} has shape {shape}, whose leading axis does not split "
                f"over the {work.num_workers} workers of axis {work.axis_name!r}. Pad or trim the "
                "batch, or list the argument in replicated_argnums or replicated_argnames."
            )
