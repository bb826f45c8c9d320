#pragma once

#include <algorithm>
#include <cstddef>
#include <utility>
#include <vector>

namespace gradwire {

/// First in, first out, in memory that only grows: std::deque takes and gives back a node every few
/// items for ever.
/// Threads: the caller locks.
template <typename T>
class RingQueue {
 public:
  void Push(T item) {
    if (size_ == ring_.size()) Grow();
    ring_[(first_ + size_++) % ring_.size()] = std::move(item);
  }
  /// The oldest item; the queue is not empty.
  const T& Front() const { return ring_[first_]; }
  T Pop() {
    T item = std::exchange(ring_[first_], T{});
    first_ = (first_ + 1) % ring_.size();
    --size_;
    return item;
  }
  std::size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }

 private:
  void Grow() {
    std::vector<T> larger(std::max<std::size_t>(16, 2 * ring_.size()));
    for (std::size_t i = 0; i < size_; ++i)
      larger[i] = std::move(ring_[(first_ + i) % ring_.size()]);
    ring_ = std::move(larger);
    first_ = 0;
  }

  std::vector<T> ring_;
  std::size_t first_ = 0;
  std::size_t size_ = 0;
};

}  // namespace gradwire
