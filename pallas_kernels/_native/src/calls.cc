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
  int64_t units, group_size;
};

// Reads the layout, and takes the functions of its group size and spacing.
ffi::Error read(const Layout& layout, const Floats& table, const Bytes& payloads, Codec& codec) {
  if (ffi::Error error = check({{"payloads", payloads.dimensions(), {kAny, kAny}},
                                {"levels", table.dimensions(), {kMaxWidth + 1, kAny}}});
      error.failure())
    return error;
  const int64_t columns = table.dimensions()[1];
  constexpr int64_t kUniformColumns = sizeof(UniformLevels) / sizeof(float);
  constexpr int64_t kQuadraticColumns = sizeof(QuadraticLevels) / sizeof(float);
  if (columns != kUniformColumns && columns != kQuadraticColumns)
    return invalid("levels have ", columns, " numbers each, not ", kUniformColumns,
                   " (uniform) or ", kQuadraticColumns, " (quadratic)");
  const Kernels& kernels = *kernels_of_this_machine();
  const CodedRows* const of_sizes =
      columns == kUniformColumns ? kernels.uniform : kernels.quadratic;
  switch (layout.group_size) {
    case 8: codec.coded = &of_sizes[0]; break;
    case 16: codec.coded = &of_sizes[1]; break;
    case 32: codec.coded = &of_sizes[2]; break;
    default: return invalid("group_size=", layout.group_size, ", not 8, 16 or 32");
  }
  codec.plain = &kernels.plain;
  codec.levels = {table.typed_data(), columns};
  codec.units = layout.units;
  codec.groups = kRow / layout.group_size;
  codec.payload_bytes = payloads.dimensions()[1];
  return ffi::Error::Success();
}

// Places of all chunks, and those of one, of which the sections fit into its message.
struct AllPlaces {
  const Ints &order, &widths, &starts;

  int64_t chunks() const { return order.dimensions()[0]; }
  int64_t rows() const { return order.dimensions()[1]; }  // of a chunk

  ffi::Error check_shapes(const Codec& codec) const {
    if (ffi::Error error = check({{"order", order.dimensions(), {kAny, kAny}}}); error.failure())
      return error;
    if (ffi::Error error = check({{"widths", widths.dimensions(), {chunks(), rows()}},
                                  {"starts", starts.dimensions(), {chunks(), kStarts}}});
        error.failure())
      return error;
    const int64_t bytes_of_scales = rows() * (codec.groups + 2);
    // The first two: the product below would overflow.
    if (codec.units < 0 || codec.units > codec.payload_bytes / kUnit ||
        kUnit * codec.units + bytes_of_scales > codec.payload_bytes)
      return invalid("payloads have ", codec.payload_bytes, " bytes, too few for ", codec.units,
                     " units and the ", bytes_of_scales, " bytes of scales of ", rows(), " rows");
    return ffi::Error::Success();
  }

  ffi::Error read(int64_t chunk, int64_t num_rows, const Codec& codec, Places& places) const {
    const int64_t rows = this->rows(), chunks = this->chunks();
    if (chunk < 0 || chunk >= chunks) return invalid("chunk=", chunk, " of ", chunks, " chunks");
    places = {order.typed_data() + chunk * rows, widths.typed_data() + chunk * rows,
              starts.typed_data() + chunk * kStarts, rows};
    if (!places.fit(num_rows, codec.units))
      return invalid("places of chunk ", chunk, " leave its message of ", codec.units,
                     " units, or are not of its ", rows, " of ", num_rows, " rows");
    return ffi::Error::Success();
  }
};

// Inputs that all operations on the messages of one chunk share.
struct Inputs {
  Codec codec;
  Received received;
  LocalRows local;
  Places places;
};

ffi::Error read(const Bytes& payloads, const ffi::AnyBuffer& rows, const AllPlaces& places,
                const Ints& chunk, const Floats& table, const Layout& layout, Inputs& inputs) {
  if (ffi::Error error = read(rows, inputs.local); error.failure()) return error;
  if (ffi::Error error = read(layout, table, payloads, inputs.codec); error.failure())
    return error;
  if (ffi::Error error = places.check_shapes(inputs.codec); error.failure()) return error;
  if (ffi::Error error = check({{"chunk", chunk.dimensions(), {1}}}); error.failure())
    return error;
  inputs.received = {payloads.typed_data(), payloads.dimensions()[0]};
  return places.read(chunk.typed_data()[0], inputs.local.count, inputs.codec, inputs.places);
}

ffi::Error call_statistics(ffi::ThreadPool pool, ffi::AnyBuffer rows, ffi::Result<Floats> norms) {
  LocalRows local;
  if (ffi::Error error = read(rows, local); error.failure()) return error;
  if (ffi::Error error = check({{"norms", norms->dimensions(), {local.count}}}); error.failure())
    return error;
  statistics(pool, kernels_of_this_machine()->plain, local, norms->typed_data());
  return ffi::Error::Success();
}

