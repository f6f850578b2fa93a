"""Plan of one call of a loss: everything that is static, and the parts of its programs."""

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import PartitionSpec

from dynamiq_jax._worker_loss import aux as auxiliary
from dynamiq_jax._worker_loss import modules, replaced
from dynamiq_jax._worker_loss.batch import in_order_of_workers, split_axis
from dynamiq_jax._worker_loss.replicas import Replicas
from dynamiq_jax._worker_loss.roles import DIFFERENTIATED, SPLIT, WHOLE, unwrap_single
from dynamiq_jax._worker_loss.signature import Signature
from dynamiq_jax._worker_loss.weight import Weight
from dynamiq_jax._worker_loss.worker_loss import WorkerLoss
from pallas_kernels._jax import compat

P = PartitionSpec
Specs = tuple[PartitionSpec, ...] | None  # of the leaves of the differentiated trees


@dataclasses.dataclass(frozen=True)
class LossPlan:
    """Everything about one call of a loss that is static, and the parts of its programs.

    Plans are equal for calls that have one program. `loss` and `value` are called by the functions
    that `over_workers` runs.
    """

    work: WorkerLoss
    signature: Signature
    specs: Specs  # None if nothing shows them

    @property
    def called(self) -> str:
        """Name of the loss, and static numbers and texts of the call."""
        function: Any = inspect.unwrap(self.work.loss_fn)
        while isinstance(function, functools.partial):
            function = inspect.unwrap(function.func)
        kind = function if hasattr(function, "__qualname__") else type(function)
        line = getattr(getattr(function, "__code__", None), "co_firstlineno", None)
        static = [each.value for each in self.signature.static]
        plain = [value for value in static if isinstance(value, bool | int | float | str)]
        return f"{kind.__module__}.{kind.__qualname__}:{line} {plain!r}"

    def replicas(self, trees: tuple[Any, ...]) -> Replicas:
        """Return the replicas of the differentiated trees."""
        specs = None
        if self.specs is not None:
            specs = unwrap_single(jax.tree.unflatten(jax.tree.structure(trees), self.specs))
        return Replicas(self.work.mesh, self.work.axis_name, self.work.compression, specs)

    def over_workers(
        self,
        function: Callable[[Mapping[str, list[Any]]], tuple[Any, Any]],
        arrays: Mapping[str, list[Any]],
    ) -> tuple[Any, Any]:
        """Call a function of leaves by role for every worker; see `WorkerMap.map`.

        Differentiated leaves are replicas: [workers, *shape], of which each worker gets its own.
        """

        def of_own(arrays: Mapping[str, list[Any]]) -> tuple[Any, Any]:
            own = [leaf.reshape(leaf.shape[1:]) for leaf in arrays[DIFFERENTIATED]]
            return function({**arrays, DIFFERENTIATED: own})

        rules = self.signature.of_batch(self.signature.rules)
        batch = in_order_of_workers(arrays[SPLIT], self.signature.splits, rules, self.work.axes)
        specs: dict[str, list[Any]] = {
            DIFFERENTIATED: [P(self.work.workers.axes)] * len(arrays[DIFFERENTIATED]),
            SPLIT: self.signature.splits,
            WHOLE: [P()] * len(arrays[WHOLE]),
        }
        return self.work.workers.map(of_own, specs, {**arrays, SPLIT: batch})

    def loss(
        self, arrays: Mapping[str, list[Any]], differentiated: list[Array]
    ) -> tuple[Array, tuple[Any, list[Any]]]:
        """Return the loss of one worker, and `(aux, rest of every module)`.

        The loss is weighted by targets: its mean over workers is the mean over all targets.
        """
        worker = lax.axis_index(self.work.names)
        own, weight = {**arrays, DIFFERENTIATED: differentiated}, None
        if self.work.num_targets is not None:
            weight = self._weight(self.work.targets(*self.signature.rebuild(own, worker)))
            own[DIFFERENTIATED] = weight.mask_gradients(differentiated)
        args, kwargs = self.signature.rebuild(own, worker)
        loss, aux = auxiliary.split_result(self.work.loss_fn(*args, **kwargs), self.work.has_aux)
        # JAX would differentiate one share of a loss that is equal on all workers, as a pmean is.
        loss = compat.match_varying(jnp.asarray(loss), worker)
        if weight is not None:
            loss = weight.of(loss)
        held = self.signature.modules_in(args, kwargs)
        rests = [
            modules.rest_of(module, before, self.work.names)
            for module, before in zip(held, self.signature.rests(arrays), strict=True)
        ]
        return loss, (auxiliary.OfWorker(aux, weight), rests)

    def check_gradients(self, arrays: Mapping[str, list[Any]]) -> None:
        """Raise ValueError for a differentiated leaf whose gradient is its next state."""
        trees = unwrap_single(self.signature.differentiated(arrays))
        names = [
            jax.tree_util.keystr(path)
            for path, leaf in jax.tree.leaves_with_path(trees)
            if jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)
        ]
        replaced.check_gradients(
            lambda leaves: self.loss(arrays, leaves)[0],
            arrays[DIFFERENTIATED],
            names,
            self.work.workers.axes,
        )

    def value(self, loss: Array, aux: auxiliary.OfWorker) -> tuple[list[Array], Any]:
        """Return rows of aux of this worker, and the loss and other aux of all workers."""
        loss = auxiliary.mean_of_workers(loss, self.work.names)
        if not self.work.has_aux:
            return [], loss

        def of_workers(role: str, leaf: Any) -> Array:
            return auxiliary.of_workers(leaf, role, aux.weight, self.work.names)

        tree = auxiliary.map_roles(of_workers, self.work.aux, aux.tree)
        rows, others = auxiliary.take_rows(self.work.aux, tree)
        return rows, (loss, others)

    def with_rows(self, value: Any, rows: Sequence[Array], batch: Sequence[Any]) -> Any:
        """Return the value with rows of aux of all workers, in the order of the batch.

        Args:
          value: loss, and aux without its rows; see `value`.
          rows: rows of each worker: [workers, rows, ...].
          batch: arrays that are split over the workers.
        """
        if not self.work.has_aux:
            return value
        splits: dict[int, set[Any]] = {}
        rules = self.signature.of_batch(self.signature.rules)
        for array, spec, rule in zip(batch, self.signature.splits, rules, strict=True):
            axis, _ = split_axis(spec, self.work.axes)
            splits.setdefault(np.shape(array)[axis], set()).add(rule)
        loss, others = value
        joined = [leaf.reshape(math.prod(leaf.shape[:2]), *leaf.shape[2:]) for leaf in rows]
        aux = auxiliary.put_rows(joined, self.work.aux, others)
        return loss, auxiliary.in_order_of_batch(
            self.work.aux, aux, splits, self.work.workers.count
        )

    def _weight(self, targets: Array) -> Weight:
        """Return the weight of a worker with some targets."""
        targets = lax.stop_gradient(targets)
        total = lax.psum(targets, self.work.names)
        share = targets * np.float32(self.work.workers.count) / jnp.where(total == 0, 1, total)
        return Weight(share, (targets != 0) | (total == 0))


def inexact_leaves(tree: Any) -> list[Array]:
    """Return the leaves of a tree that are differentiated, in flattened order."""
    return [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
