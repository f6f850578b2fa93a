"""Error feedback: the values that a step leaves out are added to the next gradient."""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from dynamiq_jax._core import WireCost
from dynamiq_jax.methods._base import Call, Method, Reduced, State
from pallas_kernels._jax.compat import override


@dataclasses.dataclass(frozen=True, kw_only=True)
class Feedback(Method):
    """Base of wrappers whose state holds the values that a step left out.

    They send the bytes of the inner method.
    """

    inner: Method  # the method that leaves something out: biased and coarse methods gain most

    is_stateful = True

    def __post_init__(self):
        if not isinstance(self.inner, Method):
            raise ValueError(
                f"inner={self.inner!r} is not a method. Give one, such as dq.methods.BF16()."
            )
        if isinstance(self.inner, Feedback):
            raise ValueError(
                f"inner={self.inner!r} already keeps what it leaves out: nothing would be left to "
                f"keep a second time. Give {self.inner.inner!r}."
            )

    @property
    @override
    def uses_shapes(self) -> bool:
        return self.inner.uses_shapes

    @property
    @override
    def state_kind(self) -> str:
        """The class: the state is in units of the gradient, with any inner method."""
        name = type(self).__name__
        return f"{name}({self.inner.state_kind})" if self.inner.is_stateful else name

    @property
    @override
    def metrics(self) -> tuple[str, ...]:
        return self.inner.metrics

    @property
    @override
    def details(self) -> tuple[str, ...]:
        return self.inner.details

    @property
    @override
    def granule(self) -> int:
        return self.inner.granule

    @override
    def wire_cost(self, call: Call) -> WireCost:
        return self.inner.wire_cost(call)


class FeedbackState(NamedTuple):
    """State of `ErrorFeedback` for one bucket: a plain pytree."""

    residual: Array  # float32 [size], in units of the gradient: what this worker has left out
    inner: State  # of the inner method


@dataclasses.dataclass(frozen=True, kw_only=True)
class ErrorFeedback(Feedback):
    """Error feedback around a biased or coarse method.

    The residual of a worker holds what earlier steps left out. Each worker adds its residual to its
    gradient, and keeps what this step leaves out (Seide et al., Interspeech 2014; Karimireddy et
    al., ICML 2019, arXiv 1901.09847, algorithm 2):

        wanted = gradient + residual;  residual = wanted - applied

    Over any number of steps, the applied values and the last residual of a worker add up to its
    gradients. Two losses are in no residual: the rounding of partial sums at hops, which belongs to
    no single worker, and the cast of a result to the dtype of its leaf. So a method that rounds
    partial sums to nearest keeps a drift on a ring or a butterfly. The residual costs a float32 for
    each coordinate, and 4 bytes on the wire in all. Unlike in the papers, gradients do not contain
    the learning rate, since the optimizer comes after the all-reduce: change it slowly.

    A residual is set to zero where it is not finite. NaN and Inf surface in the result of their own
    step and corrupt no later one, but the residual of these coordinates is lost.

    Each worker has its own residual. Between calls of `jax.shard_map`, carry the states of
    `dq.all_reduce_gradients` along the axis, in `in_specs` and `out_specs` alike; a checkpoint then
    holds the residuals of all workers:

        dq.AllReduceState(step=P(), method=P("data"), metrics=P())

    >>> import jax
    >>> import dynamiq_jax as dq
    >>> method = ErrorFeedback(inner=dq.methods.BlockInt(code_bits=4))
    >>> reduce = dq.all_reduce_gradients("data", method=method)
    >>> gradients = jax.random.normal(jax.random.key(0), (2, 64, 32))
    >>> state = jax.jit(jax.vmap(reduce.init, axis_name="data"))(gradients)
    >>> step = jax.jit(jax.vmap(reduce.update, axis_name="data"))
    >>> mean, state = step(gradients, state)
    >>> bucket, worker = state.method.values()
    >>> bucket.residual.shape[-1] == 64 * 32  # of each worker
    True
    """

    @override
    def init_state(self, call: Call) -> FeedbackState:
        return FeedbackState(jnp.zeros(call.size, jnp.float32), self.inner.init_state(call))

    @override
    def all_reduce(self, flat: Array, call: Call, key: Array, state: State) -> Reduced:
        wanted = flat.astype(jnp.float32) + state.residual
        with_feedback = dataclasses.replace(call, feedback=True)
        reduced = self.inner.all_reduce(wanted, with_feedback, key, state.inner)
        if reduced.applied is None:
            raise ValueError(
                f"inner={self.inner!r} does not return the values that it applied, which "
                "dq.methods.ErrorFeedback needs. Give one that does, such as dq.DynamiQ()."
            )
        left_out = wanted - reduced.applied
        residual = jnp.where(jnp.isfinite(left_out), left_out, np.float32(0))
        return dataclasses.replace(reduced, state=FeedbackState(residual, reduced.state))
