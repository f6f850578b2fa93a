// Pieces of some arrays, copied to pieces of others.

#ifndef DYNAMIQ_COPIES_H_
#define DYNAMIQ_COPIES_H_

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "blocks.h"

namespace dynamiq {

// Columns of a source that become columns of a result, in all rows.
struct Segment {
  int64_t source, start, result, at, length;
};

// Rows of an array, one behind the other.
struct Array {
  char* data;
  int64_t columns;
};

// Bytes of the first row that are copied together, or zeroed where there is no source.
struct Span {
  char* to;
  const char* from;              // or a null pointer
  int64_t to_stride, from_stride;  // bytes from one row to the next
  int64_t first, bytes;          // `first` counts the bytes of all spans before this one
};

class Copies {
 public:
  // Segments are in the order of their results. Returns the first one that is not, that overlaps
  // the one before in a result, or that leaves an array; a null pointer if there is none.
  const Segment* add(const std::vector<Array>& sources, const std::vector<Array>& results,
           const Segment* segments, size_t count, int64_t item_bytes) {
    const Segment* next = segments;
    const Segment* const end = segments + count;
    for (size_t number = 0; number < results.size(); ++number) {
      const Array& result = results[number];
      int64_t written = 0;
      const auto span = [&](const Segment* segment, int64_t columns) {
        const Array* const source = segment ? &sources[static_cast<size_t>(segment->source)] : nullptr;
        if (columns > 0)
          spans_.push_back({result.data + written * item_bytes,
                            source ? source->data + segment->start * item_bytes : nullptr,
                            result.columns * item_bytes, source ? source->columns * item_bytes : 0,
                            row_bytes_, columns * item_bytes});
        row_bytes_ += columns * item_bytes;
        written += columns;
      };
      for (; next != end && next->result == static_cast<int64_t>(number); ++next) {
        if (!is_inside(next->source, next->start, next->length, sources) ||
            !is_inside(next->result, next->at, next->length, results) || next->at < written)
          return next;
        span(nullptr, next->at - written);
        span(next, next->length);
      }
      span(nullptr, result.columns - written);
    }
    return next == end ? nullptr : next;
  }

  // Copies all rows, in blocks of bytes of all results together.
  template <class Pool>
  void run(Pool& pool, int64_t rows) const {
    constexpr int64_t kBlock = 1 << 18;  // bytes: several pieces, or a part of a large one
    if (row_bytes_ > 0)
      in_blocks(pool, rows * row_bytes_, kBlock,
                [this](int64_t first, int64_t last) { copy(first, last); });
  }

 private:
  static bool is_inside(int64_t number, int64_t start, int64_t length,
                        const std::vector<Array>& arrays) {
    if (number < 0 || number >= static_cast<int64_t>(arrays.size())) return false;
    const int64_t columns = arrays[static_cast<size_t>(number)].columns;
    return start >= 0 && length >= 0 && length <= columns && start <= columns - length;
  }

  // Copies bytes [first, last) of the rows, which count those of all results, row by row.
  void copy(int64_t first, int64_t last) const {
    while (first < last) {
      const int64_t row = first / row_bytes_, place = first % row_bytes_;
      const int64_t stop = std::min(last - row * row_bytes_, row_bytes_);
      auto span = std::upper_bound(spans_.begin(), spans_.end(), place,
                                   [](int64_t at, const Span& one) { return at < one.first; });
      for (--span; span != spans_.end() && span->first < stop; ++span) {
        const int64_t skipped = std::max<int64_t>(place - span->first, 0);
        const auto bytes = static_cast<size_t>(std::min(span->bytes, stop - span->first) - skipped);
        char* const to = span->to + row * span->to_stride + skipped;
        if (span->from == nullptr)
          std::memset(to, 0, bytes);
        else
          std::memcpy(to, span->from + row * span->from_stride + skipped, bytes);
      }
      first = row * row_bytes_ + stop;
    }
  }

  std::vector<Span> spans_;
  int64_t row_bytes_ = 0;
};

}  // namespace dynamiq

#endif  // DYNAMIQ_COPIES_H_
