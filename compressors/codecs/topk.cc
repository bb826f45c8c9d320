#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cassert>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <utility>

#include "common/base/random.h"
#include "compressors/codecs/codec_checks.h"
#include "compressors/codecs/float_mode.h"
#include "compressors/codecs/kernels.h"
#include "compressors/registry.h"
#include "compressors/wire_ids.h"

namespace gradwire {
namespace {

constexpr std::size_t kGapBlock = 128;
constexpr std::size_t kMaxWidth = 32;
constexpr std::size_t kMaxElements = std::numeric_limits<std::uint32_t>::max();
/// Of 0.1 % this has 8 above the cut, enough to aim; more would cost more than it saves.
constexpr std::size_t kMaxSamples = 8192;
/// A unit of this size is not sampled: all that is not zero is a candidate.
constexpr std::size_t kUnsampled = 16384;

std::uint32_t AbsBits(float value) { return std::bit_cast<std::uint32_t>(value) & 0x7fffffff; }

/// One thread's working memory, kept from call to call: it grows to what the largest unit needs
/// (36 bytes a kept element, 210 KiB, and without feedback a copy of the unit) and no further.
struct Scratch {
  std::vector<float> unit;             // q, where no residual holds it
  std::vector<std::uint32_t> samples;  // magnitudes
  std::vector<std::uint32_t> indices;  // what reached the threshold, then what is kept
  std::vector<std::uint32_t> bits;     // magnitudes of the former
  std::vector<float> kept;             // values of the latter
};

Scratch& ThreadScratch() {
  thread_local Scratch scratch;
  return scratch;
}

/// Where the k largest end: everything above `bits` is kept, and the first `equals` of its equals.
struct Cut {
  std::uint32_t bits = 0;
  std::size_t equals = 0;
};

/// The cut of some magnitudes; reorders them. k from 1 to bits.size().
Cut CutOf(std::span<std::uint32_t> bits, std::size_t k) {
  const auto kth = bits.begin() + static_cast<std::ptrdiff_t>(k - 1);
  std::nth_element(bits.begin(), kth, bits.end(), std::greater<>());
  const auto equals = std::count(bits.begin(), kth + 1, *kth);
  return {*kth, static_cast<std::size_t>(equals)};
}

/// The cut of any values, digit by digit from the top: four passes, no memory.
Cut CutByDigits(std::span<const float> q, std::size_t k) {
  constexpr unsigned kDigitBits = 8;
  std::uint32_t prefix = 0;
  for (unsigned shift = 32; shift > 0;) {
    const unsigned above = shift;
    shift -= kDigitBits;
    std::array<std::size_t, 1U << kDigitBits> counts{};
    for (const float value : q) {
      const std::uint32_t bits = AbsBits(value);
      if (above == 32 || bits >> above == prefix >> above) ++counts[(bits >> shift) & 0xff];
    }
    std::uint32_t digit = 0xff;
    while (counts[digit] < k) k -= counts[digit--];
    prefix |= digit << shift;
  }
  return {prefix, k};
}

/// A magnitude that a few more than k elements should reach, from a sample of them; at least 1, so
/// that zeros are never collected. Only the speed depends on it.
std::uint32_t AimThreshold(std::span<const float> q, std::size_t k, Scratch& scratch) {
  const std::size_t n = q.size();
  if (n <= kUnsampled) return 1;
  const std::size_t wanted = std::min({kMaxSamples, 32 * (n / k + 1), n / 2});
  const double above =
      static_cast<double>(k) * static_cast<double>(wanted) / static_cast<double>(n);
  // Low by a third and two standard deviations, since too few means to begin again.
  const auto rank = static_cast<std::size_t>(1.3 * above + 2 * std::sqrt(above) + 2);
  if (rank >= wanted) return 1;
  const std::size_t stride = n / wanted;
  scratch.samples.resize(wanted);
  for (std::size_t i = 0; i < wanted; ++i) {
    // Anywhere in its stretch, since tensors have periods of their own.
    scratch.samples[i] = AbsBits(q[i * stride + Mix64(i) % stride]);
  }
  return std::max(CutOf(scratch.samples, rank).bits, 1U);
}

/// The indices of the k largest magnitudes, ascending; of equals the lower index is kept. Valid
/// until the scratch is used again.
/// Exact: if at least k elements reach the threshold, the k largest of them are those of all.
std::span<const std::uint32_t> SelectLargest(std::span<const float> q, std::size_t k,
                                             Scratch& scratch) {
  const std::size_t n = q.size();
  const std::size_t limit = std::min(n, 4 * k + kUnsampled);
  std::vector<std::uint32_t>& indices = scratch.indices;
  indices.resize(limit + kBlockElements);
  const auto collect = [&](std::size_t offset, std::uint32_t threshold, std::size_t at) {
    return kernels::CollectAtLeast(q.data() + offset, std::min(kBlockElements, n - offset),
                                   threshold, static_cast<std::uint32_t>(offset),
                                   indices.data() + at);
  };

  const std::uint32_t threshold = AimThreshold(q, k, scratch);
  std::size_t found = 0;
  for (std::size_t offset = 0; offset < n && found <= limit; offset += kBlockElements) {
    found += collect(offset, threshold, found);
  }

  Cut cut;
  const bool enough = found >= k && found <= limit;
  if (enough) {
    scratch.bits.resize(found);
    for (std::size_t i = 0; i < found; ++i) scratch.bits[i] = AbsBits(q[indices[i]]);
    cut = CutOf(scratch.bits, k);
  } else if (found < k && threshold == 1) {
    cut = {0, k - found};  // fewer than k are not zero
  } else {
    cut = CutByDigits(q, k);  // clustered values, or many ties
  }

  std::size_t kept = 0;
  const auto keep = [&](std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < end; ++i) {
      const std::uint32_t bits = AbsBits(q[indices[i]]);
      if (bits < cut.bits || (bits == cut.bits && cut.equals == 0)) continue;
      if (bits == cut.bits) --cut.equals;
      indices[kept++] = indices[i];
    }
  };
  if (enough) {
    keep(0, found);
  } else {
    for (std::size_t offset = 0; offset < n; offset += kBlockElements) {
      const std::size_t begin = kept;
      keep(begin, begin + collect(offset, cut.bits + (cut.equals == 0 ? 1 : 0), begin));
    }
  }
  assert(kept == k);
  return std::span(indices).first(k);
}

enum class IndexFormat { kPacked, kU32 };

/// Writes gaps in blocks of 128: u8 width, then the gaps at that width, LSB first.
/// Returns the end of what was written.
std::byte* PackGaps(std::span<const std::uint32_t> indices, std::byte* to) {
  std::uint64_t next = 0;  // the index after the previous one
  for (std::size_t begin = 0; begin < indices.size(); begin += kGapBlock) {
    const auto block = indices.subspan(begin, std::min(kGapBlock, indices.size() - begin));
    std::array<std::uint64_t, kGapBlock> gaps;
    std::uint64_t all = 0;
    for (std::size_t i = 0; i < block.size(); ++i) {
      gaps[i] = block[i] - next;
      next = std::uint64_t{block[i]} + 1;
      all |= gaps[i];
    }
    const auto width = static_cast<std::size_t>(std::bit_width(all));
    *to++ = static_cast<std::byte>(width);
    std::uint64_t word = 0;
    std::size_t filled = 0;  // below 8 before each gap, so 32 bits more always fit
    for (std::size_t i = 0; i < block.size(); ++i) {
      word |= gaps[i] << filled;
      for (filled += width; filled >= 8; filled -= 8) {
        *to++ = static_cast<std::byte>(word & 0xff);
        word >>= 8;
      }
    }
    if (filled > 0) *to++ = static_cast<std::byte>(word & 0xff);
  }
  return to;
}

/// Keeps the k elements of the largest magnitude. Under feedback the residual is explicit: a pass
/// adds the input to it, and what is kept is taken off.
class TopkCodec final : public Compressor {
 public:
  TopkCodec(double ratio, std::size_t k, kernels::CastFormat value, IndexFormat index)
      : ratio_(ratio), k_(k), value_(value), value_bytes_(kernels::BytesOf(value)), index_(index) {}

