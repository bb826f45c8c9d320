#pragma once

#include <atomic>
#include <cstddef>
#include <utility>

#include "common/base/bytes.h"

namespace gradwire {

/// The owner of some bytes, counted by reference. Whoever drops the last reference runs Recycle()
/// on its own thread (a ZeroMQ I/O thread among them), so Recycle() must be short and must not
/// block.
/// Threads: Ref and Unref are safe from any thread.
class Blob {
 public:
  Blob(const Blob&) = delete;
  Blob& operator=(const Blob&) = delete;

  void Ref() noexcept { references_.fetch_add(1, std::memory_order_relaxed); }
  void Unref() noexcept {
    if (references_.fetch_sub(1, std::memory_order_acq_rel) == 1) Recycle();
  }

 protected:
  Blob() = default;
  virtual ~Blob() = default;
  /// Called when the last reference went. The count is 0 and the object may be used again.
  virtual void Recycle() noexcept = 0;

 private:
  std::atomic<int> references_{0};
};

/// A counted reference to a Blob. Copying it is cheap and allocates nothing.
class BlobRef {
 public:
  BlobRef() = default;
  explicit BlobRef(Blob* blob) noexcept : blob_(blob) {
    if (blob_ != nullptr) blob_->Ref();
  }
  BlobRef(const BlobRef& other) noexcept : BlobRef(other.blob_) {}
  BlobRef(BlobRef&& other) noexcept : blob_(std::exchange(other.blob_, nullptr)) {}
  BlobRef& operator=(BlobRef other) noexcept {
    std::swap(blob_, other.blob_);
    return *this;
  }
  ~BlobRef() {
    if (blob_ != nullptr) blob_->Unref();
  }

  Blob* get() const { return blob_; }
  explicit operator bool() const { return blob_ != nullptr; }

 private:
  Blob* blob_ = nullptr;
};

/// Bytes together with what keeps them alive: a pooled buffer, a received message or a caller's
/// memory. An empty payload has neither.
struct Payload {
  BlobRef owner;
  ByteView bytes;

  std::size_t size() const { return bytes.size(); }
  bool empty() const { return bytes.empty(); }
};

}  // namespace gradwire
