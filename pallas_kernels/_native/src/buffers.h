// Buffers that XLA gives to custom calls, their shapes, and errors of these calls.

#ifndef DYNAMIQ_BUFFERS_H_
#define DYNAMIQ_BUFFERS_H_

#include <cstdint>
#include <initializer_list>
#include <sstream>
#include <string>
#include <vector>

#include "operations.h"
#include "xla/ffi/api/ffi.h"

namespace dynamiq {
namespace {

namespace ffi = xla::ffi;

using Bytes = ffi::Buffer<ffi::U8>;
using Floats = ffi::Buffer<ffi::F32>;
using Ints = ffi::Buffer<ffi::S32>;
using Words = ffi::Buffer<ffi::U32>;

// Returns an error that says what is wrong, in texts and numbers.
template <class... Parts>
ffi::Error invalid(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  return ffi::Error::InvalidArgument(text.str());
}

// Returns the result of a call. Of an error, it is one that names the call and a remedy.
inline ffi::Error named(const char* call, const ffi::Error& error) {
  if (error.success()) return error;
  return ffi::Error(*error.errc(),
                    std::string("dynamiq_native_") + call + ": " + error.message() +
                        ". Use implementation='xla' with DynamiQ, or set DYNAMIQ_NATIVE=0, which "
                        "is for formats with one width and copies, too.");
}

// A function of the same arguments whose errors are `named`.
#define DYNAMIQ_NAMED(call, function) \
  [](auto&&... arguments) { return named(call, function(arguments...)); }

constexpr int64_t kAny = -1;  // length of a dimension

using Lengths = ffi::Span<const int64_t>;

inline std::string text_of(Lengths lengths) {
  std::ostringstream text;
  for (size_t i = 0; i < lengths.size(); ++i) {
    text << (i ? ", " : "[");
    if (lengths[i] == kAny) text << "any";
    else text << lengths[i];
  }
  text << (lengths.size() ? "]" : "[]");
  return text.str();
}

// An operand or a result, and the shape that it has to have.
struct Shape {
  const char* name;
  Lengths found;
  std::vector<int64_t> expected;

  bool fits() const {
    bool right = found.size() == expected.size();
    for (size_t i = 0; right && i < found.size(); ++i)
      right = expected[i] == kAny || found[i] == expected[i];
    return right;
  }
};

// Compares shapes. Any other would read or write behind an array.
inline ffi::Error check(std::initializer_list<Shape> shapes) {
  for (const Shape& shape : shapes)
    if (!shape.fits())
      return invalid(shape.name, " has the shape ", text_of(shape.found), ", not ",
                     text_of(shape.expected));
  return ffi::Error::Success();
}

// Reads the rows. Their dtype is one of three.
inline ffi::Error read(const ffi::AnyBuffer& buffer, LocalRows& rows) {
  switch (buffer.element_type()) {
    case ffi::F32: rows.dtype = Dtype::kFloat32; break;
    case ffi::BF16: rows.dtype = Dtype::kBfloat16; break;
    case ffi::F16: rows.dtype = Dtype::kFloat16; break;
    default:
      return invalid("rows are ", buffer.element_type(), ", not float32, bfloat16 or float16");
  }
  if (ffi::Error error = check({{"rows", buffer.dimensions(), {kAny, kRow}}}); error.failure())
    return error;
  rows.data = buffer.untyped_data();
  rows.count = buffer.dimensions()[0];
  return ffi::Error::Success();
}

}  // namespace
}  // namespace dynamiq

#endif  // DYNAMIQ_BUFFERS_H_
