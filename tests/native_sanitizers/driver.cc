// Runs all operations of the native codec on random inputs, in several threads at once on one pool,
// for the sanitizers of the compiler. All must end with the same bytes, and so must all instruction
// sets and compilers: the digest is known in __main__.py.

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <limits>
#include <queue>
#include <random>
#include <thread>
#include <vector>

#include "block_operations.h"
#include "copies.h"
#include "sorting.h"
#include "sparse_operations.h"

namespace {

using namespace dynamiq;

// Threads that take tasks in turns. A thread of the pool may be busy with a whole operation, which
// schedules tasks of its own.
class Threads {
 public:
  explicit Threads(int count) : count_(count) {
    for (int i = 0; i < count; ++i) threads_.emplace_back([this] { run(); });
  }
  ~Threads() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      is_over_ = true;
    }
    has_task_.notify_all();
    for (auto& thread : threads_) thread.join();
  }
  int64_t num_threads() const { return count_; }
  void Schedule(std::function<void()> task) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      tasks_.push(std::move(task));
    }
    has_task_.notify_one();
  }

 private:
  void run() {
    for (;;) {
      std::unique_lock<std::mutex> lock(mutex_);
      has_task_.wait(lock, [this] { return is_over_ || !tasks_.empty(); });
      if (tasks_.empty()) return;
      const std::function<void()> task = std::move(tasks_.front());
      tasks_.pop();
      lock.unlock();
      task();
    }
  }

  const int count_;
  bool is_over_ = false;
  std::mutex mutex_;
  std::condition_variable has_task_;
  std::queue<std::function<void()>> tasks_;
  std::vector<std::thread> threads_;
};

constexpr int64_t kChunks = 3, kRows = 150, kGroupSizes[] = {8, 16, 32};

// Inputs of all operations. Memory has no byte more than an operation may touch.
struct Bucket {
  std::vector<float> rows;
  std::vector<uint16_t> narrow_rows;
  std::vector<int32_t> order, widths, starts, scales_at;
  std::vector<float> levels;
  std::vector<uint8_t> messages;
  int64_t units = 0;
  std::mt19937 random{7};

  explicit Bucket(int64_t groups, int64_t columns) {
    const float hard[] = {0.0f, -0.0f, 1e-40f, -1e-30f, 1e30f, 3e38f, INFINITY, -INFINITY, NAN};
    // Of integers, by exact steps: libraries have logarithms of their own.
    const auto usual = [this] {
      const float uniform = static_cast<float>(random() >> 8) * 0x1p-24f - 0.5f;
      return uniform * uniform * uniform;
    };
    for (int64_t i = 0; i < kChunks * kRows * kRow; ++i) {
      const bool is_hard = i / kRow % 9 == 0 && i % 50 == 0;
      rows.push_back(is_hard ? hard[i / kRow / 9 % 9] : usual());
      narrow_rows.push_back(static_cast<uint16_t>(random()));
    }
    for (int64_t i = 0; i < kChunks * kRows; ++i) {
      order.push_back(static_cast<int32_t>(i * 11 % (kChunks * kRows)));
      widths.push_back(static_cast<int32_t>((kRows - 1 - i % kRows) * 17 / kRows));
      if (widths.back() == 1) widths.back() = 0;
      scales_at.push_back(static_cast<int32_t>(kRows - 1 - i % kRows));
    }
    for (int64_t chunk = 0; chunk < kChunks; ++chunk) {
      int32_t start = 0;
      for (int32_t k = 0; k < kMaxWidth; ++k) {
        starts.push_back(start);
        for (int64_t place = 0; place < kRows; ++place) start += widths[place] > k;
      }
      starts.push_back(start);
      units = start + 3;
    }
    for (int width = 0; width <= kMaxWidth; ++width) {
      const float top = width ? std::ldexp(1.0f, width - 1) - 1 : 0, step = 1 / std::fmax(top, 1);
      if (columns == 4) levels.insert(levels.end(), {top, step, step, 0.5f});
      else levels.insert(levels.end(), {top, step, 0, step, 0, top * top, 1, 1.5f});
    }
    for (int64_t i = 0; i < kChunks * payload_bytes(groups); ++i)
      messages.push_back(static_cast<uint8_t>(random()));
  }
  int64_t payload_bytes(int64_t groups) const { return kUnit * units + kRows * (groups + 2) + 5; }
};

