"""DynamiQ: variable-width quantization made for multi-hop all-reduce (arXiv 2602.08923)."""

import dataclasses
import functools
import numbers
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from dynamiq_jax._core import Axis, WireCost, check_choice, check_number
from dynamiq_jax.methods._base import Call, ChunkedMethod
from dynamiq_jax.methods._dynamiq_codec import DynamiQChunks, reorders_sums
from pallas_kernels import choice, operations
from pallas_kernels._jax.compat import override
from pallas_kernels.codec import (
    SUPER_GROUP_SIZE,
    WIDTHS,
    Allocation,
    Layout,
    LocalRows,
    Quantizer,
    TabulatedQuantizer,
    l2_norm,
    place_rows,
)
from pallas_kernels.codec.levels import MAX_GAP_RATIO, MIN_GAP_RATIO, SPACINGS, Spacing, num_levels
from pallas_kernels.codec.rounding import ROUNDINGS, Rounding
from pallas_kernels.codec.scales import bfloat16_bits, bfloat16_value
from pallas_kernels.copies import pad

_ALL = tuple(range(2, 17))  # widths of codes that drop nothing
_GROUP_SIZES = (8, 16, 32)
_MIN_BITS, _MAX_BITS = 2.375, 16.0  # the least: codes of 2 bits, scales and norms
_EXPONENTS = 0.1, 2.0
_NORM_BYTES = 2  # sent as bits of bfloat16, which XLA:CPU would widen


