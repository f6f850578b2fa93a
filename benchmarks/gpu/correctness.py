"""Sections `correctness` and `all_reduce`: every kernel against its XLA twin, and a whole
all-reduce among workers simulated on one device against a float64 sum.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import dynamiq_jax as dq
from benchmarks.gpu.bench import GpuBench
from benchmarks.gpu.jobs import implementations, places_of
from benchmarks.gpu.record import Results
from benchmarks.harness.device_gradients import device_gradient
from dynamiq_jax._measurement.kernel_checks import KernelVerdict, check_kernels
from pallas_kernels import operations
from pallas_kernels.codec import LocalRows, l2_norm
from pallas_kernels.registry import BASE

_TIMEOUT = 120.0  # seconds for the compiler and the run of one operation


def check(bench: GpuBench, results: Results) -> None:
    """Compare all operations with those of the base, on hard rows: what `dynamiq-jax verify` does.

    Differences by one step of rounding are no error here: reciprocals of a GPU are approximate.
    """
    for case in bench.options.check_cases:
        if not bench.record.may_start(case):
            continue
        with bench.record.case(case):
            checks = check_kernels(
                implementations(),
                [case],
                interpret=bench.options.interpret,
                timeout=_TIMEOUT,
                done=lambda name: None,
            )
            results[case] = [each.row() for each in checks]
            for each in checks:
                print(f"{each.name}: {each.verdict.name.lower()} {each.text}", flush=True)
            wrong = [each.name for each in checks if each.verdict > KernelVerdict.ROUNDING]
            if wrong:
                raise AssertionError(f"wrong: {', '.join(wrong)}")


def simulate(bench: GpuBench, results: Results) -> None:
    """Sum gradients with all backends: errors have to agree, and all replicas to be equal."""
    options = bench.options
    workers, size, dtype = options.workers, options.worker_size, options.dtypes[0]
    gradients = jnp.stack([device_gradient(w, size, 8, dtype) for w in range(workers)])
    total = np.sum(_host(gradients), axis=0)
    errors: dict[str, float] = {}
    for name in implementations():
        method = options.method(options.bits[0], name)
        key, route = ("all_reduce", name), "vmap"
        try:
            executable = _compile_vmap(method, gradients)
            reduced = jax.block_until_ready(executable(gradients))
            bench.executables[key] = executable
        except Exception as error:
            # Whether a kernel can be mapped is the backend's affair, not this benchmark's.
            results[f"no vmap of {name}"] = f"{type(error).__name__}: {str(error)[:500]}"
            route = "by hand"
            reduced = _ring_by_hand(method, gradients)[None]
        errors[name] = _vnmse(reduced[0], total)
        same = bool(jnp.all(reduced == reduced[:1]))
        results[name] = {"route": route, "vnmse": errors[name], "replicas_are_equal": same}
        results[name] |= bench.measure(key, [[gradients]]) or {}
        print(f"{workers} workers, {size} coordinates, {name}: {results[name]}", flush=True)
        if not same:
            raise AssertionError(f"{name}: replicas differ")
    apart = results["vnmse_apart"] = max(abs(e / errors[BASE.name] - 1) for e in errors.values())
    if not apart <= 0.01:
        raise AssertionError(f"vNMSE of the backends are up to {apart:.3g} apart: {errors}")


def _compile_vmap(method: dq.DynamiQ, gradients: Array) -> Callable[[Array], Array]:
    """Compile `psum`, mapped over workers: float [workers, size]."""

    def reduce(gradient: Array) -> Array:
        key, options = jax.random.key(11), dq.Compression(exact_below=1)
        return dq.psum(
            gradient, "data", key=key, method=dataclasses.replace(options, method=method)
        )

    return jax.jit(jax.vmap(reduce, axis_name="data")).lower(gradients).compile()


def _ring_by_hand(method: dq.DynamiQ, gradients: Array) -> Array:
    """Sum over a ring, one call after the other: float [size]."""
    workers, size = gradients.shape
    name, layout = method.implementation, method.layout(size, workers)
    run = operations.by(name)
    compress = jax.jit(functools.partial(operations.compress, layout=layout, implementation=name))
    hop = jax.jit(functools.partial(run.hop, layout=layout))
    rows = [layout.as_rows(gradient) for gradient in gradients]
    norms = jnp.stack([run.statistics(r) for r in rows])
    places = places_of(l2_norm(norms, axis=0), layout=layout)
    seed = jnp.array([3, 4], jnp.uint32)
    locals_ = [LocalRows(r, places, seed) for r in rows]
    final = []
    for chunk in range(workers):
        index = jnp.int32(chunk)
        payload = compress(locals_[(chunk + 1) % workers], index, jnp.int32(0))
        for turn in range(1, workers):
            local = locals_[(chunk + 1 + turn) % workers]
            payload = hop(payload[None], local, index, jnp.int32(turn))
        final.append(payload)
    summed = run.decompress(jnp.stack(final), places, layout=layout)
    return layout.as_flat(summed).astype(gradients.dtype)


def _host(array: Array) -> np.ndarray:
    """Return an array in float64, on the host."""
    return np.asarray(array.astype(jnp.float32)).astype(np.float64)


def _vnmse(estimate: Array, truth: np.ndarray) -> float:
    """Compute `dynamiq_jax.vnmse` in float64, on the host."""
    difference = _host(estimate).reshape(-1) - truth.reshape(-1)
    return float(np.sum(difference**2) / np.sum(truth**2))
