"""NumPy oracle of the wire format (docs/wire_format.md), written from the page and nothing else.

It favors clarity over speed and shares no code with the library. Scales are computed in float32,
as the page specifies them bit for bit. Level positions, probabilities and norms are computed in
float64, so a float32 implementation may differ where the outcome depends on the last bits:
`encode_rows` returns the mask of coordinates where it may not ("decided").

Shapes: a bucket of `size` values on `n` workers is n * R rows of 256 lanes; a row has
G = 256 / group_size groups; a chunk is R rows, each with a width of its own, in `units` units.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
U8 = NDArray[np.uint8]
U16 = NDArray[np.uint16]
U32 = NDArray[np.uint32]
Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]

LANES = 256
BF16_NAN = 0x7FC0
SMALLEST_NORMAL = np.float32(2.0**-126)
MASK32 = 0xFFFFFFFF


# ------------------------------------------------------------------------------------ bfloat16 bits


def bf16_to_f32(bits: U16) -> F32:
    """The float32 values of bfloat16 bit patterns, any shape."""
    return (np.asarray(bits, np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)


def bf16_nearest(values: F64 | F32) -> U16:
    """bfloat16 bits of `values` (any shape), nearest even; all that is not finite is 0x7fc0."""
    with np.errstate(over="ignore"):
        bits = np.ascontiguousarray(values, np.float32).view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    finite = (rounded & 0x7F80) != 0x7F80
    finite &= np.isfinite(values)
    return np.where(finite, rounded, np.uint16(BF16_NAN))


def bf16_up(values: F32) -> U16:
    """bfloat16 bits of non-negative float32 `values` (any shape), rounded up; not finite: 0x7fc0.

    A finite value above the largest bfloat16 becomes the bfloat16 infinity, 0x7f80.
    """
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0xFFFF) >> 16).astype(np.uint16)
    return np.where(np.isfinite(values), rounded, np.uint16(BF16_NAN))


# --------------------------------------------------------------------- 1. shapes, statistics, order


def rows_per_chunk(size: int, n: int) -> int:
    """R: rows in each of the n chunks of a bucket of `size` values."""
    rows = -(-size // LANES)
    return -(-rows // n)


def to_rows(flat: NDArray, n: int) -> F32:
    """A flat bucket [size] as its zero-padded matrix, f32[n * R, 256]."""
    rows = np.zeros((n * rows_per_chunk(flat.size, n), LANES), np.float32)
    rows.reshape(-1)[: flat.size] = flat
    return rows


def row_norms(rows: F32) -> U16:
    """L2 norm of each row of one worker, f32[..., 256] -> bfloat16 bits u16[...].

    In float64 no float32 norm overflows or underflows, so the page's scaling is not needed.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        return bf16_nearest(np.sqrt(np.sum(np.square(rows.astype(np.float64)), axis=-1)))


def combine_norms(bits: U16) -> U16:
    """Norms over the workers, u16[n, rows] -> u16[rows]: sqrt of the sum of squares."""
    with np.errstate(invalid="ignore", over="ignore"):
        squares = np.square(bf16_to_f32(bits).astype(np.float64))
        return bf16_nearest(np.sqrt(squares.sum(axis=0)))


def units(bits: float, group_size: int, rows: int) -> int:
    """U: units of 32 bytes for the codes of a chunk of R rows."""
    return math.floor((bits - 8 / group_size - 1 / 8) * rows + 1e-6)


def weights_of_norms(norm_bits: U16) -> Ints:
    """What rows are sorted by, i64[...]: bit patterns, with 2 for a norm above 2^126."""
    return np.where(norm_bits > 0x7E80, 2, norm_bits.astype(np.int64))


def row_order(norm_bits: U16) -> Ints:
    """Row indices by descending weight of their norms u16[rows], ties by index, i64[rows]."""
    return np.argsort(-weights_of_norms(norm_bits), kind="stable")


def row_table(norm_bits: U16, n: int) -> Ints:
    """i64[n, R]: the original row at each place of each chunk."""
    return row_order(norm_bits).reshape(-1, n).T  # rank p -> chunk p mod n, place p // n