ffi::Error call_hop(ffi::ThreadPool pool, Bytes payloads, ffi::AnyBuffer rows, Ints order,
                    Ints widths, Ints starts, Ints chunk, Floats table, Words seed, Ints turn,
                    int64_t units, int64_t group_size, int64_t rounding,
                    ffi::Result<Bytes> message) {
  Inputs inputs;
  if (ffi::Error error = read(payloads, rows, {order, widths, starts}, chunk, table,
                              {units, group_size}, inputs);
      error.failure())
    return error;
  if (ffi::Error error = check({{"seed", seed.dimensions(), {2}},
                                {"turn", turn.dimensions(), {1}},
                                {"message", message->dimensions(), {inputs.codec.payload_bytes}}});
      error.failure())
    return error;
  if (rounding < kNearest || rounding > kIndependent)
    return invalid("rounding=", rounding, ", not ", kNearest, " to ", kIndependent);
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
  if (ffi::Error error = read(payloads, rows, {order, widths, starts}, chunk, table,
                              {units, group_size}, inputs);
      error.failure())
    return error;
  if (ffi::Error error = check({{"sums", sums->dimensions(), {inputs.places.rows, kRow}}});
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
  if (ffi::Error error = read(payloads, rows, {order, widths, starts}, chunk, table,
                              {units, group_size}, inputs);
      error.failure())
    return error;
  if (ffi::Error error = check({{"sums", sums->dimensions(), {inputs.places.rows, kRow}},
                                {"message", message->dimensions(), {inputs.codec.payload_bytes}}});
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
  if (ffi::Error error = read({units, group_size}, table, payloads, codec); error.failure())
    return error;
  const AllPlaces all_places = {order, widths, starts};
  if (ffi::Error error = all_places.check_shapes(codec); error.failure()) return error;
  const int64_t chunks = all_places.chunks(), rows = all_places.rows();
  if (ffi::Error error = check({{"payloads", payloads.dimensions(), {chunks, kAny}},
                                {"values", values->dimensions(), {chunks * rows, kRow}}});
      error.failure())
    return error;
  const bool has_table = scales_at.element_count() > 0;
  if (ffi::Error error = check({{"table", scales_at.dimensions(), {chunks, rows}}});
      has_table && error.failure())
    return error;
  Places places = {};
  for (int64_t chunk = chunks; chunk-- > 0;)  // chunk 0 comes last: the others are behind it
    if (ffi::Error error = all_places.read(chunk, chunks * rows, codec, places); error.failure())
      return error;
  const int32_t* const at = has_table ? scales_at.typed_data() : nullptr;
  for (int64_t i = 0; at != nullptr && i < chunks * rows; ++i)
    if (at[i] < 0 || at[i] >= rows)
      return invalid("table has place ", at[i], " of ", rows, " rows of a chunk");
  decompress(pool, codec, payloads.typed_data(), chunks, places, at, values->typed_data());
  return ffi::Error::Success();
}

ffi::Error call_sort(ffi::ThreadPool pool, Words words, ffi::Result<Words> sorted) {
  const ffi::Span<const int64_t> shape = words.dimensions();
  if (shape.size() == 0) return invalid("words have the shape [], and no last dimension");
  if (ffi::Error error = check({{"sorted", sorted->dimensions(), {shape.begin(), shape.end()}}});
      error.failure())
    return error;
  const int64_t count = shape.back();
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

XLA_FFI_DEFINE_HANDLER_SYMBOL(dynamiq_statistics, DYNAMIQ_NAMED("statistics", call_statistics),
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<Floats>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(dynamiq_sort, DYNAMIQ_NAMED("sort", call_sort),
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<Words>().Ret<Words>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(dynamiq_hop, DYNAMIQ_NAMED("hop", call_hop),
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .DYNAMIQ_CHUNK_ARGS()
                                  .Arg<Words>()
                                  .Arg<Ints>()
                                  .DYNAMIQ_LAYOUT_ATTRS()
                                  .Attr<int64_t>("rounding")
                                  .Ret<Bytes>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(dynamiq_decompress_accumulate,
                              DYNAMIQ_NAMED("decompress_accumulate", call_decompress_accumulate),
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .DYNAMIQ_CHUNK_ARGS()
                                  .DYNAMIQ_LAYOUT_ATTRS()
                                  .Ret<Floats>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(dynamiq_scaled_sums, DYNAMIQ_NAMED("scaled_sums", call_scaled_sums),
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .DYNAMIQ_CHUNK_ARGS()
                                  .DYNAMIQ_LAYOUT_ATTRS()
                                  .Ret<Floats>()
                                  .Ret<Bytes>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(dynamiq_decompress, DYNAMIQ_NAMED("decompress", call_decompress),
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
