// The operations on sparse messages as custom calls of XLA:CPU.

#include <cstdint>

#include "buffers.h"
#include "dispatch.h"
#include "sparse_operations.h"

namespace dynamiq {
namespace {

// Reads the format of values [blocks, chunk], and compares the bytes of their message.
ffi::Error read(const Floats& values, int64_t keep, int64_t bits, float factor,
                const Bytes& message, SparseFormat& format) {
  if (ffi::Error error = check({{"values", values.dimensions(), {kAny, kAny}}}); error.failure())
    return error;
  const int64_t blocks = values.dimensions()[0], chunk = values.dimensions()[1];
  if (chunk < kRow || chunk > 1 << 16 || (chunk & (chunk - 1)) != 0)
    return invalid("blocks have ", chunk, " coordinates, not a power of two from 256 to 65,536");
  if (keep < 1 || keep > chunk / 2) return invalid("keep=", keep, ", not 1 to ", chunk / 2);
  if (bits < 1 || bits > 4) return invalid("bits=", bits, ", not 1 to 4");
  format = {keep, chunk, static_cast<int32_t>(bits), 0, factor};
  while (keep << (format.low_bits + 1) <= chunk) ++format.low_bits;
  const int64_t bytes = 2 + format.high_bytes() + format.low_bytes() + format.code_bytes();
  return check({{"message", message.dimensions(), {blocks * bytes}}});
}

ffi::Error call_encode(ffi::ThreadPool pool, Floats values, int64_t keep, int64_t bits,
                       float factor, ffi::Result<Bytes> message) {
  SparseFormat format;
  if (ffi::Error error = read(values, keep, bits, factor, *message, format); error.failure())
    return error;
  sparse_encode(pool, kernels_of_this_machine()->sparse, values.typed_data(),
                {message->typed_data(), values.dimensions()[0], format});
  return ffi::Error::Success();
}

ffi::Error call_decode(ffi::ThreadPool pool, Bytes message, int64_t keep, int64_t bits,
                       ffi::Result<Floats> values) {
  SparseFormat format;
  if (ffi::Error error = read(*values, keep, bits, 1, message, format); error.failure())
    return error;
  sparse_decode(pool, kernels_of_this_machine()->sparse,
                {message.typed_data(), values->dimensions()[0], format}, values->typed_data());
  return ffi::Error::Success();
}

}  // namespace
}  // namespace dynamiq

using namespace dynamiq;  // NOLINT: the macros below define symbols without a namespace

#pragma GCC visibility push(default)

XLA_FFI_DEFINE_HANDLER_SYMBOL(dynamiq_sparse_encode, DYNAMIQ_NAMED("sparse_encode", call_encode),
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Floats>()
                                  .Attr<int64_t>("keep")
                                  .Attr<int64_t>("bits")
                                  .Attr<float>("factor")
                                  .Ret<Bytes>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(dynamiq_sparse_decode, DYNAMIQ_NAMED("sparse_decode", call_decode),
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Bytes>()
                                  .Attr<int64_t>("keep")
                                  .Attr<int64_t>("bits")
                                  .Ret<Floats>());

#pragma GCC visibility pop
