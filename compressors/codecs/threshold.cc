#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cassert>
#include <memory>
#include <utility>

#include "common/base/bytes.h"
#include "compressors/codecs/codec_checks.h"
#include "compressors/codecs/float_mode.h"
#include "compressors/codecs/sparse_format.h"
#include "compressors/codecs/sparse_kernels.h"
#include "compressors/registry.h"
#include "compressors/wire_ids.h"

namespace gradwire {
namespace {

/// The bytes of a block of gaps with its values, and the least elements that it spans.
struct GapBlockCost {
  std::size_t bytes = 0;
  std::size_t elements = 1;
};

/// The whole block of gaps that costs most an element. At a width w > 0 one gap is at least
/// 2^(w-1), so the block spans 128 + 2^(w-1) elements or more.
constexpr GapBlockCost WorstBlock(std::size_t value_bytes) {
  GapBlockCost worst;
  for (std::size_t width = 0; width <= kMaxGapWidth; ++width) {
    const std::size_t bytes = kGapBlock * value_bytes + 1 + kGapBlock * width / 8;
    const std::size_t elements = kGapBlock + (width == 0 ? 0 : std::size_t{1} << (width - 1));
    if (bytes * worst.elements > worst.bytes * elements) worst = {bytes, elements};
  }
  return worst;
}

/// One thread's indices of what is kept, for the largest unit it has seen. Memory that no index
/// was written to is never touched.
struct Scratch {
  void Reserve(std::size_t wanted) {
    if (wanted <= capacity) return;
    indices = std::make_unique_for_overwrite<std::uint32_t[]>(wanted);
    capacity = wanted;
  }
  std::size_t capacity = 0;
  std::unique_ptr<std::uint32_t[]> indices;
};

Scratch& ThreadScratch() {
  thread_local Scratch scratch;
  return scratch;
}

/// Keeps the elements beyond +-theta. Under feedback the residual is explicit; what is kept is
/// taken off while its block is in the cache.
class ThresholdCodec final : public Compressor {
 public:
  ThresholdCodec(float theta, kernels::CastFormat value, IndexFormat index)
      : theta_bits_(std::bit_cast<std::uint32_t>(theta)),
        format_("threshold", value, index),
        worst_(WorstBlock(kernels::BytesOf(value))) {}

  std::string_view name() const override { return "threshold"; }

  CompressorTraits traits() const override {
    CompressorTraits traits;
    traits.compressor_class = CompressorClass::kBounded;
    traits.fixed_size = false;
    traits.block_access = false;
    traits.feedback_by_default = true;
    return traits;
  }

  /// Packed: r = bytes / elements of the worst block bounds whole blocks of gaps. The last block,
  /// of c gaps at width w, has c (v + w/8) + 1 bytes and less than one more, v those of a value;
  /// c (v + w/8) - r (c + 2^(w-1)) is linear in c and not positive at 0 and 128. So there are at
  /// most r n + 1 + 7/8 bytes behind the count.
  std::size_t MaxEncodedSize(std::size_t n) const override {
    if (n == 0) return 0;
    if (format_.index() == IndexFormat::kU32) {
      return kHead + n * (format_.value_bytes() + sizeof(std::uint32_t));
    }
    return kHead + n * worst_.bytes / worst_.elements + 2;
  }

  Result<Encoded> Encode(BlockSource& input, std::size_t n, const CodecContext& context,
                         Residual* residual, MutableBytes output) const override {
    GRADWIRE_RETURN_IF_ERROR(CheckEncode(name(), n, residual, output.size(), MaxEncodedSize(n)));
    GRADWIRE_RETURN_IF_ERROR(CheckExplicit(name(), residual));
    GRADWIRE_RETURN_IF_ERROR(CheckSparseElements(name(), n));
    Encoded encoded;
    if (n == 0) return encoded;
    const ScopedFloatMode ieee;
    Scratch& scratch = ThreadScratch();
    scratch.Reserve(n);
    float* const e = residual == nullptr ? nullptr : residual->values.data();
    std::byte* const values = output.data() + kHead;
    std::array<float, kBlockElements> kept;
    std::size_t found = 0;
    ForEachBlock(n, [&](std::size_t offset, std::size_t count) {
      std::uint32_t* const indices = scratch.indices.get() + found;
      const kernels::Collected collected = kernels::CollectAtLeast(
          input.Block(offset, count), e == nullptr ? nullptr : e + offset, context.alpha, count,
          theta_bits_ + 1, static_cast<std::uint32_t>(offset), indices, kept.data());
      encoded.finite = encoded.finite && collected.finite;
      if (!encoded.finite) return;  // the payload is void, and nothing more is taken off
      std::byte* const to = values + found * format_.value_bytes();
      kernels::EncodeCast(format_.value(), kept.data(), nullptr, 1, collected.found, to);
      if (e != nullptr) TakeOff(kept.data(), to, {indices, collected.found}, e);
      found += collected.found;
    });
    const std::span<const std::uint32_t> indices(scratch.indices.get(), found);
    if (!encoded.finite) {
      if (e != nullptr) GiveBack(values, indices, e);
      return encoded;
    }
    StoreLe(output.data(), static_cast<std::uint32_t>(found));
    const std::byte* const end =
        format_.WriteIndices(indices, values + found * format_.value_bytes());
    encoded.payload_bytes = static_cast<std::size_t>(end - output.data());
    return encoded;
  }

