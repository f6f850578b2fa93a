// Codes of a row to its bits in the planes of a message, and back: section 5 of the wire format.

#ifndef DYNAMIQ_PLANES_H_
#define DYNAMIQ_PLANES_H_

#include "kernels.h"

namespace dynamiq {
namespace {

// A row in a plane: bit i of byte j belongs to lane j + 32 i.
using Plane = uint64_t __attribute__((vector_size(kUnit)));

// Swaps the bits under `mask` of `b` with those of `a` that are `shift` bits higher.
inline void swap_bits(Plane& a, Plane& b, int shift, uint64_t mask) {
  const Plane difference = ((a >> shift) ^ b) & mask;
  b ^= difference;
  a ^= difference << shift;
}

// Swaps bit i of byte j of word k and bit k of byte j of word i. It is its own inverse.
inline void transpose(Plane (&words)[8]) {
  for (int i = 0; i < 4; ++i) swap_bits(words[i], words[i + 4], 4, 0x0f0f0f0f0f0f0f0fu);
  for (int i = 0; i < 8; i += 4)
    for (int j = i; j < i + 2; ++j) swap_bits(words[j], words[j + 2], 2, 0x3333333333333333u);
  for (int i = 0; i < 8; i += 2) swap_bits(words[i], words[i + 1], 1, 0x5555555555555555u);
}

// Reads `count` planes to one byte of every lane.
inline void read_planes(const uint8_t* planes, const int32_t* starts, int32_t count,
                        uint8_t* bytes) {
  Plane words[8];
  for (int k = 0; k < 8; ++k) {
    words[k] = Plane{};
    if (k < count) __builtin_memcpy(&words[k], planes + kUnit * starts[k], kUnit);
  }
  transpose(words);
  __builtin_memcpy(bytes, words, sizeof words);
}

inline void write_planes(uint8_t* planes, const int32_t* starts, int32_t count,
                         const uint8_t* bytes) {
  Plane words[8];
  __builtin_memcpy(words, bytes, sizeof words);
  transpose(words);
  for (int k = 0; k < count; ++k) __builtin_memcpy(planes + kUnit * starts[k], &words[k], kUnit);
}

// Planes 0 to 7 hold the low bytes of codes, planes 8 to 15 the high ones.
inline void unpack(const ReceivedRow& row, uint16_t* codes) {
  alignas(64) uint8_t low[kRow], high[kRow];
  const int32_t low_width = row.width < 8 ? row.width : 8;
  read_planes(row.planes, row.starts, low_width, low);
  for (int i = 0; i < kRow; ++i) codes[i] = low[i];
  if (row.width <= 8) return;
  read_planes(row.planes, row.starts + 8, row.width - 8, high);
  for (int i = 0; i < kRow; ++i) codes[i] = static_cast<uint16_t>(codes[i] | high[i] << 8);
}

inline void pack(const uint16_t* codes, const SentRow& row) {
  alignas(64) uint8_t low[kRow], high[kRow];
  const int32_t low_width = row.width < 8 ? row.width : 8;
  for (int i = 0; i < kRow; ++i) low[i] = static_cast<uint8_t>(codes[i]);
  write_planes(row.planes, row.starts, low_width, low);
  if (row.width <= 8) return;
  for (int i = 0; i < kRow; ++i) high[i] = static_cast<uint8_t>(codes[i] >> 8);
  write_planes(row.planes, row.starts + 8, row.width - 8, high);
}

}  // namespace
}  // namespace dynamiq

#endif  // DYNAMIQ_PLANES_H_
