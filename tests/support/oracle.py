"""NumPy oracle of the wire format (docs/wire_format.md), written from the page and nothing else.

It favors clarity over speed and shares no code with the library. Scales are computed in float32,
as the page specifies them bit for bit. Level positions, probabilities and norms are computed in
float64, so a float32 implementation may differ where the outcome depends on the last bits:
`encode_rows` returns the mask of coordinates where it may not ("decided").

Shapes: a bucket of `size` values on `n` workers is n * R rows of 256 lanes; a row has
G = 256 / group_size groups; a chunk is R rows, and `class_rows` ((width, rows), ...) adds up to R.
"""

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
ClassRows = Sequence[tuple[int, int]]

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


def class_rows_of(fractions: Sequence[tuple[int, float]], rows: int) -> list[tuple[int, int]]:
    """(width, rows) of the width classes in a chunk of R rows, without empty classes."""
    ends = np.rint(np.cumsum([share for _, share in fractions]) * rows).astype(int)  # half to even
    ends[-1] = rows
    counts = np.diff(ends, prepend=0).tolist()
    return [(width, n) for (width, _), n in zip(fractions, counts, strict=True) if n > 0]


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


def row_order(norm_bits: U16) -> Ints:
    """Row indices by descending bit pattern u16[rows], ties by index, i64[rows]."""
    return np.argsort(-norm_bits.astype(np.int64), kind="stable")


def row_table(norm_bits: U16, class_rows: ClassRows, n: int) -> Ints:
    """i64[n, R]: the original row at each place of each chunk."""
    order = row_order(norm_bits)
    per_class, start = [], 0
    for _, count in class_rows:
        members = order[start : start + n * count]  # rank p -> chunk p mod n, place p // n
        per_class.append(members.reshape(count, n).T)
        start += n * count
    assert start == order.size, "class_rows must add up to R"
    return np.concatenate(per_class, axis=1)


def consecutive_table(norm_bits: U16, n: int) -> Ints:
    """`row_table` where chunk c has to hold the c-th part of the rows."""
    parts = norm_bits.reshape(n, -1)
    return np.stack([row_order(part) + c * part.size for c, part in enumerate(parts)])


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
        return mix_mixed(mix(row + shift)[:, None] ^ lanes)
    word = mix_mixed(row[:, None] ^ lanes)
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
    in_range = row_max <= np.float32(2.0**126)  # False for NaN
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
    """Encode f32[rows, 256] with rounding offsets u [rows, 256].

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

    f = levels(width, spacing)
    r = np.clip(np.searchsorted(f, t, side="right") - 1, 0, f.size - 2)
    gap, above = f[r + 1] - f[r], t - f[r]
    magnitude = r + (u * gap < above)
    codes = (np.signbit(x).astype(np.uint16) << (width - 1)) | magnitude.astype(np.uint16)

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
    magnitude = codes & np.uint16(2 ** (width - 1) - 1)
    sign = 1.0 - 2.0 * (codes >> np.uint16(width - 1))
    return sign * levels(width, spacing)[magnitude] * scale


# -------------------------------------------------------------------------- 5, 6. packing, messages


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


def unpack_codes(packed: U8, width: int) -> U16:
    """u8[rows, 32 * width] -> u16[rows, 256]."""
    codes = np.zeros((len(packed), LANES), np.uint16)
    for low, bits in planes(width):
        plane = packed[:, 32 * low : 32 * (low + bits)].astype(np.uint16)
        fields = [(plane >> np.uint16(i * bits)) & (2**bits - 1) for i in range(8 // bits)]
        codes |= np.concatenate(fields, axis=1).astype(np.uint16) << np.uint16(low)
    return codes


def class_slices(class_rows: ClassRows) -> list[tuple[int, slice]]:
    """(width, places) of each width class in a chunk."""
    ends = np.cumsum([count for _, count in class_rows])
    pairs = zip(class_rows, ends, strict=True)
    return [(w, slice(int(end) - count, int(end))) for (w, count), end in pairs]


def payload_bytes(class_rows: ClassRows, group_size: int) -> int:
    """Length of the message of one chunk."""
    used = sum(count * (32 * width + LANES // group_size + 2) for width, count in class_rows)
    return -(-used // 16) * 16


def pack_message(codes: U16, group_scales: U8, super_scales: U16, class_rows: ClassRows) -> U8:
    """The message u8[payload_bytes] of a chunk: u16[R, 256], u8[R, G] and u16[R]."""
    parts = []
    for width, rows in class_slices(class_rows):
        packed = pack_codes(codes[rows], width)
        parts += [packed[:, 32 * low : 32 * (low + b)].reshape(-1) for low, b in planes(width)]
    parts += [group_scales.reshape(-1), super_scales.astype("<u2").view(np.uint8)]
    message = np.zeros(payload_bytes(class_rows, LANES // group_scales.shape[1]), np.uint8)
    joined = np.concatenate(parts)
    message[: joined.size] = joined
    return message


def parse_message(payload: U8, class_rows: ClassRows, group_size: int) -> tuple[U16, U8, U16]:
    """Codes u16[R, 256], group scales u8[R, G] and super-scales u16[R] of a message."""
    payload = np.ascontiguousarray(payload, np.uint8)
    assert payload.size == payload_bytes(class_rows, group_size), "not a message of this layout"
    total = sum(count for _, count in class_rows)
    codes, at = np.zeros((total, LANES), np.uint16), 0
    for width, rows in class_slices(class_rows):
        count = rows.stop - rows.start
        packed = []
        for _, bits in planes(width):
            end = at + count * 32 * bits
            packed.append(payload[at:end].reshape(count, 32 * bits))
            at = end
        if packed:
            codes[rows] = unpack_codes(np.concatenate(packed, axis=1), width)
    split = at + total * (LANES // group_size)
    group_scales = payload[at:split].reshape(total, LANES // group_size)
    super_scales = payload[split : split + 2 * total].copy().view("<u2").astype(np.uint16)
    return codes, group_scales, super_scales


# --------------------------------------------------------------------------- chunks and their paths


def encode_chunk(
    x: F32, class_rows: ClassRows, group_size: int, spacing: Spacing, u: NDArray
) -> Encoded:
    """Encode the R rows of a chunk, f32[R, 256], each class at its width."""
    parts = [
        encode_rows(x[rows], width, spacing, group_size, u[rows])
        for width, rows in class_slices(class_rows)
    ]
    return Encoded(*(np.concatenate(field) for field in zip(*parts, strict=True)))


def decode_message(payload: U8, class_rows: ClassRows, group_size: int, spacing: Spacing) -> F64:
    """The values f64[R, 256] of a message."""
    codes, groups, supers = parse_message(payload, class_rows, group_size)
    parts = []
    for width, rows in class_slices(class_rows):
        kind = width, spacing, group_size
        parts.append(decode_rows(codes[rows], groups[rows], supers[rows], *kind))
    return np.concatenate(parts)


class Kind(NamedTuple):
    """What the messages of a bucket have in common."""

    class_rows: ClassRows
    group_size: int
    spacing: Spacing
    rounding: str
    seed: tuple[int, int]


def compress(x: F32, chunk: int, turn: int, kind: Kind) -> U8:
    """The message of a chunk's rows f32[R, 256], in the order in which they are sent."""
    u = rounding_offsets(chunk * len(x) + np.arange(len(x)), turn, kind.seed, kind.rounding)
    sent = encode_chunk(x, kind.class_rows, kind.group_size, kind.spacing, u)
    return pack_message(sent.codes, sent.group_scales, sent.super_scales, kind.class_rows)