@dataclasses.dataclass(frozen=True, kw_only=True)
class DynamiQ(ChunkedMethod):
    """DynamiQ, by default the preset tuned here; `DynamiQ.paper()` is the paper's.

    `bits` counts everything that a coordinate costs on the wire in one pass: codes, group scales,
    super-scales and statistics. The bytes do not depend on the data.

    The widths of the codes do. At every step, the workers exchange the norms of their super-groups.
    From these, each chunk solves for the widths with the least expected squared error in its bytes
    (reverse water-filling). The solution is in integers, and the same on all workers.

    The norm of a sum is estimated as if the values of the workers were independent. The estimate
    misleads where much cancels in some super-groups and little in others: bits go to values that
    are not in the sum. In an all-to-all of eight or more workers, the gathered sum therefore solves
    for widths again, from its own scales.

    The least error would leave super-groups of small norm so few bits that they are noise. By
    default (`widths=None`), the narrowest code therefore has 3 bits, and 4 or 5 on rings of more
    than 8 workers, whose hops add up: in the sum, a super-group has less than half of its energy as
    error. This holds from 5 bits up, unless most of it cancels in the sum. The price at 5 bits is
    1.3 to 1.4 times the error of the sum, and twice on long rings. At 4 bits the least is 3, which
    is too little for rings of more than 8 workers. Below, it is 2: 3 would cost 1.6 times.

    `exponent` changes what is minimized. The error of a super-group counts as its squared norm to
    this power: 1 is the squared error of the sum, and a smaller power gives more bits to those of
    small norm.

    Sums are rounded with `correlated` noise by default. Each single rounding is unbiased. The chain
    of hops has a bias: 0.7 to 5.3 % of the squared error at 5 bits, most with few workers that
    agree. `independent` noise has none, and 6 to 74 % more error. An all-gather rounds to
    `nearest` by default, which is biased and has less error: no errors of other workers average
    out there.

    A magnitude above 8.47e37, nearly 2^126, counts as not finite. A super-group whose norm is above
    2^126 gets the fewest bits.

    Differences from the paper: every width up to 16 instead of 2, 4 and 8; groups of 32;
    quadratic instead of geometric levels; golden-ratio rounding instead of a permutation. Each
    chunk has widths of its own, and they take the same bytes in every chunk and at every step.

    >>> DynamiQ(bits=4.0).bits
    4.0
    >>> DynamiQ(bits=1.0)
    Traceback (most recent call last):
    ...
    ValueError: bits=1.0 is out of range. Give 2.375 to 16.
    """

    bits: float = 5.0  # per coordinate, all included; one more leaves 1/7 to 1/4 of the error
    widths: tuple[int, ...] | None = None  # bits of a code, 0 drops rows; None: see above
    group_size: int = 32  # coordinates under a one-byte scale; smaller costs bits, lowers the error
    # None: "correlated" for sums, "nearest" for an all-gather, "independent" for a message
    rounding: Rounding | None = None
    exponent: float = 1.0  # errors count as the squared norm of their super-group to this power
    spacing: Spacing = "quadratic"  # of the levels; `geometric` is the paper's, 1 % better, slower
    gap_ratio: float = 2.7  # widest gap between levels over the narrowest; 1 is uniform, 20 % worse
    implementation: str | None = None  # backend of the codec; None picks the fastest one

    _quantizer: ClassVar[type[Quantizer]] = Quantizer

    def __post_init__(self):
        choice.check(self.implementation)
        check_number("bits", self.bits, _MIN_BITS, _MAX_BITS)
        widths = _ALL if self.widths is None else self.widths
        if not isinstance(widths, tuple) or not 0 < len(set(widths)) == len(widths):
            raise ValueError(
                f"widths={self.widths!r} is not a tuple of different widths. Give one."
            )
        if any(type(width) is not int or width not in WIDTHS for width in widths):
            raise ValueError(
                f"widths={self.widths!r} is not possible. Give integers from 2 to 16, or 0."
            )
        check_choice("group_size", self.group_size, _GROUP_SIZES)
        check_choice("rounding", self.rounding, (None, *ROUNDINGS))
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
        check_number("exponent", self.exponent, *_EXPONENTS)
        # If all rows have the narrowest width, or the widest.
        low, high = (self._overhead_bits + pick(widths) for pick in (min, max))
        if not low <= self.bits <= high:
            raise ValueError(
                f"bits={self.bits!r} cannot be reached with widths={self.widths!r} and "
                f"group_size={self.group_size}: they span {low:g} to {high:g} bits. Give other "
                "widths, or bits in that range."
            )

    @classmethod
    def paper(cls, bits: float = 5.0, **changes: Any) -> "DynamiQ":
        """Return the paper's preset: widths 2, 4 and 8, groups of 16, geometric levels.

        Thresholds on the norms of super-groups separate the widths. They are solved at every step,
        as in the paper.
        """
        preset = {"widths": (2, 4, 8), "group_size": 16, "spacing": "geometric"}
        return cls(**{"bits": bits, **preset, **changes})

    def layout(
        self, size: int, num_chunks: int, *, summed: bool = True, growth: float = 1.0
    ) -> Layout:
        """Return the static layout of a bucket.

        Args:
          size: coordinates of the bucket.
          num_chunks: chunks of the bucket.
          summed: whether workers add up, or their parts are only gathered.
          growth: error of a sum over that of one compression, `Topology.error_growth`.
        """
        return Layout(
            size=size,
            num_chunks=num_chunks,
            code_bits=self.bits - self._overhead_bits,
            allocation=Allocation(self._widths_at(growth), self.exponent),
            quantizer=self._quantizer(
                group_size=self.group_size,
                spacing=self.spacing,
                gap_ratio=self.gap_ratio,
                rounding=self.rounding or ("correlated" if summed else "nearest"),
            ),
        )

    @property
    @override
    def details(self) -> tuple[str, ...]:
        return DynamiQChunks.METRICS

    @property
    @override
    def portable(self) -> "DynamiQ":
        changes = {"widths": self._widths_at(growth=1.0), "implementation": "xla"}
        return _PortableDynamiQ(**vars(self) | changes)

    @override
    def wire_cost(self, call: Call) -> WireCost:
        layout = self.layout_of(call)
        share = _NORM_BYTES * (layout.num_rows // call.num_workers)
        gathered = (call.num_workers - 1) * share
        statistics = call.axis.owners_bytes(share, share) if _sums(call) else gathered
        return WireCost(layout.payload_bytes, statistics)

    @override
    def bind(
        self, values: Array, call: Call, key: Array, *, local_norms: Array | None = None
    ) -> DynamiQChunks:
        """Return the codec of a bucket, after exchanging norms.

        Args:
          values: local values, float [size]; in an all-gather the part of this worker.
          call: bucket, axis and topology.
          key: typed PRNG key, the same on all workers.
          local_norms: norms of the local rows that give these their order and their widths, float32
            [rows]; None for the L2 norms of the values.
        """
        layout = self.layout_of(call)
        if _sums(call):
            padded = pad(values, layout.num_rows * SUPER_GROUP_SIZE)
            rows, share = padded.reshape(layout.num_rows, -1), combine_norms
        else:  # all workers gather the norms of all parts
            rows, share = values.reshape(layout.rows_per_chunk, -1), _gather_norms
        run = operations.by(self.implementation)
        if local_norms is None:
            local_norms = run.statistics(rows)
        row_norms = share(local_norms, call.axis)
        solve = functools.partial(run.solve, layout=layout)
        places = place_rows(
            row_norms, layout, consecutive=call.is_consecutive, sort=run.sort, solve=solve
        )
        seed = jax.random.bits(key, (2,), jnp.uint32)
        return DynamiQChunks(
            local=LocalRows(rows, places, seed),
            layout=layout,
            implementation=self.implementation,
            first=call.first_chunk * layout.rows_per_chunk,
            row_norms=row_norms,
        )

    reorders_sums = staticmethod(reorders_sums)

    def layout_of(self, call: Call) -> Layout:
        """Return the static layout of the bucket of a call."""
        summed, workers = _sums(call), call.num_workers
        growth = call.topology.error_growth(workers) if summed else 1.0
        return self.layout(call.size, call.num_chunks, summed=summed, growth=growth)

    def _widths_at(self, growth: float) -> tuple[int, ...]:
        """Return the widths of codes, ascending, for sums with `growth` times the error of one.

        The error of a row, over its energy, is about the growth over L^2, L the largest magnitude
        of its codes. By default, the narrowest width keeps it below one half: 3 bits, and 4 to 5 on
        rings of more than 8 workers. It leaves half a bit of the budget to rows that need more.
        """
        if self.widths is not None:
            return tuple(sorted(self.widths))
        enough = next(width for width in _ALL if num_levels(width) ** 2 >= 2 * growth)
        affordable = int(self.bits - self._overhead_bits - 0.5)
        return tuple(width for width in _ALL if width >= min(enough, max(affordable, 2)))

    @property
    def _overhead_bits(self) -> float:
        """Bits of a coordinate beside its code: group scales, super-scale and norm."""
        return 8 / self.group_size + (16 + 16) / SUPER_GROUP_SIZE


@dataclasses.dataclass(frozen=True, kw_only=True)
class _PortableDynamiQ(DynamiQ):
    """DynamiQ with levels from a table: a compiler cannot fuse their sums with products."""

    _quantizer: ClassVar[type[Quantizer]] = TabulatedQuantizer


def _sums(call: Call) -> bool:
    return call.collective != "all_gather"


def combine_norms(local: Array, axis: Axis) -> Array:
    """Combine norms of all workers, float32 [count], as sqrt(sum of squares): bits of bfloat16.

    The workers divide `count`. The result is uint16 [count], the same on all workers.
    """

    def combine(words: Array) -> Array:
        return bfloat16_bits(l2_norm(bfloat16_value(words), axis=0))

    shares = bfloat16_bits(local).reshape(axis.size, -1)
    return axis.reduce_by_owners(shares, combine).reshape(-1)


def _gather_norms(local: Array, axis: Axis) -> Array:
    """Gather the norms of all workers, float32 [count] each, as bits: uint16 [workers * count]."""
    return axis.gather(bfloat16_bits(local)).reshape(-1)
