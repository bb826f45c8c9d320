#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace gradwire {

/// Items that are ready, handed out in the one order that every worker uses: the highest priority
/// first, then the lowest key. A total order matters: with equal priorities in another order on
/// each worker, two workers can fill their windows with different keys.
/// Threads: the caller locks.
class AdmissionQueue {
 public:
  struct Item {
    std::int32_t priority = 0;
    std::uint64_t key = 0;
  };

  void Push(Item item) {
    heap_.push_back(item);
    std::push_heap(heap_.begin(), heap_.end(), After);
  }
  const Item& Top() const { return heap_.front(); }
  Item Pop() {
    std::pop_heap(heap_.begin(), heap_.end(), After);
    const Item item = heap_.back();
    heap_.pop_back();
    return item;
  }
  bool empty() const { return heap_.empty(); }
  std::size_t size() const { return heap_.size(); }
  void Clear() { heap_.clear(); }
  void Reserve(std::size_t items) { heap_.reserve(items); }

 private:
  static bool After(const Item& a, const Item& b) {
    return a.priority != b.priority ? a.priority < b.priority : a.key > b.key;
  }
  std::vector<Item> heap_;
};

/// A bound on bytes that something holds: what a worker may have unreceived at a server (credit),
/// or the encoded buffers that wait (tokens). Neither is ever given back by another worker's doing.
/// Threads: the caller locks.
class ByteWindow {
 public:
  explicit ByteWindow(std::size_t limit) : limit_(limit) {}

  /// A unit larger than the window goes when nothing else is outstanding.
  bool Admits(std::size_t bytes) const {
    return outstanding_ == 0 || outstanding_ + bytes <= limit_;
  }
  void Take(std::size_t bytes) { outstanding_ += bytes; }
  void Give(std::size_t bytes) { outstanding_ -= std::min(bytes, outstanding_); }
  std::size_t outstanding() const { return outstanding_; }
  std::size_t limit() const { return limit_; }

 private:
  std::size_t limit_;
  std::size_t outstanding_ = 0;
};

}  // namespace gradwire
