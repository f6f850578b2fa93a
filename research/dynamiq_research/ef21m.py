"""EF21 with momentum: workers send differences from an estimate that they keep."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dynamiq_jax.methods import Call, Exact, Method, Reduced, State
from dynamiq_jax.parts import Feedback, check_number, override, same_over
from dynamiq_research.powersgd import PowerSGD
from dynamiq_research.single_coordinates import RandK, TopK
from dynamiq_research.thc import THC
from dynamiq_research.topk_chunked import SparseBlocks


class EF21MState(NamedTuple):
    """State of `EF21M` for one bucket: a plain pytree."""

    tracker: Array  # float32 [size]: moving average of the gradients of this worker
    estimate: Array  # float32 [size]: sum of all that this worker has applied
    total: Array  # float32 [size]: sum of the estimates of all workers, the same on all of them
    step: Array  # int32 scalar: steps that changed the state
    inner: State  # of the inner method


@functools.singledispatch
def sums_applied(method: Method) -> bool:
    """Return whether the sum loses nothing of what the workers applied: hops do not round.

    `Reduced.applied` of all workers then adds up to `Reduced.total`, but for float32. The class of
    a method of your own is registered by `sums_applied.register`.
    """
    return False


@sums_applied.register(Exact)
@sums_applied.register(TopK)
def _always(method: Method) -> bool:
    return True


@sums_applied.register(THC)
def _of_thc(method: THC) -> bool:
    return method.sum_bits is None


@sums_applied.register(PowerSGD)
@sums_applied.register(RandK)
@sums_applied.register(SparseBlocks)
def _of_inner(method: PowerSGD | RandK | SparseBlocks) -> bool:
    return sums_applied(method.inner)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EF21M(Feedback):
    """EF21 with Polyak momentum, around a method whose hops do not round.

    Fatkhullin, Tyurin, Richtarik, NeurIPS 2023, arXiv 2305.15155; around ARC-Top-K in arXiv
    2510.26709. Each worker keeps a moving average of its gradients, and an estimate of it. It
    compresses the difference, and all workers keep the sum of the estimates, which is the result:

        tracker = (1 - momentum) * tracker + momentum * gradient
        applied = compressed(tracker - estimate)
        estimate = estimate + applied;  total = total + sum of applied

    Differences shrink as gradients settle, and so does the error. `ErrorFeedback` keeps an error of
    the size of the gradients. The result is an average of gradients over `1 / momentum` steps: give
    the optimizer less momentum than without. In step t the momentum is at least 1 / t. So the first
    tracker is the first gradient, and up to step `1 / momentum` a tracker is the mean of all
    gradients so far. `momentum=1` is EF21.

    The sum of the estimates of all workers has to stay `total`. Where hops round partial sums, it
    would not: the losses would add up for good. In a simulation of 400 steps, `total` was off by
    1.4% with hops like those of bfloat16, and by 45% with hops of 5 bits. So `inner` has to be a
    method that sums what workers applied: `Exact`, `THC`, or `ARCTopK`, `TopKChunked`, `OmniReduce`
    and `PowerSGD` around one of these. A method with `inner=BF16()` is refused.

    A step whose result is not finite anywhere in a bucket returns this result on all workers, and
    leaves the state of the bucket as it was.

    The state has three float32 for each coordinate. Trackers and estimates differ between workers:
    carry the state along the axis, as that of `ErrorFeedback`.

    Differences from the papers: the first step is compressed too, where the papers send the first
    gradient in full, and the momentum of at least 1 / t is ours. For a first step in full, compile
    a second one with `EF21M(inner=Exact())`, and call it first. Around methods without state of
    their own, both have the same state.

    >>> import jax, jax.numpy as jnp
    >>> import dynamiq_jax as dq, dynamiq_research
    >>> method = EF21M(inner=dynamiq_research.ARCTopK(inner=dq.methods.Exact(), bits=4.0))
    >>> reduce = dq.all_reduce_gradients("data", method=method)
    >>> gradients = jax.random.normal(jax.random.key(0), (2, 128, 64))
    >>> state = jax.jit(jax.vmap(reduce.init, axis_name="data"))(gradients)
    >>> step = jax.jit(jax.vmap(reduce.update, axis_name="data"))
    >>> for _ in range(20):
    ...     mean, state = step(gradients, state)
    >>> bool(jnp.allclose(mean[0], gradients.mean(axis=0), atol=1e-5))
    True
    """

    inner: Method  # sums the differences, without a loss at hops
    momentum: float = 0.1  # weight of a new gradient; 1 for none of those before

    @override
    def __post_init__(self):
        is_positive = "more than 0, up to 1"
        check_number("momentum", self.momentum, float(np.finfo(np.float32).tiny), 1.0, is_positive)
        super().__post_init__()
        if not sums_applied(self.inner):
            raise ValueError(
                f"inner={self.inner!r} rounds partial sums, or does not return what it applied. "
                "The sum that EF21M keeps would drift away from what workers applied. Give "
                "dq.methods.Exact(), dynamiq_research.THC(), or a method around one of them, such "
                "as dynamiq_research.ARCTopK(inner=dq.methods.Exact()); or use "
                "dq.methods.ErrorFeedback, which takes any method."
            )

    @override
    def init_state(self, call: Call) -> EF21MState:
        zeros = jnp.zeros(call.size, jnp.float32)
        return EF21MState(zeros, zeros, zeros, jnp.int32(0), self.inner.init_state(call))

    @override
    def all_reduce(self, flat: Array, call: Call, key: Array, state: State) -> Reduced:
        """Sum a bucket, without `Reduced.applied`: a worker applies its estimate, of many steps."""
        step = state.step + 1
        momentum = jnp.maximum(np.float32(self.momentum), 1 / step.astype(jnp.float32))
        # Two products: with a momentum of 1, the gradient itself.
        tracker = (1 - momentum) * state.tracker + momentum * flat.astype(jnp.float32)
        with_feedback = dataclasses.replace(call, feedback=True)
        reduced = self.inner.all_reduce(tracker - state.estimate, with_feedback, key, state.inner)
        if reduced.applied is None:
            raise ValueError(
                f"inner={self.inner!r} does not return the values that it applied, which "
                "dynamiq_research.EF21M needs. Give one that does, such as dynamiq_research.THC()."
            )
        total = same_over(state.total, call.axis.name) + reduced.total
        after = EF21MState(tracker, state.estimate + reduced.applied, total, step, reduced.state)
        # Decided by the sum, which all workers have and which is not finite where any tracker is
        # not. By its own tracker, only one worker would keep the state before. Of the whole bucket,
        # as it has one step.
        finite = jnp.all(jnp.isfinite(total))
        kept = jax.tree.map(lambda new, old: jnp.where(finite, new, old), after, state)
        return dataclasses.replace(reduced, total=total, state=kept, applied=None)