def decompress(payload: U8, kind: Kind) -> F32:
    """The values f32[R, 256] of a message."""
    decoded = decode_message(payload, kind.class_rows, kind.group_size, kind.spacing)
    return decoded.astype(np.float32)


def ring(own: F32, chunk: int, kind: Kind) -> tuple[F32, U8]:
    """Sum f32[R, 256] of one chunk of all workers f32[n, R, 256], and its last message.

    It starts at worker chunk + 1 and ends at worker chunk; each on the way decodes, adds its own
    rows in float32 and compresses again.
    """
    n = len(own)
    payload = compress(own[(chunk + 1) % n], chunk, 0, kind)
    for turn in range(1, n):
        partial = decompress(payload, kind) + own[(chunk + 1 + turn) % n]
        payload = compress(partial, chunk, turn, kind)
    return decompress(payload, kind), payload


def all_to_all(own: F32, chunk: int, kind: Kind) -> tuple[F32, U8]:
    """The same where every worker sends its rows to the owner."""
    n = len(own)
    total = own[chunk]
    for turn in range(n - 1):
        total = total + decompress(compress(own[chunk - 1 - turn], chunk, turn, kind), kind)
    if n < 8:
        payload = compress(total, chunk, n - 1, kind)
        return decompress(payload, kind), payload
    payload = compress_reordered(total, chunk, n - 1, kind)
    return decompress_reordered(payload, kind), payload


def all_reduce(
    topology: Callable[[F32, int, Kind], tuple[F32, U8]],
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
    for chunk, rows in enumerate(row_table(norm_bits, kind.class_rows, n)):
        total[rows], payload = topology(x[:, rows], chunk, kind)
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
    order = np.argsort(-row_energies(group_scales, super_scales), kind="stable")
    ordered = compress(x[order], chunk, turn, kind)
    codes, _, _ = parse_message(ordered, kind.class_rows, kind.group_size)
    return pack_message(codes, group_scales, super_scales, kind.class_rows)


def decompress_reordered(payload: U8, kind: Kind) -> F32:
    """The sum f32[R, 256] of such a message, in the order of the table."""
    codes, group_scales, super_scales = parse_message(payload, kind.class_rows, kind.group_size)
    order = np.argsort(-row_energies(group_scales, super_scales), kind="stable")
    ordered = pack_message(codes, group_scales[order], super_scales[order], kind.class_rows)
    values = np.empty((len(order), LANES), np.float32)
    values[order] = decompress(ordered, kind)
    return values
