// Operations on whole messages, row by row; see `pallas_kernels.operations`.
//
// `Pool` has `num_threads()` and `Schedule(task)`.

#ifndef DYNAMIQ_OPERATIONS_H_
#define DYNAMIQ_OPERATIONS_H_

#include <cstdint>
#include <cstring>

#include "blocks.h"
#include "kernels.h"
#include "row_writer.h"

namespace dynamiq {

constexpr int64_t kBlock = 64;           // rows that a thread takes at a time
constexpr int64_t kStarts = kMaxWidth + 1;  // entries of a chunk in `Places::starts`

enum class Dtype { kFloat32, kBfloat16, kFloat16 };

// Local rows, of one dtype.
struct LocalRows {
  const void* data;
  Dtype dtype;
  int64_t count;

  int64_t row_bytes() const { return kRow * (dtype == Dtype::kFloat32 ? 4 : 2); }

  const uint8_t* at(int64_t row) const {
    return static_cast<const uint8_t*>(data) + row_bytes() * row;
  }

  // The rows of a chunk are not neighbors in memory, so hardware does not fetch them in advance.
  void prefetch(int64_t row) const {
    for (int64_t byte = 0; byte < row_bytes(); byte += 64) __builtin_prefetch(at(row) + byte);
  }

  void load(int64_t row, const PlainRows& kernels, float* values) const {
    if (dtype == Dtype::kFloat32) {
      std::memcpy(values, at(row), kRow * sizeof(float));
    } else {
      const auto* const narrow = reinterpret_cast<const uint16_t*>(at(row));
      (dtype == Dtype::kBfloat16 ? kernels.from_bfloat16 : kernels.from_float16)(narrow, values);
    }
  }
};

// Places of the rows of one chunk.
struct Places {
  const int32_t *order, *widths, *starts;
  int64_t rows;

  // Returns whether all rows and all of their planes are there. Anything else would read or write
  // behind an array.
  bool fit(int64_t num_rows, int64_t units) const {
    int64_t of_plane[kStarts] = {};  // rows of every plane
    for (int32_t k = 0; k < kMaxWidth; ++k) {
      of_plane[k] = static_cast<int64_t>(starts[k + 1]) - starts[k];
      if (of_plane[k] < 0) return false;
    }
    if (starts[0] < 0 || starts[kMaxWidth] > units) return false;
    bool right = true;
    for (int64_t place = 0; place < rows; ++place) {
      const int32_t width = widths[place];
      right &= order[place] >= 0 && order[place] < num_rows && width >= 0 && width <= kMaxWidth;
      // Planes of narrower bits have at least as many rows.
      right &= !right || width == 0 || place < of_plane[width - 1];
    }
    for (int32_t k = 1; k < kMaxWidth; ++k) right &= of_plane[k] <= of_plane[k - 1];
    return right;
  }
};

// Levels of all widths.
struct LevelTable {
  const float* numbers;
  int64_t columns;

  const float* of(int32_t width) const { return numbers + columns * width; }
};

// Sections of a message of one chunk.
template <class Byte>
struct Sections {
  Byte *planes, *group_scales, *super_scales;
  int64_t groups;  // of a row

  Sections(Byte* message, int64_t units, int64_t rows, int64_t groups_of_row)
      : planes(message),
        group_scales(message + kUnit * units),
        super_scales(group_scales + rows * groups_of_row),
        groups(groups_of_row) {}

  Byte* end(int64_t rows) const { return super_scales + 2 * rows; }

  // The row at a place. Its scales may be at another one.
  RowIn<Byte> row(const Places& places, int64_t place, int64_t scales_at) const {
    return {planes + kUnit * place, places.starts, places.widths[place],
            group_scales + groups * scales_at, super_scales + 2 * scales_at};
  }
};

// All that the operations on messages of a layout take.
struct Codec {
  const PlainRows* plain;
  const CodedRows* coded;
  LevelTable levels;
  int64_t units, groups, payload_bytes;

