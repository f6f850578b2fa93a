"""DynamiQ: variable-width quantization made for multi-hop all-reduce (arXiv 2602.08923)."""

import dataclasses
import numbers
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dynamiq_jax._core import WireCost, check_choice, check_number
from dynamiq_jax.methods import _allocation as allocation
from dynamiq_jax.methods import _norms as norms
from dynamiq_jax.methods._allocation import Fractions
from dynamiq_jax.methods._base import Call, ChunkedMethod
from dynamiq_jax.methods._dynamiq_codec import DynamiQChunks
from pallas_kernels import implementation as backends
from pallas_kernels import operations
from pallas_kernels.codec import (
    SUPER_GROUP_SIZE,
    WIDTHS,
    Layout,
    LocalRows,
    Quantizer,
    make_layout,
    order_rows,
)
from pallas_kernels.codec.levels import MAX_GAP_RATIO, MIN_GAP_RATIO, SPACINGS, Spacing
from pallas_kernels.codec.rounding import ROUNDINGS, Rounding
from pallas_kernels.compat import override

_GROUP_SIZES = (8, 16, 32)
_MIN_BITS, _MAX_BITS = 2.5, 16.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class DynamiQ(ChunkedMethod):
    """DynamiQ, by default the preset tuned here; `DynamiQ.paper()` is the paper's.

    `bits` counts everything that a coordinate costs on the wire in one pass: codes, group scales,
    super-scales and statistics. Every single rounding is unbiased. With `correlated` rounding, the
    default, the chain of hops has a bias of 2 to 4 % of the squared error; `independent` rounding
    has none, and a third more error. The fractions suit language-model gradients, whose
    super-groups differ widely in norm; on white noise, whose super-groups are all alike, the error
    is 12 times that after `fit`. A magnitude above 2^126 (8.5e37) counts as not finite.

    Differences from the paper: fixed fractions of the super-groups get each width, instead of
    thresholds solved every step (XLA requires static shapes); every width from 2 to 16 instead of
    2, 4 and 8; groups of 32; quadratic instead of geometric levels; golden-ratio rounding instead
    of a permutation.

    >>> DynamiQ(bits=4.0).bits
    4.0
    >>> DynamiQ(bits=1.0)
    Traceback (most recent call last):
    ...
    ValueError: bits=1.0 is out of range. Give 2.5 to 16.
    """

    bits: float = 5.0  # per coordinate, everything included; one more divides the error by 4
    widths: tuple[int, ...] = tuple(range(2, 17))  # bits of a code; 0 drops rows: biased
    group_size: int = 32  # coordinates under a one-byte scale; smaller costs bits, lowers the error
    rounding: Rounding = "correlated"  # errors of hops cancel; `nearest` is biased
    fractions: Fractions | None = None  # (width, share of super-groups); solved from `bits` if None
    spacing: Spacing = "quadratic"  # of the levels; `geometric` is the paper's, 2 % better, slower
    gap_ratio: float = 2.7  # widest gap between levels over the narrowest; 1 is uniform, 20 % worse
    implementation: str | None = None  # backend of the codec; None picks the fastest one

    def __post_init__(self):
        backends.check(self.implementation)
        check_number("bits", self.bits, _MIN_BITS, _MAX_BITS)
        if not isinstance(self.widths, tuple) or not 0 < len(set(self.widths)) == len(self.widths):
            raise ValueError(
                f"widths={self.widths!r} is not a tuple of different widths. Give one."
            )
        if any(type(width) is not int or width not in WIDTHS for width in self.widths):
            raise ValueError(
                f"widths={self.widths!r} is not possible. Give integers from 2 to 16, or 0."
            )
        check_choice("group_size", self.group_size, _GROUP_SIZES)
        check_choice("rounding", self.rounding, ROUNDINGS)
        check_choice("spacing", self.spacing, SPACINGS)
        most = MAX_GAP_RATIO[self.spacing]
        if not (
            isinstance(self.gap_ratio, numbers.Real)
            and (self.gap_ratio == 1 or MIN_GAP_RATIO <= self.gap_ratio <= most)
        ):
            raise ValueError(
                f"gap_ratio={self.gap_ratio!r} is not possible with spacing={self.spacing!r}. Give "
                f"1 for uniform levels, or {MIN_GAP_RATIO:g} to {most:g}."
            )
        if self.fractions is not None:
            allocation.check_fractions(self.fractions, self.bits, self._overhead_bits)
            return
        low, high = (self._overhead_bits + extreme(self.widths) for extreme in (min, max))
        if not low <= self.bits <= high:
            raise ValueError(
                f"bits={self.bits!r} cannot be reached with widths={self.widths!r} and "
                f"group_size={self.group_size}: they span "
                f"{low:g} to {high:g} bits. Give other widths, or bits in that range."
            )

    @classmethod
    def paper(cls, bits: float = 5.0, **changes: Any) -> "DynamiQ":
        """Return the paper's preset: widths 2, 4 and 8, groups of 16, geometric levels."""
        preset = {"widths": (2, 4, 8), "group_size": 16, "spacing": "geometric"}
        return cls(**{"bits": bits, **preset, **changes})

    def fit(self, gradients: Any) -> "DynamiQ":
        """Return this method with fractions that suit measured gradients, at the same bits.

        Args:
          gradients: pytree of float arrays, one worker's or the summed gradient of a typical step.
        """
        leaves = [np.asarray(leaf, np.float32).reshape(-1) for leaf in jax.tree.leaves(gradients)]
        flat = np.concatenate(leaves) if leaves else np.zeros(0, np.float32)
        rows = np.pad(flat, (0, -flat.size % SUPER_GROUP_SIZE)).reshape(-1, SUPER_GROUP_SIZE)
        row_norms = np.linalg.norm(rows.astype(np.float64), axis=1)
        if not np.any(row_norms > 0):
            raise ValueError(
                f"gradients={gradients!r:.80} hold no nonzero value. Give the gradients of a "
                "typical training step."
            )
        quantiles = allocation.log2_norm_quantiles(row_norms)
        return dataclasses.replace(self, fractions=self._solve(quantiles))

    def layout(self, size: int, num_chunks: int) -> Layout:
        """Return the static layout of a bucket of `size` coordinates in `num_chunks` chunks."""
        quantizer = Quantizer(
            group_size=self.group_size,
            spacing=self.spacing,
            gap_ratio=self.gap_ratio,
            rounding=self.rounding,
        )
        return make_layout(size, num_chunks, self.fractions or self._solve(), quantizer)

    @override
    def wire_cost(self, call: Call) -> WireCost:
        layout = self.layout(call.size, call.num_chunks)
        gathers = call.collective == "all_gather"
        statistics_bytes = norms.gathered_bytes if gathers else norms.combined_bytes
        return WireCost(layout.payload_bytes, statistics_bytes(layout.num_rows, call.axis))

    @override
    def bind(self, values: Array, call: Call, key: Array) -> DynamiQChunks:
        layout = self.layout(call.size, call.num_chunks)
        if call.collective == "all_gather":
            # Nothing is summed: all workers gather the norms of all parts, and so their order.
            rows, share = values.reshape(layout.rows_per_chunk, -1), norms.gather_norms
        else:
            rows, share = layout.as_rows(values), norms.combine_norms
        row_norms = operations.statistics(rows, implementation=self.implementation)
        order = order_rows(share(row_norms, call.axis), layout, consecutive=call.is_consecutive)
        seed = jax.random.bits(key, (2,), jnp.uint32)
        return DynamiQChunks(
            local=LocalRows(rows, order, seed),
            layout=layout,
            implementation=self.implementation,
            first=call.first_chunk * layout.rows_per_chunk,
        )

    def _solve(self, quantiles: tuple[float, ...] | None = None) -> Fractions:
        code_bits = self.bits - self._overhead_bits
        return allocation.solve_fractions(code_bits, self.widths, quantiles)

    @property
    def _overhead_bits(self) -> float:
        return allocation.overhead_bits(self.group_size)
