// Copies as a custom call of XLA:CPU.

#include "copies.h"

#include <cstdint>
#include <vector>

#include "buffers.h"

namespace dynamiq {
namespace {

// Reads arrays that share their rows and their dtype.
struct Reader {
  ffi::DataType dtype = ffi::DataType::INVALID;
  int64_t rows = 0;

  ffi::Error read(const ffi::AnyBuffer& buffer, std::vector<Array>& arrays) {
    const auto shape = buffer.dimensions();
    if (shape.size() != 2)
      return invalid("an array has the shape ", text_of(shape), ", not [rows, columns]");
    if (dtype == ffi::DataType::INVALID) {
      dtype = buffer.element_type();
      rows = shape[0];
    }
    if (buffer.element_type() != dtype || shape[0] != rows)
      return invalid("arrays have different rows or dtypes: ", buffer.element_type(),
                     text_of(shape), " and ", dtype, " of ", rows, " rows");
    arrays.push_back({static_cast<char*>(buffer.untyped_data()), shape[1]});
    return ffi::Error::Success();
  }
};

ffi::Error call_copies(ffi::ThreadPool pool, ffi::RemainingArgs sources,
                       ffi::RemainingRets results, ffi::Span<const int64_t> table) {
  Reader reader;
  std::vector<Array> from, to;
  for (size_t number = 0; number < sources.size(); ++number) {
    const auto buffer = sources.get<ffi::AnyBuffer>(number);
    if (buffer.has_error()) return buffer.error();
    if (ffi::Error error = reader.read(*buffer, from); error.failure()) return error;
  }
  for (size_t number = 0; number < results.size(); ++number) {
    auto buffer = results.get<ffi::AnyBuffer>(number);
    if (buffer.has_error()) return buffer.error();
    if (ffi::Error error = reader.read(**buffer, to); error.failure()) return error;
  }
  constexpr size_t kNumbers = sizeof(Segment) / sizeof(int64_t);
  if (table.size() % kNumbers)
    return invalid("the table has ", table.size(), " numbers, and ", kNumbers, " are a segment");
  Copies copies;
  const auto* const segments = reinterpret_cast<const Segment*>(table.begin());
  const auto item_bytes = static_cast<int64_t>(ffi::ByteWidth(reader.dtype));
  if (const Segment* wrong = copies.add(from, to, segments, table.size() / kNumbers, item_bytes))
    return invalid("segment ", wrong - segments, " leaves its arrays, overlaps another or is not ",
                   "in order: ", wrong->length, " columns of source ", wrong->source, " from ",
                   wrong->start, " on, to result ", wrong->result, " from ", wrong->at, " on");
  copies.run(pool, reader.rows);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace dynamiq

using namespace dynamiq;  // NOLINT: the macro below defines a symbol without a namespace

#pragma GCC visibility push(default)

XLA_FFI_DEFINE_HANDLER_SYMBOL(dynamiq_copies, DYNAMIQ_NAMED("copies", call_copies),
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<ffi::Span<const int64_t>>("table"));

#pragma GCC visibility pop
