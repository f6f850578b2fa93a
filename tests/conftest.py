"""Eight CPU devices, strict dtypes and ranks, and the fixtures that every file shares."""

import functools
import gc
import importlib.util
import os
from collections.abc import Callable, Iterator

import jax
import pytest
from hypothesis import settings
from jax.sharding import AxisType, Mesh

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")

# XLA reads its flags again for each program, so that a file can have flags of its own.
READ_AGAIN = "--xla_flags_reset=true"
os.environ["XLA_FLAGS"] = " ".join(filter(None, (os.environ.get("XLA_FLAGS"), READ_AGAIN)))
# Other emitters of fused loops compile in a third of the time, and a program as one part in less
# than as many. Later versions of XLA have one kind of emitters only, and end the process at a flag
# that they do not have.
QUICK = (
    "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
    if jax.__version_info__ < (0, 11)
    else ""
)

# Trainers that others wrote have environments of their own: see `make test-tunix`.
collect_ignore = [] if importlib.util.find_spec("tunix") else ["trainers"]

# Files that run examples, pages and trainers, whose own code may promote ranks.
OF_USERS = (
    *("allocation_benchmark", "arc_top_k", "compare", "docs", "llm", "notebook"),
    *("time_to_accuracy", "tunix", "upgrading"),
)

# Examples are the same in every run, and none fails for being slow on a busy machine.
settings.register_profile("suite", deadline=None, derandomize=True, max_examples=25)
settings.load_profile("suite")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--optimized", action="store_true", help="compile all programs as users do, which is slower"
    )
    parser.addoption("--x64", action="store_true", help="run with numbers of 64 bits")


def pytest_configure(config: pytest.Config) -> None:
    jax.config.update("jax_enable_x64", config.getoption("--x64"))


def pytest_collection_finish() -> None:
    """Collect garbage rarely: most objects are parts of traced programs, which stay for long, and
    to look through them again and again is a tenth of the time of the suite.
    """
    gc.freeze()
    gc.set_threshold(100_000, 20, 100)


@pytest.fixture(scope="module", autouse=True)
def optimization(request: pytest.FixtureRequest) -> Iterator[None]:
    """Compile without most optimizations, except in files that are marked as `optimized`: those
    about arithmetic that gives the same bits in different programs. Compilation is most of the time
    of the suite, and this saves two thirds of it.
    """
    is_marked = request.node.get_closest_marker("optimized") is not None
    optimized = is_marked or request.config.getoption("--optimized")
    jax.config.update("jax_disable_most_optimizations", not optimized)
    with pytest.MonkeyPatch.context() as patch:  # for processes that tests start
        patch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", str(int(not optimized)))
        if not optimized:
            patch.setenv("XLA_FLAGS", f"{os.environ['XLA_FLAGS']} {QUICK}")
        yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="module", autouse=True)
def strict_ranks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let no code of the library rely on implicit promotion of ranks."""
    name = request.module.__name__.rpartition(".")[2].removeprefix("test_")
    jax.config.update("jax_numpy_rank_promotion", "allow" if name.startswith(OF_USERS) else "raise")
    yield
    jax.config.update("jax_numpy_rank_promotion", "allow")


@pytest.fixture(scope="session")
def data_mesh() -> Callable[[int], Mesh]:
    """`data_mesh(n)`: a mesh of the first n devices with the one axis "data"."""

    @functools.cache
    def make(num_workers: int) -> Mesh:
        return jax.make_mesh(
            (num_workers,),
            ("data",),
            axis_types=(AxisType.Auto,),
            devices=jax.devices()[:num_workers],
        )

    return make
