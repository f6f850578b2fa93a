"""Agreement of all processes about a collective, before they run it.

Processes that trace different collectives would hang, decode garbage, or get more noise.
"""

import dataclasses
import os
import platform
import re
import sys
import threading
from typing import Any

import jax
import jaxlib
from jax import Array

from dynamiq_jax._buckets.axes import Axes
from dynamiq_jax._check.exchange import Exchange
from dynamiq_jax._collectives.all_reduce import AllReduce
from dynamiq_jax._collectives.measured import Measured
from dynamiq_jax._inputs.policy import UNCOMPRESSED
from dynamiq_jax._plan import recording
from dynamiq_jax._plan.plan import Plan
from pallas_kernels import codec, operations
from pallas_kernels._jax import compat

# Flags of JAX on which random bits, or the rounding of sums and products, depend.
_JAX_FLAGS = (
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_disable_most_optimizations",
)
# Parts of the names of XLA's flags on which rounding depends. The instruction set of a CPU decides
# whether a multiplication and an addition are rounded once or twice, and so do optimizations.
_XLA_FLAGS = ("excess_precision", "fast_m", "ftz", "precision", "max_isa", "optimization_level")
_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")

_exchange: Exchange | None = None
_lock = threading.Lock()


def check(plan: Plan, key: Array) -> None:
    """Check that all processes trace the same collective.

    Processes are compared through the coordination service of `jax.distributed`, once for each
    collective that they trace. Compiled programs do not change, and run without any check. With one
    process nothing is done; neither are programs compared that `inspect` traces, or in which the
    axes are those of `jax.vmap`.

    All processes of the job are compared if the mesh has all of its devices. Otherwise those of the
    mesh of `jax.set_mesh` are, and without it none: `jax.shard_map` does not say which devices run
    a part of a program.

    Raises:
      RuntimeError: processes differ. All of them raise it, and it names the differences.
    """
    job = compat.job() if plan.request.compression.check_agreement else None
    if job is None or recording.is_recording():
        return
    processes = _processes(plan.collective.axes, job.num_processes)
    if len(processes) < 2 or job.process not in processes:
        return
    description = _of_collective(plan, key)
    for name, value in plan.request.settings:
        description |= _fields(name, value)
    description |= _of_process() | _of_leaves(plan)
    exchange_of(job).agree(description, processes, only_traces=compat.only_traces())


def exchange_of(job: compat.DistributedProcess) -> Exchange:
    """Return the exchange of a job: a new one if `jax.distributed` was initialized again."""
    global _exchange
    with _lock:  # two exchanges would count the collectives of one process apart
        if _exchange is None or _exchange.client is not job.client:
            _exchange = Exchange(job.client, job.process)
        return _exchange


def _processes(axes: Axes, num_processes: int) -> tuple[int, ...]:
    """Return the processes that run a collective, ascending; none if they are not known."""
    mesh = jax.sharding.get_abstract_mesh()
    if not {*axes.names} <= {*mesh.manual_axes}:
        return ()
    device = getattr(mesh, "abstract_device", None)
    if mesh.size == jax.device_count(None if device is None else device.platform):
        return tuple(range(num_processes))
    concrete = compat.concrete_mesh()
    if concrete is None or dict(concrete.shape) != dict(mesh.shape):
        return ()
    return tuple(sorted({device.process_index for device in concrete.devices.flat}))


def _of_collective(plan: Plan, key: Array) -> dict[str, str]:
    """Describe a collective, but for its leaves."""
    collective, request = plan.collective, plan.request
    mesh, axes = jax.sharding.get_abstract_mesh(), collective.axes
    # The request says whether errors are measured.
    kind = AllReduce if isinstance(collective, Measured) else type(collective)
    texts = {
        "collective": kind.__name__,
        "axes": _text({axis.name: axis.size for axis in (axes.slow, *axes.fast)}),
        "mesh": _text(dict(mesh.shape)),
        **_fields("topology", request.compression.route),
        "with_metrics": _text(request.measures),
        "implementation of the key": _text(str(jax.random.key_impl(key))),
    }
    for field in dataclasses.fields(kind):
        value = getattr(collective, field.name)
        is_default = field.name == "last_first" and value == field.default  # of its kind
        if isinstance(value, bool | int | float | str) and not is_default:
            texts[field.name] = _text(value)
    described = ("compression.method", "compression.topology", "compression.specs")
    of_compression = _fields("compression", request.compression).items()
    return texts | {name: text for name, text in of_compression if not name.startswith(described)}


def _of_process() -> dict[str, str]:
    """Describe what rounding and random bits depend on besides the program."""
    package = sys.modules[__name__.partition(".")[0]]
    device = jax.local_devices()[0]
    return {
        "dynamiq_jax.__version__": _text(getattr(package, "__version__", None)),
        "version of the wire format": _text(codec.WIRE_FORMAT),
        "jax.__version__": _text(jax.__version__),
        "jaxlib.__version__": _text(jaxlib.__version__),
        "device": _text((device.platform, device.device_kind)),
        "refused kernels": _text(operations.refused_backends()),
        "processor": _text(platform.machine() if device.platform == "cpu" else None),
        **{flag: _text(getattr(jax.config, flag, None)) for flag in _JAX_FLAGS},
        **{name: _text(_flags(os.environ.get(name, ""))) for name in _VARIABLES},
    }


def _flags(text: str) -> list[str]:
    """Return the flags of XLA on which rounding depends."""
    return sorted(flag for flag in text.split() if any(part in flag for part in _XLA_FLAGS))


def _of_leaves(plan: Plan) -> dict[str, str]:
    """Describe the leaves of a tree and their methods."""
    methods = [method or UNCOMPRESSED for method in plan.methods]
    same = len({*methods}) == 1
    texts = {"number of leaves": _text(len(methods))}
    if same:
        texts |= _fields("method", methods[0])
    specs = plan.shards.specs
    for number, (path, leaf) in enumerate(zip(plan.names, plan.leaves, strict=True)):
        name = f"tree{path}"
        split = f" split as {specs[number]}" if any(specs[number]) else ""
        texts[f"leaf {number}"] = _text(f"{name} of {leaf.dtype}{list(leaf.shape)}{split}")
        if not same:
            texts[f"method of {name}"] = _text(methods[number])
    return texts


def _fields(name: str, value: Any) -> dict[str, str]:
    """Describe a named value, with one entry for each field of a dataclass."""
    if not dataclasses.is_dataclass(value):
        return {name: _text(value)}
    texts = {name: type(value).__name__}
    for field in dataclasses.fields(value):
        texts |= _fields(f"{name}.{field.name}", getattr(value, field.name))
    return texts


def _text(value: Any) -> str:
    """Return a value as text, the same for equal values in all processes."""
    if dataclasses.is_dataclass(value):
        return ", ".join(f"{name}={each}" for name, each in _fields("", value).items())[1:]
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # methods of 4 and 4.0 bits are equal
    text = value if isinstance(value, str) else repr(value)
    return re.sub(r" at 0x[0-9a-fA-F]+", "", text)  # addresses of objects differ
