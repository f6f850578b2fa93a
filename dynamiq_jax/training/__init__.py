"""Train steps for workers that are far or slow, around collectives of any method.

`LocalSGD` and `Pipelined` have one form:

    output, state = description.update(input, state)     # or step

init(params)        return the first state, a NamedTuple that can be saved and restored
update, step        take a step: an input and a state to an output and the next state, as in optax
state_specs         specs of the state, for `jax.shard_map`
wire_report(params) count the bytes of a step, without running it

The description is frozen. An update takes parameters and returns them; a step takes a function to
gradients and returns the value of that function.
"""

from dynamiq_jax.training._local_sgd import LocalSGD, LocalSGDState
from dynamiq_jax.training._pipelined.step import (
    Pipelined,
    PipelinedReport,
    PipelinedState,
    PipelinedUpdate,
)

__all__ = [
    "LocalSGD",
    "LocalSGDState",
    "Pipelined",
    "PipelinedReport",
    "PipelinedState",
    "PipelinedUpdate",
]