  std::string_view name() const override { return "topk"; }

  CompressorTraits traits() const override {
    CompressorTraits traits;
    traits.compressor_class = CompressorClass::kContractive;
    traits.fixed_size = index_ == IndexFormat::kU32;
    traits.block_access = false;
    traits.feedback_by_default = true;
    return traits;
  }

  std::size_t MaxEncodedSize(std::size_t n) const override {
    const std::size_t k = Kept(n);
    if (index_ == IndexFormat::kU32) return k * (value_bytes_ + sizeof(std::uint32_t));
    // The gaps add up to n - k at most, so none is wider than that.
    const std::size_t width = std::min<std::size_t>(kMaxWidth, std::size_t(std::bit_width(n - k)));
    const std::size_t whole = k / kGapBlock * (1 + kGapBlock * width / 8);
    const std::size_t last = k % kGapBlock;
    return k * value_bytes_ + whole + (last == 0 ? 0 : 1 + (last * width + 7) / 8);
  }

  Result<Encoded> Encode(BlockSource& input, std::size_t n, const CodecContext& context,
                         Residual* residual, MutableBytes output) const override {
    GRADWIRE_RETURN_IF_ERROR(CheckEncode(name(), n, residual, output.size(), MaxEncodedSize(n)));
    GRADWIRE_RETURN_IF_ERROR(CheckExplicit(name(), residual));
    if (n > kMaxElements) {
      return InvalidArgument(
          fmt::format("topk was given {} elements, expected at most {}", n, kMaxElements));
    }
    const ScopedFloatMode ieee;
    Scratch& scratch = ThreadScratch();
    if (residual == nullptr) scratch.unit.resize(n);
    const std::span<float> q = residual == nullptr ? std::span(scratch.unit) : residual->values;
    Encoded encoded;
    ForEachBlock(n, [&](std::size_t offset, std::size_t count) {
      const float* block = input.Block(offset, count);
      float* to = q.data() + offset;
      const bool finite =
          residual == nullptr
              ? kernels::EncodeCast(kernels::CastFormat::kF32, block, nullptr, 1, count,
                                    std::as_writable_bytes(std::span(to, count)).data())
              : kernels::AddFeedback(block, to, context.alpha, count);
      encoded.finite = encoded.finite && finite;
    });
    if (!encoded.finite || n == 0) return encoded;

    const std::span<const std::uint32_t> indices = SelectLargest(q, Kept(n), scratch);
    const std::size_t k = indices.size();
    scratch.kept.resize(k);
    for (std::size_t i = 0; i < k; ++i) scratch.kept[i] = q[indices[i]];
    kernels::EncodeCast(value_, scratch.kept.data(), nullptr, 1, k, output.data());
    if (residual != nullptr) {
      kernels::DecodeCast(value_, output.data(), k, scratch.kept.data());
      for (std::size_t i = 0; i < k; ++i) q[indices[i]] -= scratch.kept[i];
    }
    std::byte* end = output.data() + k * value_bytes_;
    if (index_ == IndexFormat::kU32) {
      std::memcpy(end, indices.data(), indices.size_bytes());
      end += indices.size_bytes();
    } else {
      end = PackGaps(indices, end);
    }
    encoded.payload_bytes = static_cast<std::size_t>(end - output.data());
    return encoded;
  }

