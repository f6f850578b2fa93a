// Blocks of sparse messages, for the instruction set of rows.cc: the bytes of
// `dynamiq_jax.islands.messages.sparse`, which is their specification.

#ifndef DYNAMIQ_SPARSE_BLOCKS_H_
#define DYNAMIQ_SPARSE_BLOCKS_H_

#include "floats.h"
#include "kernels.h"

namespace dynamiq {
namespace {

// The magnitude of a value as bits, whose order is the same: zero for subnormal numbers, Inf for NaN.
inline int32_t size_bits(float value) {
  constexpr int32_t kTinyBits = 1 << 23, kInf = 255 << 23;
  const int32_t bits = static_cast<int32_t>(magnitude_bits(value));
  const int32_t finite = bits < kInf ? bits : kInf;
  return finite < kTinyBits ? 0 : finite;
}

// The `rank`-th largest of some numbers from 0 to 2^31 - 1, bit by bit.
inline int32_t ranked(const int32_t* numbers, int64_t count, int64_t rank) {
  int32_t found = 0;
  for (int32_t bit = 1 << 30; bit > 0; bit >>= 1) {
    const int32_t least = found | bit;
    int32_t reached = 0;
    for (int64_t i = 0; i < count; ++i) reached += numbers[i] >= least;
    if (reached >= rank) found = least;
  }
  return found;
}

// Writes the places of the `keep` largest sizes in order, of equal ones the first.
inline void find_largest(const SparseFormat& format, const SparseScratch& scratch) {
  const int64_t keep = format.keep, chunk = format.chunk;
  int32_t* const some = scratch.some;
  // As many lanes as are kept, or more, have a size that reaches the `keep`-th largest of their
  // maxima. So nothing below it is kept, and little above it is not.
  int64_t lanes = 16;
  while (lanes < 2 * keep) lanes *= 2;
  for (int64_t i = 0; i < lanes; ++i) some[i] = 0;
  for (int64_t first = 0; first < chunk; first += lanes)
    for (int64_t i = 0; i < lanes; ++i) {
      const int32_t size = scratch.sizes[first + i];
      some[i] = size > some[i] ? size : some[i];
    }
  const int32_t bound = ranked(some, lanes, keep);
  int64_t count = 0;
  for (int32_t i = 0; i < chunk; ++i) {
    const int32_t size = scratch.sizes[i];
    some[count] = size;
    scratch.places[count] = i;
    count += size >= bound;
  }
  const int32_t least = ranked(some, count, keep);
  int64_t room = keep, kept = 0;  // for those of the least size
  for (int64_t i = 0; i < count; ++i) room -= some[i] > least;
  for (int64_t i = 0; i < count; ++i) {
    const bool is_least = some[i] == least;
    const bool is_kept = some[i] > least || (is_least && room > 0);
    room -= is_least;
    scratch.places[kept] = scratch.places[i];
    kept += is_kept;
  }
}

inline float size_at(const SparseScratch& scratch, int32_t place) {
  return float_of(static_cast<uint32_t>(scratch.sizes[place]));
}

// The number by which scales are measured: the sum of sizes by halves, or the largest one.
inline float measure(const SparseFormat& format, const SparseScratch& scratch) {
  int64_t width = 1;
  while (width < format.keep) width *= 2;
  float* const sums = scratch.sums;
  for (int64_t i = 0; i < width; ++i)
    sums[i] = i < format.keep ? size_at(scratch, scratch.places[i]) : 0.0f;
  for (int64_t half = width / 2; half > 0; half /= 2)
    for (int64_t i = 0; i < half; ++i) {
      const float other = sums[half + i];
      sums[i] = format.bits == 1 ? sums[i] + other : sums[i] > other ? sums[i] : other;
    }
  return sums[0];
}

// Writes fields of some bits, the lowest first.
class FieldWriter {
 public:
  FieldWriter(uint8_t* at, int32_t width) : at_(at), width_(width) {}

