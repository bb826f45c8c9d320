#pragma once

#include <cstddef>
#include <memory>

#include "common/base/blob.h"
#include "common/base/bytes.h"

namespace gradwire {

/// A writable buffer from a BufferPool, 64-byte aligned. Movable; when it and every Payload made
/// from it are gone, the memory goes back to the pool.
class PooledBuffer {
 public:
  PooledBuffer() = default;
  PooledBuffer(BlobRef owner, MutableBytes bytes) : owner_(std::move(owner)), bytes_(bytes) {}

  /// The capacity asked for. Write before sharing; shared bytes are read only.
  MutableBytes bytes() const { return bytes_; }
  bool empty() const { return bytes_.empty(); }

  /// A shared view of the first `size` bytes that keeps the buffer alive.
  Payload Share(std::size_t size) const { return {owner_, bytes_.first(size)}; }

 private:
  BlobRef owner_;
  MutableBytes bytes_;
};

/// Recycles byte buffers so that a steady state allocates nothing. Sizes are rounded up to a few
/// classes; a buffer outlives the pool if somebody still holds it.
/// Threads: safe.
class BufferPool {
 public:
  BufferPool();
  ~BufferPool();
  BufferPool(const BufferPool&) = delete;
  BufferPool& operator=(const BufferPool&) = delete;

  /// Shapes: returns exactly `size` bytes, contents unspecified. size 0 gives an empty buffer.
  /// Errors: throws std::bad_alloc only.
  PooledBuffer Acquire(std::size_t size);

  /// Bytes of memory this pool has taken from the system and not given back.
  std::size_t allocated_bytes() const;

 private:
  struct State;
  class Buffer;
  std::shared_ptr<State> state_;
};

}  // namespace gradwire