  Status Validate(ByteView payload, std::size_t n) const override {
    return ForEachKept(payload, n, [](std::size_t, float) {});
  }

  Status Decode(ByteView payload, const CodecContext&, std::span<float> output) const override {
    std::fill(output.begin(), output.end(), 0.0F);
    return ForEachKept(payload, output.size(),
                       [&](std::size_t index, float value) { output[index] = value; });
  }

  Status DecodeAdd(ByteView payload, const CodecContext&,
                   std::span<float> accumulator) const override {
    const ScopedFloatMode ieee;
    return ForEachKept(payload, accumulator.size(),
                       [&](std::size_t index, float value) { accumulator[index] += value; });
  }

  /// Right for any range, but reads the whole payload.
  void DecodeAddRange(ByteView payload, std::size_t n, const CodecContext&, std::size_t offset,
                      std::span<float> accumulator) const override {
    const ScopedFloatMode ieee;
    const Status status = ForEachKept(payload, n, [&](std::size_t index, float value) {
      if (index >= offset && index - offset < accumulator.size()) {
        accumulator[index - offset] += value;
      }
    });
    assert(status.ok());
    static_cast<void>(status);
  }

  void Flush(Residual&) const override {}

  void Undo(ByteView payload, const CodecContext& context, Residual& residual) const override {
    const Status status = DecodeAdd(payload, context, residual.values);
    assert(status.ok());
    static_cast<void>(status);
  }

