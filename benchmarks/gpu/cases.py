"""A bucket of one size and dtype at some bits: the programs and inputs of all jobs on it."""

import functools
import math
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.error.plain_codecs import PLAIN_CODECS
from benchmarks.gpu.bench import GpuBench, Program
from benchmarks.gpu.jobs import JobName, implementations, kernel_jobs, plain_jobs, program_key
from benchmarks.harness.device_gradients import device_gradient
from pallas_kernels.codec import SUPER_GROUP_SIZE, LocalRows

_CACHE_BYTES = 256 * 2**20  # several times the L2 of any GPU: inputs rotate through at least this

Inputs = dict[str, Any]  # arrays by name


class GpuCase:
    """One chunk on one device: a step of a ring is the same for every chunk."""

    def __init__(self, bench: GpuBench, size: int, dtype: str, bits: float):
        self.size, self.dtype, self.bits = size, dtype, bits
        self.layout = bench.options.method(bits).layout(size, num_chunks=1)
        self.jobs = kernel_jobs(self.layout) | plain_jobs()
        self._bench = bench

    def key(self, job: JobName) -> tuple:
        """Return the key of the job's executable."""
        return program_key(*job, self.size, self.dtype, self.bits)

    def programs(self, jobs: Iterable[JobName]) -> dict[Any, Program]:
        """Return the programs of jobs by their keys."""
        return {
            self.key(job): (self.jobs[job].function, self.arguments(job, self.shapes))
            for job in jobs
        }

    def arguments(self, job: JobName, inputs: Inputs) -> list[Any]:
        """Return those of the inputs that the job takes."""
        return [inputs[name] for name in self.jobs[job].inputs]

    def arg_sets(self, job: JobName, sets: Iterable[Inputs]) -> list[list[Any]]:
        """Return the job's arguments from every set of inputs."""
        return [self.arguments(job, inputs) for inputs in sets]

    @functools.cached_property
    def shapes(self) -> Inputs:
        """Shapes of all inputs."""
        shape, layout = jax.ShapeDtypeStruct, self.layout
        rows = shape((layout.num_rows, SUPER_GROUP_SIZE), jnp.dtype(self.dtype))
        norms = shape((layout.num_rows,), jnp.float32)
        places = jax.eval_shape(self.jobs["places", "xla"].function, norms)
        shapes = {
            "rows": rows,
            "norms": norms,
            "places": places,
            "local": LocalRows(rows, places, shape((2,), jnp.uint32)),
            "payload": shape((1, layout.payload_bytes), jnp.uint8),
        }
        shapes |= {name: shape((), jnp.int32) for name in ("chunk", "first turn", "second turn")}
        for name in PLAIN_CODECS:
            message = jax.eval_shape(self.jobs["compress", name].function, rows)
            shapes[f"{name} codes"], shapes[f"{name} scale"] = message
        return shapes

    def make_inputs(self) -> list[Inputs]:
        """Make as many sets of inputs as it takes to leave the cache, by what is compiled: the
        statistics and the places of XLA, and one `compress` at least.
        """
        count = math.ceil(_CACHE_BYTES / (self.size * jnp.dtype(self.dtype).itemsize))
        most = 2 if self._bench.options.interpret else 8
        return [self._inputs(index) for index in range(min(count, most))]

    def _inputs(self, index: int) -> Inputs:
        run = self._bench.executables
        mine, other = (
            device_gradient(worker, self.size, index, self.dtype).reshape(-1, SUPER_GROUP_SIZE)
            for worker in range(2)
        )
        norms = run[self.key(("statistics", "xla"))](mine)
        places = run[self.key(("places", "xla"))](norms)
        local = LocalRows(mine, places, jnp.array([1, 2 + index], jnp.uint32))
        inputs: Inputs = {
            "rows": mine,
            "norms": norms,
            "places": places,
            "local": local,
            "chunk": jnp.int32(0),
            "first turn": jnp.int32(0),
            "second turn": jnp.int32(1),
        }
        # The neighbor's messages, of whichever backend compiled.
        theirs = inputs | {"local": local._replace(rows=other)}
        compressors = [("compress", name) for name in implementations()]
        compressor = next(job for job in compressors if self.key(job) in run)
        inputs["payload"] = run[self.key(compressor)](*self.arguments(compressor, theirs))[None]
        for name in PLAIN_CODECS:
            key = self.key(("compress", name))
            if key in run:
                inputs[f"{name} codes"], inputs[f"{name} scale"] = run[key](other)
        return inputs
