"""Speed of the Triton kernels on an NVIDIA GPU, beside what a user would compare them with.

    python benchmarks/gpu_kernels.py

Needs JAX with CUDA and numpy, and no installation. Correctness comes first: against the XLA twin of
every kernel, and against a float64 sum. Yardsticks are measured in the same run: a device-to-device
copy, XLA's own fusion of the same maths, an int8 block quantizer, and casts to MXFP8. Results are
written after every section, so that a run that is cut short leaves what it had.

A time is that of back-to-back calls over their number, in a batch long enough to hide the host; the
median of several batches. Where a call is shorter than the host needs to start one, that is what
the figure shows: such rows are marked, and the profiler's own times are in the last section.
"""

import argparse
import contextlib
import dataclasses
import functools
import importlib.util
import json
import math
import os
import shutil
import statistics as statistics_module
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

_STARTED = time.perf_counter()
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import common
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from dynamiq_jax.codec.layout import Layout
from dynamiq_jax.codec.norms import l2_norm
from dynamiq_jax.codec.ordering import order_rows
from dynamiq_jax.codec.packing import SUPER_GROUP_SIZE
from dynamiq_jax.codec.scales import bfloat16_bits
from dynamiq_jax.collectives import psum
from dynamiq_jax.methods.dynamiq import DynamiQ
from pallas_kernels.compress.api import compress
from pallas_kernels.decompress.api import decompress
from pallas_kernels.hop.api import hop
from pallas_kernels.hop.triton import hop as triton_hop
from pallas_kernels.implementation import without_gpu
from pallas_kernels.statistics.api import statistics
from pallas_kernels.triton_launch import Config as LaunchConfig

MEBI, GIBI = 2**20, 2**30
KERNELS = ("statistics", "compress", "hop", "decompress")
IMPLEMENTATIONS = ("triton", "xla")
_CACHE_BYTES = 256 * MEBI  # several times the L2 of any GPU: inputs rotate through at least this
_KEPT_BYTES = 24 * GIBI  # outputs and temporaries of calls that may be alive at once
_SHORT_US = 50.0  # calls below this are near what the host needs to start one

Row = dict[str, Any]
Job = tuple[Callable[..., Any], tuple[str, ...]]  # a function, and the names of its inputs
JobKey = tuple[str, str]  # operation, implementation
Inputs = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Options of the benchmark; the tiny ones of `--small` prove the script, not the kernels."""

    sizes: tuple[int, ...]  # coordinates; the first is the one that matters most
    bits: tuple[float, ...]  # the first is the one that matters most
    bits_of_sizes: tuple[float, ...]  # of all sizes but the first
    dtypes: tuple[str, ...]
    widths: tuple[int, ...]  # of codes
    sweep_rows: tuple[int, ...]
    sweep_warps: tuple[int, ...]
    check_bits: tuple[float, ...]
    check_size: int
    workers: int
    worker_size: int  # coordinates of each simulated worker
    copy_bytes: int
    batches: int
    batch_seconds: float
    warm_seconds: float
    minutes: float
    instructions_per_coordinate: float
    clock_mhz: float | None
    interpret: bool
    output: str | None


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs all sections; the exit status tells whether one failed or a kernel was wrong."""
    options = parse(arguments)
    if options.interpret:  # compiling is then most of the time
        jax.config.update("jax_disable_most_optimizations", True)
    with without_gpu("interpret") if options.interpret else contextlib.nullcontext():
        bench = Bench(options)
        first, others = options.sizes[0], options.sizes[1:]
        bits, other_bits = options.bits[:1], options.bits[1:]
        bench.section("device", measure_device)
        bench.section("correctness", check_kernels)
        bench.section("main", functools.partial(measure_kernels, sizes=(first,), bits=bits))
        bench.section("prediction", predict)
        bench.section("sweep", sweep)
        bench.section("all_reduce", simulate_all_reduce)
        bench.section("bits", functools.partial(measure_kernels, sizes=(first,), bits=other_bits))
        # Size by size: what is left out when time is short is the largest.
        bench.section(
            "sizes", functools.partial(measure_kernels, sizes=others, bits=options.bits_of_sizes)
        )
        bench.section("profiler", profile)
        bench.plot()
    return bench.finish()


def parse(arguments: Sequence[str] | None) -> Options:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--sizes", type=float, nargs="+", default=[128, 16, 1024], help="Mi coordinates")
    add("--bits", type=float, nargs="+", default=[5, 3, 8, 4, 6, 7], help="the first matters most")
    add("--dtypes", nargs="+", default=["float32", "bfloat16"], help="of the gradient")
    add("--rows", type=int, nargs="+", default=[4, 8, 16, 32], help="of the sweep")
    add("--warps", type=int, nargs="+", default=[2, 4, 8], help="of the sweep")
    add("--workers", type=int, default=8, help="of the simulated all-reduce")
    add("--minutes", type=float, default=7.5, help="what does not fit is left out")
    add("--batches", type=int, default=7, help="of calls; the median batch counts")
    add("--instructions-per-coordinate", type=float, default=53, help="of a hop, to predict with")
    add("--clock-mhz", type=float, help="of the multiprocessors; else nvidia-smi's largest")
    add("--small", action="store_true", help="tiny sizes, to try the script")
    add("--interpret", action="store_true", help="without a GPU: slowly, and no time means much")
    add("--output", help="JSON; without it benchmarks/results/gpu_kernels.json (small: none)")
    given = parser.parse_args(arguments)
    # Tiny sizes are no result to keep.
    default = None if given.interpret or given.small else str(common.RESULTS / "gpu_kernels.json")
    small = given.small
    row = SUPER_GROUP_SIZE
    return Options(
        sizes=(64 * row, 48 * row) if small else tuple(int(s * MEBI) for s in given.sizes),
        bits=(5.0, 3.0) if small else tuple(given.bits),
        bits_of_sizes=(5.0,) if small else tuple(given.bits),
        dtypes=tuple(given.dtypes),
        widths=(2, 8) if small else DynamiQ.widths,  # few widths compile faster
        sweep_rows=(8,) if small else tuple(given.rows),
        sweep_warps=(4,) if small else tuple(given.warps),
        check_bits=(5.0,) if small else (5.0, 3.0, 8.0, 12.0),
        # Three ragged chunks: blocks overhang, and rows are padded.
        check_size=100 * row + 7 if small else 4 * MEBI + 7 * row + 7,
        workers=min(given.workers, 4) if small else given.workers,
        worker_size=64 * row if small else 4 * MEBI,
        copy_bytes=MEBI if small else 2 * GIBI,
        batches=2 if small else given.batches,
        batch_seconds=0.0 if small else 0.02,
        warm_seconds=0.0 if small else 0.1,
        minutes=given.minutes,
        instructions_per_coordinate=given.instructions_per_coordinate,
        clock_mhz=given.clock_mhz,
        interpret=given.interpret,
        output=given.output or default,
    )


