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

/// One byte an element: its sign and a power of two.
class NaturalCodec final : public Compressor {
 public:
  std::string_view name() const override { return "natural"; }

  CompressorTraits traits() const override {
    CompressorTraits traits;
    traits.compressor_class = CompressorClass::kUnbiased;
    return traits;
  }

  std::size_t MaxEncodedSize(std::size_t n) const override { return n; }

  /// Of 2^e (1 + f) the variance is 2^2e f (1 - f), over the square f (1 - f) / (1 + f)^2: at most
  /// 1/8, for f = 1/3.
  double FeedbackVariance(std::size_t) const override { return 1.0 / 8; }

  Result<Encoded> Encode(BlockSource& input, std::size_t n, const CodecContext& context,
                         Residual* residual, MutableBytes output) const override {
    GRADWIRE_RETURN_IF_ERROR(CheckEncode(name(), n, residual, output.size(), MaxEncodedSize(n)));
    GRADWIRE_RETURN_IF_ERROR(CheckExplicit(name(), residual));
    const ScopedFloatMode ieee;
    const DrawKey key(context.stream_seed);
    float* const e = residual == nullptr ? nullptr : residual->values.data();
    Encoded encoded{MaxEncodedSize(n), true};
    ForEachBlock(n, [&](std::size_t offset, std::size_t count) {
      const bool finite =
          kernels::EncodeNatural(input.Block(offset, count), e == nullptr ? nullptr : e + offset,
                                 context.alpha, key, offset, count, output.data() + offset);
      encoded.finite = encoded.finite && finite;
    });
    if (!encoded.finite && e != nullptr) kernels::DecodeAddNatural(output.data(), n, e);
    return encoded;
  }

  Status Validate(ByteView payload, std::size_t n) const override {
    return CheckPayloadSize(name(), n, payload.size(), MaxEncodedSize(n));
  }

  Status Decode(ByteView payload, const CodecContext&, std::span<float> output) const override {
    GRADWIRE_RETURN_IF_ERROR(Validate(payload, output.size()));
    const ScopedFloatMode ieee;
    kernels::DecodeNatural(payload.data(), output.size(), output.data());
    return Status::Ok();
  }

  Status DecodeAdd(ByteView payload, const CodecContext&,
                   std::span<float> accumulator) const override {
    GRADWIRE_RETURN_IF_ERROR(Validate(payload, accumulator.size()));
    const ScopedFloatMode ieee;
    kernels::DecodeAddNatural(payload.data(), accumulator.size(), accumulator.data());
    return Status::Ok();
  }

  void DecodeAddRange(ByteView payload, std::size_t n, const CodecContext&, std::size_t offset,
                      std::span<float> accumulator) const override {
    assert(offset + accumulator.size() <= n);
    static_cast<void>(n);
    const ScopedFloatMode ieee;
    kernels::DecodeAddNatural(payload.data() + offset, accumulator.size(), accumulator.data());
  }

  void Flush(Residual&) const override {}

  void Undo(ByteView payload, const CodecContext& context, Residual& residual) const override {
    const Status status = DecodeAdd(payload, context, residual.values);
    assert(status.ok());
    static_cast<void>(status);
  }
};

}  // namespace

/// Rounds each element up or down to a power of two, at random so that the mean is right.
/// Layout: a byte an element, the sign bit highest and below it c: 0 for zero, else 2^(c - 110).
/// Unbiased with omega = 1/8 from 2^-109 to 2^17; above it saturates, below it goes to 0 or 2^-109.
/// Source: Horvath et al. 2019, natural compression.
Status RegisterNatural(CompressorRegistry& registry) {
  CompressorInfo info;
  info.name = "natural";
  info.wire_id = wire_id::kNatural;
  info.description = "the sign and a power of two in a byte";
  info.source = "Horvath et al. 2019";
  info.create = [](const Parameters&) -> Result<std::unique_ptr<const Compressor>> {
    return std::unique_ptr<const Compressor>(std::make_unique<NaturalCodec>());
  };
  return registry.Register(std::move(info));
}

}  // namespace gradwire
