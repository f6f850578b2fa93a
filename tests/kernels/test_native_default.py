"""The native codec as the default on CPUs: where it is, where it is not, and what says so."""

import dataclasses
import functools
import logging

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import dynamiq_jax as dq
from pallas_kernels import _native, choice, first_use, operations
from pallas_kernels._native import library
from pallas_kernels._native.backend import Native
from pallas_kernels._native.build import SWITCH
from pallas_kernels.first_use import DIGESTS, KNOWN
from pallas_kernels.registry import BACKENDS, BASE
from tests.support.gradients import of_workers
from tests.support.native_calls import with_and_without
from tests.support.workers import TWO_WIDTHS

pytestmark = [
    pytest.mark.optimized,
    pytest.mark.skipif(_native.why_not() is not None, reason=str(_native.why_not())),
]

NATIVE, CALL = BACKENDS["native"], "dynamiq_native_"
ROWS = np.ones((3, 256), np.float32)


def norms(rows, implementation=None):
    """A function of its own for each program, so that none is traced before."""
    return operations.by(implementation).statistics(rows)


def program_of(function, *args) -> str:
    return jax.jit(lambda *given: function(*given)).lower(*args).as_text()


# -------------------------------------------------------------------------------- where it is


def test_a_mean_runs_it_and_has_the_bits_of_the_base_which_can_be_exported():
    """An export says that the call is not portable, also where a user never named the backend."""
    gradients = jnp.asarray(of_workers(0, 2, 2560))

    def mean(implementation):
        method = dataclasses.replace(TWO_WIDTHS, implementation=implementation)
        one = functools.partial(dq.pmean, axis_name="data", key=jax.random.key(1), method=method)
        return jax.jit(jax.vmap(one, axis_name="data"))

    lowered = mean(None).lower(gradients)
    assert CALL in lowered.as_text()
    with pytest.raises(ValueError, match=r"(?s)no compatibility guarantees.*dynamiq_native_"):
        jax.export.export(mean(None))(gradients)
    exported = jax.export.export(mean("xla"))(gradients)
    assert CALL not in exported.mlir_module()
    np.testing.assert_array_equal(exported.call(gradients), lowered.compile()(gradients))


@pytest.mark.parametrize(
    "dtype", [jnp.float8_e4m3fn, pytest.param(jnp.float8_e5m2, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    "method", [pytest.param(dq.DynamiQ(), marks=pytest.mark.slow, id="dynamiq"), dq.methods.MXFP8()]
)
def test_a_mean_of_floats_of_8_bits_has_the_bits_of_the_base(dtype, method, monkeypatch):
    """The library loads none, and gets them in float32."""
    gradients = jnp.asarray(1000 * of_workers(0, 2, 2048)).astype(dtype)
    of_one = functools.partial(dq.pmean, axis_name="data", key=jax.random.key(1), method=method)
    found = with_and_without(monkeypatch, jax.vmap(of_one, axis_name="data"), gradients)
    assert found[0].dtype == dtype
    assert np.unique(np.asarray(found[0], np.float32)).size > 20
    np.testing.assert_array_equal(*(each.view(np.uint8) for each in found))


def test_one_line_names_it_in_the_log(monkeypatch, caplog):
    choice._log_default.cache_clear()
    with caplog.at_level(logging.INFO, "pallas_kernels"):
        program_of(norms, ROWS)
        program_of(norms, ROWS)
    line = f"the codec runs on cpu by 'native' (C++ with {_native.instruction_set()})"
    assert caplog.messages == [line] == [operations.default_backend()]


# ---------------------------------------------------------------------------- where it is not


def is_default() -> bool:
    return CALL in program_of(norms, ROWS)


def test_it_can_be_switched_off(monkeypatch):
    assert is_default()
    monkeypatch.setenv(SWITCH, "0")
    assert not is_default()
    assert operations.default_backend() == (
        "the codec runs on cpu by 'xla'; 'native' is not used: DYNAMIQ_NATIVE=0"
    )
    with pytest.raises(ValueError, match="'native' cannot run here: DYNAMIQ_NATIVE=0"):
        norms(ROWS, "native")


def test_a_switch_of_another_value_is_refused(monkeypatch):
    monkeypatch.setenv(SWITCH, "false")
    with pytest.raises(ValueError, match=r"DYNAMIQ_NATIVE='false' is not possible\. Give 0 to run"):
        norms(ROWS)
    for value in ("", "1"):
        monkeypatch.setenv(SWITCH, value)
        assert is_default()


def test_a_probe_of_the_rounding_that_fails_is_a_reason_to_run_the_base(monkeypatch):
    def late(probe, seconds):
        raise TimeoutError(f"no result after {seconds:g} s\nmore of it")

    monkeypatch.setattr(library, "in_own_thread", late)
    monkeypatch.setenv("XLA_FLAGS", "--other")  # of which nothing is known yet
    assert not is_default()
    line = "no program shows how XLA rounds here: TimeoutError: no result after 120 s"
    assert operations.default_backend().endswith(f"'native' is not used: {line}")


def test_it_is_not_used_where_the_base_rounds_otherwise(monkeypatch):
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        assert not is_default()
        assert "XLA compiles without fused products here" in operations.default_backend()
    finally:
        jax.config.update("jax_disable_most_optimizations", False)
    assert is_default()


def test_a_broken_library_is_replaced_by_the_base(monkeypatch):
    broken = wrong("hop", lambda message: message.at[5].add(np.uint8(1)))
    monkeypatch.setitem(BACKENDS, "native", broken)
    monkeypatch.setattr(first_use, "_reasons", {})
    with pytest.warns(UserWarning, match="'native' are not used on cpu: first messages of 'def"):
        assert not is_default()
    assert operations.refused_backends() == ("native",)
    assert "'native' is not used: on cpu, first messages" in operations.default_backend()


# ------------------------------------------------------------------- the check at the first use


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n == "default" else pytest.mark.slow) for n in KNOWN]
)
def test_known_outputs_are_those_of_the_base(name):
    trial, number = first_use.known_trial(name), list(KNOWN).index(name)
    found = first_use.known_outputs(BASE, trial, own=NATIVE)
    del found["statistics"]
    digests = {output: first_use.digest(value, trial) for output, value in found.items()}
    assert digests == {output: of_trials[number] for output, of_trials in DIGESTS.items()}


def wrong(operation, change):
    """Return the native codec with a change of what one operation returns."""

    def changed(*args, **static):
        return change(getattr(NATIVE, operation)(*args, **static))

    return type("Wrong", (Native,), {operation: staticmethod(changed)})()


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("operation", "change", "said"),
    [
        ("statistics", lambda norms: norms * np.float32(1.001), "statistics of 'default' rows"),
        ("hop", lambda message: message.at[-1].add(np.uint8(1)), "first messages of"),
        (
            "decompress_accumulate",
            lambda sums: sums.at[3, 7].multiply(np.float32(1 + 2.0**-23)),
            "decompress_accumulate of",
        ),
        ("decompress", lambda values: values[::-1], "decompress of"),
        ("decompress_sums", lambda values: values.at[-1].set(0), "decompress of sums of"),
        ("sort", lambda words: words.at[:2].set(words[1::-1]), "order of"),
        ("scaled_sums", lambda found: (found[0], found[1] ^ np.uint8(1)), "scales of sums of"),
    ],
)
def test_the_check_finds_a_wrong_bit_of_any_operation(operation, change, said):
    assert first_use.difference(NATIVE, BASE) is None
    assert first_use.difference(wrong(operation, change), BASE).startswith(said)
