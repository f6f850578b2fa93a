"""Block integers: symmetric, one scale a block. What most systems mean by INT8 and INT4."""

import dataclasses
from typing import Literal, get_args

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from dynamiq_jax.codec.blocks import (
    NAN_BITS,
    BlockFormat,
    covering_step,
    in_blocks,
    step_value,
)
from dynamiq_jax.codec.scales import LARGEST_BITS, group_maxima, reciprocal
from dynamiq_jax.methods.blockwise import BlockwiseMethod

BLOCKS = (32, 64, 128, 256)  # coordinates of a block: rows are whole
_BITS = range(2, 9)
BlockRounding = Literal["nearest", "stochastic"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockInt(BlockwiseMethod):
    """Integers -L .. L, L = 2^(bits - 1) - 1, times one scale a block, coded again at every hop.

    The scale is the smallest normal bfloat16 of which L cover the largest magnitude of the block,
    so nothing saturates. It costs 16 / block bits a coordinate: 8.5 in all at 8 bits and blocks of
    32. Zeros stay zeros. A block that holds NaN, Inf or a magnitude above 2^126 (8.5e37) decodes
    to NaN, all of it; a magnitude below 2^-126 counts as zero.

    Rounding to nearest has half the squared error of stochastic rounding, and a bias that adds up
    where the same small value comes at every step: what is below half a step, 1 / (2 L) of its
    block's largest, is always lost.

    >>> BlockInt(bits=4).block
    32
    >>> BlockInt(bits=9)
    Traceback (most recent call last):
    ...
    ValueError: bits=9 is not possible. Give an integer from 2 to 8.
    """

    bits: int = 8  # of a code, without its share of the scale; one more divides the error by 4
    block: int = 32  # coordinates under one scale of 2 bytes; smaller costs bits, lowers the error
    rounding: BlockRounding = "nearest"  # lowest error, biased; `stochastic` is unbiased

    def __post_init__(self):
        if self.bits not in _BITS:
            raise ValueError(
                f"bits={self.bits!r} is not possible. Give an integer from {_BITS[0]} to "
                f"{_BITS[-1]}."
            )
        if self.block not in BLOCKS:
            raise ValueError(f"block={self.block!r} is not possible. Give one of {BLOCKS}.")
        if self.rounding not in get_args(BlockRounding):
            raise ValueError(
                f"rounding={self.rounding!r} is not known. Give one of {get_args(BlockRounding)}."
            )

    @classmethod
    def qgz(cls) -> "BlockInt":
        """Gradients of ZeRO++, qgZ (arXiv 2306.10209): 4-bit blocks that are exchanged all to all
        and summed in full precision, so that a gradient is coded once before its sum.

        Use it with `topology="all_to_all"`; `dq.psum_scatter` is the paper's collective.
        Differences from the paper: one exchange instead of one inside and one between nodes;
        bfloat16 scales; the block size is ours.
        """
        return cls(bits=4, block=128)

    @classmethod
    def equarx(cls) -> "BlockInt":
        """All-reduce of EQuARX (arXiv 2506.17615): 8-bit blocks with dynamic scales, decoded,
        summed and coded again on the way.

        Use it with `topology="ring"`. Differences from the paper: it is part of XLA's TPU runtime,
        which overlaps coding with transfers; bfloat16 scales; the block size is ours.
        """
        return cls(bits=8, block=128)

    @property
    def format(self) -> BlockFormat:
        """Codes, then bfloat16 scales."""
        return BlockFormat(bits=int(self.bits), block=self.block, side_bytes=(2,))

    @property
    def is_stochastic(self) -> bool:
        """Whether codes depend on the key."""
        return self.rounding == "stochastic"

    def encode_rows(self, rows: Array, noise: Array | None) -> tuple[Array, ...]:
        """See `BlockwiseMethod`. Codes are the integers plus L: 0 to 2 L."""
        maxima = group_maxima(rows, self.block)
        scale_bits = covering_step(lax.bitcast_convert_type(maxima, jnp.float32), self._top)
        scale_bits = jnp.where(maxima <= LARGEST_BITS, scale_bits, NAN_BITS)
        inverse = reciprocal(step_value(scale_bits))
        t = (in_blocks(rows, self.block) * inverse[:, :, None]).reshape(rows.shape)
        whole = jnp.round(t) if noise is None else jnp.floor(t + noise)
        # Noise may lift what the product's rounding put above the top. NaN becomes any code: its
        # block decodes to NaN by its scale.
        top = np.float32(self._top)
        codes = (jnp.clip(whole, -top, top) + top).astype(jnp.int32)
        return codes, scale_bits

    def decode_rows(self, codes: Array, *sides: Array) -> Array:
        """See `BlockwiseMethod`."""
        (scale_bits,) = sides
        whole = (codes.astype(jnp.int32) - np.int32(self._top)).astype(jnp.float32)
        scale = step_value(scale_bits)
        return (in_blocks(whole, self.block) * scale[:, :, None]).reshape(codes.shape)

    @property
    def _top(self) -> int:
        return 2 ** (int(self.bits) - 1) - 1
