#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "common/transport/loop.h"

namespace gradwire {

/// Tasks with a time at which they are due; of equal times the one added first comes first.
/// Threads: one, a loop's.
class TimerQueue {
 public:
  using Clock = std::chrono::steady_clock;

  void Add(Clock::time_point due, Loop::Task task) {
    heap_.push_back({due, next_number_++, std::move(task)});
    std::push_heap(heap_.begin(), heap_.end(), Later);
  }

  /// The next task if it is due.
  std::optional<Loop::Task> TakeDue(Clock::time_point now) {
    if (heap_.empty() || heap_.front().due > now) return std::nullopt;
    std::pop_heap(heap_.begin(), heap_.end(), Later);
    std::optional<Loop::Task> task = std::move(heap_.back().task);
    heap_.pop_back();
    return task;
  }

  std::optional<Clock::time_point> NextDue() const {
    if (heap_.empty()) return std::nullopt;
    return heap_.front().due;
  }

  void Clear() { heap_.clear(); }

 private:
  struct Timer {
    Clock::time_point due;
    std::uint64_t number;
    Loop::Task task;
  };
  static bool Later(const Timer& a, const Timer& b) {
    return a.due != b.due ? a.due > b.due : a.number > b.number;
  }

  std::vector<Timer> heap_;
  std::uint64_t next_number_ = 0;
};

}  // namespace gradwire
