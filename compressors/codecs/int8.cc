#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cassert>
#include <cmath>
#include <limits>
#include <memory>
#include <utility>

#include "compressors/codecs/codec_checks.h"
#include "compressors/codecs/float_mode.h"
#include "compressors/codecs/kernels.h"
#include "compressors/codecs/quantize_kernels.h"
#include "compressors/registry.h"
#include "compressors/wire_ids.h"

namespace gradwire {
namespace {

constexpr float kLargestLevel = 127;

/// Reads a source from any element on: up to the end of the source's block.
class BlockReader {
 public:
  BlockReader(BlockSource& source, std::size_t n) : source_(source), n_(n) {}

  const float* At(std::size_t offset) {
    const std::size_t begin = offset / kBlockElements * kBlockElements;
    if (values_ == nullptr || begin != begin_) {
      values_ = source_.Block(begin, std::min(kBlockElements, n_ - begin));
      begin_ = begin;
    }
    return values_ + (offset - begin);
  }

 private:
  BlockSource& source_;
  const std::size_t n_;
  const float* values_ = nullptr;
  std::size_t begin_ = 0;
};

/// What a level is worth in a block whose largest magnitude is given; 0: all levels are 0.
float ScaleOf(float largest) {
  const float scale = largest / kLargestLevel;
  if (std::isinf(kLargestLevel * scale)) return std::nextafter(scale, 0.0F);
  return scale < std::numeric_limits<float>::min() ? 0.0F : scale;
}

/// One byte an element and a scale a block. A block is read twice, from the first-level cache: for
/// its largest magnitude, then to round. Only the second time writes, so a block with a NaN leaves
/// its residual as it was.
class Int8Codec final : public Compressor {
 public:
  Int8Codec(std::size_t block, bool stochastic) : block_(block), stochastic_(stochastic) {}

  std::string_view name() const override { return "int8"; }

  CompressorTraits traits() const override {
    CompressorTraits traits;
    traits.compressor_class =
        stochastic_ ? CompressorClass::kUnbiased : CompressorClass::kContractive;
    traits.feedback_by_default = !stochastic_;
    return traits;
  }

  std::size_t MaxEncodedSize(std::size_t n) const override {
    return NumScales(n) * sizeof(float) + n;
  }

  double FeedbackVariance(std::size_t) const override {
    // An element's variance is at most scale^2 / 4, and |q|^2 of a block at least (127 scale)^2.
    constexpr double kLevels = kLargestLevel;
    return stochastic_ ? static_cast<double>(block_) / (4 * kLevels * kLevels) : 0.0;
  }

  Result<Encoded> Encode(BlockSource& input, std::size_t n, const CodecContext& context,
                         Residual* residual, MutableBytes output) const override {
    GRADWIRE_RETURN_IF_ERROR(CheckEncode(name(), n, residual, output.size(), MaxEncodedSize(n)));
    GRADWIRE_RETURN_IF_ERROR(CheckExplicit(name(), residual));
    const ScopedFloatMode ieee;
    const kernels::Int8Rounding rounding{stochastic_, DrawKey(context.stream_seed)};
    std::byte* const levels = output.data() + NumScales(n) * sizeof(float);
    const auto residual_at = [&](std::size_t offset) {
      return residual == nullptr ? nullptr : residual->values.data() + offset;
    };
    BlockReader reader(input, n);
    for (std::size_t begin = 0; begin < n; begin += block_) {
      const std::size_t end = std::min(begin + block_, n);
      std::uint32_t largest = 0;
      ForEachPart(begin, end, [&](std::size_t offset, std::size_t count) {
        largest =
            std::max(largest, kernels::LargestMagnitude(reader.At(offset), residual_at(offset),
                                                        context.alpha, count));
      });
      if (largest >= kernels::kInfinityBits) {
        if (residual != nullptr) {
          KeepAll(output, begin, context.alpha, reader, *residual);
        }
        return Encoded{MaxEncodedSize(n), false};
      }
      const float scale = ScaleOf(std::bit_cast<float>(largest));
      const float inverse = scale == 0 ? 0.0F : 1 / scale;
      StoreLe(output.data() + begin / block_ * sizeof(float), scale);
      ForEachPart(begin, end, [&](std::size_t offset, std::size_t count) {
        kernels::EncodeInt8(reader.At(offset), residual_at(offset), context.alpha, scale, inverse,
                            rounding, offset, count, levels + offset);
      });
    }
    return Encoded{MaxEncodedSize(n), true};
  }

