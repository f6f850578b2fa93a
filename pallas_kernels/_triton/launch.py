"""Programs of a Triton kernel, and how it is started."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from jax import Array
from jax.experimental import pallas as pl

from pallas_kernels import implementation


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Rows of one program, and the warps that share them: the same for all shapes.

    16 rows on 4 warps give every thread four lanes of each of the eight pieces of a row: 128 bytes
    of a float32 gradient in flight.
    """

    rows: int = 16
    warps: int = 4

    def __post_init__(self):
        for name in ("rows", "warps"):
            value = getattr(self, name)
            if value < 1 or value & (value - 1):
                raise ValueError(f"{name}={value!r} is not a power of two. Give one.")

    def programs(self, rows: int) -> int:
        """Return how many programs cover `rows` rows; the last one may overhang."""
        return -(-rows // self.rows)


def launch(
    kernel: Callable,
    grid: tuple[int, ...],
    config: Config,
    operands: Sequence[Array],
    out_shape: Any,
) -> Any:
    """Run `kernel(*refs)` on a grid. All refs are whole arrays in memory."""
    # A deprecated backend: imported here, so that its removal breaks nothing else.
    from jax.experimental.pallas import triton

    return pl.pallas_call(
        kernel,
        out_shape=out_shape,
        grid=grid,
        interpret=implementation.interpreting(),
        compiler_params=triton.CompilerParams(num_warps=config.warps, num_stages=1),
    )(*operands)
