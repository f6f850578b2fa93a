"""The check of a kernel at its first use: broken backends are found, named and replaced.

Nothing here needs a GPU. A backend is the base with one fault, and this machine takes it for the
fastest one.
"""

import threading
import types
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from pallas_kernels import _xla, first_use, implementation, operations
from pallas_kernels.codec import levels, scales
from pallas_kernels.codec.rows import decode_rows
from pallas_kernels._triton import rows as triton_rows
from pallas_kernels.codec.arithmetic import PLAIN
from pallas_kernels.implementation import without_gpu
from pallas_kernels.own_thread import in_own_thread
from tests.support.gradients import of_workers, vnmse

OPERATIONS = ("statistics", "hop", "decompress_accumulate", "decompress")
RIGHT = {name: getattr(_xla, name) for name in OPERATIONS}


def backend(**faults) -> types.SimpleNamespace:
    """The base, with some operations replaced."""
    return types.SimpleNamespace(**(RIGHT | faults))


def one_wrong_bit(*args, **kwargs):
    """The last bit of a code of the last row but one of the first plane."""
    message = _xla.hop(*args, **kwargs)
    return message.at[32 * 14].set(message[32 * 14] ^ np.uint8(1))


def not_compiled(*args, **kwargs):
    raise NotImplementedError("no lowering for shuffles\non this chip")


def never_compiled(*args, **kwargs):
    released.wait(20)
    return _xla.hop(*args, **kwargs)


def one_wrong_value(*args, **kwargs):
    rows = _xla.decompress(*args, **kwargs)
    return rows.at[5, 3].multiply(np.float32(1 + 2**-12))


released = threading.Event()

BROKEN = {
    "one wrong bit": (backend(hop=one_wrong_bit), "compress: 1 of .* bytes differ"),
    "one wrong value": (backend(decompress=one_wrong_value), "decompress: . of .* more than"),
    "an exception": (
        backend(statistics=not_compiled),
        "NotImplementedError: no lowering for shuffles[.]? ?",
    ),
    "a time-out": (backend(hop=never_compiled), "TimeoutError: no result after 0.5 s"),
}


@pytest.fixture
def chosen(monkeypatch):
    """`chosen(backend)`: take it for the kernels that are the fastest here."""
    choose = lax.platform_dependent

    def platform_dependent(*args, default, **platforms):
        if "cuda" in platforms:
            return platforms["cuda"](*args)
        return choose(*args, default=default, **platforms)

    def replace(module) -> None:
        monkeypatch.setitem(operations.BACKENDS, "triton", module)
        monkeypatch.setattr(
            implementation, "_why_not", lambda name: None if name == "triton" else "not here"
        )
        monkeypatch.setattr(lax, "platform_dependent", platform_dependent)
        monkeypatch.setattr(first_use, "_reasons", {})

    released.clear()
    yield replace
    released.set()


def all_reduce(mesh, **options):
    def reduce(gradient):
        method = dq.DynamiQ(bits=6.0, widths=(4, 8), **options)
        return dq.psum(gradient[0], "data", key=jax.random.key(1), method=method)

    mapped = jax.shard_map(reduce, mesh=mesh, in_specs=P("data"), out_specs=P())
    return np.asarray(jax.jit(mapped)(of_workers(0, 2, 4096)))


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_backend_is_named_once_and_the_sum_is_right(
    fault, chosen, data_mesh, monkeypatch
):
    module, reason = BROKEN[fault]
    chosen(module)
    if fault == "a time-out":
        monkeypatch.setattr(first_use, "_PATIENCE", 0.5)
    with pytest.warns(UserWarning, match=f"'triton' are not used on cpu: {reason}") as caught:
        found = all_reduce(data_mesh(2))
    assert len(caught) == 1
    np.testing.assert_array_equal(found, all_reduce(data_mesh(2), implementation="xla"))
    assert vnmse(found, of_workers(0, 2, 4096).sum(axis=0, dtype=np.float64)) < 2e-3
    assert operations.refused_backends() == ("triton",)
    with pytest.raises(ValueError, match=f"'triton' is refused: on cpu, {reason}"):
        all_reduce(data_mesh(2), implementation="triton")


@pytest.mark.parametrize("units", (1, 2, -1, -2))
def test_roundings_of_other_hardware_do_not_change_the_message(units, monkeypatch):
    """Reciprocals and products are off by two units, as approximate instructions may be."""
    factor = np.float32(1 + units * 2.0**-23)
    other = PLAIN._replace(
        reciprocal=lambda value: PLAIN.reciprocal(value) * factor,
        sqrt=lambda value: PLAIN.sqrt(value) * factor,
        multiply_add=lambda a, b, c: a * b * factor + c,
        multiply_subtract=lambda a, b, c: a * b * factor - c,
    )
    levels_of_all = (levels.UniformLevels, levels.QuadraticLevels, levels.GeometricLevels)
    replaced = 0
    for holder in (scales, levels, *levels_of_all):
        for function in vars(holder).values():
            defaults = getattr(function, "__defaults__", None) or ()
            if PLAIN in defaults:
                monkeypatch.setattr(
                    function, "__defaults__", tuple(other if d is PLAIN else d for d in defaults)
                )
                replaced += 1
    assert replaced >= 8
    monkeypatch.setattr(_xla, "decode_rows", lambda *a, **k: decode_rows(*a, **k) * factor)
    approximate = {name: function.__wrapped__ for name, function in RIGHT.items()}
    assert first_use.difference(backend(**approximate), backend()) is None
