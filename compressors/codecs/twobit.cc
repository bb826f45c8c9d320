#include <fmt/format.h>

#include <algorithm>
#include <cassert>
#include <memory>
#include <utility>

#include "compressors/codecs/codec_checks.h"
#include "compressors/codecs/float_mode.h"
#include "compressors/codecs/quantize_kernels.h"
#include "compressors/registry.h"
#include "compressors/wire_ids.h"

namespace gradwire {
namespace {

constexpr std::size_t kCodesPerByte = 4;

/// Two bits an element: theta, -theta or nothing; what is smaller waits in the residual.
class TwobitCodec final : public Compressor {
 public:
  explicit TwobitCodec(float theta) : theta_(theta) {}

  std::string_view name() const override { return "twobit"; }

  CompressorTraits traits() const override {
    CompressorTraits traits;
    traits.compressor_class = CompressorClass::kBounded;
    traits.feedback_by_default = true;
    return traits;
  }

  std::size_t MaxEncodedSize(std::size_t n) const override {
    return n / kCodesPerByte + (n % kCodesPerByte != 0 ? 1 : 0);
  }

  Result<Encoded> Encode(BlockSource& input, std::size_t n, const CodecContext& context,
                         Residual* residual, MutableBytes output) const override {
    GRADWIRE_RETURN_IF_ERROR(CheckEncode(name(), n, residual, output.size(), MaxEncodedSize(n)));
    GRADWIRE_RETURN_IF_ERROR(CheckExplicit(name(), residual));
    const ScopedFloatMode ieee;
    float* const e = residual == nullptr ? nullptr : residual->values.data();
    Encoded encoded{MaxEncodedSize(n), true};
    ForEachBlock(n, [&](std::size_t offset, std::size_t count) {
      const kernels::TwobitResult block = kernels::EncodeTwobit(
          input.Block(offset, count), e == nullptr ? nullptr : e + offset, context.alpha, theta_,
          count, output.data() + offset / kCodesPerByte);
      encoded.finite = encoded.finite && block.finite;
      encoded.out_of_bound += block.out_of_bound;
    });
    if (!encoded.finite && e != nullptr) kernels::DecodeAddTwobit(output.data(), theta_, n, e);
    return encoded;
  }

  Status Validate(ByteView payload, std::size_t n) const override {
    GRADWIRE_RETURN_IF_ERROR(CheckPayloadSize(name(), n, payload.size(), MaxEncodedSize(n)));
    return CheckCodes(payload, n, 0, n);
  }

  Status Decode(ByteView payload, const CodecContext&, std::span<float> output) const override {
    return DecodeWith(kernels::DecodeTwobit, payload, output);
  }

  Status DecodeAdd(ByteView payload, const CodecContext&,
                   std::span<float> accumulator) const override {
    return DecodeWith(kernels::DecodeAddTwobit, payload, accumulator);
  }

  void DecodeAddRange(ByteView payload, std::size_t n, const CodecContext&, std::size_t offset,
                      std::span<float> accumulator) const override {
    assert(offset % kBlockElements == 0 && offset + accumulator.size() <= n);
    static_cast<void>(n);
    const ScopedFloatMode ieee;
    kernels::DecodeAddTwobit(payload.data() + offset / kCodesPerByte, theta_, accumulator.size(),
                             accumulator.data());
  }

  void Flush(Residual&) const override {}

  void Undo(ByteView payload, const CodecContext& context, Residual& residual) const override {
    const Status status = DecodeAdd(payload, context, residual.values);
    assert(status.ok());
    static_cast<void>(status);
  }

 private:
  using DecodeKernel = void (*)(const std::byte*, float, std::size_t, float*);

  /// Checks codes while they are about to be read anyway.
  Status DecodeWith(DecodeKernel kernel, ByteView payload, std::span<float> values) const {
    const std::size_t n = values.size();
    GRADWIRE_RETURN_IF_ERROR(CheckPayloadSize(name(), n, payload.size(), MaxEncodedSize(n)));
    const ScopedFloatMode ieee;
    for (std::size_t offset = 0; offset < n; offset += kBlockElements) {
      const std::size_t count = std::min(kBlockElements, n - offset);
      GRADWIRE_RETURN_IF_ERROR(CheckCodes(payload, n, offset, count));
      kernel(payload.data() + offset / kCodesPerByte, theta_, count, values.data() + offset);
    }
    return Status::Ok();
  }

  /// Checks the codes of `count` elements from `offset`, a multiple of four, and the bits after the
  /// last of all n.
  static Status CheckCodes(ByteView payload, std::size_t n, std::size_t offset, std::size_t count) {
    const std::size_t end = offset + count;
    const ByteView bytes =
        payload.subspan(offset / kCodesPerByte, (count + kCodesPerByte - 1) / kCodesPerByte);
    std::byte threes{0};  // all bytes' at once, which compilers make vectors of
    for (const std::byte byte : bytes) threes |= byte & (byte >> 1) & std::byte{0x55};
    if (threes != std::byte{0}) {
      std::size_t at = offset;
      while ((payload[at / kCodesPerByte] >> (at % kCodesPerByte * 2) & std::byte{3}) !=
             std::byte{3}) {
        ++at;
      }
      return CorruptData(fmt::format("twobit code of element {} is 3, expected 0 to 2", at));
    }
    const std::size_t last = n % kCodesPerByte;
    if (end == n && last != 0 && (bytes.back() >> (2 * last)) != std::byte{0}) {
      return CorruptData(fmt::format("twobit payload ends in byte {:#04x}, expected {} bits of 0",
                                     std::to_integer<unsigned>(bytes.back()), 8 - 2 * last));
    }
    return Status::Ok();
  }

  const float theta_;
};

}  // namespace

/// Sends theta with the sign of what is at least that large, and keeps the rest for later.
/// Layout: codes of 2 bits, the first element lowest: 1 for theta, 2 for -theta, 0; last bits 0.
/// Biased; bounded: the residual stays within theta as long as |q| is within 2 theta. Encode counts
/// the elements where it is not.
/// Source: the 2-bit compression of MXNet's kvstore; Strom 2015 (one threshold for all).
Status RegisterTwobit(CompressorRegistry& registry) {
  CompressorInfo info;
  info.name = "twobit";
  info.wire_id = wire_id::kTwobit;
  info.description = "theta, -theta or nothing in two bits";
  info.source = "Strom 2015; MXNet";
  info.parameters = {
      {.name = "theta",
       .kind = ParameterInfo::Kind::kNumber,
       .default_value = "0.5",
       .min = 1e-30,
       .max = 1e30,
       .choices = {},
       .description = "the value that is sent for what is at least that large"},
  };
  info.create = [](const Parameters& parameters) -> Result<std::unique_ptr<const Compressor>> {
    return std::unique_ptr<const Compressor>(
        std::make_unique<TwobitCodec>(static_cast<float>(parameters.Number("theta"))));
  };
  return registry.Register(std::move(info));
}

}  // namespace gradwire
