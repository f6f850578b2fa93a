"""Error feedback: what a step leaves out is added to the next one."""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from dynamiq_jax.chunks import WireCost
from dynamiq_jax.methods.base import Method, Reduced, State
from dynamiq_jax.topologies.base import Topology


class FeedbackState(NamedTuple):
    """State of `ErrorFeedback` for one bucket: a plain pytree."""

    residual: (
        Array  # float32 [size], in units of the gradient: what this worker has left out so far
    )
    method: State  # of the method inside


@dataclasses.dataclass(frozen=True, kw_only=True)
class ErrorFeedback(Method):
    """Makes up for a method that is biased or coarse: each worker adds what the steps before left
    out of its gradient, its residual, and keeps what this step leaves out (Seide et al.,
    Interspeech 2014; Karimireddy et al., ICML 2019, arXiv 1901.09847, algorithm 2):

        wanted = gradient + residual;  residual = wanted - applied

    Nothing is lost, only late: over any number of steps, what was applied and the last residual add
    up to the gradients. What hops round off partial sums belongs to no worker and is not kept; nor
    is what a result loses when it is cast to the dtype of its leaf. Costs a float32 for each
    coordinate, and no bytes on the wire. Unlike the papers, gradients go in without the learning
    rate, as an optimizer behind the all-reduce has it: change it slowly.

    A residual is set to zero where it is not finite: NaN and Inf surface in the result of their own
    step and poison no later one, but what was waiting there is lost.

    Each worker has a residual of its own. Between calls of `jax.shard_map`, carry the states of
    `dq.all_reduce_gradients` along the axis, in `in_specs` and `out_specs` alike; a checkpoint then
    holds the residuals of all workers:

        dq.AllReduceState(step=P(), method=P("data"))

    >>> import jax, jax.numpy as jnp
    >>> import dynamiq_jax as dq
    >>> method = ErrorFeedback(method=dq.methods.PowerSGD(rank=1))
    >>> reduce = dq.all_reduce_gradients("data", method=method)
    >>> gradients = jax.random.normal(jax.random.key(0), (2, 64, 32))
    >>> state = jax.jit(jax.vmap(reduce.init, axis_name="data"))(gradients)
    >>> step = jax.jit(jax.vmap(reduce.update, axis_name="data"))
    >>> mean, state = step(gradients, state)
    >>> kept = state.method[0].residual.reshape(gradients.shape)
    >>> bool(jnp.allclose(mean[0] + kept.mean(axis=0), gradients.mean(axis=0), atol=1e-5))
    True
    """

    method: Method  # What leaves something out: biased and coarse methods gain most.

    def __post_init__(self):
        if not isinstance(self.method, Method):
            raise ValueError(
                f"method={self.method!r} is not a method. Give one, such as dq.BF16()."
            )
        if isinstance(self.method, ErrorFeedback):
            raise ValueError(
                f"method={self.method!r} already keeps what it leaves out: nothing would be left "
                f"for a second residual. Give {self.method.method!r}."
            )

    def for_leaves(self, shapes: tuple[tuple[int, ...], ...]) -> "ErrorFeedback":
        """See `Method`."""
        return dataclasses.replace(self, method=self.method.for_leaves(shapes))

    def wire_cost(self, size: int, num_workers: int, num_chunks: int) -> WireCost:
        """See `Method`. That of the method inside."""
        return self.method.wire_cost(size, num_workers, num_chunks)

    def init_state(self, size: int, num_workers: int) -> FeedbackState:
        """See `Method`."""
        return FeedbackState(
            residual=jnp.zeros(size, jnp.float32), method=self.method.init_state(size, num_workers)
        )

    def all_reduce(
        self,
        flat: Array,
        axis_name: str,
        num_workers: int,
        *,
        topology: Topology,
        key: Array,
        state: State,
    ) -> Reduced:
        """See `Method`."""
        wanted = flat.astype(jnp.float32) + state.residual
        inner, applied = self.method.all_reduce_applied(
            wanted, axis_name, num_workers, topology=topology, key=key, state=state.method
        )
        left_out = wanted - applied
        residual = jnp.where(jnp.isfinite(left_out), left_out, np.float32(0))
        return inner._replace(state=FeedbackState(residual=residual, method=inner.state))
