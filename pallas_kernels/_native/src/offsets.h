// Rounding offsets of a row: section 4 of the wire format.

#ifndef DYNAMIQ_OFFSETS_H_
#define DYNAMIQ_OFFSETS_H_

#include "floats.h"
#include "kernels.h"

namespace dynamiq {
namespace {

inline uint32_t mix_mixed(uint32_t word) {
  word *= 0x7feb352du;
  word = (word ^ (word >> 15)) * 0x846ca68bu;
  return word ^ (word >> 16);
}

inline uint32_t mix(uint32_t word) { return mix_mixed(word ^ (word >> 16)); }

// (half + 1/2) / 2^16 of 16 bits: exact, and cheaper than a conversion.
inline float offset_of(uint32_t half) {
  return float_of(half | 0x43000000u) - (128.0f - 0x1p-17f);
}

inline void write_offsets(const Noise& noise, uint32_t id, float* offsets) {
  if (noise.rounding == kNearest) {
    for (int i = 0; i < kRow; ++i) offsets[i] = 0.5f;
    return;
  }
  const uint32_t turns = noise.turn * 0x9e379e37u;
  uint32_t row = mix(mix(id ^ noise.seed[0]) + noise.seed[1]), added = turns;
  if (noise.rounding == kIndependent) {
    row = mix(row + turns);
    added = 0;
  }
  constexpr uint32_t kHalf = kRow / 2;
  for (uint32_t j = 0; j < kHalf; ++j) {
    const uint32_t word = mix_mixed(row + j * 0x9e3779b1u) + added;
    offsets[j] = offset_of(word & 0xffffu);
    offsets[j + kHalf] = offset_of(word >> 16);
  }
}

}  // namespace
}  // namespace dynamiq

#endif  // DYNAMIQ_OFFSETS_H_
