"""Memory and time of a step are known before it is taken."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from examples.llm import budget
from examples.llm.docstrings import conversations
from tests.support import llm_files

GIB = 2**30


def step_of(argument: int, temporary: int, output: int, alias: int):
    sizes = SimpleNamespace(
        argument_size_in_bytes=argument,
        temp_size_in_bytes=temporary,
        output_size_in_bytes=output,
        alias_size_in_bytes=alias,
    )
    return SimpleNamespace(memory_analysis=lambda: sizes)


def test_a_step_that_cannot_fit_is_refused(monkeypatch):
    """Donated arguments count once; virtual devices share the memory of the machine."""
    mesh = llm_files.mesh_of(2, 2)
    step = step_of(3 * GIB, 2 * GIB, 4 * GIB, 3 * GIB)
    monkeypatch.setattr(budget, "free_memory", lambda: 27 * GIB)
    assert budget.check_memory(step, mesh).startswith("needs 26.0 GiB of memory; this machine has")
    monkeypatch.setattr(budget, "free_memory", lambda: 25 * GIB)
    with pytest.raises(ValueError, match=r"--workers 2 needs 26.0 GiB .* has 25.0 GiB free. Give"):
        budget.check_memory(step, mesh)
    monkeypatch.setattr(budget, "free_memory", lambda: None)
    assert budget.check_memory(step, mesh) == "needs 26.0 GiB of memory"


def test_a_compiled_step_tells_its_memory():
    mesh = llm_files.mesh_of(2)
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    x = jax.ShapeDtypeStruct((2, 2**20), jnp.float32, sharding=sharding)
    step = jax.jit(lambda x: jnp.sort(x, axis=1)).lower(x).compile()
    text = budget.check_memory(step, mesh)
    least, most = 2 * 2 * 2**22 / GIB, 2 * 5 * 2**22 / GIB
    needed = float(text.split()[1]) - budget.REST_OF_PROCESS / GIB
    assert least - 0.05 <= needed <= most + 0.05


def test_the_free_memory_of_a_machine_is_plausible():
    free = budget.free_memory()
    assert free is None or 2**20 < free < 2**50


def test_the_time_of_a_step_grows_with_tokens_and_parameters():
    params = [jax.ShapeDtypeStruct((10**6,), "float32")] * 10
    one = budget.seconds_of_step(params, 10**6)
    assert one > 0
    assert budget.seconds_of_step(params, 10**9) > 100 * one


def test_conversations_are_answers_to_functions_without_their_docstrings():
    chats = conversations()
    assert len(chats) > 1000
    answers = [chat[1]["content"] for chat in chats]
    assert len(set(answers)) == len(answers)
    for (question, answer), _ in zip(chats, range(200), strict=False):
        assert question["role"] == "user" and answer["role"] == "assistant"
        assert "def " in question["content"]
        assert answer["content"] not in question["content"]
    assert conversations() == chats
