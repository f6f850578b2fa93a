// The operations as custom calls of XLA:CPU, through its typed foreign function interface.

#include <cstdint>

#include "buffers.h"
#include "dispatch.h"
#include "operations.h"
#include "sorting.h"

namespace dynamiq {
namespace {

// Numbers of a layout, which are attributes of a call.
struct Layout {
  int64_t units, group_size, rounding;
};

// Reads the layout, and takes the functions of its group size and spacing.
ffi::Error read(const Layout& layout, const Floats& table, int64_t payload_bytes, Codec& codec) {
  const Kernels* const kernels = kernels_of_this_machine();
  if (kernels == nullptr) return ffi::Error(ffi::ErrorCode::kUnimplemented, kTooOld);
  const int64_t columns = table.dimensions()[1];
  constexpr int64_t kUniformColumns = sizeof(UniformLevels) / sizeof(float);
  constexpr int64_t kQuadraticColumns = sizeof(QuadraticLevels) / sizeof(float);
  if (columns != kUniformColumns && columns != kQuadraticColumns)
    return invalid("levels: neither uniform nor quadratic");
  const CodedRows* const of_sizes =
      columns == kUniformColumns ? kernels->uniform : kernels->quadratic;
  switch (layout.group_size) {
    case 8: codec.coded = &of_sizes[0]; break;
    case 16: codec.coded = &of_sizes[1]; break;
    case 32: codec.coded = &of_sizes[2]; break;
    default: return invalid("group_size: not 8, 16 or 32");
  }
  codec.plain = &kernels->plain;
  codec.levels = {table.typed_data(), columns};
  codec.units = layout.units;
  codec.groups = kRow / layout.group_size;
  codec.payload_bytes = payload_bytes;
  return ffi::Error::Success();
}

// Reads the places of one chunk.
ffi::Error read(const Ints& order, const Ints& widths, const Ints& starts, int64_t chunk,
                int64_t num_rows, const Codec& codec, Places& places) {
  const int64_t chunks = order.dimensions()[0], rows = order.dimensions()[1];
  if (chunk < 0 || chunk >= chunks) return invalid("chunk: there is none of this number");
  places = {order.typed_data() + chunk * rows, widths.typed_data() + chunk * rows,
            starts.typed_data() + chunk * kStarts, rows};
  if (!places.fit(num_rows, codec.units)) return invalid("places: they leave the message");
  if (kUnit * codec.units + rows * (codec.groups + 2) > codec.payload_bytes)
    return invalid("payloads: too short for their sections");
  return ffi::Error::Success();
}

// Inputs that all operations on the messages of one chunk share.
struct Inputs {
  Codec codec;
  Received received;
  LocalRows local;
  Places places;
};

ffi::Error read(const Bytes& payloads, const ffi::AnyBuffer& rows, const Ints& order,
                const Ints& widths, const Ints& starts, const Ints& chunk, const Floats& table,
                const Layout& layout, Inputs& inputs) {
  if (ffi::Error error = read(rows, inputs.local); error.failure()) return error;
  if (ffi::Error error = read(layout, table, payloads.dimensions()[1], inputs.codec);
      error.failure())
    return error;
  inputs.received = {payloads.typed_data(), payloads.dimensions()[0]};
  return read(order, widths, starts, chunk.typed_data()[0], inputs.local.count, inputs.codec,
              inputs.places);
}

ffi::Error call_statistics(ffi::ThreadPool pool, ffi::AnyBuffer rows, ffi::Result<Floats> norms) {
  const Kernels* const kernels = kernels_of_this_machine();
  if (kernels == nullptr) return ffi::Error(ffi::ErrorCode::kUnimplemented, kTooOld);
  LocalRows local;
  if (ffi::Error error = read(rows, local); error.failure()) return error;
  statistics(pool, kernels->plain, local, norms->typed_data());
  return ffi::Error::Success();
}

ffi::Error call_hop(ffi::ThreadPool pool, Bytes payloads, ffi::AnyBuffer rows, Ints order,
                    Ints widths, Ints starts, Ints chunk, Floats table, Words seed, Ints turn,
                    int64_t units, int64_t group_size, int64_t rounding,
                    ffi::Result<Bytes> message) {
  Inputs inputs;
  if (ffi::Error error = read(payloads, rows, order, widths, starts, chunk, table,
                              {units, group_size, rounding}, inputs);
      error.failure())
    return error;
  const Noise noise = {{seed.typed_data()[0], seed.typed_data()[1]},
                       static_cast<uint32_t>(turn.typed_data()[0]),
                       static_cast<Rounding>(rounding)};
  const auto first_id =
      static_cast<uint32_t>(chunk.typed_data()[0]) * static_cast<uint32_t>(inputs.places.rows);
  hop(pool, inputs.codec, inputs.received, inputs.local, inputs.places, noise, first_id,
      message->typed_data());
  return ffi::Error::Success();
}

ffi::Error call_decompress_accumulate(ffi::ThreadPool pool, Bytes payloads, ffi::AnyBuffer rows,
                                      Ints order, Ints widths, Ints starts, Ints chunk,
                                      Floats table, int64_t units, int64_t group_size,
                                      ffi::Result<Floats> sums) {
  Inputs inputs;
  if (ffi::Error error = read(payloads, rows, order, widths, starts, chunk, table,
                              {units, group_size, 0}, inputs);
      error.failure())
    return error;
  decompress_accumulate(pool, inputs.codec, inputs.received, inputs.local, inputs.places,
                        sums->typed_data());
  return ffi::Error::Success();
}

ffi::Error call_scaled_sums(ffi::ThreadPool pool, Bytes payloads, ffi::AnyBuffer rows, Ints order,
                            Ints widths, Ints starts, Ints chunk, Floats table, int64_t units,
                            int64_t group_size, ffi::Result<Floats> sums,
                            ffi::Result<Bytes> message) {
  Inputs inputs;
  if (ffi::Error error = read(payloads, rows, order, widths, starts, chunk, table,
                              {units, group_size, 0}, inputs);
      error.failure())
    return error;
  scaled_sums(pool, inputs.codec, inputs.received, inputs.local, inputs.places,
              sums->typed_data(), message->typed_data());
  return ffi::Error::Success();
}

// `scales_at` is empty where scales are at the place of their row.
ffi::Error call_decompress(ffi::ThreadPool pool, Bytes payloads, Ints order, Ints widths,
                           Ints starts, Floats table, Ints scales_at, int64_t units,
                           int64_t group_size, ffi::Result<Floats> values) {
  Codec codec;
  if (ffi::Error error =
          read({units, group_size, 0}, table, payloads.dimensions()[1], codec);
      error.failure())
    return error;
  const int64_t chunks = order.dimensions()[0], rows = order.dimensions()[1];
  Places places;
  for (int64_t chunk = chunks; chunk-- > 0;)  // chunk 0 comes last: the others are behind it
    if (ffi::Error error = read(order, widths, starts, chunk, chunks * rows, codec, places);
        error.failure())
      return error;
  const int32_t* const at = scales_at.element_count() > 0 ? scales_at.typed_data() : nullptr;
  for (int64_t i = 0; at != nullptr && i < chunks * rows; ++i)
    if (at[i] < 0 || at[i] >= rows) return invalid("table: there is no such place");
  decompress(pool, codec, payloads.typed_data(), chunks, places, at, values->typed_data());
  return ffi::Error::Success();
}

ffi::Error call_sort(ffi::ThreadPool pool, Words words, ffi::Result<Words> sorted) {
  const int64_t count = words.dimensions().back();
  const int64_t arrays = count > 0 ? static_cast<int64_t>(words.element_count()) / count : 0;
  sort_all(pool, words.typed_data(), arrays, count, sorted->typed_data());
  return ffi::Error::Success();
}

}  // namespace
}  // namespace dynamiq

