"""Launch of a kernel, and the arguments that all kernels share."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import modes
from pallas_kernels._mosaic_tpu.vectors import I32
from pallas_kernels.codec import Index, Places

IN_MEMORY = pl.BlockSpec(memory_space=pl.ANY)
IN_VECTOR_MEMORY = pl.BlockSpec(memory_space=pltpu.VMEM)
AS_SCALARS = None  # int32, read one by one
Operand = tuple[Array, pl.BlockSpec | None]
Result = tuple[jax.ShapeDtypeStruct, pl.BlockSpec]
_ROOM = 8 * 2**20  # bytes of vector memory for spills and what is not listed


def scalars(chunk: Index, turn: Index, seed: Array, places: Places) -> list[Operand]:
    """Return the chunk, the turn, the seed and the starts of all planes, as int32 scalars.

    An array of all of them would take an operation of its own.
    """
    small = [jnp.asarray(value).astype(I32).reshape(1) for value in (chunk, turn)]
    words = lax.bitcast_convert_type(jnp.asarray(seed), I32)
    return [(array, AS_SCALARS) for array in (*small, words, places.starts.reshape(-1))]


def launch(
    kernel: Callable,
    steps: int,
    operands: Sequence[Operand],
    results: Sequence[Result],
    scratch: Sequence[Any],
    name: str,
) -> list[Array]:
    """Run `kernel(step, *refs)` for all steps, one after the other.

    The refs are those of operands, results and scratch memory, in this order. Scalars come first
    among the operands, as other specs may depend on them.
    """
    arrays, specs = zip(*operands, strict=True)
    used = sum(_bytes(memory.shape, memory) for memory in scratch if hasattr(memory, "shape"))
    # A block of an operand is there twice: while one is used, the next one arrives.
    used += sum(
        2 * _bytes(spec.block_shape, array)
        for array, spec in operands
        if spec is not None and spec.block_shape is not None
    )
    return pl.pallas_call(
        lambda *refs: kernel(pl.program_id(0), *refs),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=specs.count(AS_SCALARS),
            grid=(steps,),
            in_specs=[spec for spec in specs if spec is not AS_SCALARS],
            out_specs=[spec for _, spec in results],
            scratch_shapes=list(scratch),
        ),
        out_shape=[shape for shape, _ in results],
        name=name,
        interpret=pltpu.InterpretParams() if modes.interpreting() else False,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",),
            disable_bounds_checks=True,
            vmem_limit_bytes=_ROOM + used,
        ),
    )(*arrays)


def _bytes(shape: Sequence[Any], array: Any) -> int:
    return math.prod(shape) * jnp.dtype(array.dtype).itemsize
