"""Write files of states and messages, by the code of the release whose folder is given.

In a worktree of the commit of the release, 1e21b2b for 0.1.0, with JAX 0.10.2:

    PYTHONPATH=. python CHECKOUT/tests/releases/write.py CHECKOUT/tests/releases/0.1.0

So only names that every release has are used here.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import dynamiq_jax as dq
from dynamiq_jax._core import Axis
from dynamiq_jax.methods import MXFP8, MXINT8, BlockInt, Call, ErrorFeedback
from dynamiq_jax.topologies import Ring
from dynamiq_jax.training import LocalSGD

WORKERS = 2
SHAPE = (16, 64)
STEPS = 3  # before the state is saved


class Program(NamedTuple):
    """A train step of all workers, by `jax.vmap`."""

    init: Callable[[Any], Any]  # of parameters
    step: Callable[[Any, Any], tuple[Any, Any]]  # of values and a state to a result and a state


def values(step: int, count: int = WORKERS) -> Any:
    """Return values of a step, float32 [count, *SHAPE]: the same bits on all machines."""
    index = np.arange(count * np.prod(SHAPE)).reshape(count, *SHAPE)
    whole = (index * 7919 + step * 104729) % 1009 - 504
    return jnp.asarray((whole * (1 + index % 5)).astype(np.float32) / 1024)


def _on_workers(function: Callable) -> Callable:
    return jax.jit(jax.vmap(function, axis_name="data"))


def _all_reduce(method: Any) -> Program:
    reduce = dq.all_reduce_gradients("data", method=method)
    start = jax.vmap(reduce.init, axis_name="data", axis_size=WORKERS, in_axes=None)
    return Program(start, _on_workers(reduce.update))


def _local_sgd(**settings: Any) -> Program:
    local = LocalSGD(axis_name="data", **settings)
    start = jax.vmap(local.init, axis_name="data", axis_size=WORKERS, in_axes=None)
    return Program(start, _on_workers(local.update))


FEEDBACK = ErrorFeedback(inner=BlockInt(code_bits=4))
PROGRAMS: dict[str, Callable[[], Program]] = {
    "dynamiq": lambda: _all_reduce("dynamiq:5"),
    "error_feedback": lambda: _all_reduce(FEEDBACK),
    "local_sgd": lambda: _local_sgd(every=2, delay=1, method="dynamiq:5"),
    "local_sgd_feedback": lambda: _local_sgd(every=2, method=FEEDBACK),
}

METHODS = {
    "dynamiq_4": dq.DynamiQ(bits=4),
    "dynamiq_5": dq.DynamiQ(),
    "dynamiq_paper": dq.DynamiQ.paper(),
    "mxfp8": MXFP8(),
    "int4": BlockInt(code_bits=4),
    "mxint8": MXINT8(),
    "bf16": dq.methods.BF16(),
}


class Recorder(Axis):
    """Axis of one worker that keeps the arrays that it gathers."""

    def __init__(self) -> None:
        super().__init__("alone", 1)
        object.__setattr__(self, "arrays", [])

    @property
    def index(self) -> Any:
        return jnp.zeros((), jnp.int32)

    def gather(self, value: Any) -> Any:
        self.arrays.append(value)
        return value[None]


def go_on(program: Program, state: Any) -> Any:
    """Return the results of the next two steps, stacked."""
    first, state = program.step(values(STEPS), state)
    second, _ = program.step(values(STEPS + 1), state)
    return jnp.stack([first, second])


def message(method: Any) -> tuple[list[Any], Any]:
    """Return the arrays that a worker sends in an all-gather of some values, and their decoding."""
    part = values(0, count=2).reshape(-1)

    def run(part):
        axis = Recorder()
        call = Call(size=part.size, axis=axis, topology=Ring(), collective="all_gather")
        gathered = method.all_gather(part, call, jax.random.key(0))
        return list(axis.arrays), gathered.decode()

    return jax.jit(run)(part)


def write(folder: Path) -> None:
    """Write a file for each program and each method."""
    if folder.name != dq.__version__:
        raise SystemExit(f"{folder} is not a folder of {dq.__version__}, which {dq.__file__} is.")
    folder.mkdir(exist_ok=True)
    for name, make in PROGRAMS.items():
        program = make()
        state = program.init(values(0)[0])
        for step in range(STEPS):
            _, state = program.step(values(step), state)
        result = go_on(program, state)
        leaves = jax.tree_util.tree_leaves_with_path(state)
        arrays = {jax.tree_util.keystr(path): leaf for path, leaf in leaves}
        np.savez_compressed(folder / f"state_{name}.npz", result=result, **arrays)
    for name, method in METHODS.items():
        sent, decoded = message(method)
        arrays = {f"sent{number}": array for number, array in enumerate(sent)}
        np.savez_compressed(folder / f"message_{name}.npz", decoded=decoded, **arrays)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
