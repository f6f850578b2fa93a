"""Global compensation: what the sum of all workers got wrong is added to the next gradient."""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from dynamiq_jax.methods import Call, Exact, Method, Reduced, State, WireCost
from dynamiq_jax.parts import Feedback, check_flag, match_varying, override


class CompensationState(NamedTuple):
    """State of `GlobalCompensation` for one bucket: a plain pytree."""

    compensation: Array  # float32 [size], in units of the gradient: this worker's
    inner: State  # of the inner method


@dataclasses.dataclass(frozen=True, kw_only=True)
class GlobalCompensation(Feedback):
    """Compensation by what all workers applied, as Marsit has it (arXiv 2204.06787).

    Each worker adds its compensation to its gradient. It keeps the difference between that and the
    mean of all workers, as it came out of the sum:

        wanted = gradient + compensation;  compensation = wanted - total / num_workers

    Over any number of steps, the applied means and the mean of the compensations add up to the
    means of the gradients: what hops lose comes back too. `inner` does not have to return the
    values that it applied.

    One worker's compensation also holds the difference between its own gradient and the mean, and
    the noise of the sum. Nothing removes these: it grows with the square root of the number of
    steps. Around `Marsit`, its root mean square was 1.2, 4.1, 13 and 26 after 1, 10, 100 and 400
    steps with 8 workers, where the residual of `ErrorFeedback` stayed at 0.9. The scale of the
    signs grows with it, and so does the error of the sum. So it needs full synchronization every so
    many steps (the paper has 100, from memory), after which every compensation is zero:

        every_step = dq.all_reduce_gradients("data", method=method)
        full = dq.all_reduce_gradients("data", method=dataclasses.replace(method, exact=True))

    Compile a step with each of them, and call the second one every K-th time: both have the same
    state. `ErrorFeedback(inner=Marsit())` needs no such step, and is what we recommend.

    A compensation is set to zero where it is not finite. NaN and Inf surface in the result of their
    own step and corrupt no later one. Each worker has its own, a float32 for each coordinate: carry
    states along the axis as those of `ErrorFeedback`. In a step with `exact=True` the state of the
    inner method stays as it is, and its metrics are 0.

    >>> import dataclasses
    >>> import jax, jax.numpy as jnp
    >>> import dynamiq_jax as dq, dynamiq_research
    >>> method = GlobalCompensation(inner=dynamiq_research.Marsit())
    >>> step = dq.all_reduce_gradients("data", method=method)
    >>> full = dq.all_reduce_gradients("data", method=dataclasses.replace(method, exact=True))
    >>> gradients = jax.random.normal(jax.random.key(0), (2, 64, 32))
    >>> state = jax.jit(jax.vmap(step.init, axis_name="data"))(gradients)
    >>> mean, state = jax.jit(jax.vmap(step.update, axis_name="data"))(gradients, state)
    >>> bucket, worker = state.method.values()
    >>> kept = bucket.compensation.reshape(gradients.shape)
    >>> bool(jnp.allclose(mean[0] + kept.mean(axis=0), gradients.mean(axis=0), atol=1e-5))
    True
    >>> _, state = jax.jit(jax.vmap(full.update, axis_name="data"))(gradients, state)
    >>> bucket, worker = state.method.values()
    >>> bool(jnp.any(bucket.compensation))
    False
    """

    inner: Method  # sums gradients and compensations: any method but one that keeps residuals
    exact: bool = False  # full synchronization: sums in float32, compensations become zero

    @override
    def __post_init__(self):
        check_flag("exact", self.exact)
        super().__post_init__()

    @override
    def wire_cost(self, call: Call) -> WireCost:
        return (Exact() if self.exact else self.inner).wire_cost(call)

    @override
    def init_state(self, call: Call) -> CompensationState:
        return CompensationState(jnp.zeros(call.size, jnp.float32), self.inner.init_state(call))

    @override
    def all_reduce(self, flat: Array, call: Call, key: Array, state: State) -> Reduced:
        """Sum a bucket, without `Reduced.applied`: the sum has no share that one worker applied."""
        call = dataclasses.replace(call, feedback=False)
        wanted = flat.astype(jnp.float32) + state.compensation
        if self.exact:
            reduced = Exact().all_reduce(wanted, call, key, ())
            zeros = match_varying(jnp.zeros_like(wanted), wanted)
            metrics = {name: jnp.float32(0) for name in (*self.metrics, *self.details)}
            after = CompensationState(zeros, state.inner)
            return dataclasses.replace(reduced, state=after, metrics=metrics)
        reduced = self.inner.all_reduce(wanted, call, key, state.inner)
        left_out = wanted - reduced.total / np.float32(call.num_workers)
        kept = jnp.where(jnp.isfinite(left_out), left_out, np.float32(0))
        after = CompensationState(kept, reduced.state)
        return dataclasses.replace(reduced, state=after)
