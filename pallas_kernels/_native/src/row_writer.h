// Rows of a result that nobody reads before the caches have lost them.

#ifndef DYNAMIQ_ROW_WRITER_H_
#define DYNAMIQ_ROW_WRITER_H_

#include <cstdint>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include "kernels.h"

namespace dynamiq {

// Writes rows of a decoded result in any order. A large one goes around the caches: they would read
// each line of it before the first write, and lose what the operation still reads. Rows that come
// one behind the other gain nothing from it, and lose where their pages are new.
class RowWriter {
 public:
  RowWriter(float* result, int64_t rows)
      : result_(result), around_caches_(rows >= kManyRows && is_aligned(result)) {}

  // `fill(values)` writes the 256 values of the row.
  template <class Fill>
  void write(int64_t row, const Fill& fill) const {
    float* const to = result_ + kRow * row;
#ifdef __SSE2__
    if (around_caches_) {
      alignas(64) float values[kRow];
      fill(values);
      for (int64_t lane = 0; lane < kRow; lane += 4)
        _mm_stream_ps(to + lane, _mm_load_ps(values + lane));
      return;
    }
#endif
    fill(to);
  }

  // Comes before any other thread reads the rows that this one has written.
  void finish() const {
#ifdef __SSE2__
    if (around_caches_) _mm_sfence();
#endif
  }

 private:
  static constexpr int64_t kManyRows = 4096;  // 4 MiB: more than the caches of a core

  static bool is_aligned(const float* result) {
    return reinterpret_cast<uintptr_t>(result) % 16 == 0;
  }

  float* result_;
  bool around_caches_;
};

}  // namespace dynamiq

#endif  // DYNAMIQ_ROW_WRITER_H_
