"""Train steps for workers that are far or slow, around collectives of any method.

    output, state = description.update(input, state)

init(params)        return the first state, a NamedTuple that can be saved and restored
update              take a step: an input and a state to an output and the next state, as in optax
state_specs         specs of the state, for `jax.shard_map`
wire_report(params) count the bytes of a step, without running it

The description is frozen.
"""

from dynamiq_jax.training._local_sgd import LocalSGD, LocalSGDState

__all__ = ["LocalSGD", "LocalSGDState"]