  Status Validate(ByteView payload, std::size_t n) const override {
    GRADWIRE_RETURN_IF_ERROR(CheckScales(payload, n));
    return CheckLevels(payload, n, 0, n);
  }

  Status Decode(ByteView payload, const CodecContext&, std::span<float> output) const override {
    return DecodeWith(kernels::DecodeInt8, payload, output);
  }

  Status DecodeAdd(ByteView payload, const CodecContext&,
                   std::span<float> accumulator) const override {
    return DecodeWith(kernels::DecodeAddInt8, payload, accumulator);
  }

  void DecodeAddRange(ByteView payload, std::size_t n, const CodecContext&, std::size_t offset,
                      std::span<float> accumulator) const override {
    assert(offset % kBlockElements == 0 && offset + accumulator.size() <= n);
    const ScopedFloatMode ieee;
    DecodeRange(kernels::DecodeAddInt8, payload, n, offset, accumulator);
  }

  void Flush(Residual&) const override {}

  void Undo(ByteView payload, const CodecContext& context, Residual& residual) const override {
    const Status status = DecodeAdd(payload, context, residual.values);
    assert(status.ok());
    static_cast<void>(status);
  }

 private:
  using DecodeKernel = void (*)(const std::byte*, float, std::size_t, float*);

  std::size_t NumScales(std::size_t n) const { return (n + block_ - 1) / block_; }
  const std::byte* LevelsOf(ByteView payload, std::size_t n) const {
    return payload.data() + NumScales(n) * sizeof(float);
  }

  /// Calls body(offset, count) for the parts of [begin, end) that lie in one block of the source
  /// and have one scale.
  template <typename Body>
  void ForEachPart(std::size_t begin, std::size_t end, Body&& body) const {
    const std::size_t part = std::min(block_, kBlockElements);
    for (std::size_t offset = begin; offset < end; offset += part) {
      body(offset, std::min(part, end - offset));
    }
  }

  /// residual <- q where it is finite, after the elements before `begin` were encoded.
  void KeepAll(ByteView output, std::size_t begin, float alpha, BlockReader& reader,
               Residual& residual) const {
    const std::size_t n = residual.values.size();
    DecodeRange(kernels::DecodeAddInt8, output, n, 0, residual.values.first(begin));
    ForEachPart(begin, n, [&](std::size_t offset, std::size_t count) {
      kernels::AddFeedback(reader.At(offset), residual.values.data() + offset, alpha, count);
    });
  }

  /// The elements from `offset`, a multiple of a part, through `kernel`.
  void DecodeRange(DecodeKernel kernel, ByteView payload, std::size_t n, std::size_t offset,
                   std::span<float> values) const {
    ForEachPart(offset, offset + values.size(), [&](std::size_t at, std::size_t count) {
      const auto scale = LoadLe<float>(payload.data() + at / block_ * sizeof(float));
      kernel(LevelsOf(payload, n) + at, scale, count, values.data() + (at - offset));
    });
  }

