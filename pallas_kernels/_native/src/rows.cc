// Rows to codes and scales, and back, for one instruction set: DYNAMIQ_ISA is its namespace.
//
// Loops go over 256 lanes or over those of a group, with constant bounds, so that the compiler
// vectorizes them. The arithmetic is that of `pallas_kernels.codec.rows` and `scales`.

#include "block_rows.h"
#include "floats.h"
#include "kernels.h"
#include "levels.h"
#include "offsets.h"
#include "planes.h"
#include "sparse_blocks.h"

namespace dynamiq {
namespace DYNAMIQ_ISA {
namespace {

template <class Levels>
Levels load_levels(const float* numbers) {
  Levels levels;
  __builtin_memcpy(&levels, numbers, sizeof levels);
  return levels;
}

// The scale of a group is `byte * step`. The step rounds before, and is flushed if subnormal.
inline float scale_step(uint32_t super_bits) {
  return from_bfloat16_bits(super_bits) * static_cast<float>(1.0 / 255);
}

// Writes the scales of a row, and the factors that normalize its groups.
template <int group_size>
inline void quantize_scales(const float* values, uint8_t* group_scales, uint8_t* super_scale,
                            float* inverse) {
  constexpr int groups = kRow / group_size;
  uint32_t maxima[groups];
  uint32_t largest = 0;
  for (int g = 0; g < groups; ++g) {
    maxima[g] = static_cast<uint32_t>(maximum<group_size>(values + g * group_size));
    largest = maxima[g] > largest ? maxima[g] : largest;
  }
  // Rounded up to bfloat16; NaN if its reciprocal would be subnormal.
  const uint32_t super_bits = largest <= 0x7e7f0000u ? (largest + 0xffffu) >> 16 : kNanBits;
  super_scale[0] = static_cast<uint8_t>(super_bits);
  super_scale[1] = static_cast<uint8_t>(super_bits >> 8);
  const float of_row = reciprocal(from_bfloat16_bits(super_bits)), step = scale_step(super_bits);
  for (int g = 0; g < groups; ++g) {
    const float share = at_most_one(float_of(maxima[g]) * of_row) * 255.0f;  // rounds twice
    const float byte = __builtin_ceilf(share);
    group_scales[g] = static_cast<uint8_t>(static_cast<int32_t>(byte));
    inverse[g] = reciprocal(byte * step);
  }
}

template <class Levels, int group_size>
void encode(const float* values, const Noise& noise, uint32_t id, const float* numbers,
            const SentRow& row) {
  constexpr int groups = kRow / group_size;
  float inverse[groups];
  quantize_scales<group_size>(values, row.group_scales, row.super_scale, inverse);
  if (row.width == 0) return;
  const Levels levels = load_levels<Levels>(numbers);
  const uint32_t top = static_cast<uint32_t>(static_cast<int32_t>(levels.top));
  alignas(64) float offsets[kRow];
  alignas(64) uint16_t codes[kRow];
  write_offsets(noise, id, offsets);
  for (int g = 0; g < groups; ++g) {
    const float of_group = inverse[g];
    for (int i = g * group_size; i < (g + 1) * group_size; ++i) {
      const uint32_t sign = bits_of(values[i]) >> 31;
      const float t = at_most_one(float_of(magnitude_bits(values[i])) * of_group);
      // An offset moves values of either sign in the same direction.
      const float offset = sign ? 1.0f - offsets[i] : offsets[i];
      codes[i] = static_cast<uint16_t>(round_to_level(t, offset, levels, top) << 1 | sign);
    }
  }
  pack(codes, row);
}

template <int group_size>
void write_scales(const float* values, const SentRow& row) {
  float inverse[kRow / group_size];
  quantize_scales<group_size>(values, row.group_scales, row.super_scale, inverse);
}

// Calls `use(lane, signed position, scale of the group)` for all lanes of a row.
template <class Levels, int group_size, class Use>
inline void for_each_lane(const ReceivedRow& row, const float* numbers, const Use& use) {
  const Levels levels = load_levels<Levels>(numbers);
  const float step = scale_step(load_bfloat16_bits(row.super_scale));
  alignas(64) uint16_t codes[kRow];
  unpack(row, codes);
  for (int g = 0; g < kRow / group_size; ++g) {
    const float scale = static_cast<float>(row.group_scales[g]) * step;
    for (int i = g * group_size; i < (g + 1) * group_size; ++i) {
      const uint32_t code = codes[i];
      const float position = levels.position(static_cast<float>(static_cast<int32_t>(code >> 1)));
      use(i, float_of(bits_of(position) ^ code << 31), scale);
    }
  }
}

template <class Levels, int group_size>
void decode(const ReceivedRow& row, const float* numbers, float* values) {
  for_each_lane<Levels, group_size>(
      row, numbers, [values](int i, float position, float scale) { values[i] = position * scale; });
}

// The product of a position and a scale is only added: it rounds once, with the sum.
template <class Levels, int group_size>
void add(const ReceivedRow& row, const float* numbers, float* sum) {
  for_each_lane<Levels, group_size>(row, numbers, [sum](int i, float position, float scale) {
    sum[i] = fma(position, scale, sum[i]);
  });
}

void from_bfloat16(const uint16_t* row, float* values) {
  for (int i = 0; i < kRow; ++i) values[i] = from_bfloat16_bits(row[i]);
}

void from_float16(const uint16_t* row, float* values) {
  for (int i = 0; i < kRow; ++i) values[i] = from_float16_bits(row[i]);
}

// Adds up squares in lanes of their own, and then the lanes.
inline float sum_of_squares(const float* values, float factor) {
  constexpr int lanes = 32;
  float sums[lanes] = {};
  for (int first = 0; first < kRow; first += lanes)
    for (int i = 0; i < lanes; ++i) {
      const float value = values[first + i] * factor;
      sums[i] = fma(value, value, sums[i]);
    }
  for (int half = lanes / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) sums[i] += sums[i + half];
  return sums[0];
}

float norm(const float* values) {
  const float squares = sum_of_squares(values, 1.0f);
  // Outside of this range, squares may leave that of float32.
  if (squares > 0x1p-40f && squares < 0x1p120f) return __builtin_sqrtf(squares);
  const int32_t most = maximum<kRow>(values);
  // Larger units have reciprocals that are flushed. The norm of Inf is then Inf, and that of NaN is
  // NaN by its square.
  const float unit = float_of(most < 0x7e800000 ? static_cast<uint32_t>(most) : 0x7e800000u);
  const float factor = unit > kTiny ? 1.0f / unit : 1.0f;
  return unit * __builtin_sqrtf(sum_of_squares(values, factor));
}

template <class Levels, int group_size>
constexpr CodedRows coded_rows() {
  return {decode<Levels, group_size>, add<Levels, group_size>, encode<Levels, group_size>,
          write_scales<group_size>};
}

#define DYNAMIQ_TEXT(name) #name
#define DYNAMIQ_NAME(name) DYNAMIQ_TEXT(name)

constexpr Kernels kKernels = {
    DYNAMIQ_NAME(DYNAMIQ_ISA),
    {from_bfloat16, from_float16, norm},
    {coded_rows<Uniform, 8>(), coded_rows<Uniform, 16>(), coded_rows<Uniform, 32>()},
    {coded_rows<Quadratic, 8>(), coded_rows<Quadratic, 16>(), coded_rows<Quadratic, 32>()},
    {block_rows<Element<4, 3, 7, 0x7e>>(), block_rows<Element<5, 2, 15, 0x7b>>(),
     block_rows<Element<3, 2, 3, 0x1f>>(), block_rows<Element<2, 3, 1, 0x1f>>(),
     block_rows<Element<2, 1, 1, 0x7>>(), block_rows<Element<1, 6, 1, 0x7f, true>>(),
     block_rows<Integer<32>>(), block_rows<Integer<64>>(), block_rows<Integer<128>>(),
     block_rows<Integer<256>>()},
    {encode_sparse, decode_sparse},
};

}  // namespace

const Kernels& kernels() { return kKernels; }

}  // namespace DYNAMIQ_ISA
}  // namespace dynamiq
