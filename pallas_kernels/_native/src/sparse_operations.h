// Operations on sparse messages, block by block; see `pallas_kernels.native_sparse`.

#ifndef DYNAMIQ_SPARSE_OPERATIONS_H_
#define DYNAMIQ_SPARSE_OPERATIONS_H_

#include <cstdint>
#include <vector>

#include "blocks.h"
#include "kernels.h"

namespace dynamiq {

// A message of some blocks: all scales, then all high bits, low bits and codes.
template <class Byte>
struct SparseMessage {
  Byte* data;
  int64_t blocks;
  const SparseFormat& format;

  SparseBlock<Byte> block(int64_t index) const {
    Byte* const highs = data + 2 * blocks;
    Byte* const lows = highs + blocks * format.high_bytes();
    Byte* const codes = lows + blocks * format.low_bytes();
    return {data + 2 * index, highs + index * format.high_bytes(),
            lows + index * format.low_bytes(), codes + index * format.code_bytes()};
  }
};

constexpr int64_t kSparseCoordinates = 1 << 16;  // that a thread takes at a time, or a block

inline int64_t sparse_step(const SparseFormat& format) {
  return std::max<int64_t>(kSparseCoordinates / format.chunk, 1);
}

template <class Pool>
void sparse_encode(Pool& pool, const SparseBlocks& kernels, const float* values,
                   const SparseMessage<uint8_t>& message) {
  const SparseFormat& format = message.format;
  in_blocks(pool, message.blocks, sparse_step(format), [&](int64_t first, int64_t last) {
    const auto chunk = static_cast<size_t>(format.chunk);
    std::vector<int32_t> numbers(3 * chunk);
    std::vector<float> sums(chunk);
    const SparseScratch scratch = {&numbers[0], &numbers[chunk], &numbers[2 * chunk], &sums[0]};
    for (int64_t i = first; i < last; ++i)
      kernels.encode(values + i * format.chunk, format, scratch, message.block(i));
  });
}

template <class Pool>
void sparse_decode(Pool& pool, const SparseBlocks& kernels,
                   const SparseMessage<const uint8_t>& message, float* values) {
  const SparseFormat& format = message.format;
  in_blocks(pool, message.blocks, sparse_step(format), [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i)
      kernels.decode(message.block(i), format, values + i * format.chunk);
  });
}

}  // namespace dynamiq

#endif  // DYNAMIQ_SPARSE_OPERATIONS_H_
