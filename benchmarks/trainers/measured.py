"""Trainings of other packages, measured in processes and environments of their own."""

import collections
import functools
import importlib.util
import sys
from collections.abc import Callable
from importlib import metadata
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import dynamiq_jax as dq
from benchmarks.harness.files import RESULTS
from benchmarks.harness.processes import in_process
from benchmarks.speed.mesh_bytes import sent_by_axes
from benchmarks.trainers import global_steps, maxtext_steps, steps_of_others, tunix_steps

TRAININGS = {
    **maxtext_steps.TRAININGS,
    **tunix_steps.TRAININGS,
    **global_steps.TRAININGS,
    **steps_of_others.TRAININGS,
}


def train(name: str, method: str) -> dict[str, Any]:
    """Train in a process of its own, and return the losses and the sums of the step.

    Args:
      name: key of `TRAININGS`.
      method: compression method; empty for the step as it is.
    """
    training = TRAININGS[name]
    python = sys.executable
    if importlib.util.find_spec(training.module) is None:
        python = str(RESULTS.parents[1] / f".venv-{training.environment}" / "bin" / "python")
    devices = f"--xla_force_host_platform_device_count={training.num_devices}"
    environment = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": devices, **training.variables}
    measured: dict[str, Any] = in_process(
        train_here, name, method, environment=environment, python=python
    )
    return measured


def train_here(name: str, method: str) -> dict[str, Any]:
    """Train in this process: see `train`."""
    training, measured = TRAININGS[name], dict[str, Any]()
    wrap = functools.partial(_MeasuredStep, measured=measured, method=method)
    losses = training.train(wrap)
    versions = {package: metadata.version(package) for package in ("jax", training.package)}
    return {"losses": losses, "versions": versions} | measured


class _MeasuredStep:
    """Step that is measured in its first call."""

    def __init__(
        self,
        step: Any,
        axis_name: str | tuple[str, ...],
        *,
        measured: dict[str, Any],
        method: str,
        mesh: Mesh | None = None,
        parameters: Callable[..., Any] | None = None,
        **options: Any,
    ):
        self._step = dq.compress(step, axis_name, method=method, **options) if method else step
        self._axis_name, self._method = axis_name, method
        self._measured, self._mesh, self._parameters = measured, mesh, parameters
        functools.update_wrapper(self, step, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._measured:
            if self._method:
                self._measured |= _described(self._step.report(*args, **kwargs))
            if self._parameters is not None:
                self._measured |= self._sent(args, kwargs)
        return self._step(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._step, name)

    def _sent(self, args: Any, kwargs: Any) -> dict[str, Any]:
        """Count the bytes of the compiled step, and those of `dq.pmean` of its parameters."""
        assert self._mesh is not None and self._parameters is not None
        compiled = self._step.lower(*args, **kwargs).compile()
        text = getattr(compiled, "compiled", compiled).as_text()  # equinox has a class of its own
        sent = sent_by_axes(text, self._mesh)
        parameters = self._parameters(*args, **kwargs)
        slow = self._axis_name if isinstance(self._axis_name, str) else self._axis_name[0]
        promised = dq.wire_report(
            jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), parameters),
            slow,
            mesh=self._mesh,
            method=dq.Compression(self._method or "exact", specs=jax.tree.map(_spec, parameters)),
        )
        return {
            "bytes_sent": {", ".join(axes): count for axes, count in sent.items()},
            "bytes_of_pmean": promised.bytes_per_worker,
        }


def _spec(array: Any) -> PartitionSpec:
    """Return how an array is split, over the axes of its mesh."""
    sharding = array.sharding
    return sharding.spec if isinstance(sharding, NamedSharding) else PartitionSpec()


def _described(report: Any) -> dict[str, Any]:
    """Count the sums of a step, and the bytes of its groups in one call, before and after."""
    grouped = [each for each in report.sums if each.group is not None]
    exact = collections.Counter(each.why_exact for each in report.sums if each.why_exact)
    return {
        "sums_compressed": len(report.compressed),
        "sums_exact": dict(exact.most_common()),
        "groups": report.num_groups,
        "bytes_before": sum(each.bytes_before * (each.times or 1) for each in grouped),
        "bytes_after": sum(each.bytes_after * (each.times or 1) for each in grouped),
    }
