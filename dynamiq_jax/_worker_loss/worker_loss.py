"""A loss function on the part of a batch that one worker has."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dynamiq_jax._buckets.axes import AxisName, axes_of_mesh, axis_names
from dynamiq_jax._inputs.options import Compression
from dynamiq_jax._inputs.shards import axes_in, check_whole, is_explicit, is_function, leaf_specs
from dynamiq_jax._worker_loss import aux as auxiliary
from dynamiq_jax._worker_loss import modules
from dynamiq_jax._worker_loss.arguments import (
    DIFFERENTIATED,
    SPLIT,
    WHOLE,
    Roles,
    Signature,
    sort_by_role,
    unwrap_single,
    with_gaps_filled,
)
from dynamiq_jax._worker_loss.batch import in_order_of_workers, resolve_batch, split_axis
from dynamiq_jax._worker_loss.in_specs import check_axes
from dynamiq_jax._worker_loss.replicas import Replicas
from dynamiq_jax._worker_loss.transforms import Transform, Workers
from dynamiq_jax._worker_loss.weight import Weight
from pallas_kernels._jax import compat

P = PartitionSpec
Specs = tuple[PartitionSpec, ...] | None  # of the leaves of the differentiated trees


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)  # specs cannot be hashed
class WorkerLoss:
    """A loss function, how workers share its arguments, and how gradients are sent.

    `loss` and `value` are called by the functions that `over_workers` runs.
    """

    loss_fn: Callable[..., Any]
    roles: Roles
    has_aux: bool
    aux: Any  # roles of aux, as a user gives them
    num_targets: Callable[..., Array] | None
    mesh: Mesh
    axis_name: AxisName
    specs: Any  # as a user gives them
    compression: Compression
    transform: Transform
    check_vma: bool | None

    def __post_init__(self) -> None:
        axes_of_mesh(self.axis_name, self.mesh)  # raises if it is not possible
        check_axes(self.roles.in_specs, self._axes)
        auxiliary.check_roles(self.aux, self.has_aux)
        self.workers.check()

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the axes of workers, for collectives beside the loss function."""
        return self.workers.names

    @property
    def axes(self) -> dict[str, int]:
        """Axes of workers, and their sizes."""
        return {name: self.mesh.shape[name] for name in self._axes}

    def bind(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Signature, Specs, dict[str, list[Any]]]:
        """Sort the arguments of a call, and find how differentiated leaves are split.

        Returns:
          What is static, specs of differentiated leaves (None if nothing shows them), and the
          leaves by role.
        """
        self.workers.check_context()
        self.roles.check(len(args), kwargs)
        signature, arrays = sort_by_role(args, kwargs, self.roles)
        trees = signature.differentiated(arrays)
        for tree in trees:
            check_whole("tree", tree)
        leaf_specs_of_args: Specs
        if self.specs is None:
            leaf_specs_of_args = _placed(trees, self.mesh)
        elif is_function(self.specs):
            leaf_specs_of_args = tuple(leaf_specs(trees, tuple(map(self.specs, trees))))
        else:
            leaf_specs_of_args = tuple(leaf_specs(trees, self.roles.in_argnums_order(self.specs)))
        if self.specs is not None:
            self._check_specs(trees, leaf_specs_of_args or ())
        signature = resolve_batch(signature, arrays[SPLIT], self.roles.parameters, self.axes)
        return signature, leaf_specs_of_args, arrays

    def called(self, signature: Signature) -> str:
        """Return the name of the loss, and static numbers and texts of a call."""
        function: Any = inspect.unwrap(self.loss_fn)
        while isinstance(function, functools.partial):
            function = inspect.unwrap(function.func)
        kind = function if hasattr(function, "__qualname__") else type(function)
        line = getattr(getattr(function, "__code__", None), "co_firstlineno", None)
        static = [each.value for each in signature.static]
        plain = [value for value in static if isinstance(value, bool | int | float | str)]
        return f"{kind.__module__}.{kind.__qualname__}:{line} {plain!r}"

    def run(
        self,
        function: Callable[..., Any],
        signature: Signature,
        specs: Specs,
        arrays: dict[str, list[Any]],
        *others: Any,
    ) -> Any:
        """Call a function of what `bind` returns and other arrays, compiled.

        It is traced once for signatures and specs that are equal. The structure of a module may
        hold metadata that cannot be hashed. Then it is traced at every call outside of a `jax.jit`.
        """
        static = function, signature, specs
        try:
            hash(static)
        except TypeError:
            return self._jitted(*static)(arrays, *others)
        return self._programs(*static)(arrays, *others)

    @functools.cached_property
    def _programs(self) -> Callable[..., Any]:
        """The compiled functions of this loss, which are forgotten with it."""
        return functools.lru_cache(maxsize=256)(self._jitted)

    def _jitted(
        self, function: Callable[..., Any], signature: Signature, specs: Specs
    ) -> Callable[..., Any]:
        return jax.jit(functools.partial(function, self, signature, specs))

    @functools.cached_property
    def workers(self) -> Workers:
        """The workers, and the transformation that runs a loss for each."""
        return Workers(self.mesh, self._axes, self.transform, self.check_vma)

    def replicas(self, trees: tuple[Any, ...], specs: Specs) -> Replicas:
        """Return the replicas of the differentiated trees."""
        return Replicas(self.mesh, self.axis_name, self.compression, specs_like(trees, specs))

    def over_workers(
        self,
        function: Callable[[Mapping[str, list[Any]]], tuple[Any, Any]],
        signature: Signature,
        arrays: Mapping[str, list[Any]],
    ) -> tuple[Any, Any]:
        """Call a function of leaves by role for every worker; see `Workers.map`.

        Differentiated leaves are replicas: [workers, *shape], of which each worker gets its own.
        """

        def of_own(arrays: Mapping[str, list[Any]]) -> tuple[Any, Any]:
            own = [leaf.reshape(leaf.shape[1:]) for leaf in arrays[DIFFERENTIATED]]
            return function({**arrays, DIFFERENTIATED: own})

        batch = in_order_of_workers(signature, arrays[SPLIT], self.axes)
        specs: dict[str, list[Any]] = {
            DIFFERENTIATED: [P(self._axes)] * len(arrays[DIFFERENTIATED]),
            SPLIT: signature.splits,
            WHOLE: [P()] * len(arrays[WHOLE]),
        }
        return self.workers.map(of_own, specs, {**arrays, SPLIT: batch})

    def loss(
        self, signature: Signature, arrays: Mapping[str, list[Any]], differentiated: list[Array]
    ) -> tuple[Array, tuple[Any, list[Any]]]:
        """Return the loss of one worker, and `(aux, rest of every module)`.

        The loss is weighted by targets. Its mean over workers is that of all targets.
        """
        before, before_named = signature.rebuild(arrays)
        worker = lax.axis_index(self.names)
        weight = None
        if self.num_targets is not None:
            weight = self._weight(self.targets(*self._built(signature, arrays, differentiated)))
            differentiated = weight.mask_gradients(differentiated)
        args, kwargs = self._built(signature, arrays, differentiated)
        loss, aux = auxiliary.split_result(self.loss_fn(*args, **kwargs), self.has_aux)
        # Of a loss that is the same everywhere, such as a pmean, JAX would differentiate one share.
        loss = compat.match_varying(loss, worker)
        if weight is not None:
            loss = weight.of(jnp.asarray(loss))
        rests = [
            modules.rest_of(
                _at(where, args, kwargs), _at(where, before, before_named).rest, self.names
            )
            for where, _ in signature.graphs
        ]
        return loss, (auxiliary.OfWorker(aux, weight), rests)

    def _built(
        self, signature: Signature, arrays: Mapping[str, list[Any]], differentiated: list[Array]
    ) -> tuple[Any, Any]:
        """Return the arguments of the loss of one worker, by position and by name."""
        args, kwargs = signature.rebuild({**arrays, DIFFERENTIATED: differentiated})
        for where, graph in signature.graphs:
            container: Any = args if isinstance(where, int) else kwargs
            parts = container[where]
            worker = lax.axis_index(self.names)
            container[where] = modules.merge(graph, parts.params, parts.rest, worker)
        return args, kwargs

    def targets(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Array:
        """Return the number of targets of a call of the loss, 1 without `num_targets`."""
        if self.num_targets is None:
            return jnp.float32(1)
        args, kwargs = with_gaps_filled(self.loss_fn, args, kwargs)
        count = jnp.asarray(self.num_targets(*args, **kwargs))
        if count.shape != ():
            raise ValueError(
                f"num_targets returns an array of shape {count.shape}. Return the number of all "
                "targets, such as its sum."
            )
        return count.astype(jnp.float32)

    def value(self, loss: Array, aux: auxiliary.OfWorker) -> tuple[list[Array], Any]:
        """Return rows of aux of this worker, and what a user gets besides them and gradients."""
        loss = auxiliary.mean_of_workers(loss, self.names)
        if not self.has_aux:
            return [], loss

        def of_workers(role: str, leaf: Any) -> Array:
            return auxiliary.of_workers(leaf, role, aux.weight, self.names)

        tree = auxiliary.map_roles(of_workers, self.aux, aux.tree)
        rows, others = auxiliary.take_rows(self.aux, tree)
        return rows, (loss, others)

    def with_rows(
        self, value: Any, rows: Sequence[Array], signature: Signature, batch: Sequence[Any]
    ) -> Any:
        """Return the value with rows of aux of all workers, in the order of the batch.

        Args:
          value: what is the same on all workers; see `value`.
          rows: rows of each worker: [workers, rows, ...].
          signature: of the call.
          batch: arrays that are split over the workers.
        """
        if not self.has_aux:
            return value
        splits: dict[int, set[Any]] = {}
        rules = signature.of_batch(signature.rules)
        for array, spec, rule in zip(batch, signature.splits, rules, strict=True):
            axis, _ = split_axis(spec, self.axes)
            splits.setdefault(np.shape(array)[axis], set()).add(rule)
        loss, others = value
        joined = [leaf.reshape(-1, *leaf.shape[2:]) for leaf in rows]
        aux = auxiliary.put_rows(joined, self.aux, others)
        return loss, auxiliary.in_order_of_batch(self.aux, aux, splits, self.workers.count)

    @property
    def value_spec(self) -> Any:
        """Specs of a value over the workers: all of it is the same on them, but for rows."""
        return (P(), *self.aux_spec) if self.aux is not None else P()

    @property
    def aux_spec(self) -> Any:
        """Specs of what a user gets besides the loss: a tuple of aux, if there is any."""
        return (auxiliary.out_specs(self.aux, self._axes),) if self.aux is not None else P()

    def give_back(
        self,
        signature: Signature,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        rests: Sequence[Any],
    ) -> None:
        """Write the state after a call to the modules among its arguments."""
        for (where, _), rest in zip(signature.graphs, rests, strict=True):
            modules.update(_at(where, args, kwargs), rest)

    @property
    def _axes(self) -> tuple[str, ...]:
        """Axes of the mesh that are split over the workers."""
        return axis_names(self.axis_name)

    def _check_specs(self, trees: tuple[Any, ...], specs: Sequence[PartitionSpec]) -> None:
        """Raise ValueError for specs that split replicas over the workers."""
        for (path, _), spec in zip(jax.tree.leaves_with_path(trees), specs, strict=True):
            if named := axes_in(spec, self._axes):
                raise ValueError(
                    f"specs gives {spec} for tree{jax.tree_util.keystr(path[1:])}, but "
                    f"{named[0]!r} is an axis of the workers, each of which has whole parameters. "
                    "Give the other axes that split them, or P(). For gradients that are split "
                    "over the workers, see dq.psum_scatter."
                )

    def _weight(self, targets: Array) -> Weight:
        """Return the weight of a worker with some targets."""
        targets = lax.stop_gradient(targets)
        total = lax.psum(targets, self.names)
        share = targets * np.float32(self.workers.count) / jnp.where(total == 0, 1, total)
        return Weight(share, (targets != 0) | (total == 0))


def specs_like(trees: tuple[Any, ...], specs: Specs) -> Any:
    """Return specs with the structure of the differentiated trees, or of the only one."""
    if specs is None:
        return None
    return unwrap_single(jax.tree.unflatten(jax.tree.structure(trees), specs))


def inexact_leaves(tree: Any) -> list[Array]:
    """Return the leaves of a tree that are differentiated, in flattened order."""
    return [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.inexact)]


def _at(where: int | str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return args[where] if isinstance(where, int) else kwargs[where]


def _placed(trees: tuple[Any, ...], mesh: Mesh) -> Specs:
    """Return how leaves are placed on the mesh; None where a tracer does not show it."""
    explicit = is_explicit()
    specs = []
    for leaf in jax.tree.leaves(trees):
        if explicit:
            specs.append(jax.typeof(leaf).sharding.spec)
        elif isinstance(leaf, jax.core.Tracer):
            return None
        else:
            sharding = getattr(leaf, "sharding", None)
            if isinstance(sharding, NamedSharding) and sharding.mesh.shape == mesh.shape:
                specs.append(sharding.spec)
            else:
                specs.append(P())
    return tuple(specs)
