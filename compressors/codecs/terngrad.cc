#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cassert>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <utility>

#include "compressors/codecs/codec_checks.h"
#include "compressors/codecs/float_mode.h"
#include "compressors/codecs/quantize_kernels.h"
#include "compressors/registry.h"
#include "compressors/wire_ids.h"

namespace gradwire {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr std::size_t kTritsPerByte = 5;
constexpr std::uint8_t kByteValues = 243;  // 3^5

/// Room for the trits of a block, and of bytes that it begins and ends in.
using TritBuffer = std::array<std::byte, kBlockElements + 2 * kTritsPerByte + kernels::kTritSlack>;

/// Turns trits into bytes as they come; what does not fill a byte waits for the next block.
class TritPacker {
 public:
  explicit TritPacker(std::byte* out) : out_(out) {}

  /// Where the trits of the next block go.
  std::byte* next() { return trits_.data() + waiting_; }

  void Add(std::size_t count) {
    const std::size_t all = waiting_ + count;
    kernels::PackTrits(trits_.data(), all / kTritsPerByte, out_);
    out_ += all / kTritsPerByte;
    waiting_ = all % kTritsPerByte;
    std::memmove(trits_.data(), trits_.data() + (all - waiting_), waiting_);
  }

  /// Fills the last byte with zeros.
  void Finish() {
    if (waiting_ == 0) return;
    std::memset(next(), 0, kTritsPerByte - waiting_);
    kernels::PackTrits(trits_.data(), 1, out_);
  }

 private:
  std::byte* out_;
  std::size_t waiting_ = 0;
  TritBuffer trits_{};
};

/// Three values, 0 and +-scale, five elements a byte. The unit is read twice: for its moments, then
/// to round; with feedback the residual holds q in between.
class TerngradCodec final : public Compressor {
 public:
  explicit TerngradCodec(float clip) : clip_(clip) {}

  std::string_view name() const override { return "terngrad"; }

  CompressorTraits traits() const override {
    CompressorTraits traits;
    traits.compressor_class = CompressorClass::kUnbiased;
    traits.reads_twice = true;
    return traits;
  }

  std::size_t MaxEncodedSize(std::size_t n) const override {
    return n == 0 ? 0 : sizeof(float) + NumBytes(n);
  }

  /// One large value among many small ones: no bound that would help.
  double FeedbackVariance(std::size_t) const override {
    return std::numeric_limits<double>::infinity();
  }

  Result<Encoded> Encode(BlockSource& input, std::size_t n, const CodecContext& context,
                         Residual* residual, MutableBytes output) const override {
    GRADWIRE_RETURN_IF_ERROR(CheckEncode(name(), n, residual, output.size(), MaxEncodedSize(n)));
    GRADWIRE_RETURN_IF_ERROR(CheckExplicit(name(), residual));
    if (n == 0) return Encoded{};
    const ScopedFloatMode ieee;
    float* const e = residual == nullptr ? nullptr : residual->values.data();
    kernels::Moments unit;
    ForEachBlock(n, [&](std::size_t offset, std::size_t count) {
      const kernels::Moments block = kernels::MeasureMoments(
          input.Block(offset, count), e == nullptr ? nullptr : e + offset, context.alpha, count);
      unit.squares += block.squares;
      unit.largest = std::max(unit.largest, block.largest);
    });
    if (unit.largest >= kernels::kInfinityBits) return Encoded{MaxEncodedSize(n), false};

    const float limit = LimitOf(unit, n);
    float scale = std::min(std::bit_cast<float>(unit.largest), limit);
    float inverse = 1 / scale;
    if (std::isinf(inverse)) scale = inverse = 0;  // all is sent as 0
    StoreLe(output.data(), scale);
    const DrawKey key(context.stream_seed);
    TritPacker packer(output.data() + sizeof(float));
    ForEachBlock(n, [&](std::size_t offset, std::size_t count) {
      const float* const q = e == nullptr ? input.Block(offset, count) : nullptr;
      kernels::EncodeTrits(q, e == nullptr ? nullptr : e + offset, inverse, scale, key, offset,
                           count, packer.next());
      packer.Add(count);
    });
    packer.Finish();
    return Encoded{MaxEncodedSize(n), true};
  }

  Status Validate(ByteView payload, std::size_t n) const override {
    GRADWIRE_RETURN_IF_ERROR(CheckScale(payload, n));
    return CheckBytes(payload, n, 0, NumBytes(n));
  }

  Status Decode(ByteView payload, const CodecContext&, std::span<float> output) const override {
    return DecodeWith(kernels::DecodeTrits, payload, output);
  }

  Status DecodeAdd(ByteView payload, const CodecContext&,
                   std::span<float> accumulator) const override {
    return DecodeWith(kernels::DecodeAddTrits, payload, accumulator);
  }

  void DecodeAddRange(ByteView payload, std::size_t n, const CodecContext&, std::size_t offset,
                      std::span<float> accumulator) const override {
    assert(offset + accumulator.size() <= n);
    static_cast<void>(n);
    if (accumulator.empty()) return;
    const ScopedFloatMode ieee;
    DecodeRange(kernels::DecodeAddTrits, payload, offset, accumulator);
  }

  void Flush(Residual&) const override {}

  void Undo(ByteView payload, const CodecContext& context, Residual& residual) const override {
    const Status status = DecodeAdd(payload, context, residual.values);
    assert(status.ok());
    static_cast<void>(status);
  }

