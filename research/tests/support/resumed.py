"""A run that is saved, restored and resumed, for methods that keep a state."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from dynamiq_jax.methods import Method

SPECS = dq.AllReduceState(step=P(), method=P("data"), metrics=P())


class Run:
    """Steps of `dq.all_reduce_gradients` on a mesh of one axis, "data".

    The gradients are float32 [workers, steps, *shape]. Each step has its method, all of one state.
    """

    def __init__(self, methods: Sequence[Method], mesh: Mesh, gradients: np.ndarray):
        self.gradients = gradients
        self._compiled = {method: self._compile(method, mesh) for method in methods}
        self._updates = [self._compiled[method][1] for method in methods]
        self.start = self._compiled[methods[0]][0](gradients)

    def steps(self, state: Any, first: int, last: int) -> tuple[list[np.ndarray], Any]:
        """Take some steps; return their outputs and the state after them."""
        outputs = []
        for step in range(first, last):
            output, state = self._updates[step](self.gradients[:, step], state)
            outputs.append(np.asarray(output))
        return outputs, state

    def check_resumes(self, folder: Path) -> tuple[list[np.ndarray], Any]:
        """Check that a run that is saved after two steps goes on with the same bits.

        Returns:
          The outputs of all steps, and the state after two.
        """
        count = len(self._updates)
        uninterrupted, last = self.steps(self.start, 0, count)
        before, half = self.steps(self.start, 0, 2)
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(folder / "2", half)
        with ocp.StandardCheckpointer() as checkpointer:
            restored = checkpointer.restore(folder / "2", half)
        jax.tree.map(np.testing.assert_array_equal, restored, half)
        after, resumed = self.steps(restored, 2, count)
        np.testing.assert_array_equal(before + after, uninterrupted)
        jax.tree.map(np.testing.assert_array_equal, resumed, last)
        # The state matters.
        first, again = (self.steps(state, 0, 1)[0][0] for state in (self.start, half))
        assert not np.array_equal(first, again)
        return uninterrupted, half

    @staticmethod
    def _compile(method: Method, mesh: Mesh) -> tuple[Any, Any]:
        reduce = dq.all_reduce_gradients("data", method=method)
        init = jax.shard_map(
            lambda g: reduce.init(g[0, 0]), mesh=mesh, in_specs=P("data"), out_specs=SPECS
        )
        update = jax.shard_map(
            lambda g, state: reduce.update(g[0], state),
            mesh=mesh,
            in_specs=(P("data"), SPECS),
            out_specs=(P(), SPECS),
        )
        return jax.jit(init), jax.jit(update)