  Status Validate(ByteView payload, std::size_t n) const override {
    return WithCount(payload, n,
                     [&](std::size_t k) { return format_.Validate(payload, kHead, k, n); });
  }

  Status Decode(ByteView payload, const CodecContext&, std::span<float> output) const override {
    const ScopedFloatMode ieee;
    return WithCount(payload, output.size(),
                     [&](std::size_t k) { return format_.Decode(payload, kHead, k, output); });
  }

  Status DecodeAdd(ByteView payload, const CodecContext&,
                   std::span<float> accumulator) const override {
    const ScopedFloatMode ieee;
    return WithCount(payload, accumulator.size(), [&](std::size_t k) {
      return format_.DecodeAdd(payload, kHead, k, accumulator);
    });
  }

  /// Right for any range, but reads the whole payload.
  void DecodeAddRange(ByteView payload, std::size_t n, const CodecContext&, std::size_t offset,
                      std::span<float> accumulator) const override {
    const ScopedFloatMode ieee;
    const Status status = WithCount(payload, n, [&](std::size_t k) {
      format_.DecodeAddRange(payload, kHead, k, n, offset, accumulator);
      return Status::Ok();
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
  static constexpr std::size_t kHead = sizeof(std::uint32_t);  // the count

  /// Calls body with the checked count of a payload that is not empty.
  template <typename Body>
  Status WithCount(ByteView payload, std::size_t n, Body&& body) const {
    if (n == 0) return CheckPayloadSize(name(), n, payload.size(), 0);
    if (payload.size() < kHead) {
      return CorruptData(fmt::format("threshold payload is {} bytes, expected at least {}",
                                     payload.size(), kHead));
    }
    const auto count = LoadLe<std::uint32_t>(payload.data());
    if (count > n) {
      return CorruptData(fmt::format("threshold count is {}, expected at most {}", count, n));
    }
    return body(std::size_t{count});
  }

  /// e <- q - C(q) of what a block keeps, at most kBlockElements.
  void TakeOff(const float* q, const std::byte* encoded, std::span<const std::uint32_t> indices,
               float* e) const {
    std::array<float, kBlockElements> decoded;
    kernels::DecodeCast(format_.value(), encoded, indices.size(), decoded.data());
    for (std::size_t i = 0; i < indices.size(); ++i) e[indices[i]] = q[i] - decoded[i];
  }

  /// e <- e + C(q) of all that was taken off.
  void GiveBack(const std::byte* encoded, std::span<const std::uint32_t> indices, float* e) const {
    std::array<float, kBlockElements> decoded;
    ForEachBlock(indices.size(), [&](std::size_t begin, std::size_t count) {
      kernels::DecodeCast(format_.value(), encoded + begin * format_.value_bytes(), count,
                          decoded.data());
      for (std::size_t i = 0; i < count; ++i) e[indices[begin + i]] += decoded[i];
    });
  }

  const std::uint32_t theta_bits_;
  const SparseFormat format_;
  const GapBlockCost worst_;
};

Result<std::unique_ptr<const Compressor>> CreateThreshold(const Parameters& parameters) {
  return std::unique_ptr<const Compressor>(std::make_unique<ThresholdCodec>(
      static_cast<float>(parameters.Number("theta")), ValueOf(parameters), IndexOf(parameters)));
}

}  // namespace

/// Keeps what is beyond +-theta.
/// Layout: u32 count, then that of SparseFormat. Bounded: what is left of an element is at most
/// theta, or the rounding of its value. At most 2^32 - 1 elements.
/// Memory: 4 bytes for each element of a thread's largest unit, of which those are touched that
/// were kept at once. Source: Strom 2015; Sahu et al. 2021.
Status RegisterThreshold(CompressorRegistry& registry) {
  CompressorInfo info;
  info.name = "threshold";
  info.wire_id = wire_id::kThreshold;
  info.description = "the elements whose magnitude is above a threshold";
  info.source = "Strom 2015; Sahu et al. 2021";
  info.parameters = {
      {.name = "theta",
       .kind = ParameterInfo::Kind::kNumber,
       .default_value = "0.01",
       .min = 1e-37,
       .max = 3e38,
       .choices = {},
       .description = "magnitudes above it are kept"},
      ValueParameter("fp16"),
      IndexParameter(),
  };
  info.create = CreateThreshold;
  return registry.Register(std::move(info));
}

}  // namespace gradwire
