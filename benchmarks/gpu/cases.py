"""A bucket of one size and dtype at some bits: the programs and inputs of all operations on it."""

import functools
import math
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from benchmarks.gpu.baselines import PLAIN_CODECS
from benchmarks.gpu.bench import Bench, Program
from benchmarks.gpu.gradients import key_of, make_gradient
from benchmarks.gpu.operations import IMPLEMENTATIONS, JobName, kernel_jobs, plain_jobs, program_key
from pallas_kernels.codec.packing import SUPER_GROUP_SIZE

_CACHE_BYTES = 256 * 2**20  # several times the L2 of any GPU: inputs rotate through at least this

Inputs = dict[str, Any]  # arrays by name


class Case:
    """One chunk on one device: a step of a ring is the same for every chunk."""

    def __init__(self, bench: Bench, size: int, dtype: str, bits: float):
        self.size, self.dtype, self.bits = size, dtype, bits
        self.layout = bench.options.method(bits).layout(size, num_chunks=1)
        self.jobs = kernel_jobs(self.layout) | plain_jobs()
        self._bench = bench

    def key(self, job: JobName) -> tuple:
        """Key of the job's executable."""
        return program_key(*job, self.size, self.dtype, self.bits)

    def programs(self, jobs: Iterable[JobName]) -> dict[Any, Program]:
        """What is to be compiled for jobs, by key."""
        return {
            self.key(job): (self.jobs[job].function, self.arguments(job, self.shapes))
            for job in jobs
        }

    def arguments(self, job: JobName, inputs: Inputs) -> list[Any]:
        """Those of the inputs that the job takes."""
        return [inputs[name] for name in self.jobs[job].inputs]

    def arg_sets(self, job: JobName, sets: Iterable[Inputs]) -> list[list[Any]]:
        """The job's arguments from every set of inputs."""
        return [self.arguments(job, inputs) for inputs in sets]

    @functools.cached_property
    def shapes(self) -> Inputs:
        """Shapes of all inputs."""
        shape, layout = jax.ShapeDtypeStruct, self.layout
        shapes = {
            "rows": shape((layout.num_rows, SUPER_GROUP_SIZE), jnp.dtype(self.dtype)),
            "norms": shape((layout.num_rows,), jnp.float32),
            "order": shape((layout.num_chunks, layout.rows_per_chunk), jnp.int32),
            "payload": shape((1, layout.payload_bytes), jnp.uint8),
            "seed": shape((2,), jnp.uint32),
        }
        shapes |= {name: shape((), jnp.int32) for name in ("chunk", "zero", "hop")}
        for name in PLAIN_CODECS:
            message = jax.eval_shape(self.jobs["compress", name].function, shapes["rows"])
            shapes[f"{name} codes"], shapes[f"{name} scale"] = message
        return shapes

    def make_inputs(self) -> list[Inputs]:
        """As many sets of inputs as it takes to leave the cache. Made on the device, by what is
        compiled: with the statistics and the order of XLA, and one `compress` at least.
        """
        count = math.ceil(_CACHE_BYTES / (self.size * jnp.dtype(self.dtype).itemsize))
        most = 2 if self._bench.options.interpret else 8
        return [self._inputs(index) for index in range(min(count, most))]

    def _inputs(self, index: int) -> Inputs:
        run = self._bench.executables
        local, other = (self._rows(index, worker) for worker in range(2))
        inputs: Inputs = {
            "rows": local,
            "seed": jnp.array([1, 2 + index], jnp.uint32),
            "chunk": jnp.int32(0),
            "zero": jnp.int32(0),
            "hop": jnp.int32(1),
        }
        inputs["norms"] = run[self.key(("statistics", "xla"))](local)[0]
        inputs["order"] = run[self.key(("order", "xla"))](inputs["norms"])
        # The neighbour's messages, of whichever backend compiled.
        theirs = inputs | {"rows": other}
        compressor = next(
            job for job in (("compress", name) for name in IMPLEMENTATIONS) if self.key(job) in run
        )
        inputs["payload"] = run[self.key(compressor)](*self.arguments(compressor, theirs))[None]
        for name in PLAIN_CODECS:
            key = self.key(("compress", name))
            if key in run:
                inputs[f"{name} codes"], inputs[f"{name} scale"] = run[key](other)
        return inputs

    def _rows(self, index: int, worker: int) -> Array:
        gradient = make_gradient(
            key_of(self.size, index), key_of(index, worker), size=self.size, dtype=self.dtype
        )
        return gradient.reshape(-1, SUPER_GROUP_SIZE)
