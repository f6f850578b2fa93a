"""Bits to rows: the width of every row, solved from the norms at every step.

The squared error of a row is about its energy over L^2, where L is the largest magnitude of its
codes: with the default levels, the factor is the same for all widths within 15 %. The least sum of
errors has one price: a row takes every bit that lowers its error by more than that. This is reverse
water-filling, and for widths of 2, 4 and 8 the paper's thresholds (section 4).

All of it is integers, functions of bytes that all workers hold: all of them find the same widths.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from pallas_kernels._jax.compat import match_varying
from pallas_kernels._jax.platforms import platform_dependent
from pallas_kernels._jax.shapes import Int32
from pallas_kernels.codec.arithmetic import Index
from pallas_kernels.codec.levels import distortion
from pallas_kernels.codec.packing import MAX_WIDTH

ENERGY_STEPS = 32  # of a logarithm of an energy for each octave
ENERGY_LIMIT = 1 << 15  # above all of these logarithms
_BELOW_ALL = -8 * ENERGY_LIMIT  # no threshold is as low
# Prices that are tried at a time. The fewer steps, the fewer kernels on a GPU. A TPU takes as long
# for twice as many. They follow the backend of this process, and the result is the same.
_PRICES = {"gpu": 33, "tpu": 33}
_USUAL_PRICES = 16


@dataclasses.dataclass(frozen=True)
class Step:
    """Rows that are made wider, if their energy is large enough."""

    before: int  # width
    after: int  # width
    energy: int  # logarithm of the energy that a row needs, relative to that of the first step


@dataclasses.dataclass(frozen=True)
class Allocation:
    """Widths that rows may have, and what they minimize."""

    widths: tuple[int, ...]  # bits of a code; without 0, only rows of zeros have none
    exponent: float  # errors count as the energy of their row to this power over L^2

    @functools.cached_property
    def steps(self) -> tuple[Step, ...]:
        """Steps from no bits to the widest width; each needs more energy than the one before."""
        first, *others = sorted(self.widths)
        path = [first]
        for width in others:
            # A width that saves less for each bit than the next one does is never the best.
            while len(path) > 1 and _gain(*path[-2:]) <= _gain(path[-1], width):
                path.pop()
            path.append(width)
        gains = [_gain(before, after) for before, after in itertools.pairwise(path)]
        steps = [Step(0, first, 0)] if first else []
        for (before, after), gain in zip(itertools.pairwise(path), gains, strict=True):
            # The first gain may be zero: two bits alone save nothing but the bias of none.
            octaves = math.log2(gains[0] / gain) / self.exponent if gain < gains[0] else 0.0
            more = steps[-1].energy + 1 if steps else 0
            steps.append(Step(before, after, max(more, 1 + round(ENERGY_STEPS * octaves))))
        return tuple(steps)

    def solve(
        self, energies: Int32[Array | np.ndarray, "*chunks rows"], units: Index
    ) -> Int32[Array, "*chunks 16"]:
        """Solve for the widths of the rows of chunks.

        Args:
          energies: logarithms of the energies of rows, below `ENERGY_LIMIT`, largest first; 0 of
            a row of zeros.
          units: bits of one lane of all rows of a chunk together, at least the narrowest width for
            each.

        Returns:
          The number of rows whose codes have bit 0, 1, and so on: those with the most energy. They
          add up to `units`, less some that a step of several bits cannot use.
        """
        return jnp.vectorize(
            lambda energies: self._solve_chunk(energies, units), signature="(r)->(w)"
        )(energies)

    def _solve_chunk(self, energies: Array, units: Index) -> Array:
        sizes = np.array([step.after - step.before for step in self.steps], np.int32)
        needed = np.array([step.energy for step in self.steps], np.int32)
        most = np.full_like(needed, 2 * ENERGY_LIMIT)
        if 0 not in self.widths:
            most[0] = 1  # only zeros may have no bits
        # Zeros come after all others: nobody else can use what they get.
        energies = jnp.where(energies > 0, energies, -needed[-1])

        def rows_of_steps(prices: Array) -> Array:
            thresholds = jnp.minimum(prices[:, None] + needed[None, :], most[None, :])
            return platform_dependent(_COUNT_AT_LEAST, energies, thresholds)

        # The largest price at which the rows take too much, some digits of it at a time.
        lowest = -2 * int(needed[-1]) - 1
        tried = _PRICES.get(jax.default_backend(), _USUAL_PRICES)
        rounds = math.ceil(math.log(ENERGY_LIMIT - lowest, tried))
        scales = jnp.array([tried**power for power in reversed(range(rounds))], jnp.int32)

        def narrow(index: Array, solution: tuple[Array, Array]) -> tuple[Array, Array]:
            price, _ = solution
            prices = price + scales[index] * np.arange(tried + 1, dtype=np.int32)
            rows = rows_of_steps(prices)
            last = jnp.sum(rows[1:-1] @ sizes > units, dtype=jnp.int32)
            return prices[last], lax.dynamic_slice_in_dim(rows, last, 2)

        nothing = jnp.zeros((2, len(sizes)), jnp.int32)
        start = match_varying((jnp.int32(lowest), nothing), energies)
        # A GPU takes as long for the turns of a loop as for what they hold.
        unroll = jax.default_backend() == "gpu"
        _, (wider, rows) = lax.fori_loop(0, rounds, narrow, start, unroll=unroll)
        # What is left at the next price goes to some of those that would be wider at this one.
        more = wider - rows
        before = jnp.cumsum(more * sizes) - more * sizes
        rows = rows + jnp.clip((units - rows @ sizes - before) // sizes, 0, more)
        step_of_bit = [
            next((i for i, step in enumerate(self.steps) if bit < step.after), len(self.steps))
            for bit in range(MAX_WIDTH)
        ]
        return jnp.append(rows, 0)[np.array(step_of_bit, np.int32)]


def _gain(before: int, after: int) -> float:
    """Return how much each bit of a step lowers the error of a row, over its energy."""
    return (distortion(before) - distortion(after)) / (after - before)


def search_at_least(
    values: Int32[Array, "count"], thresholds: Int32[Array, "*shape"]
) -> Int32[Array, "*shape"]:
    """Return how many values, largest first, are at least each threshold.

    A binary search. That of `jnp` loses the types of values that vary in a map (JAX 0.12).
    """
    rounds = values.size.bit_length()

    def narrow(number: Array, reached: Array) -> Array:
        further = reached + (jnp.int32(1 << (rounds - 1)) >> number)
        last = values[jnp.minimum(further, values.size) - 1]
        return jnp.where((further <= values.size) & (last >= thresholds), further, reached)

    return lax.fori_loop(0, rounds, narrow, jnp.zeros_like(thresholds, jnp.int32))


def count_by_blocks(
    values: Int32[Array, "count"], thresholds: Int32[Array, "*shape"]
) -> Int32[Array, "*shape"]:
    """Compute `search_at_least` in two steps, which take a GPU less time than a search.

    The values are cut into about as many blocks as a block has values. Blocks whose last value is
    at least a threshold count as a whole. Of the next block, each value is compared.
    """
    size = 1 << math.ceil(values.size.bit_length() / 2)
    count = -(-values.size // size)
    padded = jnp.pad(values, (0, count * size - values.size), constant_values=_BELOW_ALL)
    blocks = padded.reshape(count, size)
    flat = thresholds.reshape(-1, 1)
    whole = jnp.sum(blocks[None, :, -1] >= flat, axis=1, dtype=jnp.int32)
    selected = blocks.at[jnp.minimum(whole, count - 1)].get(mode="promise_in_bounds")
    inside = (selected >= flat) & (whole[:, None] < count)
    reached = whole * size + jnp.sum(inside, axis=1, dtype=jnp.int32)
    return reached.reshape(thresholds.shape)


# How many values are at least each threshold. On a TPU, a kernel solves for widths by itself.
_COUNT_AT_LEAST: dict[str, Callable[[Array, Array], Array]] = {
    "cpu": search_at_least,
    "default": count_by_blocks,
}