uint64_t digest(uint64_t hash, const void* data, size_t bytes) {
  for (size_t i = 0; i < bytes; ++i)
    hash = (hash ^ static_cast<const uint8_t*>(data)[i]) * 0x100000001b3u;
  return hash;
}

// Of NaN, the sign and the payload depend on the order of operands, which is the compiler's choice.
uint64_t digest_floats(uint64_t hash, std::vector<float> values) {
  for (float& value : values)
    if (std::isnan(value)) value = std::numeric_limits<float>::quiet_NaN();
  return digest(hash, values.data(), 4 * values.size());
}

// So do the codes of a row that decodes to NaN, which have no meaning.
uint64_t digest_message(uint64_t hash, const Codec& codec, const Places& places,
                        std::vector<uint8_t> message) {
  const auto sections = codec.sections(message.data(), places.rows);
  for (int64_t place = 0; place < places.rows; ++place) {
    const SentRow row = sections.row(places, place, place);
    if ((row.super_scale[0] | row.super_scale[1] << 8) != 0x7fc0) continue;
    for (int32_t k = 0; k < row.width; ++k)
      std::memset(row.planes + kUnit * row.starts[k], 0, kUnit);
    std::memset(row.group_scales, 0, static_cast<size_t>(codec.groups));
  }
  return digest(hash, message.data(), message.size());
}

// Runs everything and returns a digest of all results.
uint64_t run_all(Threads& pool, int64_t group_size_index, bool is_uniform) {
  const Kernels& kernels = *kernels_of_this_machine();
  const int64_t groups = kRow / kGroupSizes[group_size_index], columns = is_uniform ? 4 : 8;
  const Bucket bucket(groups, columns);
  const CodedRows& coded = (is_uniform ? kernels.uniform : kernels.quadratic)[group_size_index];
  const int64_t bytes = bucket.payload_bytes(groups);
  const Codec codec = {&kernels.plain, &coded, {bucket.levels.data(), columns},
                       bucket.units,   groups, bytes};
  uint64_t hash = 0xcbf29ce484222325u;
  for (const Dtype dtype : {Dtype::kFloat32, Dtype::kBfloat16, Dtype::kFloat16}) {
    const LocalRows local = {dtype == Dtype::kFloat32
                                 ? static_cast<const void*>(bucket.rows.data())
                                 : static_cast<const void*>(bucket.narrow_rows.data()),
                             dtype, kChunks * kRows};
    std::vector<float> norms(kChunks * kRows);
    statistics(pool, kernels.plain, local, norms.data());
    hash = digest_floats(hash, norms);
    for (int64_t chunk = 0; chunk < kChunks; ++chunk) {
      const Places places = {&bucket.order[chunk * kRows], &bucket.widths[chunk * kRows],
                             &bucket.starts[chunk * kStarts], kRows};
      if (!places.fit(local.count, bucket.units)) std::abort();
      const Received received = {bucket.messages.data(), chunk};
      std::vector<uint8_t> message(bytes);
      std::vector<float> sums(kRows * kRow);
      const Noise noise = {{1, 2}, 3, static_cast<Rounding>(chunk)};
      hop(pool, codec, received, local, places, noise, 5, message.data());
      hash = digest_message(hash, codec, places, message);
      decompress_accumulate(pool, codec, received, local, places, sums.data());
      hash = digest_floats(hash, sums);
      scaled_sums(pool, codec, received, local, places, sums.data(), message.data());
      hash = digest_message(hash, codec, places, message);
    }
  }
  const Places all = {bucket.order.data(), bucket.widths.data(), bucket.starts.data(), kRows};
  for (const int32_t* table : {static_cast<const int32_t*>(nullptr), bucket.scales_at.data()}) {
    std::vector<float> values(kChunks * kRows * kRow);
    decompress(pool, codec, bucket.messages.data(), kChunks, all, table, values.data());
    hash = digest_floats(hash, values);
  }
  return hash;
}

