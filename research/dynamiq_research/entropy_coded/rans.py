"""Interleaved rANS: entropy coding of integers that are nearly normal, in vectors of lanes.

Asymmetric numeral systems (Duda, arXiv 0902.0271, arXiv 1311.2540), many coders side by side whose
words share one stream (Giesen, "Interleaved entropy coders", arXiv 1402.3392). All arithmetic is
that of uint32, so that every backend decodes the same.
"""

import dataclasses
import functools
import math

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from numpy.typing import NDArray

from dynamiq_jax.parts import match_varying, override
from dynamiq_research.entropy_coded.integer_coders import Encoded, IntegerCoder, ordinals
from pallas_kernels.codec import SUPER_GROUP_SIZE, packing, row_bytes

SYMBOLS = 64
_CENTER = SYMBOLS // 2  # symbol of the integers from 0 on
_PROBABILITY_BITS = 12
_TOTAL = 2**_PROBABILITY_BITS
_SYMBOL_BITS = 6
_LOWEST = np.uint32(2**16)  # states are from here to 2^32
_WORD_BITS = np.uint32(16)
_LANE_BYTES = 4  # of the state that a lane ends with
_INTEGERS_OF_A_LANE = 512  # at least: the states of the lanes cost 1/16 bit then
_MAX_LANES = 2**12
# Standard deviations of the tables, in symbols: quarters of an octave from 1/4 on.
_DEVIATIONS = 2.0 ** (np.arange(26) / 4 - 2)
_NARROW = 4.0  # most standard deviations, in symbols, of the integers that a coder is made for
_SLACK, _SPREAD = 1.01, 4.0  # of the budget over the mean: a share, and standard deviations