def consecutive_table(norm_bits: U16, n: int) -> Ints:
    """`row_table` where chunk c has to hold the c-th part of the rows."""
    parts = norm_bits.reshape(n, -1)
    return np.stack([row_order(part) + c * part.size for c, part in enumerate(parts)])


class Step(NamedTuple):
    """A step of rows to a larger width, for rows with enough energy."""

    bits: int
    energy: int  # beyond the price; at least 1 suffices if `always`
    always: bool


def path(allowed: Sequence[int], exponent: float) -> list[Step]:
    """The steps of rows from no bits to the widest width."""
    error = {w: 1.0 if w == 0 else 1.0 / (2 ** (w - 1) - 1) ** 2 for w in allowed}

    def gain(a: int, b: int) -> float:
        return (error[a] - error[b]) / (b - a)

    first, *others = sorted(allowed)
    widths = [first]
    while others:  # the largest gain of a bit, of equal ones the longest step
        best = max(gain(widths[-1], w) for w in others)
        widths.append(max(w for w in others if gain(widths[-1], w) == best))
        others = [w for w in others if w > widths[-1]]
    steps = [Step(first, 0, always=True)] if first else []
    for a, b in itertools.pairwise(widths):
        ratio = gain(*widths[:2]) / gain(a, b) if a > widths[0] else 1
        needed = 1 + round(32 * np.log2(ratio) / exponent)
        if steps:
            needed = max(needed, steps[-1].energy + 1)
        steps.append(Step(b - a, needed, always=False))
    return steps


def default_widths(bits: float, group_size: int, partial_sums: Sequence[int]) -> range:
    """Widths that are allowed by default, from how many workers each compressed sum has."""
    growth = sum(partial_sums) / max(partial_sums)
    enough = next(w for w in range(2, 17) if (2 ** (w - 1) - 1) ** 2 >= 2 * growth)
    affordable = int(bits - 8 / group_size - 1 / 8 - 1 / 2)
    return range(max(2, min(enough, affordable)), 17)