// Runs the formats with one width and returns a digest of all results.
uint64_t run_blocks(Threads& pool) {
  const Kernels& kernels = *kernels_of_this_machine();
  const Bucket bucket(8, 4);
  const int32_t mx_widths[] = {8, 8, 6, 6, 4, 8};
  uint64_t hash = 0xcbf29ce484222325u;
  for (int64_t format = 0; format < kBlockFormats; ++format)
    for (int32_t width = 2; width <= 8; ++width) {
      if (format < 6 && width != mx_widths[format]) continue;
      const BlockCodec codec = {&kernels.plain, &kernels.blocks[format], width, kRows};
      const std::vector<uint8_t> messages(bucket.messages.begin(),
                                          bucket.messages.begin() + 2 * codec.payload_bytes());
      const LocalRows local = {bucket.rows.data(), Dtype::kFloat32, kChunks * kRows};
      for (int64_t chunk = 0; chunk < kChunks; ++chunk) {
        const Received received = {messages.data(), chunk};
        const Noise noise = {{1, 2}, 3, chunk == 1 ? kIndependent : kNearest};
        std::vector<uint8_t> message(codec.payload_bytes());
        std::vector<float> sums(kRows * kRow), decoded(kRows * kRow);
        block_hop(pool, codec, received, local, chunk * kRows, noise, 5, message.data());
        block_accumulate(pool, codec, received, local, chunk * kRows, sums.data());
        block_decompress(pool, codec, message.data(), 1, decoded.data());
        hash = digest(hash, message.data() + codec.codes_bytes(),
                      static_cast<size_t>(kRows * codec.row_sides()));
        hash = digest_floats(digest_floats(hash, sums), decoded);
      }
    }
  return hash;
}

// Writes a result that goes around the caches, and ends the program if a value is not there.
template <class Pool>
void write_many_rows(Pool& pool) {
  constexpr int64_t kRowsOfResult = 5000;
  std::vector<float> values(kRowsOfResult * kRow);
  const RowWriter result(values.data(), kRowsOfResult);
  in_blocks(pool, kRowsOfResult, kBlock, [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row)
      result.write(row, [row](float* to) {
        for (int64_t lane = 0; lane < kRow; ++lane) to[lane] = static_cast<float>(row + lane);
      });
    result.finish();
  });
  for (int64_t i = 0; i < kRowsOfResult * kRow; ++i)
    if (values[i] != static_cast<float>(i / kRow + i % kRow)) std::abort();
}

