"""The interface of backends, and the choice of one: by name, platform, machine and operation."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dynamiq_jax as dq
from pallas_kernels import choice, first_use, modes, operations
from pallas_kernels._xla import Xla
from pallas_kernels.backend import Backend
from pallas_kernels.pallas_backend import PallasBackend
from pallas_kernels.registry import BACKENDS, BASE
from tests.support.kernel_cases import small_layout, some_messages, some_rows

# Interpreted kernels have the bits of the base where both are optimized.
pytestmark = pytest.mark.optimized

LAYOUT = small_layout(20)
CHUNK = np.int32(1)
OWN = (Backend.statistics, Backend.hop, Backend.decompress_accumulate, Backend.decompress)
DERIVED = (Backend.solve, Backend.energies, Backend.scaled_sums, Backend.decompress_sums)


class Compiled(Xla):
    """A backend for CPUs, as of a library that may be missing, and that has no code for some rows.

    It keeps the names of its operations in the order in which they are traced.
    """

    name = "compiled"
    platform = "cpu"

    def __init__(self, missing: str | None = None, **changes):
        self.missing = missing
        self.traced: list[str] = []
        for name, value in changes.items():
            setattr(self, name, value)

    def why_not_here(self):
        return self.missing

    def why_not_for(self, operation, *arrays, layout=None):
        if layout is not None and layout.quantizer.spacing == "geometric":
            return "it has no code for spacing='geometric'"
        if any(jnp.result_type(leaf) == jnp.float16 for leaf in jax.tree.leaves(arrays)):
            return "it has no code for float16"
        return None

    def hop(self, *args, **static):
        self.traced.append("hop")
        return super().hop(*args, **static)

    def decompress_accumulate(self, *args, **static):
        self.traced.append("decompress_accumulate")
        return super().decompress_accumulate(*args, **static)


@pytest.fixture
def register(monkeypatch):
    """`register(*backends)`: add backends of CPUs to the registry, which pass their checks."""

    def add(*backends: Backend) -> None:
        monkeypatch.setattr(first_use, "_reasons", {})
        monkeypatch.setattr(first_use, "_tried", lambda *_: None)
        monkeypatch.delitem(BACKENDS, "native")  # the default, where it is compiled
        for backend in backends:
            monkeypatch.setitem(BACKENDS, backend.name, backend)

    return add


def compress(layout=LAYOUT, dtype="float32", implementation=None):
    local = some_rows(layout, dtype)
    return operations.compress(local, CHUNK, 0, layout=layout, implementation=implementation)


# --------------------------------------------------------------------------------------- registry


def test_the_registry_names_every_backend_and_starts_with_the_base():
    assert next(iter(BACKENDS.values())) is BASE
    assert [backend.name for backend in BACKENDS.values()] == list(BACKENDS)
    assert len({type(backend) for backend in BACKENDS.values()}) == len(BACKENDS)


def test_a_backend_without_one_of_its_own_operations_cannot_be_made():
    """So that those in the registry have all of them."""
    whole = {operation.__name__: operation for operation in OWN} | {"why_not_here": lambda _: None}
    for missing in whole:
        parts = {name: part for name, part in whole.items() if name != missing}
        with pytest.raises(TypeError, match=missing):
            type("Partial", (Backend,), parts)()


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=pytest.mark.slow if isinstance(b, PallasBackend) else ())
        for n, b in BACKENDS.items()
        if b is not BASE
    ],
)
def test_every_backend_writes_the_bytes_of_the_base(name):
    """Of the message that is compared at the first use, with all widths and with hard rows."""
    is_interpreted = isinstance(BACKENDS[name], PallasBackend)
    with modes.without_gpu("interpret") if is_interpreted else contextlib.nullcontext():
        if reason := BACKENDS[name].why_not_here():
            pytest.skip(reason)
        assert first_use.difference(BACKENDS[name], BASE) is None


# ------------------------------------------------------------------------------ derived operations


def test_derived_operations_are_made_of_those_of_the_backend():
    backend, local = Compiled(), some_rows(LAYOUT)
    messages = some_messages(LAYOUT, "float32", 1, 2)
    jax.eval_shape(lambda: backend.scaled_sums(messages, local, CHUNK, layout=LAYOUT))
    assert backend.traced == ["decompress_accumulate"]
    assert all(backend.derives(operation) for operation in (*DERIVED, Backend.sort))
    assert not any(BACKENDS["mosaic_tpu"].derives(operation) for operation in DERIVED)


def test_an_operation_takes_and_returns_messages_of_one_type():
    """Whatever the type is that the backend has."""
    words = Compiled(message_dtype=jnp.uint32)
    messages, taken = np.arange(LAYOUT.payload_bytes, dtype=np.uint8)[None], []

    def hop(payloads, **static):
        taken.append(payloads.dtype)
        return payloads[0]

    words.hop = hop
    sent = words.run(Backend.hop, jnp.asarray(messages), layout=LAYOUT)
    assert taken == [jnp.uint32] and sent.dtype == np.uint8
    np.testing.assert_array_equal(sent, messages[0])


# ------------------------------------------------------------------------------------------ choice


def test_a_backend_of_the_platform_is_the_default(register):
    backend = Compiled()
    register(backend)
    for implementation, traced in ((None, 1), ("xla", 1), ("compiled", 2)):
        jax.eval_shape(functools.partial(compress, implementation=implementation))
        assert backend.traced == ["hop"] * traced


def test_what_a_backend_has_no_code_for_is_left_to_the_base(register):
    backend = Compiled()
    register(backend)
    geometric = small_layout(20, spacing="geometric")
    for layout, dtype, reason in (
        (geometric, "float32", "it has no code for spacing='geometric'"),
        (LAYOUT, "float16", "it has no code for float16"),
    ):
        jax.eval_shape(functools.partial(compress, layout, dtype))
        assert backend.traced == []
        with pytest.raises(ValueError, match=f"'compiled' cannot run this: {reason}. Use None"):
            compress(layout, dtype, "compiled")


def test_a_backend_that_is_not_here_is_left_out_and_named_with_the_reason(register):
    backend = Compiled(missing="its library is not built")
    register(backend)
    jax.eval_shape(compress)
    assert backend.traced == []
    for name in (lambda: compress(implementation="compiled"), lambda: choice.check("compiled")):
        with pytest.raises(ValueError, match=r"cannot run here: its library is not built\. Use"):
            name()
    with pytest.raises(ValueError, match="its library is not built"):
        dq.DynamiQ(implementation="compiled")


def test_the_first_of_each_platform_that_is_able_is_chosen(register):
    first, second = Compiled(), Compiled(name="second")
    register(first, second)
    rows = jnp.ones((2, 256))
    for missing, chosen in ((None, first), ("it is missing", second)):
        first.missing = missing
        assert choice.fastest(Backend.statistics, rows) == {"default": BASE, "cpu": chosen}
    narrow = rows.astype(jnp.float16)
    assert choice.fastest(Backend.statistics, narrow) == {"default": BASE}
    with modes.without_gpu("compile"):
        found = choice.fastest(Backend.statistics, rows)
    assert found == {"default": BASE, "cpu": second, "cuda": BACKENDS["triton"]}


def test_the_type_of_messages_is_that_of_the_default_platform(register):
    """Backends of another type take no part."""
    first, second = Compiled(message_dtype=jnp.uint32), Compiled(name="second")
    register(first, second)
    assert choice.message_dtype(None) == choice.message_dtype("compiled") == jnp.uint32
    assert choice.fastest(Backend.statistics, jnp.ones((2, 256)))["cpu"] is first
    first.platform = "tpu"
    assert choice.message_dtype(None) == choice.message_dtype("second") == jnp.uint8
    found = choice.fastest(Backend.statistics, jnp.ones((2, 256)))
    assert found == {"default": BASE, "cpu": second}


@pytest.mark.parametrize(("dtype", "is_taken"), [("float8_e4m3fn", False), ("float16", True)])
def test_rows_of_8_bits_are_left_to_the_base_on_gpus(dtype, is_taken):
    with modes.without_gpu("compile"):
        chosen = choice.fastest(Backend.statistics, jnp.ones((2, 256), dtype))
    assert ("cuda" in chosen) == is_taken
