"""Compilation for TPUs on a machine without one."""

import contextlib
import dataclasses
import importlib.metadata
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from pallas_kernels.modes import without_gpu

INSTALL = "pip install -e '.[cli,tpu-aot]'"


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A program, and what its compilation took."""

    executable: Any
    trace_seconds: float  # from a function to StableHLO
    compile_seconds: float  # from that to an executable
    compile_cpu_seconds: float  # of all threads

    @property
    def text(self) -> str:
        """The optimized program."""
        return self.executable.as_text()


def prepare() -> None:
    """Let this process compile for TPUs, and run on the CPU.

    Raises:
      SystemExit: the compiler is not installed.
    """
    try:
        importlib.metadata.version("libtpu")
    except importlib.metadata.PackageNotFoundError:
        raise SystemExit(f"The TPU compiler is not installed: {INSTALL}") from None
    # It would search the network for a description of the machine.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    jax.config.update("jax_platforms", "cpu")


def mesh(topology: str, slices: int, axes: dict[str, int]) -> Mesh:
    """Return a mesh of TPUs that need not exist.

    Args:
      topology: name of the topology of a slice, such as `v5e:2x4`.
      slices: number of slices.
      axes: sizes of the axes by their names. Devices of a slice are consecutive.
    """
    several = {"num_slices": slices} if slices > 1 else {}
    described = topologies.get_topology_desc(platform="tpu", topology_name=topology, **several)
    devices: Sequence[Any] = described.devices
    shaped = np.array(devices).reshape(tuple(axes.values()))
    return Mesh(shaped, tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def one_device(topology: str) -> Mesh:
    """Return a mesh of one TPU that need not exist."""
    devices = mesh(topology, 1, {"data": -1}).devices
    return Mesh(devices[:1], ("data",), axis_types=(AxisType.Auto,))


def compile_for(
    devices: Mesh,
    function: Callable[..., Any],
    arguments: Sequence[tuple[jax.ShapeDtypeStruct, PartitionSpec]],
    out_specs: PartitionSpec,
) -> Compiled:
    """Compile a function that runs on every device of a mesh.

    Args:
      devices: the mesh.
      function: function of the local parts of the arguments.
      arguments: shapes of the arguments, and how these are split.
      out_specs: how the result is split.
    """
    specs = tuple(spec for _, spec in arguments)
    mapped = jax.shard_map(function, mesh=devices, in_specs=specs, out_specs=out_specs)
    shapes = [
        jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=NamedSharding(devices, spec))
        for shape, spec in arguments
    ]
    start = time.perf_counter()
    with as_on_tpu():
        lowered = jax.jit(mapped).lower(*shapes)
    traced, traced_cpu = time.perf_counter(), time.process_time()
    executable = lowered.compile()
    return Compiled(
        executable,
        trace_seconds=traced - start,
        compile_seconds=time.perf_counter() - traced,
        compile_cpu_seconds=time.process_time() - traced_cpu,
    )


@contextlib.contextmanager
def as_on_tpu() -> Iterator[None]:
    """Trace what a process with TPUs would trace: the default backend decides on kernels."""
    with mock.patch.object(jax, "default_backend", lambda: "tpu"), without_gpu("compile"):
        yield
