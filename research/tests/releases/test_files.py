"""States that earlier releases wrote go on as they did there; see tests/releases."""

from collections.abc import Callable
from pathlib import Path

import jax
import optax
import pytest

import dynamiq_jax as dq
from dynamiq_jax.methods import BlockInt, ErrorFeedback
from dynamiq_research import (
    EF21M,
    GlobalCompensation,
    Pipelined,
    PowerSGD,
    SplitSketch,
    TopKChunked,
)
from tests.releases import test_files as laws
from tests.releases.write import WORKERS, Program, _all_reduce, _local_sgd, _on_workers

# As users compile, like the program that wrote the files: others round in another way.
pytestmark = pytest.mark.optimized

HERE = Path(__file__).parent


def _pipelined() -> Program:
    pipelined = Pipelined(optimizer=optax.sgd(0.5, momentum=0.9), axis_name="data")
    start = jax.vmap(pipelined.init, axis_name="data", axis_size=WORKERS, in_axes=None)

    def step(grads, state):
        _, state = pipelined.step(lambda params: (0, grads), state)
        return pipelined.flush(state), state

    return Program(start, _on_workers(step))


FEEDBACK = ErrorFeedback(inner=TopKChunked(bits=4.0))
PROGRAMS: dict[str, Callable[[], Program]] = {
    "split_sketch": lambda: _all_reduce(SplitSketch()),
    "ef21m": lambda: _all_reduce(EF21M(inner=dq.methods.Exact())),
    "global_compensation": lambda: _all_reduce(GlobalCompensation(inner=BlockInt(code_bits=4))),
    "pipelined": _pipelined,
    "powersgd": lambda: _all_reduce(PowerSGD(rank=2)),
    "topk_chunked_feedback": lambda: _all_reduce(FEEDBACK),
    "topk_chunked_local_sgd": lambda: _local_sgd(every=2, method=FEEDBACK),
}


@pytest.mark.parametrize(
    "path", sorted(HERE.glob("*/*.npz")), ids=lambda path: f"{path.parent.name}-{path.stem}"
)
def test_states_go_on_as_in_the_release(path):
    file = laws.read(path, PROGRAMS[path.stem.removeprefix("state_")]())
    laws.test_states_go_on_as_in_the_release(file)
    laws.test_states_matter(file)


def test_every_program_has_a_file():
    assert {path.stem for path in HERE.glob("*/*.npz")} == {f"state_{name}" for name in PROGRAMS}