// Sorts two arrays, and ends the program if a word is not at its place.
template <class Pool>
void sort_two_arrays(Pool& pool, int64_t count) {
  std::vector<uint32_t> words, sorted(static_cast<size_t>(2 * count));
  for (int64_t i = 0; i < 2 * count; ++i)
    words.push_back(static_cast<uint32_t>(i % count * 7919 % count) * 858'000u);
  sort_all(pool, words.data(), 2, count, sorted.data());
  for (int64_t i = 0; i < 2 * count; ++i)
    if (sorted[static_cast<size_t>(i)] != static_cast<uint32_t>(i % count) * 858'000u) std::abort();
}

// Keeps the largest of some blocks, and ends the program if others come back. Then decodes bytes that
// no encoder writes.
template <class Pool>
void keep_the_largest(Pool& pool, int32_t bits) {
  constexpr int64_t kBlocks = 300, kKept = 37, kChunk = 512;
  const SparseFormat format = {kKept, kChunk, bits, 3, 1.0f};
  const int64_t bytes = 2 + format.high_bytes() + format.low_bytes() + format.code_bytes();
  std::vector<float> values, decoded(kBlocks * kChunk);
  for (int64_t i = 0; i < kBlocks * kChunk; ++i)
    values.push_back(static_cast<float>(i % kChunk * 331 % kChunk) * (i % 3 ? 1.0f : -1.0f));
  std::vector<uint8_t> message(static_cast<size_t>(kBlocks * bytes));
  const SparseBlocks& kernels = kernels_of_this_machine()->sparse;
  sparse_encode(pool, kernels, values.data(), {message.data(), kBlocks, format});
  sparse_decode(pool, kernels, {message.data(), kBlocks, format}, decoded.data());
  for (size_t i = 0; i < values.size(); ++i) {
    const bool is_kept = std::fabs(values[i]) >= static_cast<float>(kChunk - kKept);
    if ((decoded[i] != 0.0f) != is_kept || decoded[i] * values[i] < 0.0f) std::abort();
  }
  std::mt19937 random(7);
  for (uint8_t& byte : message) byte = static_cast<uint8_t>(random());
  sparse_decode(pool, kernels, {message.data(), kBlocks, format}, decoded.data());
}

// Copies segments to other places and back, and ends the program if a byte is not there again.
template <class Pool>
void copy_there_and_back(Pool& pool, int64_t rows) {
  constexpr int64_t kColumns[] = {400000, 31, 0, 70001}, kItem = 4;
  std::vector<Segment> there, back;
  std::vector<std::vector<char>> sources, moved, returned;
  int64_t at = 5;  // behind a gap, as each segment
  for (int64_t source = 0; source < 4; ++source) {
    const int64_t columns = kColumns[source];
    there.push_back({source, 0, 0, at, columns});
    back.push_back({0, at, source, 0, columns});
    at += columns + 5;
    sources.emplace_back(static_cast<size_t>(rows * columns * kItem));
    for (size_t i = 0; i < sources.back().size(); ++i)
      sources.back()[i] = static_cast<char>(i * i + static_cast<size_t>(source));
    returned.emplace_back(sources.back().size());
  }
  moved.emplace_back(static_cast<size_t>(rows * at * kItem), 1);
  const auto arrays = [](std::vector<std::vector<char>>& bytes, auto columns_of) {
    std::vector<Array> found;
    for (size_t i = 0; i < bytes.size(); ++i) found.push_back({bytes[i].data(), columns_of(i)});
    return found;
  };
  const auto many = [&](size_t i) { return kColumns[i]; };
  const auto one = [&](size_t) { return at; };
  Copies first, second;
  if (first.add(arrays(sources, many), arrays(moved, one), there.data(), 4, kItem)) std::abort();
  if (second.add(arrays(moved, one), arrays(returned, many), back.data(), 4, kItem)) std::abort();
  first.run(pool, rows);
  second.run(pool, rows);
  int64_t found = 0, expected = 0;
  for (const char byte : moved[0]) found += byte;
  for (const auto& source : sources)
    for (const char byte : source) expected += byte;
  if (returned != sources || found != expected) std::abort();
}

}  // namespace

int main() {
  uint64_t all = 0;
  for (int64_t size = 0; size < 3; ++size)
    for (const bool is_uniform : {false, true}) {
      std::vector<uint64_t> hashes;
      for (const int threads : {1, 2, 7}) {
        Threads pool(threads);
        // Operations that themselves run on all threads of the pool, as those of several devices.
        std::vector<uint64_t> found(5);
        std::mutex mutex;
        std::condition_variable is_done;
        size_t done = 0;
        for (uint64_t& hash : found)
          pool.Schedule([&, size, is_uniform] {
            copy_there_and_back(pool, 1 + size);
            write_many_rows(pool);
            keep_the_largest(pool, 1 + static_cast<int32_t>(size));
            sort_two_arrays(pool, 40);
            sort_two_arrays(pool, 5000);
            hash = run_all(pool, size, is_uniform) ^ run_blocks(pool);
            const std::lock_guard<std::mutex> lock(mutex);
            if (++done == found.size()) is_done.notify_all();
          });
        std::unique_lock<std::mutex> lock(mutex);
        is_done.wait(lock, [&] { return done == found.size(); });
        hashes.insert(hashes.end(), found.begin(), found.end());
      }
      for (const uint64_t hash : hashes)
        if (hash != hashes[0]) {
          std::printf("results differ between threads\n");
          return 1;
        }
      all = digest(all, hashes.data(), sizeof hashes[0]);
    }
  std::printf("%s: no difference, digest %016llx\n", kernels_of_this_machine()->name,
              static_cast<unsigned long long>(all));
  return 0;
}
