// Buffers that XLA gives to custom calls, and errors of these.

#ifndef DYNAMIQ_BUFFERS_H_
#define DYNAMIQ_BUFFERS_H_

#include <cstdint>
#include <string>

#include "operations.h"
#include "xla/ffi/api/ffi.h"

namespace dynamiq {
namespace {

namespace ffi = xla::ffi;

using Bytes = ffi::Buffer<ffi::U8>;
using Floats = ffi::Buffer<ffi::F32>;
using Ints = ffi::Buffer<ffi::S32>;
using Words = ffi::Buffer<ffi::U32>;

constexpr char kTooOld[] =
    "The native codec needs AVX2 and FMA, or AArch64. Use implementation='xla'.";

inline ffi::Error invalid(const std::string& text) { return ffi::Error::InvalidArgument(text); }

// Reads the rows. Their dtype is one of three.
inline ffi::Error read(const ffi::AnyBuffer& buffer, LocalRows& rows) {
  switch (buffer.element_type()) {
    case ffi::F32: rows.dtype = Dtype::kFloat32; break;
    case ffi::BF16: rows.dtype = Dtype::kBfloat16; break;
    case ffi::F16: rows.dtype = Dtype::kFloat16; break;
    default: return invalid("rows: not float32, bfloat16 or float16");
  }
  rows.data = buffer.untyped_data();
  rows.count = static_cast<int64_t>(buffer.element_count()) / kRow;
  return ffi::Error::Success();
}

}  // namespace
}  // namespace dynamiq

#endif  // DYNAMIQ_BUFFERS_H_
