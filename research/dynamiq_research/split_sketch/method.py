"""Remembered groups in full, and a count sketch of all others (after the abstract of OSCAR)."""

import bisect
import dataclasses
import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dynamiq_jax.methods import BF16, Call, ChunkedMethod, Method, Reduced, State, WireCost
from dynamiq_jax.parts import (
    as_chunks,
    check_choice,
    check_integer,
    check_number,
    match_varying,
    override,
    same_over,
)
from dynamiq_research.split_sketch.count_sketch import CountSketch, num_stretches
from dynamiq_research.topk_chunked import Chosen
from pallas_kernels.codec import l2_norm
from pallas_kernels.codec.rounding import mix
from pallas_kernels.codec.scales import bfloat16_bits

_ROWS = (1, 3, 5, 7)  # odd: the median is one of the estimates
_MAX_BITS = 32.0
_MOST_CELLS = 2**30 - 1  # of a row: an index into twice as many is an int32
_HASHES = 0x68617368  # folded into the key of the sketch
# Energy of the estimates that noise alone is expected to bring in, of that of the cold coordinates.
_FALSE_ENERGY = 1 / 64
_LARGEST, _LEAST = np.float32(2.0**127), np.float32(2.0**-126)  # of the memory


class SplitSketchState(NamedTuple):
    """State of `SplitSketch` for one bucket, the same bits on all workers."""

    memory: Array  # float32 [groups]: the magnitude that is expected of each group
    sent: Array  # bool [groups]: measured in the last step, not guessed


@dataclasses.dataclass(frozen=True)
class Split:
    """Static sizes of the two parts of a message."""

    room: int  # hot groups
    width: int  # cells of a sketch row; 0 if there is no sketch


