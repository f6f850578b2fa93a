// Blocks of rows on the threads of a pool.

#ifndef DYNAMIQ_BLOCKS_H_
#define DYNAMIQ_BLOCKS_H_

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>

#include "dispatch.h"

namespace dynamiq {

// Calls `work(first, last)` for blocks of at most `size` that cover [0, count), in this thread and
// in those of a pool, and returns when all are done.
//
// Several devices may be here at once, on all threads of one pool. So no thread waits for a task
// to start: this one takes blocks until none is left, and then waits for those that others have
// begun, which wait for nobody. A task that starts later finds no block.
template <class Pool, class Work>
void in_blocks(Pool& pool, int64_t count, int64_t size, const Work& work) {
  struct Progress {
    std::atomic<int64_t> next{0};
    std::mutex mutex;
    std::condition_variable is_done;
    int64_t done = 0;  // blocks; under the mutex
  };
  const int64_t blocks = (count + size - 1) / size;
  const auto progress = std::make_shared<Progress>();  // outlives this call in a task that is late
  const Work* const shared_work = &work;               // does not: only for a block that was taken
  const auto take_blocks = [=] {
    const FlushedSubnormals flushed;
    int64_t taken = 0;
    for (int64_t block; (block = progress->next.fetch_add(1)) < blocks; ++taken)
      (*shared_work)(block * size, std::min(count, (block + 1) * size));
    if (taken == 0) return;
    const std::lock_guard<std::mutex> lock(progress->mutex);
    progress->done += taken;
    if (progress->done == blocks) progress->is_done.notify_all();
  };
  const int64_t threads = std::min<int64_t>(pool.num_threads(), blocks);
  for (int64_t thread = 1; thread < threads; ++thread)
    pool.Schedule([take_blocks] { take_blocks(); });
  take_blocks();
  std::unique_lock<std::mutex> lock(progress->mutex);
  progress->is_done.wait(lock, [&] { return progress->done == blocks; });
}

}  // namespace dynamiq

#endif  // DYNAMIQ_BLOCKS_H_
