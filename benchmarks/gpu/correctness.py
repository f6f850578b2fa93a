"""Section `correctness`: every kernel against its XLA twin, and a hop against a float64 sum."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.gradients import host, key_of, make_gradient, vnmse
from benchmarks.gpu.operations import IMPLEMENTATIONS, KERNELS, kernel_jobs, order_of, program_key
from benchmarks.gpu.record import Results
from pallas_kernels.codec.layout import Layout
from pallas_kernels.operations import statistics

_CHUNKS = 3


def check(bench: Bench, results: Results) -> None:
    """All dtypes and bits."""
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


@dataclasses.dataclass
class _Findings:
    """What was compared, and what was out of its limit."""

    values: dict[str, float] = dataclasses.field(default_factory=dict)
    wrong: list[str] = dataclasses.field(default_factory=list)

    def expect(self, name: str, value: float, limit: float) -> None:
        self.values[name] = value
        if not value <= limit:  # NaN is wrong too
            self.wrong.append(f"{name} is {value:.3g}, above {limit:g}")


@dataclasses.dataclass(frozen=True)
class _Kernels:
    """Those of one backend, with the arguments that all calls share."""

    run: dict[str, Callable[..., Any]]
    order: Array
    seed: Array

    def compress(self, rows: Array) -> Array:
        """First messages of all chunks."""
        first = jnp.int32(0)
        return jnp.stack(
            [
                self.run["compress"](rows, self.order, jnp.int32(chunk), first, self.seed)
                for chunk in range(_CHUNKS)
            ]
        )

    def hop(self, received: Array, rows: Array) -> Array:
        """Second messages of all chunks."""
        second = jnp.int32(1)
        return jnp.stack(
            [
                self.run["hop"](
                    message[None], rows, self.order, jnp.int32(chunk), second, self.seed
                )
                for chunk, message in enumerate(received)
            ]
        )

    def decompress(self, messages: Array) -> Array:
        return self.run["decompress"](messages, self.order)


def _check(bench: Bench, dtype: str, bits: float) -> _Findings:
    layout = bench.options.method(bits).layout(bench.options.check_size, _CHUNKS)
    number = round(100 * bits)
    gradients = [
        make_gradient(key_of(3, number), key_of(4, worker, number), size=layout.size, dtype=dtype)
        for worker in range(2)
    ]
    mine, other = (layout.as_rows(gradient) for gradient in gradients)
    order = order_of(statistics(mine, implementation="xla")[0], layout=layout)
    seed = jnp.array([5, number], jnp.uint32)
    kernels = _compile(bench, layout, mine, order, seed, dtype, bits)
    findings = _Findings()
    _compare_statistics(findings, kernels, mine)
    received = {name: backend.compress(other) for name, backend in kernels.items()}
    _compare_messages(findings, kernels, received, mine)
    total = host(gradients[0]) + host(gradients[1])
    errors = {}
    for name, backend in kernels.items():
        rows = backend.decompress(backend.hop(received[name], mine))
        errors[name] = vnmse(layout.as_flat(rows), total)
        # Four times less for every bit: far above any right answer, far below a wrong one.
        findings.expect(f"vNMSE of {name}", errors[name], 4.0 ** (3 - bits))
    findings.expect("vNMSE apart", abs(errors["triton"] / errors["xla"] - 1), 0.01)
    return findings


def _compile(
    bench: Bench, layout: Layout, rows: Array, order: Array, seed: Array, dtype: str, bits: float
) -> dict[str, _Kernels]:
    index = jnp.int32(0)
    one, all_chunks = (
        jax.ShapeDtypeStruct((count, layout.payload_bytes), jnp.uint8) for count in (1, _CHUNKS)
    )
    args = {
        "statistics": [rows],
        "compress": [rows, order, index, index, seed],
        "hop": [one, rows, order, index, index, seed],
        "decompress": [all_chunks, order],
    }
    jobs = kernel_jobs(layout)
    keys = {
        (operation, name): ("check", *program_key(operation, name, layout.size, dtype, bits))
        for operation in KERNELS
        for name in IMPLEMENTATIONS
    }
    bench.compile_all({key: (jobs[job].function, args[job[0]]) for job, key in keys.items()})
    return {
        name: _Kernels({op: bench.executables[keys[op, name]] for op in KERNELS}, order, seed)
        for name in IMPLEMENTATIONS
    }


def _compare_statistics(findings: _Findings, kernels: dict[str, _Kernels], rows: Array) -> None:
    truth = np.linalg.norm(host(rows), axis=1)
    nonzero = truth > 0  # padding
    means = {}
    for name, backend in kernels.items():
        norms, means[name] = map(host, backend.run["statistics"](rows))
        error = np.abs(norms - truth)[nonzero] / truth[nonzero]
        findings.expect(f"norms of {name}", float(np.max(error)), 1e-5)
    error = np.abs(means["triton"] - means["xla"])[nonzero] / truth[nonzero]
    findings.expect("means", float(np.max(error)), 1e-5)


def _compare_messages(
    findings: _Findings, kernels: dict[str, _Kernels], received: dict[str, Array], rows: Array
) -> None:
    findings.expect("bytes differ: compress", _differing(received["triton"], received["xla"]), 0.01)
    sent = {name: backend.hop(received["xla"], rows) for name, backend in kernels.items()}
    findings.expect("bytes differ: hop", _differing(sent["triton"], sent["xla"]), 0.01)
    # A race, or memory that nothing wrote, shows as bytes that change.
    again = kernels["triton"].hop(received["xla"], rows)
    findings.expect("bytes differ: hop again", _differing(again, sent["triton"]), 0)
    decoded = {name: host(kernels[name].decompress(sent["triton"])) for name in kernels}
    largest = np.maximum(np.max(np.abs(decoded["xla"]), axis=1, keepdims=True), 1e-30)
    error = np.abs(decoded["triton"] - decoded["xla"]) / largest
    findings.expect("decompress", float(np.max(error)), 1e-6)


def _differing(first: Array, second: Array) -> float:
    """Share of bytes that differ."""
    return float(np.mean(np.asarray(first) != np.asarray(second)))
