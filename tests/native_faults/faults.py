"""The faults: a file of `pallas_kernels/_native/src`, a text that it has once, and another text."""

from typing import NamedTuple


class Fault(NamedTuple):
    """A replacement in the source."""

    file: str
    old: str
    new: str


FAULTS = (
    # Floats.
    Fault("floats.h", "float_of(bits << 16)", "float_of(bits << 16 | 0x8000u)"),
    Fault("floats.h", "(127u - 15u) << 23;", "(127u - 14u) << 23;"),
    Fault("floats.h", "0x3ffu)) * 0x1p-24f", "0x3ffu)) * 0x1p-25f"),
    Fault("floats.h", "exponent == 0x7c00u", "exponent == 0x7800u"),
    # Levels: roundings, and formulas.
    Fault("levels.h", "fma(code, quadratic, linear)", "code * quadratic + linear"),
    Fault("levels.h", "fma(code, slope(code), -t)", "code * slope(code) - t"),
    Fault("levels.h", "fma(code, growth, first_gap)", "fma(code, first_gap, growth)"),
    Fault("levels.h", "bits_of(missing) >> 31)", "(bits_of(missing) >> 30 & 1))"),
    # Offsets.
    Fault("offsets.h", "id ^ noise.seed[0]", "id + noise.seed[0]"),
    Fault("offsets.h", "offset_of(word >> 16)", "offset_of(word & 0xffffu)"),
    Fault("offsets.h", "row = mix(row + turns);", "row = mix(row);"),
    # Planes.
    Fault("planes.h", "0x3333333333333333u", "0x3333333333333330u"),
    Fault("planes.h", "high[i] << 8)", "high[i] << 7)"),
    Fault(
        "planes.h",
        "write_planes(row.planes, row.starts + 8,",
        "write_planes(row.planes, row.starts + 7,",
    ),
    # Rows.
    Fault("rows.cc", "static_cast<float>(1.0 / 255)", "static_cast<float>(1.0 / 256)"),
    Fault("rows.cc", "largest <= 0x7e7f0000u", "largest <= 0x7f7f0000u"),
    Fault("rows.cc", "(largest + 0xffffu) >> 16", "(largest + 0x8000u) >> 16"),
    Fault("rows.cc", "__builtin_ceilf(share)", "__builtin_rintf(share)"),
    Fault("rows.cc", "sign ? 1.0f - offsets[i] : offsets[i]", "offsets[i]"),
    Fault("rows.cc", "fma(position, scale, sum[i])", "position * scale + sum[i]"),
    Fault("rows.cc", "squares > 0x1p-40f", "squares >= 0.0f"),
    # Operations.
    Fault("operations.h", "first_id + static_cast<uint32_t>(place)", "first_id"),
    Fault("operations.h", "table ? table[i] : place", "table ? table[place] : place"),
    Fault("operations.h", "super_scales + 2 * scales_at", "super_scales + 2 * place"),
    Fault("operations.h", "std::memset(end, 0, static_cast<size_t>", "(void)(static_cast<size_t>"),
    # Blocks and threads.
    Fault("blocks.h", "(count, (block + 1) * size)", "(count, block * size + size - 1)"),
    Fault("dispatch.h", "kFlush = 0x8040", "kFlush = 0x0000"),
    # Copies: places, rows, gaps and ends.
    Fault("copies.h", "row * span->to_stride + skipped", "row * span->to_stride"),
    Fault("copies.h", "row * span->from_stride + skipped", "row * span->to_stride + skipped"),
    Fault("copies.h", "std::memset(to, 0, bytes);", ";"),
    Fault("copies.h", "    span(nullptr, result.columns - written);\n", ""),
    Fault("copies.h", "start <= columns - length;", "start < columns;"),
    Fault("copies.h", " || next->at < written)", ")"),
    Fault("copies.h", "return next == end ? nullptr : next;", "return nullptr;"),
    # Calls: shapes, indices and errors.
    Fault("buffers.h", "expected[i] == kAny || found[i] == expected[i]", "true"),
    Fault("calls.cc", "{chunks(), kStarts}", "{chunks(), kAny}"),
    Fault("calls.cc", "{chunks, kAny}", "{kAny, kAny}"),
    Fault("calls.cc", "order.typed_data() + chunk * rows", "order.typed_data()"),
    Fault("calls.cc", "chunk < 0 || chunk >= chunks", "chunk < 0"),
    Fault("calls.cc", "at[i] >= rows", "at[i] > rows"),
    # Formats with one width.
    Fault("block_rows.h", "exponent == 255 ? 255 : above", "above"),
    Fault("block_rows.h", "below_half = (1u << (drop - 1)) - 1", "below_half = (1u << (drop - 1))"),
    Fault("block_rows.h", "code < max_code ? code : max_code", "code"),
    Fault("block_rows.h", "scale > 0 ? 1.0f : 0.5f", "1.0f"),
    Fault("block_rows.h", "most <= 0x7e800000", "most <= 0x7f000000"),
    Fault("block_rows.h", "cut > 0x80 ? cut : 0x80", "cut"),
    Fault("block_rows.h", "rintf(values[i] * inverse)", "floorf(values[i] * inverse + 0.5f)"),
    Fault("block_rows.h", "return fma(value, scale, sum);", "return sum + value * scale;"),
    Fault("sorting.h", "count, kDigitBits, &starts", "count, kDigitBits - 1, &starts"),
    Fault("sorting.h", "words + array * count", "words + array"),
    Fault("row_writer.h", "to + lane, _mm", "result_ + lane, _mm"),
    Fault("row_writer.h", "lane < kRow; lane += 4", "lane < kRow - 4; lane += 4"),
    Fault("block_operations.h", "first_id + static_cast<uint32_t>(row)", "first_id"),
    Fault("block_operations.h", "i % codec.rows), codec", "i % codec.rows ^ 1), codec"),
    Fault("block_calls.cc", "place.typed_data()[0] * format.rows;", "0;"),
    # Sparse messages.
    Fault("sparse_blocks.h", "finite < kTinyBits ? 0 : finite", "finite"),
    Fault("sparse_blocks.h", "bits < kInf ? bits : kInf", "bits"),
    Fault("sparse_blocks.h", "is_least && room > 0", "is_least && room >= 0"),
    Fault("sparse_blocks.h", "numbers[i] >= least;", "numbers[i] > least;"),
    Fault("sparse_blocks.h", "0x7fffu + (bits >> 16 & 1)", "0x8000u"),
    Fault("sparse_blocks.h", "rounded < 0x7f80u", "rounded <= 0x7f80u"),
    Fault("sparse_blocks.h", "size > steps[k]", "size >= steps[k]"),
    Fault("sparse_blocks.h", "width < format.keep) width *= 2;", "width < format.keep) ++width;"),
    Fault("sparse_blocks.h", "if (place < format.chunk) ", ""),
    Fault("sparse_operations.h", "index * format.low_bytes()", "index * format.code_bytes()"),
    Fault("sparse_calls.cc", "{blocks * bytes}", "{kAny}"),
)