def solve_widths(energies: Ints, units: int, allowed: Sequence[int], exponent: float) -> Ints:
    """Widths i64[R] of rows with energies i64[R], largest first.

    From the highest price at which each row takes each step: steps are taken in this order until
    the units are used up.
    """
    steps = path(allowed, exponent)
    weights = np.where(energies > 0, energies, -steps[-1].energy)
    highest = np.array([[e - s.energy for s in steps] for e in weights.tolist()])
    for s, step in enumerate(steps):
        if step.always:
            highest[energies > 0, s] = 1 << 30
    bits = np.array([step.bits for step in steps])
    taken, left = np.zeros(highest.shape, bool), units
    for price in np.unique(highest)[::-1]:
        now = highest == price
        if (now * bits).sum() <= left:
            taken |= now
            left -= (now * bits).sum()
            continue
        for s in range(len(steps)):  # some of them; `left` as if all before were taken
            count = min(int(now[:, s].sum()), max(left // bits[s], 0))
            taken[np.flatnonzero(now[:, s])[:count], s] = True
            left -= now[:, s].sum() * bits[s]
        break
    return (taken * bits).sum(axis=1)


def energies_of_norms(norm_bits: U16) -> Ints:
    """Energies i64[...] of bit patterns of norms."""
    return weights_of_norms(norm_bits) >> 1


# ------------------------------------------------------------------------------ 4. rounding offsets


def mix(h: U32) -> U32:
    """The 32-bit mixing function, elementwise on an array."""
    h = np.asarray(h, np.uint32)
    return mix_mixed(h ^ (h >> np.uint32(16)))


def mix_mixed(h: U32) -> U32:
    """`mix` without its first step."""
    h = h * np.uint32(0x7FEB352D)
    h = h ^ (h >> np.uint32(15))
    h = h * np.uint32(0x846CA68B)
    return h ^ (h >> np.uint32(16))


def rounding_words(ids: NDArray, turn: int, seed: tuple[int, int], rounding: str) -> U32:
    """Hash words u32[rows, 128] of rows with permuted ids [rows] at turn `turn`."""
    ids = np.atleast_1d(np.asarray(ids)).astype(np.uint32)
    lanes = np.arange(LANES // 2, dtype=np.uint32) * np.uint32(0x9E3779B1)
    shift = np.uint32((turn * 0x9E379E37) & MASK32)
    row = mix(mix(ids ^ np.uint32(seed[0])) + np.uint32(seed[1]))
    if rounding == "independent":
        return mix_mixed(mix(row + shift)[:, None] + lanes)
    word = mix_mixed(row[:, None] + lanes)
    if rounding == "correlated":
        return word + shift
    raise ValueError(f"no words for rounding {rounding!r}")


def rounding_offsets(ids: NDArray, turn: int, seed: tuple[int, int], rounding: str) -> F64:
    """u in (0, 1), f64[rows, 256] (every value is exact in float32)."""
    if rounding == "nearest":
        return np.full((np.size(ids), LANES), 0.5)
    words = rounding_words(ids, turn, seed, rounding)
    halves = np.concatenate([words & np.uint32(0xFFFF), words >> np.uint32(16)], axis=1)
    return (halves + 0.5) * 2.0**-16


# ------------------------------------------------------------------------------ 2, 3. scales, codes


class Spacing(NamedTuple):
    """How the levels lie."""

    kind: str  # quadratic or geometric
    gap_ratio: float


def levels(width: int, spacing: Spacing) -> F64:
    """f(0) = 0 .. f(L) = 1, f64[L + 1], L = 2^(width - 1) - 1: sums of gaps that grow."""
    top = 2 ** (width - 1) - 1
    share = np.arange(top) / max(top - 1, 1)
    if spacing.kind == "quadratic":
        gaps = 1 + (spacing.gap_ratio - 1) * share
    else:
        gaps = spacing.gap_ratio**share
    ends = np.concatenate([[0.0], np.cumsum(gaps)])
    return ends / ends[-1]


def margin(width: int) -> float:
    """How far (in probability) a float32 implementation may be from the exact comparison.

    Positions are precise to 2^-21, of which the gaps at the top are 1 / L, and an inverse may be
    as far off.
    """
    return 2.0**-20 * (2 ** (width - 1) - 1) + 2.0**-22


def row_scales(x: F32, group_size: int) -> tuple[U8, U16]:
    """Group scales u8[rows, G] and super-scales u16[rows] (bfloat16 bits) of f32[rows, 256].

    Where the super-scale is not finite, group scales are 0 here (the page leaves them open).
    """
    group_max = np.abs(x).reshape(len(x), -1, group_size).max(axis=2)  # max() keeps a NaN
    row_max = group_max.max(axis=1)
    in_range = row_max <= np.float32(2.0**126 - 2.0**118)  # False for NaN
    super_bits = np.where(in_range, bf16_up(row_max), np.uint16(BF16_NAN))
    super_scale = bf16_to_f32(super_bits)[:, None]
    usable = np.isfinite(super_scale) & (super_scale >= SMALLEST_NORMAL)
    super_scale = np.where(usable, super_scale, np.float32(1))
    ratio = np.where(usable, group_max, np.float32(0)) * (np.float32(1) / super_scale)
    return np.minimum(np.ceil(np.float32(255) * ratio), 255).astype(np.uint8), super_bits


def group_steps(group_scales: U8, super_bits: U16) -> F32:
    """Reconstructed scale s of each group, f32[rows, G]; NaN if the super-scale is not finite."""
    with np.errstate(invalid="ignore", under="ignore"):
        unit = bf16_to_f32(super_bits) * np.float32(1 / 255)
        steps = unit[:, None] * group_scales.astype(np.float32)
    return np.where(np.isfinite(unit)[:, None], steps, np.float32(np.nan))


class Encoded(NamedTuple):
    """Rows as `encode_rows` returns them."""

    codes: U16  # [rows, 256]
    group_scales: U8  # [rows, G]
    super_scales: U16  # [rows], bfloat16 bits
    decided: Bools  # [rows, 256]: a float32 implementation has to give this very code


def encode_rows(x: F32, width: int, spacing: Spacing, group_size: int, u: NDArray) -> Encoded:
    """Encode f32[rows, 256] with rounding offsets u [rows, 256], 1 - u of negative values.

    With p = (t - f(r)) / (f(r + 1) - f(r)), the outcome is ceil(r + p - u): undecided where
    that argument is within `margin(width)` of a whole number. This covers a t next to a level,
    where another implementation may start from the neighboring r. Rows whose super-scale is not
    finite get magnitude 0 and are undecided.
    """
    x = np.ascontiguousarray(x, np.float32)
    group_scales, super_bits = row_scales(x, group_size)
    if width == 0:
        nothing = np.zeros(x.shape, np.uint16)
        return Encoded(nothing, group_scales, super_bits, np.ones(x.shape, np.bool_))
    scale = np.repeat(group_steps(group_scales, super_bits), group_size, axis=1)
    usable = scale >= SMALLEST_NORMAL  # False for NaN
    ratio = np.abs(np.where(usable, x, np.float32(0))).astype(np.float64)
    t = np.minimum(ratio / np.where(usable, scale, np.float32(1)), 1.0)

    u = np.where(np.signbit(x), 1 - u, u)
    f = levels(width, spacing)
    r = np.clip(np.searchsorted(f, t, side="right") - 1, 0, f.size - 2)
    gap, above = f[r + 1] - f[r], t - f[r]
    magnitude = r + (u * gap < above)
    codes = (magnitude.astype(np.uint16) << 1) | np.signbit(x).astype(np.uint16)

    slack = above / gap - u
    decided = np.abs(slack - np.rint(slack)) > margin(width)
    decided |= t == 0  # exact in every precision
    decided &= np.isfinite(bf16_to_f32(super_bits))[:, None]
    return Encoded(codes.astype(np.uint16), group_scales, super_bits, decided)


def decode_rows(
    codes: U16, group_scales: U8, super_scales: U16, width: int, spacing: Spacing, group_size: int
) -> F64:
    """Values f64[rows, 256] (products of f64 levels and f32 scales); NaN rows stay NaN."""
    steps = group_steps(group_scales, super_scales).astype(np.float64)
    scale = np.repeat(steps, group_size, axis=1)
    if width == 0:
        return np.where(np.isnan(scale), np.nan, 0.0)
    sign = 1.0 - 2.0 * (codes & np.uint16(1))
    return sign * levels(width, spacing)[codes >> np.uint16(1)] * scale


# -------------------------------------------------------------------------- 5, 6. packing, messages


def pack_plane(codes: U16, bit: int) -> U8:
    """One bit of u16[rows, 256] -> u8[rows, 32]."""
    bits = (codes >> np.uint16(bit)) & np.uint16(1)
    lanes = bits.reshape(-1, 8, 32)  # [row, i, j] is lane j + 32 i
    return np.packbits(lanes.astype(np.uint8), axis=1, bitorder="little")[:, 0]


def unpack_plane(plane: U8) -> U16:
    """u8[rows, 32] -> u16[rows, 256] below 2."""
    bits = np.unpackbits(plane[:, None], axis=1, bitorder="little")
    return bits.reshape(len(plane), LANES).astype(np.uint16)


def payload_bytes(rows: int, units: int, group_size: int) -> int:
    """Length of the message of one chunk."""
    used = 32 * units + rows * (LANES // group_size + 2)
    return -(-used // 16) * 16


def pack_message(codes: U16, group_scales: U8, super_scales: U16, widths: Ints, units: int) -> U8:
    """The message u8[payload_bytes] of a chunk: u16[R, 256], u8[R, G] and u16[R]."""
    planes = [pack_plane(codes[widths > bit], bit).reshape(-1) for bit in range(16)]
    joined = np.concatenate(planes)
    rows, groups = group_scales.shape
    message = np.zeros(payload_bytes(rows, units, LANES // groups), np.uint8)
    message[: joined.size] = joined
    scales = [group_scales.reshape(-1), super_scales.astype("<u2").view(np.uint8)]
    joined = np.concatenate(scales)
    message[32 * units : 32 * units + joined.size] = joined
    return message


def parse_message(payload: U8, widths: Ints, units: int, group_size: int) -> tuple[U16, U8, U16]:
    """Codes u16[R, 256], group scales u8[R, G] and super-scales u16[R] of a message."""
    payload, rows = np.ascontiguousarray(payload, np.uint8), len(widths)
    assert payload.size == payload_bytes(rows, units, group_size), "not a message of this layout"
    codes, at = np.zeros((rows, LANES), np.uint16), 0
    for bit in range(16):
        count = int((widths > bit).sum())
        plane = payload[at : at + 32 * count].reshape(count, 32)
        codes[:count] |= unpack_plane(plane) << np.uint16(bit)
        at += 32 * count
    assert not payload[at : 32 * units].any(), "units that no row uses hold zeros"
    split = 32 * units + rows * (LANES // group_size)
    group_scales = payload[32 * units : split].reshape(rows, LANES // group_size)
    super_scales = payload[split : split + 2 * rows].copy().view("<u2").astype(np.uint16)
    return codes, group_scales, super_scales


# --------------------------------------------------------------------------- chunks and their paths


class Kind(NamedTuple):
    """What the messages of a bucket have in common."""

    units: int
    allowed: Sequence[int]  # widths
    exponent: float
    group_size: int
    spacing: Spacing
    rounding: str
    seed: tuple[int, int]

    def widths(self, energies: Ints) -> Ints:
        """Widths i64[R] of a chunk whose rows have energies i64[R]."""
        return solve_widths(energies, self.units, self.allowed, self.exponent)


def encode_chunk(x: F32, widths: Ints, kind: Kind, u: NDArray) -> Encoded:
    """Encode the R rows of a chunk, f32[R, 256], each at its width i64[R]."""
    whole = [np.zeros(x.shape, np.uint16), np.zeros((len(x), LANES // kind.group_size), np.uint8)]
    whole += [np.zeros(len(x), np.uint16), np.zeros(x.shape, np.bool_)]
    for width in np.unique(widths):
        rows = widths == width
        part = encode_rows(x[rows], int(width), kind.spacing, kind.group_size, u[rows])
        for field, values in zip(whole, part, strict=True):
            field[rows] = values
    return Encoded(*whole)


def decode_message(payload: U8, widths: Ints, kind: Kind) -> F64:
    """The values f64[R, 256] of a message."""
    codes, groups, supers = parse_message(payload, widths, kind.units, kind.group_size)
    values = np.empty(codes.shape, np.float64)
    for width in np.unique(widths):
        rows = widths == width
        of_width = int(width), kind.spacing, kind.group_size
        values[rows] = decode_rows(codes[rows], groups[rows], supers[rows], *of_width)
    return values


def compress(x: F32, chunk: int, turn: int, widths: Ints, kind: Kind) -> U8:
    """The message of a chunk's rows f32[R, 256], in the order in which they are sent."""
    u = rounding_offsets(chunk * len(x) + np.arange(len(x)), turn, kind.seed, kind.rounding)
    sent = encode_chunk(x, widths, kind, u)
    return pack_message(sent.codes, sent.group_scales, sent.super_scales, widths, kind.units)


def decompress(payload: U8, widths: Ints, kind: Kind) -> F32:
    """The values f32[R, 256] of a message."""
    return decode_message(payload, widths, kind).astype(np.float32)


def ring(own: F32, chunk: int, widths: Ints, kind: Kind) -> tuple[F32, U8]:
    """Sum f32[R, 256] of one chunk of all workers f32[n, R, 256], and its last message.

    It starts at worker chunk + 1 and ends at worker chunk; each on the way decodes, adds its own
    rows in float32 and compresses again.
    """
    n = len(own)
    payload = compress(own[(chunk + 1) % n], chunk, 0, widths, kind)
    for turn in range(1, n):
        partial = decompress(payload, widths, kind) + own[(chunk + 1 + turn) % n]
        payload = compress(partial, chunk, turn, widths, kind)
    return decompress(payload, widths, kind), payload


def all_to_all(own: F32, chunk: int, widths: Ints, kind: Kind) -> tuple[F32, U8]:
    """The same where every worker sends its rows to the owner."""
    n = len(own)
    total = own[chunk]
    for turn in range(n - 1):
        sent = compress(own[chunk - 1 - turn], chunk, turn, widths, kind)
        total = total + decompress(sent, widths, kind)
    if n < 8:
        payload = compress(total, chunk, n - 1, widths, kind)
        return decompress(payload, widths, kind), payload
    payload = compress_reordered(total, chunk, n - 1, kind)
    return decompress_reordered(payload, len(total), kind), payload


def all_reduce(
    topology: Callable[[F32, int, Ints, Kind], tuple[F32, U8]],
    grads: F32,
    kind: Kind,
    norm_bits: U16 | None = None,
) -> tuple[F32, list[U8]]:
    """Sum of grads f32[n, size]: estimate f32[size], final payload of each chunk.

    `norm_bits` u16[n * R] replaces the combined norms (to follow an implementation's own order).
    """
    grads = np.asarray(grads, np.float32)
    n, size = grads.shape
    x = np.stack([to_rows(g, n) for g in grads])  # [n, n * R, 256]
    if norm_bits is None:
        norm_bits = combine_norms(row_norms(x))
    total, payloads = np.zeros(x.shape[1:], np.float32), []
    for chunk, rows in enumerate(row_table(norm_bits, n)):
        widths = kind.widths(energies_of_norms(norm_bits[rows]))
        total[rows], payload = topology(x[:, rows], chunk, widths, kind)
        payloads.append(payload)
    return total.reshape(-1)[:size], payloads


# ------------------------------------------------------------------------ 7. sums, ordered again


def row_energies(group_scales: U8, super_scales: U16) -> Ints:
    """Energies i64[R] of rows with scales u8[R, G] and u16[R], as integers."""
    squares = np.square(group_scales.astype(np.float32)).sum(axis=1)  # exact: below 2^24
    energies = (2 * super_scales.astype(np.int64) + (squares.view(np.uint32) >> 16)) >> 2
    return np.where(super_scales == BF16_NAN, 0, energies)


def compress_reordered(x: F32, chunk: int, turn: int, kind: Kind) -> U8:
    """The message of a sum f32[R, 256] in the order of the table."""
    group_scales, super_scales = row_scales(x, kind.group_size)
    order, widths = _order_of_sums(group_scales, super_scales, kind)
    ordered = compress(x[order], chunk, turn, widths, kind)
    codes, _, _ = parse_message(ordered, widths, kind.units, kind.group_size)
    return pack_message(codes, group_scales, super_scales, widths, kind.units)


def decompress_reordered(payload: U8, rows: int, kind: Kind) -> F32:
    """The sum f32[R, 256] of such a message, in the order of the table."""
    scales = payload[32 * kind.units :]
    group_scales = scales[: rows * (LANES // kind.group_size)].reshape(rows, -1)
    super_scales = scales[group_scales.size :][: 2 * rows].copy().view("<u2").astype(np.uint16)
    order, widths = _order_of_sums(group_scales, super_scales, kind)
    codes, _, _ = parse_message(payload, widths, kind.units, kind.group_size)
    ordered = pack_message(codes, group_scales[order], super_scales[order], widths, kind.units)
    values = np.empty((rows, LANES), np.float32)
    values[order] = decompress(ordered, widths, kind)
    return values


def _order_of_sums(group_scales: U8, super_scales: U16, kind: Kind) -> tuple[Ints, Ints]:
    energies = row_energies(group_scales, super_scales)
    order = np.argsort(-energies, kind="stable")
    return order, kind.widths(energies[order])


# ---------------------------------------------------------- 8. codes of one width, other methods


def planes(width: int) -> list[tuple[int, int]]:
    """(lowest bit, bits) of the planes of a width, low bits first."""
    found, low = [], 0
    while low < width:
        bits = next(p for p in (8, 4, 2, 1) if p <= width - low)
        found.append((low, bits))
        low += bits
    return found


def pack_codes(codes: U16, width: int) -> U8:
    """u16[rows, 256] -> u8[rows, 32 * width]."""
    parts = [np.zeros((len(codes), 0), np.uint8)]
    for low, bits in planes(width):
        k = 8 // bits
        plane = (codes >> np.uint16(low)) & np.uint16(2**bits - 1)
        plane = plane.reshape(len(codes), k, LANES // k)  # [row, i, j] is lane j + i * 256 / k
        parts.append(sum(plane[:, i] << np.uint16(i * bits) for i in range(k)).astype(np.uint8))
    return np.concatenate(parts, axis=1)
