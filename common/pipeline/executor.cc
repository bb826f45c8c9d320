#include "common/pipeline/executor.h"

#include <tbb/global_control.h>
#include <tbb/task_arena.h>

#include <condition_variable>
#include <mutex>
#include <utility>

namespace gradwire {
namespace {

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

  void Post(Task task) override {
    {
      const std::lock_guard lock(mu_);
      ++pending_;
    }
    arena_.enqueue([this, task = std::move(task)] {
      task();
      const std::lock_guard lock(mu_);
      if (--pending_ == 0) idle_.notify_all();
    });
  }
  int concurrency() const override { return threads_; }

 private:
  const int threads_;
  tbb::global_control limit_;
  tbb::task_arena arena_;
  std::mutex mu_;
  std::condition_variable idle_;
  int pending_ = 0;  // guarded by mu_
};

}  // namespace

std::unique_ptr<Executor> MakeExecutor(int threads) {
  if (threads <= 0) return std::make_unique<InlineExecutor>();
  return std::make_unique<TbbExecutor>(threads);
}

}  // namespace gradwire