 private:
  std::size_t Kept(std::size_t n) const {
    if (k_ != 0) return std::min(k_, n);
    const double wanted = std::floor(static_cast<double>(n) * ratio_ + 0.5);
    return std::min(std::max<std::size_t>(static_cast<std::size_t>(wanted), 1), n);
  }

  float ValueAt(const std::byte* values, std::size_t i) const {
    float value;
    kernels::DecodeCast(value_, values + i * value_bytes_, 1, &value);
    return value;
  }

  /// Calls body(index, value) for what was kept, each index checked before it is used.
  /// Errors: CorruptData; the body may have been called by then.
  template <typename Body>
  Status ForEachKept(ByteView payload, std::size_t n, Body&& body) const {
    const std::size_t k = Kept(n);
    const std::size_t head = k * value_bytes_;
    if (index_ == IndexFormat::kU32) {
      GRADWIRE_RETURN_IF_ERROR(
          CheckPayloadSize(name(), n, payload.size(), head + k * sizeof(std::uint32_t)));
    } else if (payload.size() < head) {
      return TooShort(payload.size(), head, n);
    }
    std::size_t next = 0;  // the lowest index that may come
    const auto take = [&](std::size_t i, std::size_t index) -> Status {
      if (index >= n || index < next) {
        return CorruptData(
            fmt::format("topk index {} of {} is {}, expected {} to {}", i, k, index, next, n - 1));
      }
      next = index + 1;
      body(index, ValueAt(payload.data(), i));
      return Status::Ok();
    };
    const std::byte* at = payload.data() + head;
    if (index_ == IndexFormat::kU32) {
      for (std::size_t i = 0; i < k; ++i) {
        GRADWIRE_RETURN_IF_ERROR(take(i, LoadLe<std::uint32_t>(at + i * sizeof(std::uint32_t))));
      }
      return Status::Ok();
    }

    const std::byte* const end = payload.data() + payload.size();
    const auto offset_of = [&](const std::byte* p) {
      return static_cast<std::size_t>(p - payload.data());
    };
    for (std::size_t begin = 0; begin < k; begin += kGapBlock) {
      const std::size_t count = std::min(kGapBlock, k - begin);
      if (at == end) return TooShort(payload.size(), offset_of(at) + 1, n);
      const auto width = std::to_integer<std::size_t>(*at++);
      if (width > kMaxWidth) {
        return CorruptData(
            fmt::format("topk gap width is {}, expected at most {}", width, kMaxWidth));
      }
      const std::size_t bytes = (count * width + 7) / 8;
      if (static_cast<std::size_t>(end - at) < bytes) {
        return TooShort(payload.size(), offset_of(at) + bytes, n);
      }
      std::uint64_t word = 0;
      std::size_t filled = 0;
      std::uint64_t all = 0;
      for (std::size_t i = 0; i < count; ++i) {
        for (; filled < width; filled += 8) word |= std::to_integer<std::uint64_t>(*at++) << filled;
        const std::uint64_t gap = word & ((std::uint64_t{1} << width) - 1);
        word >>= width;
        filled -= width;
        all |= gap;
        GRADWIRE_RETURN_IF_ERROR(take(begin + i, next + gap));
      }
      if (word != 0) return CorruptData("topk gaps end in bits that are not 0");
      if (static_cast<std::size_t>(std::bit_width(all)) != width) {
        return CorruptData(
            fmt::format("topk gap width is {}, expected {}", width, std::bit_width(all)));
      }
    }
    return CheckPayloadSize(name(), n, payload.size(), offset_of(at));
  }