using namespace dynamiq;  // NOLINT: the macros below define symbols without a namespace

#pragma GCC visibility push(default)

// Name of the instruction set that the operations use; a null pointer if there is none.
extern "C" const char* dynamiq_instruction_set() {
  const Kernels* const kernels = kernels_of_this_machine();
  return kernels == nullptr ? nullptr : kernels->name;
}

// Digest of the sources, to find a library that is not of them.
extern "C" const char* dynamiq_sources() { return DYNAMIQ_SOURCES; }

#define DYNAMIQ_CHUNK_ARGS()                                                              \
  Arg<Bytes>().Arg<ffi::AnyBuffer>().Arg<Ints>().Arg<Ints>().Arg<Ints>().Arg<Ints>().Arg<Floats>()
#define DYNAMIQ_LAYOUT_ATTRS() Attr<int64_t>("units").Attr<int64_t>("group_size")

XLA_FFI_DEFINE_HANDLER_SYMBOL(dynamiq_statistics, call_statistics,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<Floats>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(dynamiq_sort, call_sort,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<Words>().Ret<Words>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(dynamiq_hop, call_hop,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .DYNAMIQ_CHUNK_ARGS()
                                  .Arg<Words>()
                                  .Arg<Ints>()
                                  .DYNAMIQ_LAYOUT_ATTRS()
                                  .Attr<int64_t>("rounding")
                                  .Ret<Bytes>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(dynamiq_decompress_accumulate, call_decompress_accumulate,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .DYNAMIQ_CHUNK_ARGS()
                                  .DYNAMIQ_LAYOUT_ATTRS()
                                  .Ret<Floats>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(dynamiq_scaled_sums, call_scaled_sums,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .DYNAMIQ_CHUNK_ARGS()
                                  .DYNAMIQ_LAYOUT_ATTRS()
                                  .Ret<Floats>()
                                  .Ret<Bytes>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(dynamiq_decompress, call_decompress,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Bytes>()
                                  .Arg<Ints>()
                                  .Arg<Ints>()
                                  .Arg<Ints>()
                                  .Arg<Floats>()
                                  .Arg<Ints>()
                                  .DYNAMIQ_LAYOUT_ATTRS()
                                  .Ret<Floats>());

#pragma GCC visibility pop
