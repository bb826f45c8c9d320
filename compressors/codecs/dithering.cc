#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cassert>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <utility>

#include "compressors/codecs/codec_checks.h"
#include "compressors/codecs/dither_kernels.h"
#include "compressors/codecs/float_mode.h"
#include "compressors/registry.h"
#include "compressors/wire_ids.h"

namespace gradwire {
namespace {

constexpr std::size_t kNormBytes = sizeof(float);

/// Each element goes to one of its two neighbouring levels at random, so that it is right in the
/// mean. The norm comes first, so there are two passes: the first one finds it (and with feedback
/// leaves q in the residual), the second one rounds.
class DitheringCodec final : public Compressor {
 public:
  DitheringCodec(kernels::DitherFormat format, bool l2) : format_(format), l2_(l2) {}

  std::string_view name() const override { return "dithering"; }

  CompressorTraits traits() const override {
    CompressorTraits traits;
    traits.compressor_class = CompressorClass::kUnbiased;
    traits.reads_twice = true;
    return traits;
  }

  std::size_t MaxEncodedSize(std::size_t n) const override {
    return n == 0 ? 0 : kNormBytes + CodeBytes(n);
  }

  /// With norm <= |q|_2 = 1 for short, and t = |q_i| / norm of one element.
  /// Linear: between levels a step 1/s apart the variance is (t - a)(a + 1/s - t): at most
  /// 1/(4 s^2), and at most t/s. Over all elements n/(4 s^2), or sum t/s <= sqrt(n)/s.
  /// Natural: from 2^e to 2^(e+1) with t = 2^e (1 + f) it is f (1 - f) 4^e, at most t^2/8 (at
  /// f = 1/3). Below m = 2^(1-s) it is t (m - t): at most m^2/4, and at most t m. Over all elements
  /// 1/8 and the smaller of n m^2/4 and sqrt(n) m.
  double FeedbackVariance(std::size_t n) const override {
    const auto count = static_cast<double>(n);
    const auto s = static_cast<int>(format_.levels());
    if (format_.natural) {
      const double lowest = std::ldexp(1.0, 1 - s);
      return 0.125 + std::min(count * lowest * lowest / 4, std::sqrt(count) * lowest);
    }
    return std::min(count / (4.0 * s * s), std::sqrt(count) / s);
  }

  Result<Encoded> Encode(BlockSource& input, std::size_t n, const CodecContext& context,
                         Residual* residual, MutableBytes output) const override {
    GRADWIRE_RETURN_IF_ERROR(CheckEncode(name(), n, residual, output.size(), MaxEncodedSize(n)));
    GRADWIRE_RETURN_IF_ERROR(CheckExplicit(name(), residual));
    if (n == 0) return Encoded{};
    const ScopedFloatMode ieee;
    float* const values = residual == nullptr ? nullptr : residual->values.data();
    const float norm = Norm(input, n, values, context.alpha);
    Encoded encoded{MaxEncodedSize(n), std::isfinite(norm)};
    if (!encoded.finite) return encoded;  // the residual is q already, or the old e

    const MutableBytes payload = output.first(MaxEncodedSize(n));
    const MutableBytes codes = payload.subspan(kNormBytes);
    const float inverse = (format_.natural ? 1.0F : static_cast<float>(format_.levels())) / norm;
    if (norm == 0 || std::isinf(inverse)) {
      std::memset(payload.data(), 0, payload.size());
      return encoded;
    }
    StoreLe(payload.data(), norm);
    const kernels::DitherScale scale{inverse, UnitOf(norm)};
    const DrawKey key(context.stream_seed);
    ForEachBlock(n, [&](std::size_t offset, std::size_t count) {
      float* const left = values == nullptr ? nullptr : values + offset;
      const float* const q = left == nullptr ? input.Block(offset, count) : left;
      kernels::EncodeDither(format_, scale, q, left, offset, count, key,
                            codes.subspan(CodeBytes(offset)));
    });
    return encoded;
  }

  Status Validate(ByteView payload, std::size_t n) const override {
    GRADWIRE_RETURN_IF_ERROR(CheckPayloadSize(name(), n, payload.size(), MaxEncodedSize(n)));
    if (n == 0) return Status::Ok();
    const auto norm = LoadLe<float>(payload.data());
    if (!std::isfinite(norm) || std::signbit(norm)) {
      return CorruptData(
          fmt::format("dithering norm is {}, expected a finite number from 0", norm));
    }
    const std::size_t used = n * format_.bits % 8;
    if (used != 0 && (payload.back() >> used) != std::byte{0}) {
      return CorruptData(
          fmt::format("dithering payload ends in byte {:#04x}, expected {} bits of 0",
                      std::to_integer<unsigned>(payload.back()), 8 - used));
    }
    // Fewer bits have no other levels.
    if (format_.natural && format_.bits > 8) {
      const std::uint32_t level =
          kernels::LargestDitherLevel(format_.bits, payload.subspan(kNormBytes), n);
      if (level > format_.levels()) {
        return CorruptData(fmt::format("dithering payload has level {}, expected at most {}", level,
                                       format_.levels()));
      }
    }
    return Status::Ok();
  }

