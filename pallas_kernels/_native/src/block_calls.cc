// The operations on formats with one width as custom calls of XLA:CPU.

#include <cstdint>

#include "block_operations.h"
#include "buffers.h"
#include "dispatch.h"

namespace dynamiq {
namespace {

// Numbers of a format, which are attributes of a call.
struct Format {
  int64_t format, width, rows;
};

ffi::Error read(const Format& format, const Bytes& payloads, BlockCodec& codec) {
  if (format.format < 0 || format.format >= kBlockFormats)
    return invalid("format=", format.format, " of ", kBlockFormats, " formats");
  if (format.width < 2 || format.width > 8)
    return invalid("width=", format.width, ", not 2 to 8");
  if (format.rows < 0 || format.rows > INT32_MAX)
    return invalid("rows_of_chunk=", format.rows, ", not 0 to ", INT32_MAX);
  const Kernels& kernels = *kernels_of_this_machine();
  codec = {&kernels.plain, &kernels.blocks[format.format], static_cast<int32_t>(format.width),
           format.rows};
  return check({{"payloads", payloads.dimensions(), {kAny, codec.payload_bytes()}}});
}

struct Inputs {
  BlockCodec codec;
  Received received;
  LocalRows local;
  int64_t first_row;
};

ffi::Error read(const Format& format, const Bytes& payloads, const ffi::AnyBuffer& rows,
                const Ints& place, Inputs& inputs) {
  if (ffi::Error error = read(format, payloads, inputs.codec); error.failure()) return error;
  if (ffi::Error error = read(rows, inputs.local); error.failure()) return error;
  if (ffi::Error error = check({{"place", place.dimensions(), {1}}}); error.failure())
    return error;
  inputs.received = {payloads.typed_data(), payloads.dimensions()[0]};
  inputs.first_row = place.typed_data()[0] * format.rows;
  if (inputs.first_row < 0 || inputs.first_row + format.rows > inputs.local.count)
    return invalid("place=", place.typed_data()[0], " of chunks of ", format.rows, " of the ",
                   inputs.local.count, " local rows");
  return ffi::Error::Success();
}

ffi::Error call_hop(ffi::ThreadPool pool, Bytes payloads, ffi::AnyBuffer rows, Ints place,
                    Ints chunk, Words seed, Ints turn, int64_t format, int64_t width,
                    int64_t rows_of_chunk, int64_t is_noisy, ffi::Result<Bytes> message) {
  Inputs inputs;
  if (ffi::Error error = read({format, width, rows_of_chunk}, payloads, rows, place, inputs);
      error.failure())
    return error;
  if (ffi::Error error =
          check({{"chunk", chunk.dimensions(), {1}},
                 {"seed", seed.dimensions(), {2}},
                 {"turn", turn.dimensions(), {1}},
                 {"message", message->dimensions(), {inputs.codec.payload_bytes()}}});
      error.failure())
    return error;
  const Noise noise = {{seed.typed_data()[0], seed.typed_data()[1]},
                       static_cast<uint32_t>(turn.typed_data()[0]),
                       is_noisy ? kIndependent : kNearest};
  const uint32_t first_id =
      static_cast<uint32_t>(chunk.typed_data()[0]) * static_cast<uint32_t>(rows_of_chunk);
  block_hop(pool, inputs.codec, inputs.received, inputs.local, inputs.first_row, noise, first_id,
            message->typed_data());
  return ffi::Error::Success();
}

ffi::Error call_accumulate(ffi::ThreadPool pool, Bytes payloads, ffi::AnyBuffer rows, Ints place,
                           int64_t format, int64_t width, int64_t rows_of_chunk,
                           ffi::Result<Floats> sums) {
  Inputs inputs;
  if (ffi::Error error = read({format, width, rows_of_chunk}, payloads, rows, place, inputs);
      error.failure())
    return error;
  if (ffi::Error error = check({{"sums", sums->dimensions(), {rows_of_chunk, kRow}}});
      error.failure())
    return error;
  block_accumulate(pool, inputs.codec, inputs.received, inputs.local, inputs.first_row,
                   sums->typed_data());
  return ffi::Error::Success();
}

ffi::Error call_decompress(ffi::ThreadPool pool, Bytes payloads, int64_t format, int64_t width,
                           int64_t rows_of_chunk, ffi::Result<Floats> values) {
  BlockCodec codec;
  if (ffi::Error error = read({format, width, rows_of_chunk}, payloads, codec); error.failure())
    return error;
  const int64_t chunks = payloads.dimensions()[0];
  if (ffi::Error error =
          check({{"values", values->dimensions(), {chunks * rows_of_chunk, kRow}}});
      error.failure())
    return error;
  block_decompress(pool, codec, payloads.typed_data(), chunks, values->typed_data());
  return ffi::Error::Success();
}

}  // namespace
}  // namespace dynamiq

using namespace dynamiq;  // NOLINT: the macros below define symbols without a namespace

#pragma GCC visibility push(default)

#define DYNAMIQ_FORMAT_ATTRS() \
  Attr<int64_t>("format").Attr<int64_t>("width").Attr<int64_t>("rows_of_chunk")

XLA_FFI_DEFINE_HANDLER_SYMBOL(dynamiq_block_hop, DYNAMIQ_NAMED("block_hop", call_hop),
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Bytes>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<Ints>()
                                  .Arg<Ints>()
                                  .Arg<Words>()
                                  .Arg<Ints>()
                                  .DYNAMIQ_FORMAT_ATTRS()
                                  .Attr<int64_t>("is_noisy")
                                  .Ret<Bytes>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(dynamiq_block_accumulate,
                              DYNAMIQ_NAMED("block_accumulate", call_accumulate),
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Bytes>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<Ints>()
                                  .DYNAMIQ_FORMAT_ATTRS()
                                  .Ret<Floats>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(dynamiq_block_decompress,
                              DYNAMIQ_NAMED("block_decompress", call_decompress),
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Bytes>()
                                  .DYNAMIQ_FORMAT_ATTRS()
                                  .Ret<Floats>());

#pragma GCC visibility pop