  static Status TooShort(std::size_t got, std::size_t expected, std::size_t n) {
    return CorruptData(fmt::format("topk payload is {} bytes, expected at least {} for {} elements",
                                   got, expected, n));
  }

  const double ratio_;
  const std::size_t k_;  // 0: by ratio
  const kernels::CastFormat value_;
  const std::size_t value_bytes_;
  const IndexFormat index_;
};

constexpr double kDefaultRatio = 0.001;

Result<std::unique_ptr<const Compressor>> CreateTopk(const Parameters& parameters) {
  if (parameters.Has("ratio") && parameters.Has("k")) {
    return InvalidArgument("compressor topk was given ratio and k, expected one of them");
  }
  const double ratio = parameters.Has("ratio") ? parameters.Number("ratio") : kDefaultRatio;
  const std::size_t k = parameters.Has("k") ? static_cast<std::size_t>(parameters.Integer("k")) : 0;
  return std::unique_ptr<const Compressor>(std::make_unique<TopkCodec>(
      ratio, k,
      parameters.Text("value") == "fp32" ? kernels::CastFormat::kF32 : kernels::CastFormat::kF16,
      parameters.Text("index") == "u32" ? IndexFormat::kU32 : IndexFormat::kPacked));
}

}  // namespace

/// Keeps the k largest magnitudes, exactly; of equals the lower index.
/// Layout: values[k] (f16 or f32), by index; then u32[k], or packed: gaps (index - previous - 1,
/// the first from -1) in blocks of 128: u8 width (0 to 32, the least that fits), then the gaps at
/// that width, LSB first, each block from a byte's start, last bits 0.
/// Biased; delta >= k / n with f32 values. At most 2^32 - 1 elements.
/// Memory: see Scratch; nothing is allocated once a thread has seen its largest unit.
/// Source: Aji and Heafield 2017; Stich et al. 2018.
Status RegisterTopk(CompressorRegistry& registry) {
  CompressorInfo info;
  info.name = "topk";
  info.wire_id = wire_id::kTopk;
  info.description = "the k elements of the largest magnitude";
  info.source = "Aji and Heafield 2017; Stich et al. 2018";

  info.parameters = {
      // No default value, so that k alone is not taken for both.
      {.name = "ratio",
       .kind = ParameterInfo::Kind::kNumber,
       .default_value = "",
       .min = 1e-9,
       .max = 1,
       .choices = {},
       .description = "the part that is kept, 0.001 if neither ratio nor k is given"},
      {.name = "k",
       .kind = ParameterInfo::Kind::kInteger,
       .default_value = "",
       .min = 1,
       .max = static_cast<double>(kMaxElements),
       .choices = {},
       .description = "how many are kept, in place of ratio"},
      {.name = "value",
       .kind = ParameterInfo::Kind::kChoice,
       .default_value = "fp16",
       .choices = {"fp16", "fp32"},
       .description = "how values are written"},
      {.name = "index",
       .kind = ParameterInfo::Kind::kChoice,
       .default_value = "packed",
       .choices = {"packed", "u32"},
       .description = "how indices are written"},
  };
  info.create = CreateTopk;
  return registry.Register(std::move(info));
}

}  // namespace gradwire