  Status Decode(ByteView payload, const CodecContext&, std::span<float> output) const override {
    const std::size_t n = output.size();
    GRADWIRE_RETURN_IF_ERROR(Validate(payload, n));
    if (n == 0) return Status::Ok();
    const ScopedFloatMode ieee;
    kernels::DecodeDither(format_, UnitOf(LoadLe<float>(payload.data())),
                          payload.subspan(kNormBytes), n, output.data());
    return Status::Ok();
  }

  Status DecodeAdd(ByteView payload, const CodecContext& context,
                   std::span<float> accumulator) const override {
    GRADWIRE_RETURN_IF_ERROR(Validate(payload, accumulator.size()));
    AddRange(payload, 0, accumulator);
    static_cast<void>(context);
    return Status::Ok();
  }

  void DecodeAddRange(ByteView payload, std::size_t n, const CodecContext&, std::size_t offset,
                      std::span<float> accumulator) const override {
    assert(offset % kBlockElements == 0 && offset + accumulator.size() <= n);
    static_cast<void>(n);
    AddRange(payload, offset, accumulator);
  }

  void Flush(Residual&) const override {}

  void Undo(ByteView payload, const CodecContext& context, Residual& residual) const override {
    const Status status = DecodeAdd(payload, context, residual.values);
    assert(status.ok());
    static_cast<void>(status);
  }

 private:
  std::size_t CodeBytes(std::size_t n) const { return (n * format_.bits + 7) / 8; }

  /// Not finite if some q is not. With feedback `values` becomes q.
  float Norm(BlockSource& input, std::size_t n, float* values, float alpha) const {
    std::uint32_t largest = 0;
    double squares = 0;
    ForEachBlock(n, [&](std::size_t offset, std::size_t count) {
      const float* const block = input.Block(offset, count);
      float* const e = values == nullptr ? nullptr : values + offset;
      if (l2_) {
        squares += kernels::DitherSquares(block, e, alpha, count);
      } else {
        largest = std::max(largest, kernels::DitherLargest(block, e, alpha, count));
      }
    });
    if (!l2_) return std::bit_cast<float>(largest);
    if (!std::isfinite(squares)) return std::numeric_limits<float>::infinity();
    constexpr float kMax = std::numeric_limits<float>::max();
    const double root = std::sqrt(squares);
    return root < static_cast<double>(kMax) ? static_cast<float>(root) : kMax;
  }

  /// What the kernels multiply levels with.
  float UnitOf(float norm) const {
    if (format_.natural) return norm;
    const auto s = static_cast<float>(format_.levels());
    const float step = norm / s;
    return std::isinf(s * step) ? std::nextafter(step, 0.0F) : step;
  }

  void AddRange(ByteView payload, std::size_t offset, std::span<float> accumulator) const {
    if (accumulator.empty()) return;
    const ScopedFloatMode ieee;
    kernels::DecodeAddDither(format_, UnitOf(LoadLe<float>(payload.data())),
                             payload.subspan(kNormBytes + CodeBytes(offset)), accumulator.size(),
                             accumulator.data());
  }

  const kernels::DitherFormat format_;
  const bool l2_;
};

Result<std::unique_ptr<const Compressor>> CreateDithering(const Parameters& parameters) {
  kernels::DitherFormat format;
  format.bits = static_cast<unsigned>(parameters.Integer("bits"));
  format.natural = parameters.Text("levels") == "natural";
  return std::unique_ptr<const Compressor>(
      std::make_unique<DitheringCodec>(format, parameters.Text("norm") == "l2"));
}

}  // namespace

/// Random rounding to a few levels of the unit's norm.
/// Layout: f32 norm, then ceil(n * bits / 8) bytes: codes of `bits` bits, LSB first, the sign bit
/// lowest and the level above it; last bits 0. Norm 0: all codes 0.
/// Unbiased (to 2^-17 of a step, the resolution of the draws); omega: see FeedbackVariance.
/// Norm: max |q|, or the root of the sum of squares, in double, in the order of
/// kernels::DitherSquares.
/// Source: Alistarh et al. 2017, QSGD (linear); Horváth et al. 2019, natural compression (natural).
Status RegisterDithering(CompressorRegistry& registry) {
  CompressorInfo info;
  info.name = "dithering";
  info.wire_id = wire_id::kDithering;
  info.description = "random rounding to a few levels of the norm";
  info.source = "Alistarh et al. 2017; Horváth et al. 2019";
  info.parameters = {
      {.name = "bits",
       .kind = ParameterInfo::Kind::kInteger,
       .default_value = "5",
       .min = 2,
       .max = 16,
       .choices = {},
       .description = "of an element: the sign and a level"},
      {.name = "levels",
       .kind = ParameterInfo::Kind::kChoice,
       .default_value = "linear",
       .choices = {"linear", "natural"},
       .description = "equal steps up to the norm, or its halves, quarters, ..."},
      {.name = "norm",
       .kind = ParameterInfo::Kind::kChoice,
       .default_value = "max",
       .choices = {"max", "l2"},
       .description = "the largest level: max |q| or the root of the sum of squares"},
  };
  info.create = CreateDithering;
  return registry.Register(std::move(info));
}

}  // namespace gradwire
