// Rows of formats with one width, whose blocks have some bytes each beside their codes: the MX
// formats and block integers of `dynamiq_jax.methods`, for the instruction set of rows.cc.

#ifndef DYNAMIQ_BLOCK_ROWS_H_
#define DYNAMIQ_BLOCK_ROWS_H_

#include "floats.h"
#include "kernels.h"
#include "offsets.h"

namespace dynamiq {
namespace {

constexpr uint32_t kInfinityBits = 255u << 23;

// Calls `use(bits, low, plane of the row)` for the planes of codes, of 8, 4, 2 and 1 bits: see
// `pallas_kernels.codec.packing`.
template <class Byte, class Use>
inline void for_each_plane(const BlockRow<Byte>& row, int32_t width, const Use& use) {
  Byte* plane = row.codes;
  for (int32_t bits = 8, low = 0; bits > 0; bits /= 2) {
    if (width - low < bits) continue;
    use(bits, low, plane + kUnit * bits * row.index);
    plane += kUnit * bits * row.count;
    low += bits;
  }
}

inline void pack(const uint8_t* codes, int32_t width, const BlockRow<uint8_t>& row) {
  for_each_plane(row, width, [codes](int32_t bits, int32_t low, uint8_t* plane) {
    const int32_t bytes = static_cast<int32_t>(kUnit) * bits, mask = (1 << bits) - 1;
    for (int32_t j = 0; j < bytes; ++j) plane[j] = 0;
    const uint8_t* lanes = codes;
    for (int32_t shift = 0; shift < 8; shift += bits, lanes += bytes)
      for (int32_t j = 0; j < bytes; ++j)
        plane[j] = static_cast<uint8_t>(plane[j] | (lanes[j] >> low & mask) << shift);
  });
}

inline void unpack(const BlockRow<const uint8_t>& row, int32_t width, uint8_t* codes) {
  for (int i = 0; i < kRow; ++i) codes[i] = 0;
  for_each_plane(row, width, [codes](int32_t bits, int32_t low, const uint8_t* plane) {
    const int32_t bytes = static_cast<int32_t>(kUnit) * bits, mask = (1 << bits) - 1;
    uint8_t* lanes = codes;
    for (int32_t shift = 0; shift < 8; shift += bits, lanes += bytes)
      for (int32_t j = 0; j < bytes; ++j)
        lanes[j] = static_cast<uint8_t>(lanes[j] | (plane[j] >> shift & mask) << low);
  });
}

// An element of the MX formats: `dynamiq_jax.methods._minifloat`, in integers as there.
template <int exponent_bits, int mantissa_bits, int bias, int max_code, bool twos_complement = false>
struct Element {
  static constexpr int block = 32, side_bytes = 1;
  static constexpr int width = 1 + exponent_bits + mantissa_bits;
  static constexpr int32_t sign = 1 << (width - 1), hidden = 1 << 23;
  static constexpr bool has_special = max_code < sign - 1;
  static constexpr bool has_infinity = has_special && (max_code + 1) % (1 << mantissa_bits) == 0;

  static void encode_block(const float* values, const float*, int32_t, uint8_t* codes,
                           uint8_t* side) {
    constexpr int32_t max_exponent = (max_code >> mantissa_bits) - bias;
    const int32_t exponent = maximum<block>(values) >> 23;
    const int32_t above = exponent > max_exponent ? exponent - max_exponent : 0;
    const int32_t scale = exponent == 255 ? 255 : above;
    side[0] = static_cast<uint8_t>(scale);
    // In steps of the subnormal codes, 2^steps. Each half of the power is a normal number.
    const int32_t steps = 127 - scale + bias - 1 + mantissa_bits, part = steps / 2;
    const float first = power_of_two(part), second = power_of_two(steps - part);
    const int32_t least_exponent = scale + 1 - bias > 1 ? scale + 1 - bias : 1;
    constexpr int32_t drop = 23 - mantissa_bits;
    constexpr uint32_t below_half = (1u << (drop - 1)) - 1;
    for (int i = 0; i < block; ++i) {
      const int32_t bits = static_cast<int32_t>(bits_of(values[i]));
      const int32_t magnitude = bits & 0x7fffffff;
      const uint32_t odd = static_cast<uint32_t>(magnitude >> drop & 1);
      const uint32_t rounded = static_cast<uint32_t>(magnitude) + below_half + odd;
      const int32_t normal =
          static_cast<int32_t>(rounded >> drop) - (scale - bias) * (1 << mantissa_bits);
      // The sum with 2^23 rounds to a whole number.
      const float whole = float_of(static_cast<uint32_t>(magnitude)) * first * second + 0x1p23f;
      const int32_t subnormal = static_cast<int32_t>(bits_of(whole) - bits_of(0x1p23f));
      const int32_t code = magnitude >= least_exponent * hidden ? normal : subnormal;
      const int32_t least = code < max_code ? code : max_code;
      const int32_t negative = twos_complement ? -least & (2 * sign - 1) : least | sign;
      codes[i] = static_cast<uint8_t>(bits < 0 ? negative : least);
    }
  }

  static float power_of_two(int32_t power) {
    return float_of(static_cast<uint32_t>(127 + power) << 23);
  }

