#include "common/base/buffer_pool.h"

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <map>
#include <mutex>
#include <new>
#include <vector>

namespace gradwire {
namespace {

constexpr std::size_t kAlignment = 64;

// Four classes a power of two waste at most a fifth and make unequal units share buffers.
std::size_t SizeClass(std::size_t size) {
  const std::size_t floor = std::bit_floor(std::max<std::size_t>(size, 256));
  const std::size_t step = floor / 4;
  return (size <= floor) ? floor : floor + (size - floor + step - 1) / step * step;
}

}  // namespace

struct BufferPool::State {
  std::mutex mu;
  std::map<std::size_t, std::vector<Buffer*>> free;  // guarded by mu
  std::size_t allocated = 0;                         // guarded by mu
  bool closed = false;                               // guarded by mu
};

class BufferPool::Buffer final : public Blob {
 public:
  Buffer(std::shared_ptr<State> state, std::size_t capacity)
      : state_(std::move(state)),
        capacity_(capacity),
        data_(static_cast<std::byte*>(std::aligned_alloc(kAlignment, capacity))) {
    if (data_ == nullptr) throw std::bad_alloc();
  }
  ~Buffer() override { std::free(data_); }

  std::byte* data() const { return data_; }

 private:
  void Recycle() noexcept override {
    // The state must outlive the lock even when this buffer is the last to hold it.
    const std::shared_ptr<State> state = state_;
    {
      const std::lock_guard lock(state->mu);
      if (!state->closed) {
        state->free[capacity_].push_back(this);
        return;
      }
    }
    delete this;
  }

  const std::shared_ptr<State> state_;
  const std::size_t capacity_;
  std::byte* const data_;
};

BufferPool::BufferPool() : state_(std::make_shared<State>()) {}

BufferPool::~BufferPool() {
  std::map<std::size_t, std::vector<Buffer*>> free;
  {
    const std::lock_guard lock(state_->mu);
    state_->closed = true;
    free.swap(state_->free);
  }
  for (auto& [capacity, buffers] : free) {
    for (Buffer* buffer : buffers) delete buffer;
  }
}

PooledBuffer BufferPool::Acquire(std::size_t size) {
  if (size == 0) return {};
  const std::size_t capacity = SizeClass(size);
  Buffer* buffer = nullptr;
  {
    const std::lock_guard lock(state_->mu);
    std::vector<Buffer*>& free = state_->free[capacity];
    if (!free.empty()) {
      buffer = free.back();
      free.pop_back();
    } else {
      state_->allocated += capacity;
      // Recycle() must not allocate: make room for every buffer of this class beforehand.
      free.reserve(free.capacity() + 1);
    }
  }
  if (buffer == nullptr) buffer = new Buffer(state_, capacity);
  return {BlobRef(buffer), {buffer->data(), size}};
}

std::size_t BufferPool::allocated_bytes() const {
  const std::lock_guard lock(state_->mu);
  return state_->allocated;
}

}  // namespace gradwire
