"""Sections `correctness` and `all_reduce`: every kernel against its XLA twin, a hop against a
float64 sum, and a whole all-reduce among workers simulated on one device.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import dynamiq_jax as dq
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.cases import make_gradient
from benchmarks.gpu.jobs import IMPLEMENTATIONS, KERNELS, kernel_jobs, places_of, program_key
from benchmarks.gpu.record import Results
from pallas_kernels import operations
from pallas_kernels.codec import Layout, LocalRows, l2_norm

_CHUNKS = 3


def check(bench: Bench, results: Results) -> None:
    """Compare the kernels of all backends for all dtypes and bits."""
    for dtype in bench.options.dtypes:
        for bits in bench.options.check_bits:
            label = f"{dtype} {bits:g} bits"
            if not bench.record.may_start(label):
                continue
            with bench.record.case(label):
                findings = _check(bench, dtype, bits)
                results[label] = {"wrong": findings.wrong, **findings.values}
                values = ", ".join(f"{name} {value:.3g}" for name, value in findings.values.items())
                print(f"{label}: {values}", flush=True)
                if findings.wrong:
                    raise AssertionError(f"{label}: {', '.join(findings.wrong)}")


def simulate(bench: Bench, results: Results) -> None:
    """Sum gradients with both backends: errors have to agree, and all replicas to be equal."""
    options = bench.options
    workers, size, dtype = options.workers, options.worker_size, options.dtypes[0]
    gradients = jnp.stack([make_gradient(w, size, 8, dtype) for w in range(workers)])
    total = np.sum(_host(gradients), axis=0)
    errors: dict[str, float] = {}
    for name in IMPLEMENTATIONS:
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
    apart = abs(errors["triton"] / errors["xla"] - 1)
    results["vnmse_apart"] = apart
    if not apart <= 0.01:
        raise AssertionError(f"vNMSE of triton and xla are {apart:.3g} apart")


@dataclasses.dataclass
class _Findings:
    """Values that were compared, and those that are out of their limits."""

    values: dict[str, float] = dataclasses.field(default_factory=dict)
    wrong: list[str] = dataclasses.field(default_factory=list)

    def expect(self, name: str, value: float, limit: float) -> None:
        self.values[name] = value
        if not value <= limit:  # NaN is wrong too
            self.wrong.append(f"{name} is {value:.3g}, above {limit:g}")


@dataclasses.dataclass(frozen=True)
class _Kernels:
    """Compiled operations of one backend."""

    run: dict[str, Callable[..., Any]]

    def compress(self, local: LocalRows) -> Array:
        """Return the first messages of all chunks."""
        first = jnp.int32(0)
        return jnp.stack(
            [self.run["compress"](local, jnp.int32(chunk), first) for chunk in range(_CHUNKS)]
        )

    def hop(self, received: Array, local: LocalRows) -> Array:
        """Return the second messages of all chunks."""
        second = jnp.int32(1)
        return jnp.stack(
            [
                self.run["hop"](message[None], local, jnp.int32(chunk), second)
                for chunk, message in enumerate(received)
            ]
        )


def _check(bench: Bench, dtype: str, bits: float) -> _Findings:
    layout = bench.options.method(bits).layout(bench.options.check_size, _CHUNKS)
    seed = round(100 * bits)
    gradients = [make_gradient(worker, layout.size, seed, dtype) for worker in range(2)]
    rows, other_rows = (layout.as_rows(gradient) for gradient in gradients)
    norms = operations.statistics(rows, implementation="xla")
    places = places_of(norms, layout=layout)
    local = LocalRows(rows, places, jnp.array([5, seed], jnp.uint32))
    kernels = _compile(bench, layout, local, dtype, bits)
    findings = _Findings()
    _compare_statistics(findings, kernels, rows)
    received = {
        name: backend.compress(local._replace(rows=other_rows)) for name, backend in kernels.items()
    }
    _compare_messages(findings, kernels, received, local)
    total = _host(gradients[0]) + _host(gradients[1])
    errors = {}
    for name, backend in kernels.items():
        summed = backend.run["decompress"](backend.hop(received[name], local), places)
        errors[name] = _vnmse(layout.as_flat(summed), total)
        # Four times less for every bit: far above any right answer, far below a wrong one.
        findings.expect(f"vNMSE of {name}", errors[name], 4.0 ** (3 - bits))
    findings.expect("vNMSE apart", abs(errors["triton"] / errors["xla"] - 1), 0.01)
    return findings


def _compile(
    bench: Bench, layout: Layout, local: LocalRows, dtype: str, bits: float
) -> dict[str, _Kernels]:
    index = jnp.int32(0)
    one, all_chunks = (
        jax.ShapeDtypeStruct((count, layout.payload_bytes), jnp.uint8) for count in (1, _CHUNKS)
    )
    args = {
        "statistics": [local.rows],
        "compress": [local, index, index],
        "hop": [one, local, index, index],
        "decompress": [all_chunks, local.places],
    }
    jobs = kernel_jobs(layout)
    keys = {
        (operation, name): ("check", *program_key(operation, name, layout.size, dtype, bits))
        for operation in KERNELS
        for name in IMPLEMENTATIONS
    }
    bench.compile_all({key: (jobs[job].function, args[job[0]]) for job, key in keys.items()})
    return {
        name: _Kernels({op: bench.executables[keys[op, name]] for op in KERNELS})
        for name in IMPLEMENTATIONS
    }


def _compare_statistics(findings: _Findings, kernels: dict[str, _Kernels], rows: Array) -> None:
    truth = np.linalg.norm(_host(rows), axis=1)
    nonzero = truth > 0  # padding
    for name, backend in kernels.items():
        norms = _host(backend.run["statistics"](rows))
        error = np.abs(norms - truth)[nonzero] / truth[nonzero]
        findings.expect(f"norms of {name}", float(np.max(error)), 1e-5)


def _compare_messages(
    findings: _Findings,
    kernels: dict[str, _Kernels],
    received: dict[str, Array],
    local: LocalRows,
) -> None:
    findings.expect("bytes differ: compress", _differing(received["triton"], received["xla"]), 0.01)
    sent = {name: backend.hop(received["xla"], local) for name, backend in kernels.items()}
    findings.expect("bytes differ: hop", _differing(sent["triton"], sent["xla"]), 0.01)
    # A race, or memory that nothing wrote, shows as bytes that change.
    again = kernels["triton"].hop(received["xla"], local)
    findings.expect("bytes differ: hop again", _differing(again, sent["triton"]), 0)
    decoded = {
        name: _host(backend.run["decompress"](sent["triton"], local.places))
        for name, backend in kernels.items()
    }
    largest = np.maximum(np.max(np.abs(decoded["xla"]), axis=1, keepdims=True), 1e-30)
    error = np.abs(decoded["triton"] - decoded["xla"]) / largest
    findings.expect("decompress", float(np.max(error)), 1e-6)


def _differing(first: Array, second: Array) -> float:
    """Return the share of bytes that differ."""
    return float(np.mean(np.asarray(first) != np.asarray(second)))


def _compile_vmap(method: dq.DynamiQ, gradients: Array) -> Callable[[Array], Array]:
    """Compile `psum`, mapped over workers: float [workers, size]."""

    def reduce(gradient: Array) -> Array:
        key, options = jax.random.key(11), dq.Options(exact_below=1)
        return dq.psum(gradient, "data", key=key, method=method, options=options)

    return jax.jit(jax.vmap(reduce, axis_name="data")).lower(gradients).compile()


def _ring_by_hand(method: dq.DynamiQ, gradients: Array) -> Array:
    """Sum over a ring, one call after the other: float [size]."""
    workers, size = gradients.shape
    name, layout = method.implementation, method.layout(size, workers)
    chosen: dict[str, Any] = {"layout": layout, "implementation": name}
    compress = jax.jit(functools.partial(operations.compress, **chosen))
    hop = jax.jit(functools.partial(operations.hop, **chosen))
    rows = [layout.as_rows(gradient) for gradient in gradients]
    norms = jnp.stack([operations.statistics(r, implementation=name) for r in rows])
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
    summed = operations.decompress(jnp.stack(final), places, **chosen)
    return layout.as_flat(summed).astype(gradients.dtype)


def _host(array: Array) -> np.ndarray:
    """Return an array in float64, on the host."""
    return np.asarray(array.astype(jnp.float32)).astype(np.float64)


def _vnmse(estimate: Array, truth: np.ndarray) -> float:
    """Compute `dynamiq_jax.vnmse` in float64, on the host."""
    difference = _host(estimate).reshape(-1) - truth.reshape(-1)
    return float(np.sum(difference**2) / np.sum(truth**2))
