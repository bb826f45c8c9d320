#include "common/pipeline/executor.h"

#include <tbb/global_control.h>
#include <tbb/task_arena.h>

#include <condition_variable>
#include <cstddef>
#include <mutex>
#include <utility>

#include "common/base/ring_queue.h"

#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
#endif

namespace gradwire {
namespace {

// ThreadSanitizer does not see into Debian's libtbb, so it is told that what happened before a task
// was posted happened before the task runs.
void MarkPosted([[maybe_unused]] void* executor) {
#if defined(__SANITIZE_THREAD__)
  __tsan_release(executor);
#endif
}
void MarkTaken([[maybe_unused]] void* executor) {
#if defined(__SANITIZE_THREAD__)
  __tsan_acquire(executor);
#endif
}

class InlineExecutor final : public Executor {
 public:
  void Post(Task task) override { task(); }
  int concurrency() const override { return 0; }
};

class TbbExecutor final : public Executor {
 public:
  explicit TbbExecutor(int threads)
      : threads_(threads),
        // oneTBB makes only as many threads as there are cores less one unless it is told
        // otherwise.
        limit_(tbb::global_control::max_allowed_parallelism, static_cast<std::size_t>(threads) + 1),
        arena_(threads, 0) {
    arena_.initialize();
  }

  ~TbbExecutor() override {
    std::unique_lock lock(mu_);
    idle_.wait(lock, [this] { return pending_ == 0; });
  }

  // Tasks are handed over under our own lock, and oneTBB only carries the word that there is one:
  // so ThreadSanitizer, which does not see into Debian's libtbb, sees who gave what to whom.
  void Post(Task task) override {
    {
      const std::lock_guard lock(mu_);
      ++pending_;
      queue_.Push(std::move(task));
    }
    MarkPosted(this);
    arena_.enqueue([this] { RunOne(); });
  }
  int concurrency() const override { return threads_; }

 private:
  void RunOne() {
    MarkTaken(this);
    Task task;
    {
      const std::lock_guard lock(mu_);
      task = queue_.Pop();
    }
    task();
    const std::lock_guard lock(mu_);
    if (--pending_ == 0) idle_.notify_all();
  }

  const int threads_;
  tbb::global_control limit_;
  tbb::task_arena arena_;
  std::mutex mu_;
  std::condition_variable idle_;
  RingQueue<Task> queue_;  // guarded by mu_
  int pending_ = 0;        // guarded by mu_
};

}  // namespace

std::unique_ptr<Executor> MakeExecutor(int threads) {
  if (threads <= 0) return std::make_unique<InlineExecutor>();
  return std::make_unique<TbbExecutor>(threads);
}

}  // namespace gradwire