  void write(uint32_t field) {
    bits_ |= static_cast<uint64_t>(field) << used_;
    for (used_ += width_; used_ >= 8; used_ -= 8, bits_ >>= 8) *at_++ = static_cast<uint8_t>(bits_);
  }

  void finish() {
    if (used_ > 0) *at_ = static_cast<uint8_t>(bits_);
  }

 private:
  uint8_t* at_;
  const int32_t width_;
  int32_t used_ = 0;
  uint64_t bits_ = 0;
};

// Reads them.
class FieldReader {
 public:
  FieldReader(const uint8_t* at, int32_t width) : at_(at), width_(width) {}

  uint32_t read() {
    for (; there_ < width_; there_ += 8) bits_ |= static_cast<uint64_t>(*at_++) << there_;
    const auto field = static_cast<uint32_t>(bits_ & ((1u << width_) - 1));
    bits_ >>= width_;
    there_ -= width_;
    return field;
  }

 private:
  const uint8_t* at_;
  const int32_t width_;
  int32_t there_ = 0;
  uint64_t bits_ = 0;
};

void encode_sparse(const float* values, const SparseFormat& format, const SparseScratch& scratch,
                   const SparseBlock<uint8_t>& block) {
  for (int64_t i = 0; i < format.chunk; ++i) scratch.sizes[i] = size_bits(values[i]);
  find_largest(format, scratch);
  const float most = measure(format, scratch);
  const uint32_t bits = most * format.factor < kTiny ? 0 : bits_of(most * format.factor);
  const uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1)) >> 16;
  const uint32_t scale = rounded < 0x7f80u ? rounded : kNanBits;
  block.scale[0] = static_cast<uint8_t>(scale);
  block.scale[1] = static_cast<uint8_t>(scale >> 8);
  const int32_t levels = 1 << (format.bits - 1);
  float steps[8];
  for (int32_t k = 1; k < levels; ++k)
    steps[k] = most * (static_cast<float>(k) / static_cast<float>(levels));
  for (int64_t i = 0; i < format.high_bytes(); ++i) block.highs[i] = 0;
  FieldWriter lows(block.lows, format.low_bits), codes(block.codes, format.bits);
  for (int64_t i = 0; i < format.keep; ++i) {
    const int32_t place = scratch.places[i];
    const int64_t high = (place >> format.low_bits) + i;
    block.highs[high / 8] = static_cast<uint8_t>(block.highs[high / 8] | 1 << high % 8);
    lows.write(static_cast<uint32_t>(place & ((1 << format.low_bits) - 1)));
    const float size = size_at(scratch, place);
    uint32_t index = 0;
    for (int32_t k = 1; k < levels; ++k) index += size > steps[k];
    codes.write(index << 1 | bits_of(values[place]) >> 31);
  }
  lows.finish();
  codes.finish();
}

// A place behind the block, which no encoder writes, is left out.
void decode_sparse(const SparseBlock<const uint8_t>& block, const SparseFormat& format,
                   float* values) {
  for (int64_t i = 0; i < format.chunk; ++i) values[i] = 0.0f;
  const float scale = from_bfloat16_bits(load_bfloat16_bits(block.scale));
  FieldReader lows(block.lows, format.low_bits), codes(block.codes, format.bits);
  int64_t rank = 0;
  for (int64_t byte = 0; byte < format.high_bytes(); ++byte)
    for (uint32_t bits = block.highs[byte]; bits && rank < format.keep; bits &= bits - 1, ++rank) {
      const int64_t high = 8 * byte + __builtin_ctz(bits) - rank;
      const int64_t place = high << format.low_bits | lows.read();
      const uint32_t code = codes.read();
      const float odd = static_cast<float>(static_cast<int32_t>(code | 1));
      if (place < format.chunk) values[place] = (code & 1 ? -odd : odd) * scale;
    }
}

}  // namespace
}  // namespace dynamiq

#endif  // DYNAMIQ_SPARSE_BLOCKS_H_
