// Operations on whole messages of formats with one width; see `pallas_kernels._native.native_blocks`.

#ifndef DYNAMIQ_BLOCK_OPERATIONS_H_
#define DYNAMIQ_BLOCK_OPERATIONS_H_

#include "operations.h"

namespace dynamiq {

// A format, and the messages of chunks of `rows` rows each.
struct BlockCodec {
  const PlainRows* plain;
  const BlockRows* blocks;
  int32_t width;
  int64_t rows;

  int64_t codes_bytes() const { return rows * kUnit * width; }
  int64_t row_sides() const { return kRow / blocks->block * blocks->side_bytes; }
  int64_t payload_bytes() const { return codes_bytes() + rows * row_sides(); }

  template <class Byte>
  BlockRow<Byte> row(Byte* message, int64_t index) const {
    return {message, rows, index, message + codes_bytes() + index * row_sides()};
  }
};

// Writes the sum of a local row and the received ones.
inline void sum_row(const BlockCodec& codec, const Received& received, const LocalRows& local,
                    int64_t first_row, int64_t row, float* sum) {
  local.load(first_row + row, *codec.plain, sum);
  for (int64_t m = 0; m < received.count; ++m) {
    const uint8_t* const message = received.data + m * codec.payload_bytes();
    codec.blocks->add(codec.row(message, row), codec.width, sum);
  }
}

// `first_row` is where the chunk starts in the local rows, `first_id` its first row in the bucket.
template <class Pool>
void block_hop(Pool& pool, const BlockCodec& codec, const Received& received,
               const LocalRows& local, int64_t first_row, const Noise& noise, uint32_t first_id,
               uint8_t* message) {
  in_blocks(pool, codec.rows, kBlock, [&](int64_t first, int64_t last) {
    alignas(64) float values[kRow];
    for (int64_t row = first; row < last; ++row) {
      sum_row(codec, received, local, first_row, row, values);
      const uint32_t id = first_id + static_cast<uint32_t>(row);
      codec.blocks->encode(values, noise, id, codec.width, codec.row(message, row));
    }
  });
}

template <class Pool>
void block_accumulate(Pool& pool, const BlockCodec& codec, const Received& received,
                      const LocalRows& local, int64_t first_row, float* sums) {
  in_blocks(pool, codec.rows, kBlock, [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row)
      sum_row(codec, received, local, first_row, row, sums + kRow * row);
  });
}

template <class Pool>
void block_decompress(Pool& pool, const BlockCodec& codec, const uint8_t* messages, int64_t chunks,
                      float* values) {
  in_blocks(pool, chunks * codec.rows, kBlock, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      const uint8_t* const message = messages + i / codec.rows * codec.payload_bytes();
      codec.blocks->decode(codec.row(message, i % codec.rows), codec.width, values + kRow * i);
    }
  });
}

}  // namespace dynamiq

#endif  // DYNAMIQ_BLOCK_OPERATIONS_H_
