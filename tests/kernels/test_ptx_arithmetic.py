"""PTX instructions of the Triton kernels do what the kernels do when they are interpreted.

Instructions are executed by NumPy, as the PTX ISA (8.7, sections 9.7.8) describes them.
"""

import re

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels._triton import arithmetic
from pallas_kernels.modes import without_gpu

RNG = np.random.default_rng(0)
FIRST, SECOND = RNG.integers(2**32, size=(2, 64), dtype=np.uint32)
INDEX = np.arange(64, dtype=np.int32) % 4
LOW = np.uint32(2**16 - 1)  # what is above of two joined bytes is not used


def permuted(first, second, selector):
    """`prmt.b32`: four of eight bytes, or eight times the sign of one."""
    both = first.astype(np.uint64) | (second.astype(np.uint64) << np.uint64(32))
    result = np.zeros_like(first)
    for place in range(4):
        chosen = (selector >> np.uint32(4 * place)) & np.uint32(15)
        byte = (both >> (8 * (chosen & 7)).astype(np.uint64)).astype(np.uint32) & np.uint32(255)
        byte = np.where(chosen & 8, np.where(byte & 128, 255, 0), byte).astype(np.uint32)
        result |= byte << np.uint32(8 * place)
    return result


def looked_up(table, *words):
    """`lop3.b32`: bits by a table of the eight cases of three bits."""
    result = np.zeros_like(words[0])
    for case in range(8):
        if table >> case & 1:
            bits = zip((2, 1, 0), words, strict=True)
            result |= np.bitwise_and.reduce([w if case >> n & 1 else ~w for n, w in bits])
    return result


def executed(ptx, *operands):
    words = np.broadcast_arrays(*(np.asarray(word).astype(np.uint32) for word in operands))
    if ptx == "prmt.b32":
        return jnp.asarray(permuted(*words))
    table = re.fullmatch(r"lop3\.b32 \$0, \$1, \$2, \$3, (0x\w\w);", ptx)
    return jnp.asarray(looked_up(int(table[1], 16), *words))


def magnitudes(words, index):
    size, sign = arithmetic.bytes_to_float(words, index)
    return size, np.asarray(sign) >> np.uint32(31)


def offsets(half):
    def scaled(words, index):
        found = arithmetic.halves_to_offsets(words, half, index)
        return np.asarray(found) * arithmetic.offset_unit()  # XLA would flush subnormals

    return scaled


OPERATIONS = {
    "bytes_to_float": lambda: magnitudes(FIRST, INDEX),
    "halves_to_offsets, low": lambda: offsets(0)(FIRST, INDEX),
    "halves_to_offsets, high": lambda: offsets(1)(FIRST, INDEX),
    "select_bits": lambda: arithmetic.select_bits(np.uint32(0x0FF00F0F), FIRST, SECOND),
    "join_low of bytes": lambda: arithmetic.join_low(FIRST, SECOND, 8) & LOW,
    "join_low of halves": lambda: arithmetic.join_low(FIRST, SECOND, 16),
    "join_top": lambda: arithmetic.join_top(FIRST, SECOND) & LOW,
    "signs_to_halves": lambda: arithmetic.signs_to_halves(FIRST, SECOND, INDEX),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_instructions_do_what_interpreted_kernels_do(name, monkeypatch):
    with without_gpu("interpret"):
        expected = OPERATIONS[name]()
    monkeypatch.setattr(arithmetic, "_on_words", executed)
    found = OPERATIONS[name]()
    for one, other in zip(np.atleast_2d(found), np.atleast_2d(expected), strict=True):
        np.testing.assert_array_equal(one, other)
        assert len(np.unique(one)) > 1
