"""How a Triton kernel is cut into programs and started."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from jax import Array
from jax.experimental import pallas as pl

from pallas_kernels import implementation


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Rows of one program and warps that share them: the same for all shapes.

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
        """Programs that cover `rows` rows, the last of which may overhang."""
        return -(-rows // self.rows)


def launch(
    kernel: Callable,
    grid: tuple[int, ...],
    config: Config,
    operands: Sequence[Array],
    out_shape: Any,
) -> Any:
    """Runs `kernel(*refs)` on a grid. All refs are whole arrays in memory."""
    # A backend that will go: imported here, so that its removal takes nothing else with it.
    from jax.experimental.pallas import triton

    return pl.pallas_call(
        kernel,
        out_shape=out_shape,
        grid=grid,
        interpret=implementation.interpreting(),
        compiler_params=triton.CompilerParams(num_warps=config.warps, num_stages=1),
    )(*operands)
