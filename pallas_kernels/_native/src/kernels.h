// Functions of one row, as tables of pointers: one table for each instruction set and group size.
//
// rows.cc is compiled once for every instruction set. It includes nothing of the standard library:
// the linker keeps one copy of an inline function, which may be the one that needs AVX-512.

#ifndef DYNAMIQ_KERNELS_H_
#define DYNAMIQ_KERNELS_H_

#include <stdint.h>

namespace dynamiq {

constexpr int64_t kRow = 256;     // coordinates of a row
constexpr int64_t kUnit = 32;     // bytes of a row in a plane
constexpr int32_t kMaxWidth = 16;  // bits of a code, and planes of a message

// A row of a message. `Byte` is `const uint8_t` where the row is read.
template <class Byte>
struct RowIn {
  Byte* planes;           // plane k of the row is at kUnit * starts[k]
  const int32_t* starts;  // first unit of every plane
  int32_t width;          // bits of a code
  Byte* group_scales;
  Byte* super_scale;
};
using ReceivedRow = RowIn<const uint8_t>;
using SentRow = RowIn<uint8_t>;

enum Rounding : int64_t { kNearest, kCorrelated, kIndependent };

// Inputs of the rounding offsets, see `pallas_kernels.codec.rounding`.
struct Noise {
  uint32_t seed[2];
  uint32_t turn;
  Rounding rounding;
};

// Levels as in `pallas_kernels.codec.levels`, whose fields have this order.
struct UniformLevels {
  float top, step, first_gap, shift;
};
struct QuadraticLevels {
  float top, linear, quadratic, first_gap, growth, span, square, shift;
};

// `levels` points to the levels of the row's width.
struct CodedRows {
  void (*decode)(const ReceivedRow& row, const float* levels, float* values);
  void (*add)(const ReceivedRow& row, const float* levels, float* sum);
  void (*encode)(const float* values, const Noise& noise, uint32_t id, const float* levels,
                 const SentRow& row);
  void (*write_scales)(const float* values, const SentRow& row);
};

struct PlainRows {
  void (*from_bfloat16)(const uint16_t* row, float* values);
  void (*from_float16)(const uint16_t* row, float* values);
  float (*norm)(const float* values);
};

// A row of a message of a format with one width. The planes of all rows lie one behind the other.
template <class Byte>
struct BlockRow {
  Byte* codes;  // of the whole message
  int64_t count, index;
  Byte* sides;  // of this row: bytes that blocks have beside their codes
};

// A format with one width, in the order of `pallas_kernels._native.native_blocks`.
struct BlockRows {
  int64_t block, side_bytes;  // of a block
  void (*decode)(const BlockRow<const uint8_t>& row, int32_t width, float* values);
  void (*add)(const BlockRow<const uint8_t>& row, int32_t width, float* sum);
  void (*encode)(const float* values, const Noise& noise, uint32_t id, int32_t width,
                 const BlockRow<uint8_t>& row);
};
constexpr int64_t kBlockFormats = 10;

// A format of sparse messages, in the words of `dynamiq_jax.islands.messages.sparse`.
struct SparseFormat {
  int64_t keep, chunk;
  int32_t bits, low_bits;
  float factor;  // of the scale of a block

  int64_t high_bytes() const { return (keep + (chunk >> low_bits) + 6) / 8; }
  int64_t low_bytes() const { return (keep * low_bits + 7) / 8; }
  int64_t code_bytes() const { return (keep * bits + 7) / 8; }
};

// A block of a sparse message.
template <class Byte>
struct SparseBlock {
  Byte *scale, *highs, *lows, *codes;
};

// Memory for as many numbers each as a block has coordinates.
struct SparseScratch {
  int32_t *sizes, *some, *places;
  float* sums;
};

struct SparseBlocks {
  void (*encode)(const float* values, const SparseFormat& format, const SparseScratch& scratch,
                 const SparseBlock<uint8_t>& block);
  void (*decode)(const SparseBlock<const uint8_t>& block, const SparseFormat& format,
                 float* values);
};

struct Kernels {
  const char* name;  // of the instruction set
  PlainRows plain;
  CodedRows uniform[3], quadratic[3];  // of groups of 8, 16 and 32 coordinates
  BlockRows blocks[kBlockFormats];
  SparseBlocks sparse;
};

namespace avx2 {
const Kernels& kernels();
}
namespace avx512 {
const Kernels& kernels();
}
namespace neon {
const Kernels& kernels();
}

}  // namespace dynamiq

#endif  // DYNAMIQ_KERNELS_H_
