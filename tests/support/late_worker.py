"""One process of each test in test_late_process.py."""

import functools
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from tests.support.agreement_worker import compressed, local_sgd, outcome, reduce_gradients, tree_of

DELAY = 40.0  # seconds, more than gloo has for a reduce-scatter
KEY = 3


def along(function: Callable[..., Any], **arguments: Any) -> Callable[[Mesh], Any]:
    """Run a collective of a compressed leaf, or of an exact one."""
    return in_map(lambda: function(tree_of("w"), "data", key=jax.random.key(KEY), **arguments))


def in_map(local: Callable[[], Any], axes: tuple[str, ...] = ("data",)) -> Callable[[Mesh], Any]:
    def on(mesh: Mesh) -> Any:
        shape = (1,) * (len(axes) - 1) + (mesh.size,)
        own = Mesh(mesh.devices.reshape(shape), axes, axis_types=(AxisType.Auto,) * len(axes))
        return jax.jit(jax.shard_map(local, mesh=own, in_specs=(), out_specs=P(), check_vma=False))

    return on


def over_fast_axis() -> Any:
    """Sum over a fast axis that crosses the processes."""
    tree = {"w": jnp.ones((16, 256)) * jax.lax.axis_index("fast")}
    return dq.psum(tree, ("slow", "fast"), key=jax.random.key(KEY), method="mxfp8")


CASES: dict[str, Callable[[Mesh], Any]] = {
    "psum": along(dq.psum, method="mxfp8"),
    "pmean, all to all": along(dq.pmean, method="bf16:all_to_all"),
    "pmean, exact": along(dq.pmean, method="exact"),
    "pmean, estimated error": along(
        dq.pmean, method=dq.Compression("mxfp8", max_error=0.5), with_metrics=True
    ),
    "psum_scatter": along(dq.psum_scatter, method="mxfp8", tiled=True),
    "psum_scatter, exact": along(dq.psum_scatter, method="exact", tiled=True),
    "psum, a fast axis": in_map(over_fast_axis, ("slow", "fast")),
    "all_gather": along(dq.all_gather, method="mxfp8", tiled=True),
    "all_reduce_gradients": in_map(lambda: reduce_gradients("w", method="ef+mxfp8")),
    "compress": functools.partial(compressed, "w", method="mxfp8"),
    "compress, exact": functools.partial(compressed, "w", method="exact"),
    "LocalSGD": in_map(lambda: local_sgd("w")),
}


def errors_of_all(rank: int) -> dict[str, str | None]:
    """Run each function of `CASES`; see `errors_of`."""
    return errors_of(rank, CASES)


def errors_of(rank: int, cases: dict[str, Callable[[Mesh], Any]]) -> dict[str, str | None]:
    """Run each function on a pair of devices of its own, one of each process, so that all of them
    wait at the same time for the second process.
    """
    devices = np.array(jax.devices()).reshape(2, len(cases))
    programs = {}
    for number, (name, function) in enumerate(cases.items()):
        mesh = Mesh(devices[:, number], ("data",), axis_types=(AxisType.Auto,))
        programs[name] = function(mesh)
        jax.block_until_ready(programs[name]())  # gloo connects
    errors: dict[str, str | None] = dict.fromkeys(cases)

    def run(name: str) -> None:
        try:
            jax.block_until_ready(programs[name]())
        except Exception as error:
            errors[name] = str(error)

    if rank:
        time.sleep(DELAY)
    threads = [threading.Thread(target=run, args=(name,)) for name in cases]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def end_of_first(rank: int, form: str) -> dict[str, Any]:
    """Run the first collective of two processes, which the second one compiles for long."""

    def be_slow(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if rank and "backend_compile" in event and "first_step" in str(kwargs.get("fun_name")):
            time.sleep(DELAY)

    mesh = Mesh(np.array(jax.devices()), ("data",), axis_types=(AxisType.Auto,))
    program = CASES[form](mesh)

    def first_step() -> Any:
        return program()

    jax.monitoring.register_event_duration_secs_listener(be_slow)
    return outcome(jax.jit(first_step))
