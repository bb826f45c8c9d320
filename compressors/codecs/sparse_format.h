#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string_view>

#include "common/base/status.h"
#include "compressors/codecs/kernels.h"
#include "compressors/compressor.h"
#include "compressors/registry.h"

namespace gradwire {

/// What codecs that keep few elements of a unit can index.
inline constexpr std::size_t kMaxSparseElements = std::numeric_limits<std::uint32_t>::max();
/// Errors: InvalidArgument for more.
Status CheckSparseElements(std::string_view name, std::size_t n);

/// How many elements of a unit are kept: a part of them, or a number.
struct KeptCount {
  double ratio = 0;
  std::size_t k = 0;  // 0: by ratio

  /// clamp(floor(n * ratio + 0.5), 1, n) in double, or min(k, n); 0 of none.
  std::size_t Of(std::size_t n) const;
};

/// The parameters ratio and k, of which one may be given, and what they say.
ParameterInfo RatioParameter(std::string_view default_ratio);
ParameterInfo KParameter();
/// Errors: InvalidArgument if both are given.
Result<KeptCount> KeptCountOf(std::string_view name, const Parameters& parameters,
                              double default_ratio);

/// The parameter value, fp16 or fp32, and what it says.
ParameterInfo ValueParameter(std::string_view default_value);
kernels::CastFormat ValueOf(const Parameters& parameters);

enum class IndexFormat { kPacked, kU32 };
/// The parameter index, packed or u32, and what it says.
ParameterInfo IndexParameter();
IndexFormat IndexOf(const Parameters& parameters);

/// Gaps are packed in blocks of this many, at a width of their own.
inline constexpr std::size_t kGapBlock = 128;
inline constexpr std::size_t kMaxGapWidth = 32;

/// Some elements of a unit as bytes: what topk and threshold share.
/// Layout, k kept: values[k] (f16 or f32), by index; then u32[k], or packed: gaps (index - previous
/// - 1, the first from -1) in blocks of 128: u8 width (0 to 32, the least that fits), then the gaps
/// at that width, LSB first, each block from a byte's start, last bits 0.
/// Payloads may have a head of the codec's own before that; sizes in messages count it. Whoever
/// reads has checked that k <= n and that the head is there.
/// Threads: safe.
class SparseFormat {
 public:
  /// `name` is the codec's, for messages, and outlives this.
  SparseFormat(std::string_view name, kernels::CastFormat value, IndexFormat index)
      : name_(name), value_(value), value_bytes_(kernels::BytesOf(value)), index_(index) {}

  kernels::CastFormat value() const { return value_; }
  std::size_t value_bytes() const { return value_bytes_; }
  IndexFormat index() const { return index_; }

  /// Writes indices, which ascend, where the values end. Returns the end of what was written.
  std::byte* WriteIndices(std::span<const std::uint32_t> indices, std::byte* to) const;

  /// Errors of all: CorruptData with what was got and expected.
  Status Validate(ByteView payload, std::size_t head, std::size_t k, std::size_t n) const;
  /// Writes zeros between what was kept.
  Status Decode(ByteView payload, std::size_t head, std::size_t k, std::span<float> output) const;
  Status DecodeAdd(ByteView payload, std::size_t head, std::size_t k,
                   std::span<float> accumulator) const;
  /// Adds those of the range of a valid payload of n elements; reads all of it.
  void DecodeAddRange(ByteView payload, std::size_t head, std::size_t k, std::size_t n,
                      std::size_t offset, std::span<float> accumulator) const;

 private:
  struct Chunk;
  template <bool kValues, typename Body>
  Status ForEachChunk(ByteView payload, std::size_t head, std::size_t k, std::size_t n,
                      Body&& body) const;
  template <typename Unpack>
  Status ReadGaps(ByteView payload, const std::byte*& at, std::size_t begin, std::size_t count,
                  std::size_t k, std::size_t n, std::size_t& next, Unpack&& unpack) const;
  Status ReadIndices(const std::byte* at, std::size_t begin, std::size_t count, std::size_t k,
                     std::size_t n, std::size_t& next, std::uint32_t* indices) const;
  Status TooShort(std::size_t got, std::size_t expected, std::size_t n) const;
  Status WrongIndex(std::size_t i, std::size_t k, std::size_t index, std::size_t next,
                    std::size_t n) const;

  const std::string_view name_;
  const kernels::CastFormat value_;
  const std::size_t value_bytes_;
  const IndexFormat index_;
};

}  // namespace gradwire