class Bench:
    """What has been measured, the time that is left, and the file that it goes to."""

    def __init__(self, options: Options):
        self.options = options
        self.path = Path(options.output) if options.output else None
        self.sections: dict[str, dict[str, Any]] = {}
        self.rows: list[Row] = []  # every timed operation
        self.executables: dict[Any, Callable[..., Any]] = {}
        self.longest_case = 0.0
        self._environment = common.environment() | gpu_facts()
        print(" ".join(f"{k}={v}" for k, v in self._environment.items()), flush=True)
        if options.interpret:
            print("INTERPRETED: no time below means anything")

    def section(self, name: str, run: Callable[["Bench", dict[str, Any]], None]) -> None:
        """Runs `run(bench, results)`, which adds to `results` as it goes, and writes the file."""
        started = time.perf_counter()
        results: dict[str, Any] = {}
        section: dict[str, Any] = {"status": "ok", "errors": [], "skipped": [], "results": results}
        self.sections[name] = section
        self._section = section
        print(f"\n== {name}", flush=True)
        with self.guard(name):
            if self.may_start(name):
                run(self, results)
        if section["errors"]:
            section["status"] = "failed"
        elif section["skipped"]:
            section["status"] = "incomplete"
        section["seconds"] = round(time.perf_counter() - started, 2)
        self.write()

    @contextlib.contextmanager
    def guard(self, what: str) -> Iterator[None]:
        """Keeps an error in the record, and goes on."""
        try:
            yield
        except Exception as error:
            self.fail(what, error)

    def fail(self, what: str, error: Exception) -> None:
        """Records an error of the section that runs."""
        lines = traceback.format_exception(error)
        message = f"{type(error).__name__}: {str(error)[:600]}"
        print(f"FAILED {what}: {message}", flush=True)
        self._section["errors"].append(
            {"what": what, "error": message, "traceback": "".join(lines)[-4000:]}
        )

    def skip(self, what: str, why: str) -> None:
        """Records what was left out."""
        print(f"skipped {what}: {why}", flush=True)
        self._section["skipped"].append({"what": what, "why": why})

    def may_start(self, what: str) -> bool:
        """Whether a case as long as the longest so far still fits."""
        left = self.options.minutes * 60 - (time.perf_counter() - _STARTED)
        if left > self.longest_case:
            return True
        self.skip(what, f"{left:.0f} s are left")
        return False

    @contextlib.contextmanager
    def case(self, what: str) -> Iterator[None]:
        """A guarded case, whose duration is remembered."""
        started = time.perf_counter()
        with self.guard(what):
            yield
        self.longest_case = max(self.longest_case, time.perf_counter() - started)

    def compile_all(self, functions: dict[Any, tuple[Callable[..., Any], Sequence[Any]]]) -> None:
        """Compiles what is not yet, on all cores; errors are recorded, and the key stays absent."""
        lowered = {}
        for key, (function, args) in functions.items():
            if key not in self.executables:
                # Traced here: the mode of the kernels is a context variable of this thread.
                with self.guard(f"trace {key}"):
                    lowered[key] = jax.jit(function).lower(*args)
        with ThreadPoolExecutor(max_workers=min(16, os.cpu_count() or 1)) as pool:
            futures = {key: pool.submit(value.compile) for key, value in lowered.items()}
        for key, future in futures.items():
            with self.guard(f"compile {key}"):
                self.executables[key] = future.result()

    def measure(self, key: Any, arg_sets: Sequence[Sequence[Any]]) -> Row | None:
        """Time of an executable, or None and an error on record."""
        if key not in self.executables:
            return None
        with self.guard(f"run {key}"):
            return measure(self.executables[key], arg_sets, self.options)
        return None

    def method(self, bits: float, implementation: str | None = None) -> DynamiQ:
        """The method that is measured."""
        return DynamiQ(bits=bits, widths=self.options.widths, implementation=implementation)

    @property
    def copy_bytes_per_second(self) -> float:
        """Measured in this run."""
        return self.sections["device"]["results"].get("copy_bytes_per_second", math.nan)

    def write(self) -> None:
        """Writes everything so far."""
        if self.path is None:
            return
        record = {
            "environment": self._environment,
            "config": dataclasses.asdict(self.options),
            "timings": "meaningless: interpreted" if self.options.interpret else "device",
            "sections": self.sections,
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(jsonable(record), indent=1) + "\n")
        part.replace(self.path)

    def plot(self) -> None:
        """Draws the results beside the JSON, where matplotlib is there."""
        if self.path is None or importlib.util.find_spec("matplotlib") is None:
            return
        try:
            draw(self, self.path.with_suffix(".png"))
        except Exception as error:
            print(f"no plot: {type(error).__name__}: {error}")

    def finish(self) -> int:
        """Says how it went; 1 if anything failed."""
        seconds = time.perf_counter() - _STARTED
        print(f"\n{seconds:.0f} s; " + ", ".join(f"{n} {s['status']}" for n, s in self.items()))
        for name, section in self.items():
            for error in section["errors"][:3]:
                print(f"  {name}: {error['what']}: {error['error'][:200]}")
        if self.path:
            print(f"Written to {self.path}")
        return int(any(section["errors"] for _, section in self.items()))

    def items(self) -> list[tuple[str, dict[str, Any]]]:
        """Sections by name."""
        return list(self.sections.items())


