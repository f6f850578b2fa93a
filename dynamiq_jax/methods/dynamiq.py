"""DynamiQ: variable-width quantization made for multi-hop all-reduce (arXiv 2602.08923)."""

import dataclasses
import numbers
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from dynamiq_jax import compat
from dynamiq_jax.chunks import WireCost
from dynamiq_jax.codec import allocation, scales
from dynamiq_jax.codec.allocation import Fractions
from dynamiq_jax.codec.layout import Layout, make_layout
from dynamiq_jax.codec.levels import MAX_GAP_RATIO, MIN_GAP_RATIO, SPACINGS, Spacing
from dynamiq_jax.codec.ordering import order_rows
from dynamiq_jax.codec.packing import SUPER_GROUP_SIZE, WIDTHS
from dynamiq_jax.codec.rounding import ROUNDINGS, Rounding
from dynamiq_jax.methods.base import ChunkedMethod
from dynamiq_jax.methods.dynamiq_chunks import DynamiQChunks
from dynamiq_jax.methods.statistics import combine_statistics, combined_bytes
from pallas_kernels import implementation as backends
from pallas_kernels.statistics.api import statistics

_GROUP_SIZES = (8, 16, 32)
_MIN_BITS, _MAX_BITS = 2.5, 16.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class DynamiQ(ChunkedMethod):
    """DynamiQ, by default the preset tuned here; `DynamiQ.paper()` is the paper's.

    `bits` counts everything that a coordinate costs on the wire in one pass: codes, group scales,
    super-scales and statistics. Every single rounding is unbiased; correlated over the hops, as by
    default, a bias of 2 to 4 % of the squared error is left (`independent` has none, and a third
    more error). The fractions suit language-model gradients, whose super-groups differ widely in
    norm; on white noise, where all are alike, the error is 12 times that after `fit`. A magnitude
    above 2^126 (8.5e37) counts as not finite. Differences from the paper: fixed fractions of the
    super-groups get each width, instead of thresholds solved every step (XLA wants static shapes);
    every width from 2 to 16 instead of 2, 4 and 8; groups of 32; quadratic instead of geometric
    levels; golden-ratio rounding instead of a permutation.

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
    centre: bool = False  # subtract super-group means first; 1/16 bit, no help on LM gradients
    implementation: str | None = None  # backend of the codec; None picks the fastest that there is

    def __post_init__(self):
        backends.check(self.implementation)
        if not (isinstance(self.bits, numbers.Real) and _MIN_BITS <= self.bits <= _MAX_BITS):
            raise ValueError(
                f"bits={self.bits!r} is out of range. Give {_MIN_BITS} to {_MAX_BITS:g}."
            )
        if not isinstance(self.widths, tuple) or not 0 < len(set(self.widths)) == len(self.widths):
            raise ValueError(
                f"widths={self.widths!r} is not a tuple of different widths. Give one."
            )
        if any(type(width) is not int or width not in WIDTHS for width in self.widths):
            raise ValueError(
                f"widths={self.widths!r} is not possible. Give integers from 2 to 16, or 0."
            )
        if self.group_size not in _GROUP_SIZES:
            raise ValueError(
                f"group_size={self.group_size!r} is not possible. Give one of {_GROUP_SIZES}."
            )
        if self.rounding not in ROUNDINGS:
            raise ValueError(f"rounding={self.rounding!r} is not known. Give one of {ROUNDINGS}.")
        if type(self.centre) is not bool:
            raise ValueError(f"centre={self.centre!r} is not possible. Give True or False.")
        if self.spacing not in SPACINGS:
            raise ValueError(f"spacing={self.spacing!r} is not known. Give one of {SPACINGS}.")
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
            self._check_fractions(self.fractions)
        else:
            low, high = (self._overhead_bits + extreme(self.widths) for extreme in (min, max))
            if not low <= self.bits <= high:
                raise ValueError(
                    f"bits={self.bits!r} cannot be reached with widths={self.widths!r} and "
                    f"group_size={self.group_size}: they span "
                    f"{low:g} to {high:g} bits. Give other widths, or bits in that range."
                )

    @classmethod
    def paper(cls, bits: float = 5.0, **changes: Any) -> "DynamiQ":
        """The paper's preset: widths 2, 4 and 8, groups of 16, geometric levels."""
        preset = {"widths": (2, 4, 8), "group_size": 16, "spacing": "geometric"}
        return cls(**{"bits": bits, **preset, **changes})

    def fit(self, gradients: Any) -> "DynamiQ":
        """This method with fractions that suit the super-group norms of measured gradients, at the
        same bits.

        Args:
          gradients: pytree of float arrays, one worker's or the summed gradient of a typical step.
        """
        leaves = [np.asarray(leaf, np.float32).reshape(-1) for leaf in jax.tree.leaves(gradients)]
        flat = np.concatenate(leaves) if leaves else np.zeros(0, np.float32)
        rows = np.pad(flat, (0, -flat.size % SUPER_GROUP_SIZE)).reshape(-1, SUPER_GROUP_SIZE)
        norms = np.linalg.norm(rows.astype(np.float64), axis=1)
        if not np.any(norms > 0):
            raise ValueError(
                f"gradients={gradients!r:.80} hold no nonzero value. Give the gradients of a "
                "typical training step."
            )
        quantiles = allocation.log2_norm_quantiles(norms)
        fractions = allocation.solve_fractions(
            self.bits - self._overhead_bits, self.widths, quantiles
        )
        return dataclasses.replace(self, fractions=fractions)

    def layout(self, size: int, num_chunks: int) -> Layout:
        """Static layout of a bucket of `size` coordinates."""
        fractions = self.fractions or allocation.solve_fractions(
            self.bits - self._overhead_bits, self.widths
        )
        return make_layout(
            size,
            num_chunks,
            fractions=fractions,
            group_size=self.group_size,
            spacing=self.spacing,
            gap_ratio=self.gap_ratio,
            rounding=self.rounding,
        )

    def wire_cost(self, size: int, num_workers: int, num_chunks: int) -> WireCost:
        """See `Method`."""
        layout = self.layout(size, num_chunks)
        return WireCost(
            payload_bytes=layout.payload_bytes,
            statistics_bytes=combined_bytes(
                layout.num_rows, num_workers, kinds=2 if self.centre else 1
            ),
        )

    def bind(
        self,
        flat: Array,
        axis_name: str,
        num_workers: int,
        num_chunks: int,
        key: Array,
        *,
        consecutive: bool = False,
    ) -> DynamiQChunks:
        """See `ChunkedMethod`."""
        layout = self.layout(flat.size, num_chunks)
        rows = layout.as_rows(flat)
        combined = combine_statistics(self._statistics(rows), axis_name, num_workers)
        shift = _finite_mean(combined) if self.centre else None
        return DynamiQChunks(
            rows=rows if shift is None else rows.astype(jnp.float32) - shift[:, None],
            order=order_rows(scales.bfloat16_bits(combined[0]), layout, consecutive=consecutive),
            seed=jax.random.bits(key, (2,), jnp.uint32),
            shift=None if shift is None else shift * np.float32(num_workers),
            layout=layout,
            implementation=self.implementation,
        )

    def bind_part(self, part: Array, axis_name: str, num_workers: int, key: Array) -> DynamiQChunks:
        """See `ChunkedMethod`. All workers learn all statistics, and so the order of each part."""
        layout = self.layout(num_workers * part.size, num_workers)
        rows = part.reshape(layout.rows_per_chunk, SUPER_GROUP_SIZE)
        words = compat.all_gather(scales.bfloat16_bits(self._statistics(rows)), axis_name)
        gathered = scales.bfloat16_value(jnp.swapaxes(words, 0, 1).astype(jnp.uint32))
        gathered = gathered.reshape(gathered.shape[0], layout.num_rows)
        first = lax.axis_index(axis_name) * layout.rows_per_chunk
        shift = _finite_mean(gathered) if self.centre else None
        if shift is not None:
            mine = lax.dynamic_slice_in_dim(shift, first, layout.rows_per_chunk)
            rows = rows.astype(jnp.float32) - mine[:, None]
        return DynamiQChunks(
            rows=rows,
            order=order_rows(scales.bfloat16_bits(gathered[0]), layout, consecutive=True),
            seed=jax.random.bits(key, (2,), jnp.uint32),
            shift=shift,
            layout=layout,
            implementation=self.implementation,
            first=first,
        )

    def _statistics(self, rows: Array) -> Array:
        """Norms and, to centre, means: float32 [1 or 2, num_rows]."""
        norms, means = statistics(rows, implementation=self.implementation)
        return jnp.stack([norms, means]) if self.centre else norms[None]

    @property
    def _overhead_bits(self) -> float:
        return allocation.overhead_bits(self.group_size, statistics=2 if self.centre else 1)

    def _check_fractions(self, fractions: Fractions) -> None:
        if not (
            isinstance(fractions, tuple) and all(isinstance(pair, tuple) for pair in fractions)
        ):
            raise ValueError(f"fractions={fractions!r} is not a tuple of (width, share) tuples.")
        widths = [width for width, _ in fractions]
        if (
            widths != sorted(set(widths), reverse=True)
            or any(width not in WIDTHS or share < 0 for width, share in fractions)
            or abs(sum(share for _, share in fractions) - 1) > 1e-6
        ):
            raise ValueError(
                f"fractions={fractions!r} is not possible. Give (width, share) pairs, widest "
                "first, with shares that add up to 1."
            )
        bits = sum(width * share for width, share in fractions) + self._overhead_bits
        if abs(bits - self.bits) > 0.01:
            raise ValueError(
                f"fractions={fractions!r} make {bits:.3f} bits, not bits={self.bits!r}. Give "
                f"bits={bits:.3f}, or fractions that fit."
            )


def _finite_mean(statistics: Array) -> Array:
    """Means, without those that would turn finite values into NaN: float32 [num_rows]."""
    return jnp.where(jnp.isfinite(statistics[1]), statistics[1], np.float32(0))
