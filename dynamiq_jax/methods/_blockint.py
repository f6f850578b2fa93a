"""Block integers: symmetric, one scale a block. The INT8 and INT4 of most systems."""

import dataclasses
from typing import Literal, get_args

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from dynamiq_jax._core import check_choice, check_integer
from dynamiq_jax.methods._blockwise import (
    BLOCKS,
    BlockFormat,
    BlockwiseMethod,
    covering_step,
    in_blocks,
)
from pallas_kernels._jax.compat import override
from pallas_kernels.codec.scales import (
    LARGEST_BITS,
    NAN_BITS,
    bfloat16_value,
    group_maxima,
    reciprocal,
)

BlockRounding = Literal["nearest", "stochastic"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockInt(BlockwiseMethod):
    """Integers -L .. L, L = 2^(code_bits - 1) - 1, times one scale a block, coded at every hop.

    The scale is the smallest normal bfloat16 of which L cover the largest magnitude of the block,
    so nothing saturates. It costs 16 / block bits a coordinate: 8.5 in all at 8 bits and blocks of
    32. Zeros stay zeros. A block that holds NaN, Inf or a magnitude above 2^126 (8.5e37) decodes
    to NaN, all of it; a magnitude below 2^-126 counts as zero.

    Rounding to nearest has half the squared error of stochastic rounding. Its bias adds up where
    the same small value comes at every step. Values below half a step, which is 1 / (2 L) of the
    largest value in their block, are always lost.

    >>> BlockInt(code_bits=4).block
    32
    >>> BlockInt(code_bits=9)
    Traceback (most recent call last):
    ...
    ValueError: code_bits=9 is not possible. Give an integer from 2 to 8.
    """

    code_bits: int = 8  # of a code, without its share of the scale; one more divides the error by 4
    block: int = 32  # coordinates under one scale of 2 bytes; smaller costs bits, lowers the error
    rounding: BlockRounding = "nearest"  # lowest error, biased; `stochastic` is unbiased

    def __post_init__(self):
        check_integer("code_bits", self.code_bits, 2, 8)
        check_choice("block", self.block, BLOCKS)
        check_choice("rounding", self.rounding, get_args(BlockRounding))

    @classmethod
    def qgz(cls) -> "BlockInt":
        """Return qgZ, the gradient format of ZeRO++ (arXiv 2306.10209): blocks of 4-bit codes.

        Blocks are exchanged all to all and summed in full precision, so that a gradient is coded
        once before its sum. Use it with the topology "all_to_all"; `dq.psum_scatter` is the paper's
        collective. Differences from the paper: one exchange instead of one inside and one between
        nodes; bfloat16 scales; the block size is ours.
        """
        return cls(code_bits=4, block=128)

    @classmethod
    def equarx(cls) -> "BlockInt":
        """Return the format of EQuARX (arXiv 2506.17615): 8-bit blocks with dynamic scales.

        Blocks are decoded, summed and coded again on the way. Use it with the topology "ring".
        Differences from the paper: it is part of XLA's TPU runtime, which overlaps coding with
        transfers; bfloat16 scales; the block size is ours.
        """
        return cls(code_bits=8, block=128)

    @property
    @override
    def format(self) -> BlockFormat:
        """Codes, then bfloat16 scales."""
        return BlockFormat(bits=self.code_bits, block=self.block, side_bytes=(2,))

    @property
    @override
    def is_stochastic(self) -> bool:
        return self.rounding == "stochastic"

    @property
    @override
    def native_format(self) -> str:
        return f"integer{self.block}"

    @override
    def encode_rows(self, rows: Array, noise: Array | None) -> tuple[Array, ...]:
        maxima = group_maxima(rows, self.block)
        scale_bits = covering_step(lax.bitcast_convert_type(maxima, jnp.float32), self._top)
        scale_bits = jnp.where(maxima <= LARGEST_BITS, scale_bits, NAN_BITS.astype(np.uint16))
        inverse = reciprocal(bfloat16_value(scale_bits))
        t = (in_blocks(rows, self.block) * inverse[:, :, None]).reshape(rows.shape)
        whole = jnp.round(t) if noise is None else jnp.floor(t + noise)
        # Noise may lift a value that the rounding of the product put above the top. NaN becomes any
        # code: its block decodes to NaN by its scale.
        top = np.float32(self._top)
        codes = (jnp.clip(whole, -top, top) + top).astype(jnp.int32)
        return codes.astype(jnp.uint16), scale_bits

    @override
    def decode_rows(self, codes: Array, *sides: Array) -> Array:
        (scale_bits,) = sides
        whole = (codes.astype(jnp.int32) - np.int32(self._top)).astype(jnp.float32)
        scale = bfloat16_value(scale_bits)
        return (in_blocks(whole, self.block) * scale[:, :, None]).reshape(codes.shape)

    @property
    def _top(self) -> int:
        return 2 ** (self.code_bits - 1) - 1
