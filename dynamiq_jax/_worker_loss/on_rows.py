"""A loss on chosen rows of one batch, without workers, for experiments."""

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental import multihost_utils

from dynamiq_jax._worker_loss import modules
from dynamiq_jax._worker_loss.aux import split_result
from dynamiq_jax._worker_loss.batch import split_axis
from dynamiq_jax._worker_loss.loss_call import LossCall
from dynamiq_jax._worker_loss.roles import DIFFERENTIATED, SPLIT, WHOLE
from dynamiq_jax._worker_loss.rows import order_of

_COORDINATES = 256  # of the gradient that experiments compare, at least


class Result(NamedTuple):
    """Loss of some rows, with its gradient, aux and targets."""

    loss: Array
    gradient: list[Array]  # of the leaves that are differentiated
    aux: Any
    targets: Array  # float32 scalar


class Seen(NamedTuple):
    """Losses of several sets of rows, as experiments compare them."""

    losses: np.ndarray  # [sets]
    gradients: np.ndarray  # coordinates that are large in the whole batch: [sets, coordinates]
    targets: np.ndarray  # [sets]

    def mean(self) -> "Seen":
        """Return the mean over the sets, weighted by their targets."""
        weights = self.targets / self.targets.sum()
        counts = weights != 0  # 0/0 of a set without targets is no part of the mean
        return Seen(
            (weights[counts] @ self.losses[counts])[None],
            (weights[counts] @ self.gradients[counts])[None],
            self.targets.mean(keepdims=True),
        )


class OnRows:
    """A loss of one call, on chosen rows of its batch."""

    def __init__(self, call: LossCall):
        self.work, self.signature = call.plan.work, call.plan.signature
        self.arrays = dict(call.arrays)
        self.workers = self.work.workers.count
        self.axes = [split_axis(spec, self.work.axes)[0] for spec in self.signature.splits]
        sizes = {
            np.shape(leaf)[axis] for leaf, axis in zip(self.arrays[SPLIT], self.axes, strict=True)
        }
        self.count = sizes.pop() if len(sizes) == 1 else 0  # 0 if arrays differ
        self.batch_names = self.signature.of_batch(self.signature.names)
        self._largest: list[Array] = []
        self._see = jax.jit(self._seen, static_argnums=2)  # one program for sets of one size
        self._aux = jax.jit(self._aux_of_sets)

    @functools.cached_property
    def whole(self) -> Result:
        """The loss of the whole batch, with its gradient."""
        result = jax.jit(self._result)(self.arrays)
        each = math.ceil(max(_COORDINATES, 8 * self.workers) / max(1, len(result.gradient)))
        self._largest = [
            jax.lax.top_k(jnp.abs(leaf).astype(jnp.float32).ravel(), min(each, leaf.size))[1]
            for leaf in result.gradient
        ]
        return result

    @property
    def parts(self) -> np.ndarray:
        """Rows of every worker: [workers, rows]."""
        rules = set(self.signature.of_batch(self.signature.rules))
        rule = rules.pop() if len(rules) == 1 else None
        return order_of(rule, self.count, self.workers)

    @functools.cached_property
    def has_16_bits(self) -> bool:
        """True for a loss that computes in 16 bits."""
        closed = jax.make_jaxpr(self._result)(self.arrays)
        return any(dtype in (jnp.bfloat16, jnp.float16) for dtype in _dtypes_in(closed.jaxpr))

    def fails(self, rows: np.ndarray, kept: int | None = None) -> str:
        """Return the error that the loss raises for some rows; empty without an error.

        Args:
          rows: numbers of rows.
          kept: index of an array of the batch that stays whole.
        """
        try:
            jax.eval_shape(
                lambda arrays: self._result(self._taken(arrays, rows, kept)), self.arrays
            )
        except Exception as error:  # the loss may raise any error
            return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        return ""

    def see(self, sets: np.ndarray, kept: int | None = None, keys: int | None = None) -> Seen:
        """Return the losses of sets of rows.

        Args:
          sets: numbers of rows, [sets, rows].
          kept: index of an array of the batch that every set has whole.
          keys: number by which PRNG keys are changed.
        """
        assert self.whole is not None
        arrays = dict(self.arrays)
        if keys is not None:
            arrays[WHOLE] = [_other(leaf, keys) for leaf in arrays[WHOLE]]

        seen = self._see(arrays, jnp.asarray(sets), kept)
        return Seen(*map(on_host, seen))

    def aux_of(self, sets: np.ndarray) -> tuple[Any, np.ndarray]:
        """Return aux of sets of rows along a leading axis, and their targets: [sets]."""
        aux, targets = self._aux(self.arrays, jnp.asarray(sets))
        return aux, on_host(targets)

    def coordinates(self, gradient: Sequence[Array]) -> Array:
        """Return the coordinates of a gradient that are large in the whole batch, float32.

        Those of complex leaves are their real and their imaginary parts.
        """
        chosen = []
        for leaf, places in zip(gradient, self._largest, strict=True):
            large = leaf.ravel()[places]
            parts = (large.real, large.imag) if jnp.iscomplexobj(large) else (large,)
            chosen += [part.astype(jnp.float32) for part in parts]
        return jnp.concatenate(chosen) if chosen else jnp.zeros(0)

    def _seen(
        self, arrays: Mapping[str, list[Any]], sets: Array, kept: int | None
    ) -> tuple[Array, Array, Array]:
        def one(rows: Array) -> tuple[Array, Array, Array]:
            result = self._result(self._taken(arrays, rows, kept))
            coordinates = self.coordinates(result.gradient)
            return result.loss.astype(jnp.float32), coordinates, result.targets

        return jax.lax.map(one, sets)

    def _aux_of_sets(self, arrays: Mapping[str, list[Any]], sets: Array) -> tuple[Any, Array]:
        def one(rows: Array) -> tuple[Any, Array]:
            result = self._result(self._taken(arrays, rows, None))
            return result.aux, result.targets

        return jax.lax.map(one, sets)

    def _taken(self, arrays: Mapping[str, list[Any]], rows: Any, kept: int | None) -> Any:
        taken = [
            leaf if number == kept else jnp.take(jnp.asarray(leaf), rows, axis=axis)
            for number, (leaf, axis) in enumerate(zip(arrays[SPLIT], self.axes, strict=True))
        ]
        return {**arrays, SPLIT: taken}

    def _result(self, arrays: Mapping[str, list[Any]]) -> Result:
        def loss_of(differentiated: list[Array]) -> tuple[Array, tuple[Any, Array]]:
            args, kwargs = self.signature.rebuild({**arrays, DIFFERENTIATED: differentiated})
            loss, aux = split_result(self.work.loss_fn(*args, **kwargs), self.work.has_aux)
            return loss, (aux, self.work.targets(args, kwargs))

        floating = [jnp.asarray(leaf) for leaf in arrays[DIFFERENTIATED]]
        run = functools.partial(jax.value_and_grad(loss_of, has_aux=True), floating)
        for name in self.work.names:
            run = functools.partial(_as_only_worker, run, name)
        (loss, (aux, targets)), gradient = run()
        return Result(loss, gradient, aux, targets)