 private:
  using DecodeKernel = void (*)(const std::byte*, std::size_t, std::size_t, float, std::size_t,
                                float*);

  static std::size_t NumBytes(std::size_t n) {
    return n / kTritsPerByte + (n % kTritsPerByte != 0 ? 1 : 0);
  }

  /// What |q| is clipped to. A sigma that overflows is the largest float.
  float LimitOf(const kernels::Moments& unit, std::size_t n) const {
    if (clip_ == 0) return kInfinity;
    constexpr float kMax = std::numeric_limits<float>::max();
    const double sigma = std::sqrt(unit.squares / static_cast<double>(n));
    return clip_ * (sigma < static_cast<double>(kMax) ? static_cast<float>(sigma) : kMax);
  }

  /// May begin inside of a byte.
  static void DecodeRange(DecodeKernel kernel, ByteView payload, std::size_t offset,
                          std::span<float> values) {
    const ByteView bytes = payload.subspan(sizeof(float) + offset / kTritsPerByte);
    kernel(bytes.data(), bytes.size(), offset % kTritsPerByte, LoadLe<float>(payload.data()),
           values.size(), values.data());
  }

  /// Checks bytes while they are about to be read anyway.
  Status DecodeWith(DecodeKernel kernel, ByteView payload, std::span<float> values) const {
    const std::size_t n = values.size();
    GRADWIRE_RETURN_IF_ERROR(CheckScale(payload, n));
    const ScopedFloatMode ieee;
    std::size_t checked = 0;
    for (std::size_t offset = 0; offset < n; offset += kBlockElements) {
      const std::size_t count = std::min(kBlockElements, n - offset);
      const std::size_t end = NumBytes(offset + count);
      GRADWIRE_RETURN_IF_ERROR(CheckBytes(payload, n, checked, end));
      checked = end;
      DecodeRange(kernel, payload, offset, values.subspan(offset, count));
    }
    return Status::Ok();
  }

  Status CheckScale(ByteView payload, std::size_t n) const {
    GRADWIRE_RETURN_IF_ERROR(CheckPayloadSize(name(), n, payload.size(), MaxEncodedSize(n)));
    if (n == 0) return Status::Ok();
    const auto scale = LoadLe<float>(payload.data());
    if (!std::isfinite(scale) || std::signbit(scale)) {
      return CorruptData(
          fmt::format("terngrad scale is {}, expected a finite number from 0", scale));
    }
    return Status::Ok();
  }

  /// Checks bytes [begin, end) of the trits of n elements.
  static Status CheckBytes(ByteView payload, std::size_t n, std::size_t begin, std::size_t end) {
    if (begin == end) return Status::Ok();
    const ByteView bytes = payload.subspan(sizeof(float) + begin, end - begin);
    // A maximum, which compilers make vectors of; a search that stops early they do not.
    std::uint8_t largest = 0;
    for (const std::byte byte : bytes) {
      largest = std::max(largest, std::to_integer<std::uint8_t>(byte));
    }
    if (largest >= kByteValues) {
      const auto at = std::find_if(bytes.begin(), bytes.end(), [](std::byte byte) {
        return std::to_integer<std::uint8_t>(byte) >= kByteValues;
      });
      return CorruptData(fmt::format("terngrad byte {} is {}, expected at most {}",
                                     begin + static_cast<std::size_t>(at - bytes.begin()),
                                     std::to_integer<unsigned>(*at), kByteValues - 1));
    }
    if (end != NumBytes(n) || n % kTritsPerByte == 0) return Status::Ok();
    unsigned values = 1;
    for (std::size_t trit = 0; trit < n % kTritsPerByte; ++trit) values *= 3;
    const auto last = std::to_integer<unsigned>(bytes.back());
    if (last >= values) {
      return CorruptData(
          fmt::format("terngrad payload ends in byte {}, expected at most {} for {} trits", last,
                      values - 1, n % kTritsPerByte));
    }
    return Status::Ok();
  }

  const float clip_;
};

}  // namespace

/// Three values: 0 and +-scale, at random so that the mean is right.
/// Layout: f32 scale, then five elements a byte in base 3, the first one the lowest digit: 0, 1 for
/// +, 2 for -; missing trits 0.
/// Unbiased after the clip to clip * sqrt(mean x^2); no bound of the variance by the unit's norm
/// that allows feedback.
/// Source: Wen et al. 2017, TernGrad (equations 3 and 8).
Status RegisterTerngrad(CompressorRegistry& registry) {
  CompressorInfo info;
  info.name = "terngrad";
  info.wire_id = wire_id::kTerngrad;
  info.description = "0 and the largest magnitude with a sign, five in a byte";
  info.source = "Wen et al. 2017";
  info.parameters = {
      {.name = "clip",
       .kind = ParameterInfo::Kind::kNumber,
       .default_value = "2.5",
       .min = 0,
       .max = 1e6,
       .choices = {},
       .description = "largest magnitude in root mean squares of the unit; 0 = not clipped"},
  };
  info.create = [](const Parameters& parameters) -> Result<std::unique_ptr<const Compressor>> {
    return std::unique_ptr<const Compressor>(
        std::make_unique<TerngradCodec>(static_cast<float>(parameters.Number("clip"))));
  };
  return registry.Register(std::move(info));
}

}  // namespace gradwire