@dataclasses.dataclass(frozen=True, kw_only=True)
class SplitSketch(Method):
    """Remembered large groups in full, and a count sketch of all other coordinates.

    After the abstract of OSCAR (Majhi, Laskar, Muzahid, Kim, HPCA 2026), which says that gradients
    of consecutive steps are large and small in the same places. Its text was not at hand:
    everything beyond the split and the count sketch is a reconstruction.

    All workers hold the same memory of the magnitude of each group of coordinates. Those with the
    largest memory are *hot* and are sent as values, without indices. The others are *cold*: their
    count sketch is sent, and of these coordinates the sum has those that stand out of the noise of
    the sketch, and zeros. The metric `kept` is their share. Both parts travel in one message, which
    `inner` sums.

    The memory of a hot group is a moving average of the mean magnitude of the sums. That of a cold
    group grows a little in each step, so that every group is measured again from time to time, and
    at once if the sketch finds something large in it. The first steps measure every group once.

    Biased: use it inside `ErrorFeedback`. NaN and Inf surface at their coordinate, or in their
    block of `inner`. A cold one also spoils its cells, so that a few other cold coordinates are
    zero in that step. None enters the memory.

    Carry the state as that of `ErrorFeedback`. Inside error feedback, `decay=0.5` follows the
    residual more closely.
    """

    bits: float = 2.0  # per coordinate of the bucket, the sketch included
    hot: float = 15 / 16  # share of the sent numbers that are values: 1 for no sketch
    rows: int = 3  # of the sketch: more give fewer cells each, and fewer false finds
    group: int = 16  # coordinates that are remembered together
    decay: float = 0.9  # of the memory of a hot group: the weight of the steps before
    growth: float = 0.02  # of the memory of a cold group: share of the mean hot memory
    # Sums the message. Its bits are the cost of each number.
    inner: ChunkedMethod = dataclasses.field(default_factory=BF16)

    def __post_init__(self):
        least = math.ulp(0.0)
        check_number("bits", self.bits, least, _MAX_BITS, f"more than 0, up to {_MAX_BITS:g}")
        check_number("hot", self.hot, 0.0, 1.0, "a share of the sent numbers, from 0 to 1")
        check_choice("rows", self.rows, _ROWS)
        check_integer("group", self.group, 1)
        check_number("decay", self.decay, 0.0, 1.0)
        check_number("growth", self.growth, 0.0, 1.0)
        if not isinstance(self.inner, ChunkedMethod):
            raise ValueError(
                f"inner={self.inner!r} cannot sum the message: it is not a method of one round "
                "without state. Give one, such as dq.methods.BF16() or dq.methods.Exact()."
            )

    @property
    @override
    def is_stateful(self) -> bool:
        return True

    @property
    @override
    def state_kind(self) -> str:
        return f"SplitSketch(group={self.group})"

    @property
    @override
    def metrics(self) -> tuple[str, ...]:
        return ("kept",)

    @override
    def wire_cost(self, call: Call) -> WireCost:
        split = self.split(call)
        return self._cost(split.room * self.group + split.width * self.rows, call)

    @override
    def init_state(self, call: Call) -> SplitSketchState:
        """Return a memory above that of any gradient, in an order that a hash makes."""
        groups = self._num_groups(call)
        words = mix(jnp.arange(groups, dtype=jnp.uint32) + np.uint32(_HASHES))
        share = words.astype(jnp.float32) * np.float32(2.0**-33)  # [0, 1 / 2]
        memory = _LARGEST * (np.float32(0.5) + share)
        return SplitSketchState(memory, jnp.zeros(groups, jnp.bool_))

    @override
    def all_reduce(self, flat: Array, call: Call, key: Array, state: State) -> Reduced:
        """Sum a bucket.

        A worker applies its own values of hot groups, and an equal part of each kept estimate. So
        error feedback corrects the noise of the sketch too.
        """
        split, state = self.split(call), same_over(state, call.axis.name)
        blocks = as_chunks(flat.astype(jnp.float32), 1, self.group).reshape(-1, self.group)
        chosen = Chosen.best(bfloat16_bits(state.memory), split.room)
        message, sketch = chosen.take(blocks).reshape(-1), None
        if split.width:
            cold = chosen.put(jnp.zeros((split.room, self.group), jnp.float32), blocks)
            hashes = jax.random.fold_in(key, _HASHES)
            sketch = CountSketch.draw(hashes, cold.size, self.rows, split.width)
            message = jnp.concatenate([message, sketch.encode(cold.reshape(-1)).reshape(-1)])
        reduced = self.inner.all_reduce(message, call.of_size(message.size), key, ())

        def hot_part(values: Array) -> Array:
            return values[: split.room * self.group].reshape(-1, self.group)

        hot = jnp.zeros(blocks.shape, jnp.float32)
        if sketch is not None:
            cells = reduced.total[split.room * self.group :].reshape(self.rows, -1)
            hot = _heavy_hitters(sketch, cells).reshape(blocks.shape)
            # Noise may stand out where hot coordinates have left zeros.
            hot = chosen.put(jnp.zeros((split.room, self.group), jnp.float32), hot)
        total = chosen.put(hot_part(reduced.total), hot)
        applied = reduced.applied
        if applied is not None:
            shares = hot * np.float32(1 / call.num_workers)
            # What is not finite has not entered the sum: the others keep their values.
            shares = jnp.where(jnp.isfinite(hot), shares, np.float32(0))
            applied = chosen.put(hot_part(applied), shares).reshape(-1)[: call.size]
        return dataclasses.replace(
            reduced,
            total=total.reshape(-1)[: call.size],
            applied=applied,
            state=match_varying(self._remember(state, chosen, total), flat),
            metrics={"kept": jnp.mean((hot != 0).astype(jnp.float32))},
        )

    def _num_groups(self, call: Call) -> int:
        return -(-call.size // self.group)

    def _cost(self, numbers: int, call: Call) -> WireCost:
        return self.inner.wire_cost(call.of_size(numbers))

    def split(self, call: Call) -> Split:
        """Divide the numbers that `bits` allow: at least one group, and one cell of each row."""

        def sent(numbers: int) -> int:
            return call.topology.bytes_sent(self._cost(numbers, call), call.num_workers)

        groups = self._num_groups(call)
        allowed = self.bits / 8 * call.size * 2 * (call.num_workers - 1) / call.num_workers
        everything = range(1, groups * self.group + 1)
        numbers = bisect.bisect_right(everything, allowed, key=sent)
        if numbers == len(everything):
            return Split(groups, 0)
        width, room = 0, 0
        if self.hot < 1:
            width = min(max(1, int((1 - self.hot) * numbers / self.rows)), call.size, _MOST_CELLS)
        if self.hot > 0:
            room = min(max(1, (numbers - width * self.rows) // self.group), groups)
        return Split(room, width)

    def _remember(self, state: State, chosen: Chosen, total: Array) -> SplitSketchState:
        """Return the next state, from the sums of all groups, [groups, group]."""
        before, guessed = state.memory, ~state.sent
        seen = jnp.sum(jnp.abs(total) * np.float32(1 / self.group), axis=1)
        finite = jnp.isfinite(seen)
        is_hot = chosen.put(jnp.ones(chosen.places.shape, jnp.bool_), jnp.zeros_like(finite))
        decay = np.float32(self.decay)
        # One measurement replaces any guess.
        hot = jnp.where(guessed, seen, decay * before + (1 - decay) * seen)
        measured = jnp.where(is_hot & finite, seen, np.float32(0))
        typical = jnp.sum(measured * np.float32(1 / max(1, chosen.places.size)))
        # Without the least number, memories of zeros would stay zeros, in the order of the groups.
        grown = before + jnp.maximum(np.float32(self.growth) * typical, _LEAST)
        memory = jnp.where(is_hot, hot, jnp.maximum(grown, seen))
        memory = jnp.minimum(jnp.where(finite, memory, before), _LARGEST)
        return SplitSketchState(memory, is_hot & finite)


def _heavy_hitters(sketch: CountSketch, cells: Array) -> Array:
    """Estimate the coordinates that stand out of the noise of a sketch; others are zero.

    A coordinate stands out if it does in each row, with the same sign. A coordinate whose cells are
    not finite in any row is NaN.
    """
    finite = jnp.isfinite(cells)
    count = jnp.maximum(jnp.sum(finite.astype(jnp.float32)), np.float32(1))
    # The noise of a cell, of which the mean over rows is the norm of all that was sketched.
    deviation = l2_norm(jnp.where(finite, cells, np.float32(0)).reshape(-1), axis=0)
    deviation /= jnp.sqrt(count)
    least = deviation * threshold(len(cells), num_stretches(sketch.size, sketch.width))

    def estimate(rows: Sequence[Array]) -> Array:
        ordered = _sort(rows)
        stands_out = (ordered[0] > least) | (ordered[-1] < -least)
        is_lost = ~jnp.isfinite(rows[0])
        for row in rows[1:]:
            is_lost &= ~jnp.isfinite(row)
        kept = jnp.where(stands_out, ordered[len(ordered) // 2], np.float32(0))
        return jnp.where(is_lost, np.float32(np.nan), kept)

    return sketch.decode(cells, estimate)


def threshold(rows: int, stretches: int) -> np.float32:
    """Return the deviations of a cell that an estimate has to exceed in each row.

    Of coordinates that are zero, those beyond it bring in `_FALSE_ENERGY`: `stretches` coordinates
    share the energy of a cell.
    """
    normal = statistics.NormalDist()

    def false_energy(limit: float) -> float:
        # Those that exceed a limit do so by about its inverse.
        return 2 * normal.cdf(-limit) ** rows * (limit + 1 / limit) ** 2 * stretches

    low, high = 1.0, 10.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if false_energy(middle) > _FALSE_ENERGY else (low, middle)
    return np.float32(high)


def _sort(rows: Sequence[Array]) -> list[Array]:
    """Sort arrays elementwise, the least first; NaN goes everywhere."""
    ordered = list(rows)
    for end in range(len(ordered) - 1, 0, -1):
        for place in range(end):
            pair = ordered[place], ordered[place + 1]
            ordered[place], ordered[place + 1] = jnp.minimum(*pair), jnp.maximum(*pair)
    return ordered
