"""Eight CPU devices, strict dtypes, and the fixtures that every file shares."""

import functools
import importlib.util
from collections.abc import Callable, Iterator

import jax
import pytest
from hypothesis import settings
from jax.sharding import AxisType, Mesh

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")

# Trainers that others wrote have environments of their own: see `make test-tunix`.
collect_ignore = [] if importlib.util.find_spec("tunix") else ["trainers"]

# Examples are the same in every run, and none fails for being slow on a busy machine.
settings.register_profile("suite", deadline=None, derandomize=True, max_examples=25)
settings.load_profile("suite")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--optimized", action="store_true", help="compile all programs as users do, which is slower"
    )


@pytest.fixture(scope="module", autouse=True)
def optimization(request: pytest.FixtureRequest) -> Iterator[None]:
    """Compile without most optimizations, except in files that are marked as `optimized`: those
    about arithmetic that gives the same bits in different programs. Compilation is most of the time
    of the suite, and this saves a third of it.
    """
    is_marked = request.node.get_closest_marker("optimized") is not None
    optimized = is_marked or request.config.getoption("--optimized")
    jax.config.update("jax_disable_most_optimizations", not optimized)
    with pytest.MonkeyPatch.context() as patch:  # for processes that tests start
        patch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", str(int(not optimized)))
        yield
    jax.config.update("jax_disable_most_optimizations", False)


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