@dataclasses.dataclass(frozen=True, kw_only=True)
class RansCoder(IntegerCoder):
    """Code close to the entropy of normal integers.

    An integer is a symbol, its high bits, and `shift` low bits, which are sent as they are. Every
    block has the table of the normal distribution that is closest to its mean square. No table is
    sent: both sides have them all, and a byte for each block names one.
    """

    block: int  # integers that share a table
    shift: int  # low bits
    words: int  # room of the stream

    @staticmethod
    def of_normal(rows: int, block: int, deviation: float) -> "RansCoder":
        """Return a coder with room for normal integers of a standard deviation.

        Args:
          rows: rows of 256 in a message.
          block: integers that share a table; divides the integers of a message.
          deviation: standard deviation of the integers.
        """
        shift = max(0, math.ceil(math.log2(deviation / _NARROW)))
        size = rows * SUPER_GROUP_SIZE
        mean, spread = _bits(shift, deviation / 2**shift)
        bits = _SLACK * mean * size + _SPREAD * spread * math.sqrt(size)
        return RansCoder(rows=rows, block=block, shift=shift, words=math.ceil(bits / 16))

    @property
    def lanes(self) -> int:
        """Coders side by side, a power of two."""
        most = min(self.block, _MAX_LANES, max(1, self.size // _INTEGERS_OF_A_LANE))
        return 2 ** (most.bit_length() - 1)

    @property
    @override
    def num_bytes(self) -> int:
        low = self.rows * row_bytes(self.shift)
        return 2 * self.words + _LANE_BYTES * self.lanes + self._blocks + low

    @override
    def encode(self, integers: Array) -> Encoded:
        symbols = (integers >> np.int16(self.shift)).astype(jnp.int32) + np.int32(_CENTER)
        inside = jnp.all((symbols >= 0) & (symbols < SYMBOLS))
        symbols = jnp.clip(symbols, 0, SYMBOLS - 1).reshape(-1, self.lanes)
        tables = self._tables_of(integers)
        entries = jnp.asarray(_encoding_table(min(self.shift, 3)))

        def step(states: Array, each: tuple[Array, Array]) -> tuple[Array, tuple[Array, Array]]:
            symbols, table = each
            entry = entries[table, symbols]
            frequency, start = entry & np.uint32(_TOTAL - 1), entry >> np.uint32(_PROBABILITY_BITS)
            spills = states >= frequency << np.uint32(32 - _PROBABILITY_BITS)
            word = states.astype(jnp.uint16)
            states = jnp.where(spills, states >> _WORD_BITS, states)
            quotient = states // frequency
            states = (quotient << np.uint32(_PROBABILITY_BITS)) + states - quotient * frequency
            return states + start, (word, spills)

        first = match_varying(jnp.full(self.lanes, _LOWEST), integers)
        each = symbols, self._of_steps(tables)
        # Backwards, as decoding takes from the end what came last.
        states, (words, spills) = lax.scan(step, first, each, reverse=True)
        places, count = ordinals(spills)
        stream = match_varying(jnp.zeros(self.words + 1, jnp.uint16), integers)
        places = jnp.where(spills, jnp.minimum(places, np.int32(self.words)), self.words)
        stream = stream.at[places].set(words, mode="promise_in_bounds")[:-1]
        low = lax.bitcast_convert_type(integers & np.int16(2**self.shift - 1), jnp.uint16)
        parts = [
            lax.bitcast_convert_type(stream, jnp.uint8).reshape(-1),
            lax.bitcast_convert_type(states, jnp.uint8).reshape(-1),
            tables.astype(jnp.uint8),
            *packing.pack(low, self.shift),
        ]
        fits = inside & (count <= self.words)
        filled = count.astype(jnp.float32) / np.float32(self.words)
        filled = jnp.where(fits, filled, jnp.maximum(filled, np.float32(2)))
        return Encoded(jnp.concatenate(parts), filled)

    @override
    def decode(self, body: Array) -> Array:
        ends = np.cumsum([2 * self.words, _LANE_BYTES * self.lanes, self._blocks])
        words, states, tables, low = jnp.split(body, ends)
        words = lax.bitcast_convert_type(words.reshape(-1, 2), jnp.uint16)
        states = lax.bitcast_convert_type(states.reshape(-1, _LANE_BYTES), jnp.uint32)
        entries = jnp.asarray(_decoding_table(min(self.shift, 3)))

        def step(carry: tuple[Array, Array], table: Array) -> tuple[tuple[Array, Array], Array]:
            states, read = carry
            slot = states & np.uint32(_TOTAL - 1)
            entry = entries.at[table, slot].get(mode="clip")
            symbol = entry & np.uint32(SYMBOLS - 1)
            offset = (entry >> np.uint32(_SYMBOL_BITS)) & np.uint32(_TOTAL - 1)
            frequency = entry >> np.uint32(_SYMBOL_BITS + _PROBABILITY_BITS)
            states = frequency * (states >> np.uint32(_PROBABILITY_BITS)) + offset
            needs = states < _LOWEST
            until = read + jnp.cumsum(needs.astype(jnp.int32))
            word = words.at[until - 1].get(mode="clip").astype(jnp.uint32)
            states = jnp.where(needs, states << _WORD_BITS | word, states)
            return (states, until[-1]), symbol.astype(jnp.uint8)

        first = states, match_varying(jnp.int32(0), body)
        _, symbols = lax.scan(step, first, self._of_steps(tables.astype(jnp.int32)))
        high = symbols.reshape(self.rows, -1).astype(jnp.int16) - np.int16(_CENTER)
        offset = lax.bitcast_convert_type(packing.unpack(low, self.rows, self.shift), jnp.int16)
        return (high << np.int16(self.shift)) | offset.reshape(self.rows, SUPER_GROUP_SIZE)

    def _tables_of(self, integers: Array) -> Array:
        """Choose the table of each block by its mean square: int32 [blocks]."""
        blocks = integers.reshape(self._blocks, self.block).astype(jnp.float32)
        square = jnp.mean(blocks**2, axis=1) * np.float32(4.0**-self.shift)
        limits = _limits(min(self.shift, 3))
        return jnp.sum(square[:, None] > limits[None, :], axis=1, dtype=jnp.int32)

    def _of_steps(self, of_blocks: Array) -> Array:
        """Repeat a number of each block for every step of the lanes."""
        return jnp.repeat(of_blocks, self.block // self.lanes)

    @property
    def _blocks(self) -> int:
        return self.size // self.block


def _probabilities(shift: int, deviation: float) -> NDArray[np.float64]:
    """Return each symbol's probability for rounded normal numbers; `deviation` is in symbols."""
    edges = np.arange(SYMBOLS + 1) - _CENTER - 0.5 / 2**shift
    below = np.array([0.5 * math.erfc(-edge / deviation / math.sqrt(2)) for edge in edges])
    below[0], below[-1] = 0, 1
    return np.diff(below)


@functools.cache
def _frequencies(shift: int) -> NDArray[np.uint32]:
    """Return frequencies of the symbols that sum to 4096, none of them 0: [tables, symbols]."""
    rows = []
    for deviation in _DEVIATIONS:
        frequency = np.maximum(np.floor(_probabilities(shift, deviation) * _TOTAL), 1)
        frequency[frequency.argmax()] += _TOTAL - frequency.sum()
        rows.append(frequency)
    return np.array(rows, np.uint32)


def _starts(frequencies: NDArray[np.uint32]) -> NDArray[np.uint32]:
    ends = np.cumsum(frequencies, axis=1, dtype=np.uint32)
    return ends - frequencies


@functools.cache
def _encoding_table(shift: int) -> NDArray[np.uint32]:
    """Return start and frequency of each symbol, 12 bits each: uint32 [tables, symbols]."""
    frequencies = _frequencies(shift)
    return _starts(frequencies) << np.uint32(_PROBABILITY_BITS) | frequencies


@functools.cache
def _decoding_table(shift: int) -> NDArray[np.uint32]:
    """Return frequency, slot less start and symbol of every slot: uint32 [tables, 4096]."""
    rows = []
    for frequencies, starts in zip(_frequencies(shift), _starts(_frequencies(shift)), strict=True):
        symbols = np.repeat(np.arange(SYMBOLS, dtype=np.uint32), frequencies)
        offsets = np.arange(_TOTAL, dtype=np.uint32) - starts[symbols]
        entry = frequencies[symbols] << np.uint32(_PROBABILITY_BITS) | offsets
        rows.append(entry << np.uint32(_SYMBOL_BITS) | symbols)
    return np.array(rows)


@functools.cache
def _limits(shift: int) -> NDArray[np.float32]:
    """Return the mean squares, in symbols, up to which each table but the last is the best."""
    integers = np.arange(-4 * SYMBOLS * 2**shift, 4 * SYMBOLS * 2**shift + 1) / 2**shift
    edges = np.append(integers - 0.5 / 2**shift, np.inf)
    means = []
    for deviation in _DEVIATIONS:
        below = np.array([math.erfc(-edge / deviation / math.sqrt(2)) for edge in edges]) / 2
        means.append(np.diff(below) @ integers**2)
    return np.sqrt(np.multiply(means[:-1], means[1:])).astype(np.float32)


def _bits(shift: int, deviation: float) -> tuple[float, float]:
    """Return mean and standard deviation of the bits of a symbol; `deviation` is in symbols."""
    shift = min(shift, 3)
    probabilities = _probabilities(shift, deviation)
    bits = _PROBABILITY_BITS - np.log2(_frequencies(shift))
    bits = bits[(bits @ probabilities).argmin()]
    mean = float(bits @ probabilities)
    return mean, math.sqrt(float((bits - mean) ** 2 @ probabilities))
