// Sorting of words, by their digits.

#ifndef DYNAMIQ_SORTING_H_
#define DYNAMIQ_SORTING_H_

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "blocks.h"

namespace dynamiq {

constexpr int kDigitBits = 11;
constexpr uint32_t kDigits = 1u << kDigitBits;
constexpr int kPasses = 3;  // over all 32 bits

// Moves words to where their digit puts them. `next` has where each digit starts.
inline void move_by_digit(const uint32_t* from, int64_t count, int shift, uint32_t* next,
                          uint32_t* to) {
  for (int64_t i = 0; i < count; ++i) to[next[from[i] >> shift & (kDigits - 1)]++] = from[i];
}

// Writes `count` words in ascending order.
inline void sort_words(const uint32_t* words, int64_t count, uint32_t* sorted) {
  if (count < kDigits) {  // tables of digits would take longer
    std::copy(words, words + count, sorted);
    std::sort(sorted, sorted + count);
    return;
  }
  std::vector<uint32_t> between(static_cast<size_t>(count));
  std::vector<uint32_t> starts(kPasses * kDigits);
  for (int64_t i = 0; i < count; ++i)
    for (int pass = 0; pass < kPasses; ++pass)
      ++starts[pass * kDigits + (words[i] >> pass * kDigitBits & (kDigits - 1))];
  for (int pass = 0; pass < kPasses; ++pass) {
    uint32_t before = 0;
    for (uint32_t digit = 0; digit < kDigits; ++digit)
      before += std::exchange(starts[pass * kDigits + digit], before);
  }
  move_by_digit(words, count, 0, &starts[0], sorted);
  move_by_digit(sorted, count, kDigitBits, &starts[kDigits], between.data());
  move_by_digit(between.data(), count, 2 * kDigitBits, &starts[2 * kDigits], sorted);
}

// Sorts each of several arrays that lie one behind the other.
template <class Pool>
void sort_all(Pool& pool, const uint32_t* words, int64_t arrays, int64_t count, uint32_t* sorted) {
  in_blocks(pool, arrays, 1, [&](int64_t first, int64_t last) {
    for (int64_t array = first; array < last; ++array)
      sort_words(words + array * count, count, sorted + array * count);
  });
}

}  // namespace dynamiq

#endif  // DYNAMIQ_SORTING_H_
