"""Eight CPU devices, strict dtypes, and the fixtures that every file shares."""

import functools
from collections.abc import Callable

import jax
import pytest
from hypothesis import settings
from jax.sharding import AxisType, Mesh

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")

# Examples are the same in every run, and none fails for being slow on a busy machine.
settings.register_profile("suite", deadline=None, derandomize=True, max_examples=25)
settings.load_profile("suite")


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