  template <class Byte>
  Sections<Byte> sections(Byte* message, int64_t rows) const {
    return Sections<Byte>(message, units, rows, groups);
  }
};

// Messages of one chunk that have arrived.
struct Received {
  const uint8_t* data;
  int64_t count;
};

// Writes the sum of a local row and the received ones, in the order of the messages.
inline void sum_row(const Codec& codec, const Received& received, const LocalRows& local,
                    const Places& places, int64_t place, float* sum) {
  local.load(places.order[place], *codec.plain, sum);
  for (int64_t m = 0; m < received.count; ++m) {
    const auto sections = codec.sections(received.data + m * codec.payload_bytes, places.rows);
    const ReceivedRow row = sections.row(places, place, place);
    codec.coded->add(row, codec.levels.of(row.width), sum);
  }
}

template <class Pool>
void statistics(Pool& pool, const PlainRows& kernels, const LocalRows& local, float* norms) {
  in_blocks(pool, local.count, 4 * kBlock, [&](int64_t first, int64_t last) {
    alignas(64) float values[kRow];
    for (int64_t row = first; row < last; ++row) {
      local.load(row, kernels, values);
      norms[row] = kernels.norm(values);
    }
  });
}

// `first_id` is the number of the first place in the table of all chunks.
template <class Pool>
void hop(Pool& pool, const Codec& codec, const Received& received, const LocalRows& local,
         const Places& places, const Noise& noise, uint32_t first_id, uint8_t* message) {
  const auto sections = codec.sections(message, places.rows);
  in_blocks(pool, places.rows, kBlock, [&](int64_t first, int64_t last) {
    alignas(64) float values[kRow];
    for (int64_t place = first; place < last; ++place) {
      if (place + 1 < last) local.prefetch(places.order[place + 1]);
      sum_row(codec, received, local, places, place, values);
      const SentRow row = sections.row(places, place, place);
      codec.coded->encode(values, noise, first_id + static_cast<uint32_t>(place),
                          codec.levels.of(row.width), row);
    }
  });
  uint8_t* const used = sections.planes + kUnit * int64_t{places.starts[kMaxWidth]};
  std::memset(used, 0, static_cast<size_t>(sections.group_scales - used));
  uint8_t* const end = sections.end(places.rows);
  std::memset(end, 0, static_cast<size_t>(message + codec.payload_bytes - end));
}

template <class Pool>
void decompress_accumulate(Pool& pool, const Codec& codec, const Received& received,
                           const LocalRows& local, const Places& places, float* sums) {
  in_blocks(pool, places.rows, kBlock, [&](int64_t first, int64_t last) {
    for (int64_t place = first; place < last; ++place) {
      if (place + 1 < last) local.prefetch(places.order[place + 1]);
      sum_row(codec, received, local, places, place, sums + kRow * place);
    }
  });
}

// Also writes the scales of the sums to a message that holds no codes.
template <class Pool>
void scaled_sums(Pool& pool, const Codec& codec, const Received& received, const LocalRows& local,
                 const Places& places, float* sums, uint8_t* message) {
  const auto sections = codec.sections(message, places.rows);
  std::memset(message, 0, static_cast<size_t>(codec.payload_bytes));
  in_blocks(pool, places.rows, kBlock, [&](int64_t first, int64_t last) {
    for (int64_t place = first; place < last; ++place) {
      if (place + 1 < last) local.prefetch(places.order[place + 1]);
      float* const sum = sums + kRow * place;
      sum_row(codec, received, local, places, place, sum);
      codec.coded->write_scales(sum, sections.row(places, place, place));
    }
  });
}

// `all_places` are those of chunk 0, with those of the others behind them. `table` is where the
// messages have the scales of every place; a null pointer for the place itself.
template <class Pool>
void decompress(Pool& pool, const Codec& codec, const uint8_t* messages, int64_t chunks,
                const Places& all_places, const int32_t* table, float* values) {
  const int64_t rows = all_places.rows;
  const RowWriter result(values, chunks * rows);
  in_blocks(pool, chunks * rows, kBlock, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      const int64_t chunk = i / rows, place = i % rows;
      const Places places = {all_places.order + chunk * rows, all_places.widths + chunk * rows,
                             all_places.starts + chunk * kStarts, rows};
      const auto sections = codec.sections(messages + chunk * codec.payload_bytes, rows);
      const ReceivedRow row = sections.row(places, place, table ? table[i] : place);
      result.write(places.order[place], [&](float* decoded) {
        codec.coded->decode(row, codec.levels.of(row.width), decoded);
      });
    }
    result.finish();
  });
}

}  // namespace dynamiq

#endif  // DYNAMIQ_OPERATIONS_H_
