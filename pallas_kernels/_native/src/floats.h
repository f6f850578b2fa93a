// Floats and their bits.
//
// XLA:CPU compiles a product that is only added to something to one instruction, which rounds once.
// This code calls `fma` in these places. The compiler must fuse nothing else (-ffp-contract=off):
// all other products and sums round by themselves, in XLA and here.

#ifndef DYNAMIQ_FLOATS_H_
#define DYNAMIQ_FLOATS_H_

#include <stdint.h>

namespace dynamiq {
namespace {

inline uint32_t bits_of(float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline float float_of(uint32_t bits) {
  float value;
  __builtin_memcpy(&value, &bits, sizeof value);
  return value;
}

inline float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }

inline float at_most_one(float value) { return value < 1.0f ? value : 1.0f; }  // NaN to 1

inline uint32_t magnitude_bits(float value) { return bits_of(value) & 0x7fffffffu; }

constexpr float kTiny = 0x1p-126f;  // the smallest normal number
constexpr uint32_t kNanBits = 0x7fc0u;  // bfloat16

inline float reciprocal(float scale) { return scale < kTiny ? 0.0f : 1.0f / scale; }

// The largest magnitude of `count` values, as bits: the order is the same, with NaN on top.
template <int count>
inline int32_t maximum(const float* values) {
  int32_t most = 0;
  for (int i = 0; i < count; ++i) {
    const int32_t bits = static_cast<int32_t>(magnitude_bits(values[i]));  // below 2^31
    most = bits > most ? bits : most;
  }
  return most;
}

inline float from_bfloat16_bits(uint32_t bits) { return float_of(bits << 16); }

inline uint32_t load_bfloat16_bits(const uint8_t* at) { return at[0] | uint32_t(at[1]) << 8; }

// By integers: hardware that flushes subnormal numbers may do so in a conversion, too.
inline float from_float16_bits(uint32_t half) {
  const uint32_t exponent = half & 0x7c00u, payload = (half & 0x7fffu) << 13;
  const float subnormal = static_cast<float>(static_cast<int32_t>(half & 0x3ffu)) * 0x1p-24f;
  const uint32_t rebias = exponent == 0x7c00u ? (255u - 31u) << 23 : (127u - 15u) << 23;
  const uint32_t magnitude = exponent ? payload + rebias : bits_of(subnormal);
  return float_of(magnitude | (half & 0x8000u) << 16);
}

}  // namespace
}  // namespace dynamiq

#endif  // DYNAMIQ_FLOATS_H_
