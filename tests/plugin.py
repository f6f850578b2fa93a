"""Eight CPU devices, strict dtypes and ranks, and the fixtures that every file shares."""

import functools
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import jax
import pytest
from hypothesis import settings
from jax.sharding import AxisType, Mesh

from pallas_kernels import _xla
from tests.conformance import rows
from tests.support import broken_backends, speed
from tests.support.compile_times import CompileTimes

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")

speed.read_flags_again()
speed.reuse_contexts()

MOST_MEMORY = 4 * 2**30  # bytes of a process whose traces are kept

# Files that run examples, pages and trainers, whose own code may promote ranks.
OF_USERS = (
    *("allocation_benchmark", "arc_top_k", "compare", "docs", "global_forms", "llm", "notebook"),
    *("maxtext", "other_trainers", "reports", "time_to_accuracy", "tunix"),
)

# Examples are the same in every run, and none fails for being slow on a busy machine.
settings.register_profile("suite", deadline=None, derandomize=True, max_examples=speed.MAX_EXAMPLES)
settings.load_profile("suite")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--optimized", action="store_true", help="compile all programs as users do, which is slower"
    )
    parser.addoption("--x64", action="store_true", help="run with numbers of 64 bits")
    parser.addoption("--compile-times", action="store_true", help="show seconds in JAX by file")
    parser.addoption(
        "--rows", metavar="MODULE:NAME", help="run the conformance tests on methods of a package"
    )


def pytest_configure(config: pytest.Config) -> None:
    jax.config.update("jax_enable_x64", config.getoption("--x64"))
    if config.getoption("--rows"):
        rows.choose(config.getoption("--rows"))
    if config.getoption("--compile-times"):
        config.pluginmanager.register(CompileTimes())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Make slow tests of all but some cases of the laws that are marked as `sampled`.

    A hash of its name chooses a case, so that a case comes or goes with its name alone. Of laws of
    research every second case is chosen: it is not tried harder than the product.
    """
    laws: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if any(mark.name in ("optimized", "frames") for mark in item.own_markers):
            raise pytest.UsageError(f"{item.nodeid}: give its mark to the file, as pytestmark.")
        if item.get_closest_marker("slow") is None:
            laws[item.nodeid.partition("[")[0]].append(item)
    for cases in laws.values():
        sampled = cases[0].get_closest_marker("sampled")
        every = sampled.args[0] if sampled else 1 + ("research" in cases[0].path.parts)
        first = min(cases, key=_hash)
        for item in cases:
            if _hash(item) % every and item is not first:
                item.add_marker(pytest.mark.slow)


def _hash(item: pytest.Item) -> int:
    return zlib.crc32(item.nodeid.encode())


def pytest_collection_finish() -> None:
    speed.collect_garbage_rarely()


@pytest.fixture(scope="session", autouse=True)
def compiled_once() -> None:
    """Share compiled programs among all tests of a run, and with later runs."""
    speed.compile_once(speed.folder_of_programs())


@pytest.fixture(scope="module", autouse=True)
def optimization(request: pytest.FixtureRequest) -> Iterator[None]:
    """Compile quickly, except in files that are marked as `optimized` or `frames`: as users do."""

    def as_users_do(mark: str) -> bool:
        marked = request.node.get_closest_marker(mark) is not None
        return marked or request.config.getoption("--optimized")

    with speed.compiling(optimized=as_users_do("optimized"), frames=as_users_do("frames")):
        yield


@pytest.fixture(scope="module", autouse=True)
def forgotten_traces() -> Iterator[None]:
    """Forget how the codec was traced for the layouts of files, once they take gigabytes."""
    yield
    if speed.memory() > MOST_MEMORY:
        for operation in (_xla.statistics, _xla.hop, _xla.decompress_accumulate, _xla.decompress):
            operation.clear_cache()


@pytest.fixture(scope="module", autouse=True)
def strict_ranks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let no code of the library rely on implicit promotion of ranks."""
    name = request.module.__name__.rpartition(".")[2]
    is_strict = name.startswith("test_") and not name.removeprefix("test_").startswith(OF_USERS)
    jax.config.update("jax_numpy_rank_promotion", "raise" if is_strict else "allow")
    yield
    jax.config.update("jax_numpy_rank_promotion", "allow")


@pytest.fixture(scope="session")
def data_mesh() -> Callable[[int], Mesh]:
    """`data_mesh(n)`: a mesh of the first n devices with the one axis "data"."""

    @functools.cache
    def make(num_workers: int) -> Mesh:
        return jax.make_mesh((num_workers,), ("data",), axis_types=(AxisType.Auto,))

    return make


@pytest.fixture
def chosen_backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Any], None]]:
    """`chosen_backend(backend)`: take a backend for the fastest kernels of this machine."""
    broken_backends.released.clear()
    yield functools.partial(broken_backends.choose, monkeypatch)
    broken_backends.released.set()
