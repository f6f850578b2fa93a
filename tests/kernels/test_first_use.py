"""The check of a kernel at its first use: broken backends are found, named and replaced.

Nothing here needs a GPU: a broken backend is the base with one fault.
"""

import inspect
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from pallas_kernels import _xla, first_use, operations
from pallas_kernels.codec import levels, scales
from pallas_kernels.codec.arithmetic import PLAIN
from pallas_kernels.codec.rows import decode_rows
from pallas_kernels.modes import without_gpu
from pallas_kernels.registry import BASE
from tests.support.broken_backends import BROKEN, backend
from tests.support.gradients import of_workers, vnmse


def all_reduce(mesh, **options):
    def reduce(gradient):
        method = dq.DynamiQ(bits=6.0, widths=(4, 8), **options)
        return dq.psum(gradient[0], "data", key=jax.random.key(1), method=method)

    mapped = jax.shard_map(reduce, mesh=mesh, in_specs=P("data"), out_specs=P())
    return np.asarray(jax.jit(mapped)(of_workers(0, 2, 4096)))


@pytest.mark.parametrize(
    "fault",
    [pytest.param(f, marks=() if f == "one wrong bit" else pytest.mark.slow) for f in BROKEN],
)
def test_a_broken_backend_is_named_once_and_the_sum_is_right(
    fault, chosen_backend, data_mesh, monkeypatch
):
    module, reason = BROKEN[fault]
    chosen_backend(module)
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


@pytest.mark.parametrize(
    ("reciprocals", "products"), [(2, -2), pytest.param(-2, -2, marks=pytest.mark.slow)]
)
def test_roundings_of_other_hardware_do_not_change_the_message(reciprocals, products, monkeypatch):
    """Both are off by some units in the last place, as approximate instructions may be."""
    of_reciprocals, of_products = (
        np.float32(1 + units * 2.0**-23) for units in (reciprocals, products)
    )
    other = PLAIN._replace(
        reciprocal=lambda value: PLAIN.reciprocal(value) * of_reciprocals,
        sqrt=lambda value: PLAIN.sqrt(value) * of_reciprocals,
        multiply_add=lambda a, b, c: a * b * of_products + c,
        multiply_subtract=lambda a, b, c: a * b * of_products - c,
    )
    replaced = 0
    for holder in (scales, levels, levels.UniformLevels, levels.QuadraticLevels):
        for function in map(inspect.unwrap, vars(holder).values()):
            defaults = getattr(function, "__defaults__", None) or ()
            if PLAIN in defaults:
                ours = tuple(other if value is PLAIN else value for value in defaults)
                monkeypatch.setattr(function, "__defaults__", ours)
                replaced += 1
    assert replaced >= 8
    monkeypatch.setattr(_xla, "decode_rows", lambda *a, **k: decode_rows(*a, **k) * of_products)
    own = (_xla.statistics, _xla.hop, _xla.decompress_accumulate, _xla.decompress)
    approximate = {function.__name__: function.__wrapped__ for function in own}
    assert first_use.difference(backend(**approximate), BASE) is None


def test_the_message_has_all_widths_and_hard_rows():
    trial = first_use.small_trial()
    assert {*trial.widths.tolist()} == {0, *range(2, 17)}
    assert trial.layout.padding_start < trial.layout.payload_bytes
    assert trial.layout.units > trial.widths.sum()  # a backend has to clear the others
    for rows in (trial.local.rows, trial.other.rows):
        assert np.isnan(rows).any() and np.isinf(rows).any() and (rows == 0).all(axis=1).any()
        assert np.signbit(rows[rows == 0]).any()  # -0.0
        largest = np.max(np.abs(rows), axis=1)
        assert not ((largest > 0) & (largest < 2.0**-110)).any()  # hardware may flush them


def test_results_of_all_operations_on_messages_depend_on_them():
    """A backend that decodes something else is then found by any of them."""
    trial = first_use.small_trial()

    @jax.jit
    def results(messages):
        return {name: call.by(BASE) for name, call in trial.calls(messages).items()}

    messages = trial.send(BASE)
    found, of_zeros = results(messages), results(jnp.zeros_like(messages))
    depending = {n for n in found if not np.array_equal(found[n], of_zeros[n], equal_nan=True)}
    assert depending == set(found) - {"statistics", "compress", "order", "widths"}


def test_a_right_backend_is_checked_once_under_every_transformation(chosen_backend, monkeypatch):
    """The check runs while JAX traces, with arrays that are not part of the program."""
    hops = []

    def hop(*args, **kwargs):
        hops.append(threading.current_thread().name)
        return _xla.hop(*args, **kwargs)

    chosen_backend(backend(hop=hop))

    def norms(rows):
        return operations.by().statistics(rows)

    rows = jax.random.normal(jax.random.key(0), (3, 4, 256))
    expected = np.linalg.norm(np.asarray(rows), axis=-1)
    with jax.debug_nans(True), jax.check_tracer_leaks(True):
        found = jax.jit(jax.vmap(norms))(rows)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert {*hops} == {"dynamiq-jax"} and len(first_use._reasons) == 1
    tried = len(hops)
    looped = jax.jit(lambda rows: jax.lax.scan(lambda c, x: (c, norms(x)), 0, rows)[1])(rows)
    np.testing.assert_array_equal(looped, found)
    assert np.isfinite(jax.grad(lambda rows: jnp.sum(norms(rows)))(rows[0])).all()
    trial = first_use.small_trial()
    payload = jnp.zeros((1, trial.layout.payload_bytes), jnp.uint8)
    jax.jit(lambda: operations.by().hop(payload, trial.local, 0, 1, layout=trial.layout)).lower()
    assert hops[tried:] == ["MainThread"]
    assert operations.refused_backends() == ()


def test_the_check_can_be_switched_off(chosen_backend, monkeypatch):
    chosen_backend(backend(statistics=lambda rows: _xla.statistics(rows) + np.float32(1)))
    rows = np.ones((2, 256), np.float32)
    monkeypatch.setenv(first_use.SWITCH, "0")
    np.testing.assert_array_equal(operations.by().statistics(rows), [17, 17])
    np.testing.assert_array_equal(operations.by("triton").statistics(rows), [17, 17])
    monkeypatch.setenv(first_use.SWITCH, "off")
    with pytest.raises(ValueError, match=r"DYNAMIQ_CHECK_KERNELS='off' is not possible\. Give 1"):
        operations.by().statistics(rows)
    monkeypatch.delenv(first_use.SWITCH)
    with pytest.warns(UserWarning, match="not used on cpu: statistics: .* of 240 bytes"):
        np.testing.assert_array_equal(operations.by().statistics(rows), [16, 16])


def test_nothing_is_checked_where_no_kernel_runs(data_mesh, monkeypatch):
    """Neither for the base, nor where kernels are interpreted or compiled for another machine."""
    monkeypatch.setattr(first_use, "_reasons", {})
    monkeypatch.setattr(first_use, "_tried", pytest.fail)
    all_reduce(data_mesh(2))
    assert operations.refused_backends() == ()
    shape = jax.ShapeDtypeStruct((4, 256), jnp.float32)
    for mode in ("interpret", "compile"):
        with without_gpu(mode):
            for name in (None, "triton"):
                jax.jit(operations.by(name).statistics).trace(shape)
    assert first_use._reasons == {}