  /// Checks levels while they are about to be read anyway.
  Status DecodeWith(DecodeKernel kernel, ByteView payload, std::span<float> values) const {
    const std::size_t n = values.size();
    GRADWIRE_RETURN_IF_ERROR(CheckScales(payload, n));
    const ScopedFloatMode ieee;
    for (std::size_t offset = 0; offset < n; offset += kBlockElements) {
      const std::size_t count = std::min(kBlockElements, n - offset);
      GRADWIRE_RETURN_IF_ERROR(CheckLevels(payload, n, offset, count));
      DecodeRange(kernel, payload, n, offset, values.subspan(offset, count));
    }
    return Status::Ok();
  }

  Status CheckScales(ByteView payload, std::size_t n) const {
    GRADWIRE_RETURN_IF_ERROR(CheckPayloadSize(name(), n, payload.size(), MaxEncodedSize(n)));
    for (std::size_t i = 0; i < NumScales(n); ++i) {
      const auto scale = LoadLe<float>(payload.data() + i * sizeof(float));
      if (!std::isfinite(scale) || std::signbit(scale)) {
        return CorruptData(
            fmt::format("int8 scale {} is {}, expected a finite number from 0", i, scale));
      }
      // From half a step beyond the largest float on, which is exact in double: no encoder of ours
      // writes it, and it would decode to infinity.
      if (127 * static_cast<double>(scale) >= 0x1.ffffffp127) {
        return CorruptData(fmt::format(
            "int8 scale {} is {}, expected one of which 127 times is a finite float", i, scale));
      }
    }
    return Status::Ok();
  }

  Status CheckLevels(ByteView payload, std::size_t n, std::size_t offset, std::size_t count) const {
    constexpr std::byte kRefused{0x80};
    const std::byte* const levels = LevelsOf(payload, n) + offset;
    // A minimum, which compilers make vectors of; a search that stops early they do not.
    std::uint8_t least = 1;
    for (std::size_t i = 0; i < count; ++i) {
      least = std::min(least, std::to_integer<std::uint8_t>(levels[i] ^ kRefused));
    }
    if (least != 0) return Status::Ok();
    const auto at = static_cast<std::size_t>(std::find(levels, levels + count, kRefused) - levels);
    return CorruptData(
        fmt::format("int8 level of element {} is -128, expected -127 to 127", offset + at));
  }

  const std::size_t block_;
  const bool stochastic_;
};

Result<std::unique_ptr<const Compressor>> CreateInt8(const Parameters& parameters) {
  const std::uint64_t block = parameters.Integer("block");
  if (!std::has_single_bit(block)) {
    return InvalidArgument(
        fmt::format("block of compressor int8 is {}, expected a power of two", block));
  }
  return std::unique_ptr<const Compressor>(
      std::make_unique<Int8Codec>(static_cast<std::size_t>(block), parameters.Bool("stochastic")));
}

}  // namespace

/// Signed bytes in steps of 1/127 of the largest magnitude of their block.
/// Layout: f32 scale for each block, then n signed levels from -127 to 127.
/// Rounded to nearest: contractive, the error is at most half a step, or the element itself where
/// the step would be denormal. Stochastic: unbiased, omega = block / (4 * 127^2).
/// Source: Dettmers 2016 (8-bit gradients); Alistarh et al. 2017, QSGD (stochastic levels).
Status RegisterInt8(CompressorRegistry& registry) {
  CompressorInfo info;
  info.name = "int8";
  info.wire_id = wire_id::kInt8;
  info.description = "signed bytes and a scale a block";
  info.source = "Dettmers 2016; Alistarh et al. 2017";
  info.parameters = {
      {.name = "block",
       .kind = ParameterInfo::Kind::kInteger,
       .default_value = "1024",
       .min = 32,
       .max = 16384,
       .choices = {},
       .description = "elements that share a scale, a power of two"},
      {.name = "stochastic",
       .kind = ParameterInfo::Kind::kBool,
       .default_value = "false",
       .choices = {},
       .description = "round up and down at random, so that the mean is right"},
  };
  info.create = CreateInt8;
  return registry.Register(std::move(info));
}

}  // namespace gradwire
