#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>
#include <new>
#include <span>

namespace gradwire::trainer {

/// A fixed number of floats on a 64-byte boundary (one AVX-512 vector), zeros at first.
class FloatBuffer {
 public:
  FloatBuffer() = default;
  explicit FloatBuffer(std::size_t size)
      : data_(static_cast<float*>(::operator new(size * sizeof(float), kAlignment))), size_(size) {
    std::fill_n(data_.get(), size, 0.0F);
  }

  float* data() const { return data_.get(); }
  std::size_t size() const { return size_; }
  std::span<float> span() const { return {data_.get(), size_}; }

 private:
  static constexpr std::align_val_t kAlignment{64};
  struct Free {
    void operator()(float* p) const { ::operator delete(p, kAlignment); }
  };
  std::unique_ptr<float[], Free> data_;
  std::size_t size_ = 0;
};

}  // namespace gradwire::trainer
