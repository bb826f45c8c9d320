#pragma once

#include <functional>
#include <memory>

namespace gradwire {

/// Runs tasks that compute: encode, decode, sum. Tasks never block, never throw and never wait for
/// the network.
class Executor {
 public:
  using Task = std::function<void()>;
  virtual ~Executor() = default;  // waits for the tasks under way

  /// Runs the task, on another thread or before returning. Threads: any.
  virtual void Post(Task task) = 0;
  /// Tasks that run at the same time; 0 if Post runs them itself.
  virtual int concurrency() const = 0;
};

/// `threads` oneTBB threads in an arena of their own; 0: tasks run inside Post.
std::unique_ptr<Executor> MakeExecutor(int threads);

}  // namespace gradwire
