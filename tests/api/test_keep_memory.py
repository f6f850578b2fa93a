"""Memory that is kept between calls: new pages of results with and without it, and other libraries.

A process of its own has malloc as the system sets it.
"""

import ctypes
from pathlib import Path
from types import SimpleNamespace

import pytest

import dynamiq_jax as dq
from benchmarks.harness.processes import in_process
from dynamiq_jax._api import keep_memory as module

BYTES = 2**26  # of a result: more than glibc ever keeps by itself
FEW = 0.05  # new pages of a call, of those that its result has
PAGE = 4096
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")

needs_glibc = pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"),
    reason="the C library of this machine is not glibc, of which these laws are",
)
needs_small_pages = pytest.mark.skipif(
    HUGE_PAGES.exists() and "[always]" in HUGE_PAGES.read_text(),
    reason="this machine makes huge pages of all memory, of which a result has too few to count",
)


def new_pages_of_calls(kept: bool, devices: int) -> list[int | bool]:
    """Return the fewest new pages of one call of a program with one result on each device, and
    whether memory is kept then, when threads have heaps.

    The library is imported in either case. Where memory is kept, the first calls still take new
    pages; on a busy machine there are more of them.
    """
    import resource

    import jax
    import jax.numpy as jnp

    assert not kept or dq.keep_memory()
    jax.config.update("jax_num_cpu_devices", devices)
    mesh = jax.make_mesh((devices,), ("x",))
    rows = jax.device_put(jnp.zeros((devices, BYTES // 4)), jax.NamedSharding(mesh, jax.P("x")))
    function = jax.jit(lambda rows: rows + 1)

    def new_pages() -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        jax.block_until_ready(function(rows))
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    fewest = new_pages()
    for _ in range(50 if kept else 8):  # memory that is kept takes some calls to settle
        if fewest < FEW * devices * BYTES / PAGE:
            break
        fewest = min(fewest, new_pages())
    return [fewest, dq.keep_memory()]


@needs_glibc
@needs_small_pages
@pytest.mark.parametrize("devices", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_results_take_new_pages_unless_memory_is_kept_from_the_start(devices):
    """Threads that have heaps already keep them: then nothing is changed."""
    pages = devices * BYTES // PAGE
    (without, late), (within, early) = (
        in_process(new_pages_of_calls, kept, devices, environment={"GLIBC_TUNABLES": ""})
        for kept in (False, True)
    )
    assert pages <= without < 1.2 * pages and not late
    assert within < FEW * pages and early


def library_with(monkeypatch, **functions):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(**functions))
    monkeypatch.setattr(module, "_number_of_heaps", lambda library: 1)


@pytest.mark.parametrize(
    "functions",
    [
        {},  # macOS and musl
        {"mallopt": lambda parameter, value: 1},  # Android, with parameters of its own
        {"gnu_get_libc_version": None, "mallopt": lambda parameter, value: int(parameter != -8)},
    ],
)
def test_other_libraries_keep_no_memory(functions, monkeypatch):
    monkeypatch.setattr(module, "_kept", False)
    library_with(monkeypatch, **functions)
    assert dq.keep_memory() is False
    assert not module.memory_is_kept()


def test_all_parameters_are_set_once(monkeypatch):
    seen = []

    def mallopt(parameter, value):
        seen.append((parameter, value))
        return 1

    monkeypatch.setattr(module, "_kept", False)
    library_with(monkeypatch, gnu_get_libc_version=None, mallopt=mallopt)
    assert not module.memory_is_kept()
    assert dq.keep_memory() is True
    assert module.memory_is_kept()
    assert sorted(seen) == [(-8, 1), (-4, 0), (-1, -1)]