  // Calls `use(lane, value, scale)`. Their product is exact, or flushed, or infinite.
  template <class Use>
  static void decode_block(const uint8_t* codes, const uint8_t* side, int32_t, const Use& use) {
    const uint32_t scale = side[0];
    // 2^-127 is subnormal: the values of such a block are halved.
    const float power = float_of(scale == 255 ? kNanBits << 16 : (scale > 0 ? scale : 1) << 23);
    const float half = scale > 0 ? 1.0f : 0.5f;
    constexpr float least = static_cast<float>(1.0 / (1ll << (bias - 1 + mantissa_bits)));
    for (int i = 0; i < block; ++i) {
      const int32_t word = codes[i];
      const int32_t magnitude =
          twos_complement ? (word >= sign ? 2 * sign - word : word) : word & (sign - 1);
      const float normal = float_of(static_cast<uint32_t>(
          (magnitude << (23 - mantissa_bits)) + ((127 - bias) << 23)));
      const float subnormal = static_cast<float>(magnitude) * least;
      float value = magnitude >> mantissa_bits ? normal : subnormal;
      if (has_special) value = magnitude > max_code ? float_of(kNanBits << 16) : value;
      if (has_infinity) value = magnitude == max_code + 1 ? float_of(kInfinityBits) : value;
      use(i, float_of(bits_of(value * half) | (word >= sign ? 0x80000000u : 0u)), power);
    }
  }

  static float added(float value, float scale, float sum) { return sum + value * scale; }
};

// Integers times one bfloat16 of each block: `dynamiq_jax.methods._blockint`.
template <int size>
struct Integer {
  static constexpr int block = size, side_bytes = 2;

  static float top(int32_t width) { return static_cast<float>((1 << (width - 1)) - 1); }

  // The smallest normal bfloat16 of which `levels` steps cover a span.
  static uint32_t covering_step(float span, float levels) {
    const float quotient = span * static_cast<float>(1.0 / static_cast<double>(levels));
    const uint32_t cut = bits_of(quotient) >> 16, low = cut > 0x80 ? cut : 0x80;
    return span < kTiny ? 0 : low + (from_bfloat16_bits(low) * levels < span);
  }

  // `offsets` is a null pointer for rounding to nearest.
  static void encode_block(const float* values, const float* offsets, int32_t width,
                           uint8_t* codes, uint8_t* side) {
    const int32_t most = maximum<block>(values);
    const float levels = top(width);
    const uint32_t scale = most <= 0x7e800000
                               ? covering_step(float_of(static_cast<uint32_t>(most)), levels)
                               : kNanBits;
    side[0] = static_cast<uint8_t>(scale);
    side[1] = static_cast<uint8_t>(scale >> 8);
    const float step = from_bfloat16_bits(scale), inverse = reciprocal(step);
    float wholes[block];
    if (offsets == nullptr) {
      for (int i = 0; i < block; ++i) wholes[i] = __builtin_rintf(values[i] * inverse);
    } else {
      for (int i = 0; i < block; ++i)
        wholes[i] = __builtin_floorf(fma(values[i], inverse, offsets[i]));
    }
    for (int i = 0; i < block; ++i) {
      const float above = wholes[i] < -levels ? -levels : wholes[i];
      const float code = (above > levels ? levels : above) + levels;
      codes[i] = static_cast<uint8_t>(static_cast<int32_t>(code == code ? code : 0.0f));
    }
  }

  template <class Use>
  static void decode_block(const uint8_t* codes, const uint8_t* side, int32_t width,
                           const Use& use) {
    const float scale = from_bfloat16_bits(load_bfloat16_bits(side));
    const int32_t levels = (1 << (width - 1)) - 1;
    for (int i = 0; i < block; ++i) use(i, static_cast<float>(codes[i] - levels), scale);
  }

  // The product is only added: it rounds once, with the sum.
  static float added(float value, float scale, float sum) { return fma(value, scale, sum); }
};

template <class Format>
void encode_blocks(const float* values, const Noise& noise, uint32_t id, int32_t width,
                   const BlockRow<uint8_t>& row) {
  alignas(64) float offsets[kRow];
  alignas(64) uint8_t codes[kRow];
  const bool is_noisy = noise.rounding != kNearest;
  if (is_noisy) write_offsets(noise, id, offsets);
  uint8_t* side = row.sides;
  for (int i = 0; i < kRow; i += Format::block, side += Format::side_bytes)
    Format::encode_block(values + i, is_noisy ? offsets + i : nullptr, width, codes + i, side);
  pack(codes, width, row);
}

template <class Format, class Use>
inline void for_each_value(const BlockRow<const uint8_t>& row, int32_t width, const Use& use) {
  alignas(64) uint8_t codes[kRow];
  unpack(row, width, codes);
  const uint8_t* side = row.sides;
  for (int first = 0; first < kRow; first += Format::block, side += Format::side_bytes)
    Format::decode_block(codes + first, side, width, [&](int i, float value, float scale) {
      use(first + i, value, scale);
    });
}

template <class Format>
void decode_blocks(const BlockRow<const uint8_t>& row, int32_t width, float* values) {
  for_each_value<Format>(
      row, width, [values](int i, float value, float scale) { values[i] = value * scale; });
}

template <class Format>
void add_blocks(const BlockRow<const uint8_t>& row, int32_t width, float* sum) {
  for_each_value<Format>(row, width, [sum](int i, float value, float scale) {
    sum[i] = Format::added(value, scale, sum[i]);
  });
}

template <class Format>
constexpr BlockRows block_rows() {
  return {Format::block, Format::side_bytes, decode_blocks<Format>, add_blocks<Format>,
          encode_blocks<Format>};
}

}  // namespace
}  // namespace dynamiq

#endif  // DYNAMIQ_BLOCK_ROWS_H_