# Timing.


def measure(
    function: Callable[..., Any], arg_sets: Sequence[Sequence[Any]], options: Options
) -> Row:
    """Median over batches of the time of one of many calls that follow each other on the device."""

    def batch(calls: int) -> float:
        result = None
        start = time.perf_counter()
        for call in range(calls):
            result = function(*arg_sets[call % len(arg_sets)])
        # The device does calls in order: when the last is done, all are.
        jax.block_until_ready(result)
        return time.perf_counter() - start

    limit, calls = most_calls(function), 1
    started = time.perf_counter()
    seconds = batch(calls)
    # Until a batch is long enough, and clocks that fell during compilation have risen.
    while seconds < options.batch_seconds and calls < limit:
        wanted = 1.3 * calls * options.batch_seconds / max(seconds, 1e-9)
        calls = min(limit, 64 * calls, max(2 * calls, math.ceil(wanted)))
        seconds = batch(calls)
    while time.perf_counter() - started < options.warm_seconds:
        batch(calls)
    times = [batch(calls) / calls * 1e6 for _ in range(options.batches)]
    median = statistics_module.median(times)
    return {"us": median, "spread": (max(times) - min(times)) / median, "calls": calls}


def most_calls(function: Callable[..., Any]) -> int:
    """Calls whose results may be alive at once: the host runs ahead of the device."""
    try:
        analysis = function.memory_analysis()  # type: ignore[attr-defined]
        alive = analysis.output_size_in_bytes + analysis.temp_size_in_bytes
    except Exception:  # not every backend has one
        return 16
    return max(2, min(4096, _KEPT_BYTES // max(alive, 1)))


def measure_device(bench: Bench, results: dict[str, Any]) -> None:
    """Copy bandwidth, and what starting a call costs."""
    words = jnp.arange(bench.options.copy_bytes // 4, dtype=jnp.uint32)
    copies: dict[Any, Any] = {
        ("copy", "xor"): (lambda x: x ^ np.uint32(1), [words]),
        ("copy", "jnp.copy"): (jnp.copy, [words]),
        ("launch", "tiny"): (lambda x: x + np.uint32(1), [words[:8]]),
    }
    bench.compile_all(copies)
    for key, (_, args) in copies.items():
        timing = bench.measure(key, [args])
        if timing is None:
            continue
        if key[0] == "launch":
            results["launch_us"] = timing["us"]
            continue
        speed = 2 * words.nbytes / timing["us"] * 1e6
        results[key[1]] = timing | {"bytes_per_second": speed}
        results["copy_bytes_per_second"] = max(speed, results.get("copy_bytes_per_second", 0))
    print(
        f"copy of {words.nbytes / GIBI:g} GiB: {bench.copy_bytes_per_second / 1e9:.0f} GB/s read "
        f"and written; starting a call: {results.get('launch_us', math.nan):.1f} us"
    )


# Data.


@functools.partial(jax.jit, static_argnames=("size", "dtype"))
def make_gradient(row_key: Array, key: Array, *, size: int, dtype: str) -> Array:
    """Normal values whose super-groups differ in norm by factors of 2^2.5, as a model's do. Workers
    share `row_key`.
    """
    rows = -(-size // SUPER_GROUP_SIZE)
    magnitudes = jnp.exp2(np.float32(2.5) * jax.random.normal(row_key, (rows, 1)))
    values = magnitudes * jax.random.normal(key, (rows, SUPER_GROUP_SIZE))
    return values.reshape(-1)[:size].astype(dtype)


def key_of(*numbers: int) -> Array:
    key = jax.random.key(7)
    for number in numbers:
        key = jax.random.fold_in(key, number)
    return key


def vnmse(estimate: Any, truth: np.ndarray) -> float:
    """In float64, on the host."""
    difference = np.asarray(estimate, np.float64).reshape(-1) - truth.reshape(-1)
    return float(np.sum(difference**2) / np.sum(truth**2))


# Operations.


def kernel_jobs(layout: Layout) -> dict[JobKey, Job]:
    """The four kernels of every backend, and the sort that no backend has of its own."""
    jobs: dict[JobKey, Job] = {
        ("order", "xla"): (lambda norms: order_rows(bfloat16_bits(norms), layout), ("norms",))
    }
    inputs = {
        "statistics": ("rows",),
        "compress": ("rows", "order", "chunk", "zero", "seed"),
        "hop": ("payload", "rows", "order", "chunk", "hop", "seed"),
        "decompress": ("payload", "order"),
    }
    for implementation in IMPLEMENTATIONS:
        functions: dict[str, Callable[..., Any]] = {
            "statistics": functools.partial(statistics, implementation=implementation),
            "compress": functools.partial(compress, layout=layout, implementation=implementation),
            "hop": functools.partial(hop, layout=layout, implementation=implementation),
            "decompress": functools.partial(
                decompress, layout=layout, implementation=implementation
            ),
        }
        for name, function in functions.items():
            jobs[name, implementation] = function, inputs[name]
    return jobs


def int8_codec() -> tuple[int, Callable[..., Any], Callable[..., Any]]:
    """Blocks of 128 under a float32 scale, to nearest: what one would write in ten lines."""

    def encode(blocks: Array) -> tuple[Array, Array]:
        scale = jnp.max(jnp.abs(blocks), axis=1, keepdims=True) * np.float32(1 / 127)
        inverse = jnp.where(scale > 0, 1 / scale, np.float32(0))
        return jnp.round(blocks * inverse).astype(jnp.int8), scale

    def decode(codes: Array, scale: Array) -> Array:
        return codes.astype(jnp.float32) * scale

    return 128, encode, decode


def mxfp8_codec() -> tuple[int, Callable[..., Any], Callable[..., Any]]:
    """Blocks of 32 under a power of two, elements of E4M3: the casts of OCP microscaling."""
    largest = np.float32(448)

    def power(exponent: Array) -> Array:
        return lax.bitcast_convert_type(exponent << np.uint32(23), jnp.float32)

    def encode(blocks: Array) -> tuple[Array, Array]:
        bits = lax.bitcast_convert_type(jnp.max(jnp.abs(blocks), axis=1, keepdims=True), jnp.uint32)
        # floor(log2 amax) - 8, biased by 127, is the scale's byte.
        exponent = jnp.maximum(bits >> np.uint32(23), np.uint32(9)) - np.uint32(8)
        scaled = blocks * power(np.uint32(254) - exponent)
        codes = jnp.clip(scaled, -largest, largest).astype(jnp.float8_e4m3fn)
        return codes, exponent.astype(jnp.uint8)

    def decode(codes: Array, exponent: Array) -> Array:
        return codes.astype(jnp.float32) * power(exponent.astype(jnp.uint32))

    return 32, encode, decode


PLAIN_CODECS = {"int8": int8_codec, "mxfp8": mxfp8_codec}
PLAIN_WIRE_BYTES = {"int8": 1 + 4 / 128, "mxfp8": 1 + 1 / 32}  # of a coordinate


def plain_jobs() -> dict[JobKey, Job]:
    """Compress, hop and decompress of the codecs in plain jnp."""
    jobs: dict[JobKey, Job] = {}
    for name, make in PLAIN_CODECS.items():
        jobs |= _plain_jobs(name, *make())
    return jobs


def _plain_jobs(
    name: str, block: int, encode: Callable[..., Any], decode: Callable[..., Any]
) -> dict[JobKey, Job]:
    def blocks(rows: Array) -> Array:
        return rows.reshape(-1, block).astype(jnp.float32)

    parts = (f"{name} codes", f"{name} scale")
    return {
        ("compress", name): (lambda rows: encode(blocks(rows)), ("rows",)),
        ("hop", name): (lambda c, s, rows: encode(decode(c, s) + blocks(rows)), (*parts, "rows")),
        ("decompress", name): (decode, parts),
    }


def floor_bytes(operation: str, implementation: str, layout: Layout, dtype: str) -> float:
    """Bytes that a coordinate has to move at least: every input read and output written once."""
    local = jnp.dtype(dtype).itemsize
    if implementation in PLAIN_CODECS:
        wire, places = PLAIN_WIRE_BYTES[implementation], 0.0
    else:
        wire = layout.payload_bytes / (layout.rows_per_chunk * SUPER_GROUP_SIZE)
        places = 4 / SUPER_GROUP_SIZE
    return {
        "statistics": local + 8 / SUPER_GROUP_SIZE,
        "order": 8 / SUPER_GROUP_SIZE,
        "compress": local + wire + places,
        "hop": local + 2 * wire + places,
        "decompress": wire + 4 + places,
    }[operation]


def input_shapes(layout: Layout, dtype: str) -> Inputs:
    """Shapes of all inputs by name."""
    shape = jax.ShapeDtypeStruct
    rows, places = layout.num_rows, (layout.num_chunks, layout.rows_per_chunk)
    shapes = {
        "rows": shape((rows, SUPER_GROUP_SIZE), jnp.dtype(dtype)),
        "norms": shape((rows,), jnp.float32),
        "order": shape(places, jnp.int32),
        "payload": shape((1, layout.payload_bytes), jnp.uint8),
        "seed": shape((2,), jnp.uint32),
    }
    shapes |= {name: shape((), jnp.int32) for name in ("chunk", "zero", "hop")}
    for (operation, name), (function, _) in plain_jobs().items():
        if operation == "compress":
            codes, scale = jax.eval_shape(function, shapes["rows"])
            shapes |= {f"{name} codes": codes, f"{name} scale": scale}
    return shapes


def make_inputs(bench: Bench, keys: dict[JobKey, Any], layout: Layout, dtype: str) -> list[Inputs]:
    """As many sets of inputs as it takes to leave the cache. Made on the device."""
    run = bench.executables
    count = math.ceil(_CACHE_BYTES / (layout.size * jnp.dtype(dtype).itemsize))
    sets = []
    for index in range(min(count, 8, 2 if bench.options.interpret else 8)):
        row_key = key_of(layout.size, index)
        local, other = (
            make_gradient(row_key, key_of(index, worker), size=layout.size, dtype=dtype).reshape(
                -1, SUPER_GROUP_SIZE
            )
            for worker in range(2)
        )
        inputs: Inputs = {
            "rows": local,
            "seed": jnp.array([1, 2 + index], jnp.uint32),
            "chunk": jnp.int32(0),
            "zero": jnp.int32(0),
            "hop": jnp.int32(1),
        }
        inputs["norms"] = run[keys["statistics", "xla"]](local)[0]
        inputs["order"] = run[keys["order", "xla"]](inputs["norms"])
        # The neighbour's message: whichever backend compiled can write it.
        compressor = next(
            run[keys["compress", name]] for name in IMPLEMENTATIONS if keys["compress", name] in run
        )
        names = ("order", "chunk", "zero", "seed")
        inputs["payload"] = compressor(other, *(inputs[name] for name in names))[None]
        for name in PLAIN_CODECS:
            if keys.get(("compress", name)) in run:
                codes, scale = run[keys["compress", name]](other)
                inputs |= {f"{name} codes": codes, f"{name} scale": scale}
        sets.append(inputs)
    return sets


# Sections.


def measure_kernels(
    bench: Bench, results: dict[str, Any], *, sizes: Sequence[int], bits: Sequence[float]
) -> None:
    """Every operation of every backend at sizes, bits and dtypes."""
    results["rows"] = rows = []
    print(_TITLE)
    for size in sizes:
        for one_bits in bits:
            for dtype in bench.options.dtypes:
                label = f"{size} {dtype} {one_bits:g} bits"
                if bench.may_start(label):
                    with bench.case(label):
                        rows += measure_case(bench, size, dtype, one_bits)
                    bench.write()


def case_keys(
    layout: Layout, dtype: str, bits: float
) -> tuple[dict[JobKey, Job], dict[JobKey, Any]]:
    """Jobs of a case, and the names of their executables; those that bits do not change share one
    among all bits.
    """
    jobs = kernel_jobs(layout) | plain_jobs()
    keys = {}
    for operation, name in jobs:
        fixed = operation == "statistics" or name in PLAIN_CODECS
        keys[operation, name] = (operation, name, layout.size, dtype, None if fixed else bits)
    return jobs, keys


def measure_case(bench: Bench, size: int, dtype: str, bits: float) -> list[Row]:
    layout = bench.method(bits).layout(size, num_chunks=1)
    jobs, keys = case_keys(layout, dtype, bits)
    shapes = input_shapes(layout, dtype)
    bench.compile_all(
        {keys[job]: (f, [shapes[name] for name in names]) for job, (f, names) in jobs.items()}
    )
    sets = make_inputs(bench, keys, layout, dtype)
    known = {row["key"]: row for row in bench.rows}
    rows: list[Row] = []
    for (operation, implementation), (_, names) in jobs.items():
        key = keys[operation, implementation]
        if str(key) in known:
            continue
        timing = bench.measure(key, [[inputs[name] for name in names] for inputs in sets])
        if timing is None:
            continue
        moved = floor_bytes(operation, implementation, layout, dtype)
        speed = moved * size / timing["us"] * 1e6
        rows.append(
            {
                "key": str(key),
                "dtype": dtype,
                "size": size,
                "bits": key[-1],
                "operation": operation,
                "implementation": implementation,
                **timing,
                "input_sets": len(sets),
                "short": timing["us"] < _SHORT_US,
                "ps_per_coordinate": timing["us"] / size * 1e6,
                "bytes_per_coordinate": moved,
                "gigabytes_per_second": speed / 1e9,
                "fraction_of_copy": speed / bench.copy_bytes_per_second,
            }
        )
    bench.rows += rows
    add_ratios(bench, rows)
    # The alternatives once; elsewhere they are the ratios.
    first = (size, bits) == (bench.options.sizes[0], bench.options.bits[0])
    print_rows([row for row in rows if first or row["implementation"] == "triton"])
    return rows


def add_ratios(bench: Bench, rows: Sequence[Row]) -> None:
    """Times of the alternatives over the kernel's."""
    times = {row["key"]: row["us"] for row in bench.rows}
    for row in rows:
        if row["implementation"] != "triton":
            continue
        operation, size, dtype = row["operation"], row["size"], row["dtype"]
        for name in ("xla", *PLAIN_CODECS):
            bits = None if name in PLAIN_CODECS else row["bits"]
            other = times.get(str((operation, name, size, dtype, bits)))
            row[f"{name}_over_triton"] = other / row["us"] if other else None


_COLUMNS = (
    ("dtype", 9),
    ("Mi", 6),
    ("bits", 4),
    ("operation", 16),
    ("us", 10),
    ("+-%", 4),
    ("ps/co", 8),
    ("B/co", 6),
    ("GB/s", 7),
    ("of copy", 7),
    ("xla/t", 6),
    ("int8/t", 6),
    ("mx/t", 6),
)
_TITLE = " ".join(name.rjust(width) for name, width in _COLUMNS)


def print_rows(rows: Sequence[Row]) -> None:
    """Lines of the table under `_TITLE`."""

    def ratio(row: Row, name: str) -> str:
        value = row.get(f"{name}_over_triton")
        return "" if value is None else f"{value:.2f}"

    for row in rows:
        triton = row["implementation"] == "triton"
        cells = (
            row["dtype"],
            f"{row['size'] / MEBI:.4g}",
            "" if row["bits"] is None else f"{row['bits']:g}",
            row["operation"] + ("" if triton else f" {row['implementation']}"),
            f"{row['us']:.1f}" + ("*" if row["short"] else " "),
            f"{100 * row['spread']:.0f}",
            f"{row['ps_per_coordinate']:.3f}",
            f"{row['bytes_per_coordinate']:.3f}",
            f"{row['gigabytes_per_second']:.0f}",
            f"{row['fraction_of_copy']:.3f}",
            *(ratio(row, name) for name in ("xla", *PLAIN_CODECS)),
        )
        print(" ".join(c.rjust(w) for c, (_, w) in zip(cells, _COLUMNS, strict=True)), flush=True)
    if any(row["short"] for row in rows):
        print(f"* below {_SHORT_US:g} us: starting calls may be what is measured")


def check_kernels(bench: Bench, results: dict[str, Any]) -> None:
    """Every kernel against its XLA twin, and a hop against a float64 sum."""
    for dtype in bench.options.dtypes:
        for bits in bench.options.check_bits:
            label = f"{dtype} {bits:g} bits"
            if not bench.may_start(label):
                continue
            with bench.case(label):
                found = results[label] = check_case(bench, dtype, bits)
                print(
                    f"{label}: "
                    + ", ".join(
                        f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}"
                        for name, value in found.items()
                        if name != "wrong"
                    ),
                    flush=True,
                )
                if found["wrong"]:
                    raise AssertionError(f"{label}: {', '.join(found['wrong'])}")


def check_case(bench: Bench, dtype: str, bits: float) -> dict[str, Any]:
    size, chunks = bench.options.check_size, 3
    layout = bench.method(bits).layout(size, num_chunks=chunks)
    row_key = key_of(3, round(100 * bits))
    flat = [
        make_gradient(row_key, key_of(4, worker, round(100 * bits)), size=size, dtype=dtype)
        for worker in range(2)
    ]
    mine, other = (layout.as_rows(gradient) for gradient in flat)
    seed = jnp.array([5, round(100 * bits)], jnp.uint32)
    order = order_rows(bfloat16_bits(statistics(mine, implementation="xla")[0]), layout)
    indices = [jnp.int32(index) for index in range(chunks)]
    jobs = {name: function for name, (function, _) in kernel_jobs(layout).items()}
    message, messages = (
        jax.ShapeDtypeStruct((count, layout.payload_bytes), jnp.uint8) for count in (1, chunks)
    )
    args = {
        "statistics": [mine],
        "compress": [mine, order, indices[0], indices[0], seed],
        "hop": [message, mine, order, indices[0], indices[0], seed],
        "decompress": [messages, order],
    }

    def key(operation: str, implementation: str) -> tuple:
        fixed = operation == "statistics"
        return ("check", operation, implementation, dtype, None if fixed else bits)

    bench.compile_all({key(*job): (jobs[job], args[job[0]]) for job in jobs if job[0] in KERNELS})

    def call(operation: str, implementation: str, *args: Any) -> Any:
        return bench.executables[key(operation, implementation)](*args)

    def hops(implementation: str, received: Array) -> Array:
        sent = [
            call("hop", implementation, received[c][None], mine, order, c_index, indices[1], seed)
            for c, c_index in enumerate(indices)
        ]
        return jnp.stack(sent)

    def compressed(implementation: str) -> Array:
        return jnp.stack(
            [
                call("compress", implementation, other, order, index, indices[0], seed)
                for index in indices
            ]
        )

    found: dict[str, Any] = {"wrong": []}

    def expect(name: str, value: float, limit: float) -> None:
        found[name] = value
        if not value <= limit:  # NaN is wrong too
            found["wrong"].append(f"{name} is {value:.3g}, above {limit:g}")

    norms, means = zip(
        *(map(host, call("statistics", i, mine)) for i in IMPLEMENTATIONS), strict=True
    )
    truth = np.linalg.norm(host(mine), axis=1)
    nonzero = truth > 0  # padding
    for name, value in zip(IMPLEMENTATIONS, norms, strict=True):
        error = np.abs(value - truth)[nonzero] / truth[nonzero]
        expect(f"norms of {name}", float(np.max(error)), 1e-5)
    error = np.abs(means[0] - means[1])[nonzero] / truth[nonzero]
    expect("means", float(np.max(error)), 1e-5)

    received = {name: compressed(name) for name in IMPLEMENTATIONS}
    expect("bytes differ: compress", differing(*received.values()), 0.01)
    sent = {name: hops(name, received["xla"]) for name in IMPLEMENTATIONS}
    expect("bytes differ: hop", differing(*sent.values()), 0.01)
    # A race, or memory that nothing wrote, shows as bytes that change.
    expect("bytes differ: hop again", differing(hops("triton", received["xla"]), sent["triton"]), 0)
    decoded = {n: host(call("decompress", n, sent["triton"], order)) for n in IMPLEMENTATIONS}
    largest = np.maximum(np.max(np.abs(decoded["xla"]), axis=1, keepdims=True), 1e-30)
    error = np.abs(decoded["triton"] - decoded["xla"]) / largest
    expect("decompress", float(np.max(error)), 1e-6)

    total = host(flat[0]) + host(flat[1])
    errors = {}
    for name in IMPLEMENTATIONS:
        rows = call("decompress", name, hops(name, received[name]), order)
        errors[name] = vnmse(layout.as_flat(rows), total)
        # Four times less for every bit: far above any right answer, far below a wrong one.
        expect(f"vNMSE of {name}", errors[name], 4.0 ** (3 - bits))
    expect("vNMSE apart", abs(errors["triton"] / errors["xla"] - 1), 0.01)
    return found


def host(array: Array) -> np.ndarray:
    return np.asarray(array.astype(jnp.float32)).astype(np.float64)


def differing(first: Array, second: Array) -> float:
    """Share of bytes that differ."""
    return float(np.mean(np.asarray(first) != np.asarray(second)))


def sweep(bench: Bench, results: dict[str, Any]) -> None:
    """The hop for all rows of a block and warps."""
    options = bench.options
    size, bits = options.sizes[0], options.bits[0]
    for dtype in options.dtypes:
        if not bench.may_start(f"sweep {dtype}"):
            continue
        with bench.case(f"sweep {dtype}"):
            found = results[dtype] = sweep_dtype(bench, size, dtype, bits)
            best = min(found, key=lambda row: row["us"], default=None)
            for row in found:
                print(
                    f"{dtype:>9} rows {row['rows']:>2} warps {row['warps']}: {row['us']:9.1f} us, "
                    f"{row['fraction_of_copy']:.3f} of copy" + (" <- best" if row is best else "")
                )


def sweep_dtype(bench: Bench, size: int, dtype: str, bits: float) -> list[Row]:
    options = bench.options
    layout = bench.method(bits).layout(size, num_chunks=1)
    jobs, keys = case_keys(layout, dtype, bits)
    shapes = input_shapes(layout, dtype)
    names = jobs["hop", "triton"][1]
    needed = [("statistics", "xla"), ("order", "xla"), ("compress", "xla"), ("compress", "triton")]
    functions: dict[Any, Any] = {
        keys[job]: (jobs[job][0], [shapes[name] for name in jobs[job][1]]) for job in needed
    }
    configs = [
        LaunchConfig(rows=rows, warps=warps)
        for rows in options.sweep_rows
        for warps in options.sweep_warps
    ]
    for config in configs:
        function = functools.partial(triton_hop, layout=layout, config=config)
        key = ("sweep", config.rows, config.warps, size, dtype, bits)
        functions[key] = function, [shapes[name] for name in names]
    bench.compile_all(functions)
    sets = make_inputs(bench, keys, layout, dtype)
    moved = floor_bytes("hop", "triton", layout, dtype) * size
    found = []
    for config in configs:
        key = ("sweep", config.rows, config.warps, size, dtype, bits)
        timing = bench.measure(key, [[inputs[name] for name in names] for inputs in sets])
        if timing is not None:
            fraction = moved / timing["us"] * 1e6 / bench.copy_bytes_per_second
            found.append(dataclasses.asdict(config) | timing | {"fraction_of_copy": fraction})
    return found


def simulate_all_reduce(bench: Bench, results: dict[str, Any]) -> None:
    """The error of a whole all-reduce among workers simulated on one device."""
    options = bench.options
    workers, size, dtype = options.workers, options.worker_size, options.dtypes[0]
    gradients = jnp.stack(
        [make_gradient(key_of(8), key_of(9, w), size=size, dtype=dtype) for w in range(workers)]
    )
    total = np.sum(host(gradients), axis=0)
    errors: dict[str, float] = {}
    for name in IMPLEMENTATIONS:
        method = bench.method(options.bits[0], name)
        how = "vmap"
        try:
            reduced = all_reduce_by_vmap(bench, method, gradients)
        except Exception as error:
            # Whether a kernel can be mapped is the backend's affair, not this benchmark's.
            results[f"no vmap of {name}"] = f"{type(error).__name__}: {str(error)[:500]}"
            how = "by hand"
            reduced = ring_by_hand(method, gradients)[None]
        errors[name] = vnmse(reduced[0], total)
        same = bool(jnp.all(reduced == reduced[:1]))
        results[name] = {"how": how, "vnmse": errors[name], "replicas_are_equal": same}
        key = ("all_reduce", name)
        if key in bench.executables:
            results[name] |= bench.measure(key, [[gradients]]) or {}
        print(f"{workers} workers, {size} coordinates, {name}: {results[name]}", flush=True)
        if not same:
            raise AssertionError(f"{name}: replicas differ")
    apart = abs(errors["triton"] / errors["xla"] - 1)
    results["vnmse_apart"] = apart
    if not apart <= 0.01:
        raise AssertionError(f"vNMSE of triton and xla are {apart:.3g} apart")


def all_reduce_by_vmap(bench: Bench, method: DynamiQ, gradients: Array) -> Array:
    """What a user runs, mapped over workers: float [workers, size]."""

    def reduce(gradient: Array) -> Array:
        key = jax.random.key(11)
        return psum(gradient, "data", key=key, method=method, exact_below=1)

    mapped = jax.jit(jax.vmap(reduce, axis_name="data"))
    executable = mapped.lower(gradients).compile()
    result = jax.block_until_ready(executable(gradients))
    bench.executables["all_reduce", method.implementation] = executable
    return result


def ring_by_hand(method: DynamiQ, gradients: Array) -> Array:
    """The ring, one call after the other: float [size]."""
    workers, size = gradients.shape
    name, layout = method.implementation, method.layout(size, workers)
    compress_one = jax.jit(functools.partial(compress, layout=layout, implementation=name))
    hop_one = jax.jit(functools.partial(hop, layout=layout, implementation=name))
    rows = [layout.as_rows(gradient) for gradient in gradients]
    norms = jnp.stack([statistics(r, implementation=name)[0] for r in rows])
    order = order_rows(bfloat16_bits(l2_norm(norms, axis=0)), layout)
    seed = jnp.array([3, 4], jnp.uint32)
    final = []
    for chunk in range(workers):
        index = jnp.int32(chunk)
        payload = compress_one(rows[(chunk + 1) % workers], order, index, jnp.int32(0), seed)
        for number in range(1, workers):
            local = rows[(chunk + 1 + number) % workers]
            payload = hop_one(payload[None], local, order, index, jnp.int32(number), seed)
        final.append(payload)
    return layout.as_flat(
        decompress(jnp.stack(final), order, layout=layout, implementation=name)
    ).astype(gradients.dtype)


def predict(bench: Bench, results: dict[str, Any]) -> None:
    """Paper first: what bytes and instructions would take, beside what was measured."""
    options = bench.options
    size, bits = options.sizes[0], options.bits[0]
    layout = bench.method(bits).layout(size, num_chunks=1)
    device = jax.devices()[0]
    multiprocessors = getattr(device, "core_count", None) or 132
    clock = options.clock_mhz or bench._environment.get("clock_max_mhz") or 1980.0
    # Four schedulers start one instruction of a warp of 32 threads each clock.
    lanes_per_second = multiprocessors * 4 * 32 * clock * 1e6
    results |= {"multiprocessors": multiprocessors, "clock_mhz": clock}
    print(f"{multiprocessors} multiprocessors, {clock:g} MHz; {bits:g} bits; ps per coordinate")
    for dtype in options.dtypes:
        for operation in KERNELS:
            moved = floor_bytes(operation, "triton", layout, dtype)
            times = {"memory": moved / bench.copy_bytes_per_second * 1e12}
            if operation == "hop":  # the one whose instructions are counted
                times["issue"] = options.instructions_per_coordinate / lanes_per_second * 1e12
            bound = max(times, key=lambda name: times[name])
            measured = next(
                (
                    row["ps_per_coordinate"]
                    for row in bench.rows
                    if (row["operation"], row["implementation"]) == (operation, "triton")
                    and (row["dtype"], row["size"]) == (dtype, size)
                ),
                math.nan,
            )
            results[f"{dtype} {operation}"] = {
                "bytes": moved,
                "ps": times,
                "bound": bound,
                "measured_ps": measured,
                "measured_over_predicted": measured / times[bound],
            }
            if operation == "hop":
                # What the measured time would hold if nothing but starting instructions took it.
                slots = measured * 1e-12 * lanes_per_second
                results[f"{dtype} {operation}"]["issue_slots_in_measured_time"] = slots
            print(
                f"{dtype:>9} {operation:<10} {moved:.3f} B: "
                + ", ".join(f"{name} {ps:.2f}" for name, ps in times.items())
                + f" -> {bound}; measured {measured:.2f} = {measured / times[bound]:.2f} x"
            )


def profile(bench: Bench, results: dict[str, Any]) -> None:
    """What CUPTI says of single calls: the kernels that an operation starts, and their own times,
    without the host. Last, because a machine may not allow it. One set of inputs, which a cache may
    hold if it is small.
    """
    if jax.default_backend() != "gpu":
        results["note"] = "no GPU to profile"
        return
    from jax.experimental.mosaic.gpu import profiler  # in CUDA builds of JAX only

    options = bench.options
    bits = options.bits[0]
    for size in options.sizes[:2]:
        for dtype in options.dtypes:
            layout = bench.method(bits).layout(size, num_chunks=1)
            jobs, keys = case_keys(layout, dtype, bits)
            label = f"{dtype} {size / MEBI:g} Mi {bits:g} bits"
            if keys["hop", "triton"] not in bench.executables or not bench.may_start(label):
                continue
            inputs = make_inputs(bench, keys, layout, dtype)[0]
            for job, (_, names) in jobs.items():
                if keys[job] not in bench.executables:
                    continue
                measured = profiler.measure(
                    bench.executables[keys[job]], aggregate=False, iterations=5
                )
                try:
                    calls = measured(*(inputs[name] for name in names))[1]
                    kernels = summarize_kernels(calls)
                except Exception as error:  # many machines do not let a user profile
                    bench.skip("profiler", f"{type(error).__name__}: {str(error)[:500]}")
                    return
                total = sum(us for _, us in kernels)
                results[f"{label} {' '.join(job)}"] = {"us": total, "kernels": kernels}
                if job[1] == "triton":
                    shown = ", ".join(f"{name[:32]} {us:.1f}" for name, us in kernels[:4])
                    print(f"{label} {job[0]}: {total:.1f} us: {shown}", flush=True)


def summarize_kernels(iterations: Any) -> list[tuple[str, float]]:
    """Median microseconds of every kernel of a call, from the profiler's [(name, ms)] of calls."""
    names = [name for name, _ in iterations[0]]
    return [
        (name, 1e3 * statistics_module.median(call[index][1] for call in iterations))
        for index, name in enumerate(names)
    ]


# The machine and the file.


def gpu_facts() -> dict[str, Any]:
    """What nvidia-smi says, if it is there; it is only asked."""
    fields = ("name", "driver_version", "clocks.max.sm", "memory.total", "power.limit")
    if jax.default_backend() != "gpu" or shutil.which("nvidia-smi") is None:
        return {}
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        values = [value.strip() for value in answer.stdout.splitlines()[0].split(",")]
        facts: dict[str, Any] = dict(zip(("gpu", "driver"), values, strict=False))
        facts |= {"memory_mib": values[3], "power_limit_w": values[4]}
        facts["clock_max_mhz"] = float(values[2])
    except (OSError, subprocess.SubprocessError, IndexError, ValueError):
        return {}
    return facts


def jsonable(value: Any) -> Any:
    """JSON has no NaN."""
    if isinstance(value, dict):
        return {key: jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def draw(bench: Bench, path: Path) -> None:
    """Time of a hop by bits, and the share of copy bandwidth by size."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    options = bench.options
    triton = [row for row in bench.rows if row["implementation"] == "triton"]
    if not triton:
        return
    figure, axes = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    size = options.sizes[0]
    for number, dtype in enumerate(options.dtypes):
        for name, style in {"triton": "-o", "xla": "--s"}.items():
            points = sorted(
                (row["bits"], row["ps_per_coordinate"])
                for row in bench.rows
                if (row["operation"], row["implementation"]) == ("hop", name)
                and (row["dtype"], row["size"]) == (dtype, size)
            )
            if points:
                axes[0].plot(
                    *zip(*points, strict=True), style, color=f"C{number}", label=f"{name}, {dtype}"
                )
        floor = sorted(
            (row["bits"], row["bytes_per_coordinate"] / bench.copy_bytes_per_second * 1e12)
            for row in triton
            if (row["operation"], row["dtype"], row["size"]) == ("hop", dtype, size)
        )
        if floor:
            axes[0].plot(
                *zip(*floor, strict=True), ":", color=f"C{number}", label=f"its bytes, {dtype}"
            )
        for operation, marker in zip(KERNELS, "osv^", strict=True):
            points = sorted(
                (row["size"] / MEBI, row["fraction_of_copy"])
                for row in triton
                if (row["operation"], row["dtype"]) == (operation, dtype)
                and row["bits"] in (None, options.bits[0])
            )
            label = f"{operation}, {dtype}"
            axes[1].plot(*zip(*points, strict=True), f"-{marker}", color=f"C{number}", label=label)
    axes[0].set(xlabel="bits", ylabel="ps per coordinate", yscale="log")
    axes[0].set_title(f"hop, {size / MEBI:g} Mi coordinates")
    axes[1].set(xlabel="Mi coordinates", xscale="log", ylim=(0, None))
    axes[1].set_title(f"bandwidth over that of a copy, {options.bits[0]:g} bits")
    for axis in axes:
        axis.legend(fontsize=7)
    figure.savefig(path, dpi=150)
    plt.close(figure)


if __name__ == "__main__":
    sys.exit(main())
