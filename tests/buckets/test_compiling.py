"""A process that has compiled a program waits, before it runs, for those that still compile it."""

import functools
import threading
import warnings
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dynamiq_jax._check import compiling, exchange
from tests.buckets.test_agreement import Client, exchanges_of, in_thread, silent

X = np.ones(3, np.float32)
SAME = {"collective": "AllReduce", "axes": "2"}


@pytest.fixture
def pair(monkeypatch) -> list[exchange.Exchange]:
    monkeypatch.setattr(exchange, "PATIENCE", 0.3)
    monkeypatch.setattr(exchange, "SHORT_PATIENCE", 0.3)
    return exchanges_of(2)


def step_of(one: exchange.Exchange, then: Callable[[], object] = lambda: None, description=SAME):
    """A program that is compared when it is traced. JAX compiles each anew."""

    def traced(x):
        one.agree(description, (0, 1))
        then()
        return x + 1

    return jax.jit(traced)


def fail() -> None:
    raise ArithmeticError


def trace_in_all(exchanges: list[exchange.Exchange]) -> None:
    """Compare a program in all processes, of which none compiles it: its trace fails behind."""

    def trace(one):
        with pytest.raises(ArithmeticError):
            step_of(one, fail)(X)

    check_ends(*(in_thread(lambda one=one: trace(one)) for one in exchanges))


def check_ends(*threads: threading.Thread) -> None:
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


def check_waits(thread: threading.Thread) -> None:
    thread.join(1)
    assert thread.is_alive()


def compiled_of(one: exchange.Exchange) -> set[int]:
    """The processes that show a compiled program to others."""
    keys = [key.split("/") for key, _ in one.client.key_value_dir_get("dynamiq_jax/")]
    return {int(key[-1]) for key in keys if key[-2] == "compiled"}


def call(step):
    return lambda: step(X)


def call_within_another(step):
    return lambda: jax.jit(lambda x: step(x) * 2)(X)


def evaluate_while_tracing(step):
    """A program of constants, which is compiled before the whole one is."""

    def traced(x):
        y = step(x)
        with jax.ensure_compile_time_eval():
            return y + jax.jit(lambda: jnp.arange(7.0).sum())()

    return lambda: jax.jit(traced)(X)


FORMS = (call, call_within_another, evaluate_while_tracing)


@pytest.mark.parametrize("form", FORMS)
def test_the_first_to_compile_waits_for_the_last(pair, form):
    released, ran = threading.Event(), []
    first = step_of(pair[0])
    last = step_of(pair[1], lambda: released.wait(60))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        threads = [in_thread(lambda: ran.append(form(first)())), in_thread(form(last))]
        check_waits(threads[0])
        assert not ran and compiled_of(pair[0]) == {0}
        released.set()
        check_ends(*threads)
    assert len(ran) == 1 and compiled_of(pair[0]) == {0, 1}
    (text,) = [str(each.message) for each in caught]
    assert "process 1 had not compiled the same step" in text
    assert "traced: collective: AllReduce; axes: 2." in text


def run(lowered, step):
    """JAX does not trace it again for the call."""
    return step(X)


def run_ahead(lowered, step):
    return lowered.compile()(X)


@pytest.mark.parametrize("runs", (run, run_ahead))
def test_a_program_that_was_lowered_is_shown_by_whichever_thread_compiles(pair, runs):
    """It may be for a log: no other call waits for it."""
    trace_in_all(pair)
    step = step_of(pair[1])
    lowered = step.lower(X)
    assert compiled_of(pair[0]) == set()
    check_ends(in_thread(lambda: runs(lowered, step)))
    assert compiled_of(pair[0]) == {1}
    with silent():
        assert np.all(step_of(pair[0])(X) == 2)


def test_processes_that_compile_together_send_no_warning_and_wait_once(pair):
    with silent():
        check_ends(*(in_thread(call(step_of(one))) for one in pair))
        calls = pair[0].client.calls
        step_of(pair[0])(X)  # another program with what is known
        assert pair[0].client.calls == calls


def test_a_process_that_has_not_traced_it_is_not_waited_for(pair):
    with pytest.warns(UserWarning, match="had not traced") as caught:
        step_of(pair[0])(X)
    assert len(caught) == 1


@pytest.mark.parametrize("ends", ("a failed trace", "a log"))
def test_programs_that_do_not_run_hold_no_other_program_up(pair, ends):
    trace_in_all(pair)
    if ends == "a log":
        step_of(pair[0]).lower(X)
    else:
        with pytest.raises(ArithmeticError):
            step_of(pair[0], fail)(X)
    with silent():
        assert np.all(jax.jit(lambda x: x - 5)(X) == -4)
    assert compiled_of(pair[0]) == ({0} if ends == "a log" else set())


def test_the_wait_has_an_end(pair, monkeypatch):
    monkeypatch.setattr(exchange, "COMPILING", 0.5)
    trace_in_all(pair)
    with pytest.warns(UserWarning, match="process 1 had not compiled"):
        step_of(pair[0])(X)


def test_a_service_that_fails_stops_no_step(pair, monkeypatch):
    trace_in_all(pair)
    set_value = Client.key_value_set

    def fail(self, key, value, allow_overwrite=False):
        if "/compiled/" in key:
            raise jax.errors.JaxRuntimeError("UNAVAILABLE")
        set_value(self, key, value, allow_overwrite)

    monkeypatch.setattr(Client, "key_value_set", fail)
    with pytest.warns(UserWarning, match="reports an error: UNAVAILABLE"):
        assert np.all(step_of(pair[0])(X) == 2)


def test_a_call_that_ended_is_forgotten(pair):
    """Nothing keeps its arguments."""
    check_ends(*(in_thread(call(step_of(one))) for one in pair))
    step_of(pair[0])(X)
    assert not compiling._of_calls.functions and not compiling._ahead


def test_other_events_of_jax_are_not_the_end_of_a_compiler(pair):
    """Nor is a program of constants that the trace evaluates."""

    def record(rank):
        jax.monitoring.record_event_duration_secs("/jax/core/compile/jaxpr_trace_duration", 1.0)
        with jax.ensure_compile_time_eval():
            jax.jit(lambda: jnp.arange(7.0 + rank).sum())()
        assert rank not in compiled_of(pair[rank])

    steps = [step_of(one, functools.partial(record, rank)) for rank, one in enumerate(pair)]
    check_ends(*(in_thread(call(step)) for step in steps))
    assert compiled_of(pair[0]) == {0, 1}