def on_host(array: Any) -> np.ndarray:
    """Return all values of an array in float64 or complex128, also of one that is split over
    processes.
    """
    if isinstance(array, Array) and not array.is_fully_addressable:
        array = multihost_utils.process_allgather(array, tiled=True)
    return np.asarray(array, np.complex128 if jnp.iscomplexobj(array) else np.float64)


def _dtypes_in(jaxpr: Any) -> Iterator[Any]:
    """Yield the dtypes of all results in a jaxpr, and in the jaxprs of its equations."""
    for equation in jaxpr.eqns:
        yield from (getattr(result.aval, "dtype", None) for result in equation.outvars)
        for held in jax.tree.leaves(list(equation.params.values()), is_leaf=_is_jaxpr):
            if _is_jaxpr(held):
                yield from _dtypes_in(getattr(held, "jaxpr", held))


def _is_jaxpr(value: Any) -> bool:
    return hasattr(value, "eqns")  # a closed jaxpr has equations too


def _as_only_worker(function: Callable[[], Any], axis_name: str) -> Any:
    """Return the result of a function that may use the axis of workers by its name."""
    stacked = jax.vmap(lambda _: function(), axis_name=axis_name)(jnp.zeros(1))
    return jax.tree.map(lambda leaf: leaf[0], stacked)


def _other(leaf: Any, number: int) -> Any:
    """Return another PRNG key for a key; other values stay as they are."""
    if not jnp.issubdtype(jnp.result_type(leaf), jax.dtypes.prng_key):
        return leaf
    return modules.fold_in_all(leaf, number)
