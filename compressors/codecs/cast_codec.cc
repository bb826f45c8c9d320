#include "compressors/codecs/cast_codec.h"

#include <cassert>

#include "compressors/codecs/codec_checks.h"
#include "compressors/codecs/float_mode.h"

namespace gradwire {
namespace {

class CastCodec final : public Compressor {
 public:
  CastCodec(std::string_view name, kernels::CastFormat format, CompressorTraits traits)
      : name_(name), format_(format), bytes_(kernels::BytesOf(format)), traits_(traits) {}

  std::string_view name() const override { return name_; }
  CompressorTraits traits() const override { return traits_; }
  std::size_t MaxEncodedSize(std::size_t n) const override { return n * bytes_; }

  Result<Encoded> Encode(BlockSource& input, std::size_t n, const CodecContext& context,
                         Residual* residual, MutableBytes output) const override {
    GRADWIRE_RETURN_IF_ERROR(CheckEncode(name_, n, residual, output.size(), MaxEncodedSize(n)));
    GRADWIRE_RETURN_IF_ERROR(CheckExplicit(name_, residual));
    const ScopedFloatMode ieee;
    float* e = residual == nullptr ? nullptr : residual->values.data();
    Encoded encoded{MaxEncodedSize(n), true};
    ForEachBlock(n, [&](std::size_t offset, std::size_t count) {
      const bool finite = kernels::EncodeCast(format_, input.Block(offset, count),
                                              e == nullptr ? nullptr : e + offset, context.alpha,
                                              count, output.data() + offset * bytes_);
      encoded.finite = encoded.finite && finite;
    });
    if (!encoded.finite && residual != nullptr) {
      kernels::DecodeAddCast(format_, output.data(), n, e);
    }
    return encoded;
  }

  Status Validate(ByteView payload, std::size_t n) const override {
    return CheckPayloadSize(name_, n, payload.size(), MaxEncodedSize(n));
  }

  Status Decode(ByteView payload, const CodecContext&, std::span<float> output) const override {
    GRADWIRE_RETURN_IF_ERROR(Validate(payload, output.size()));
    const ScopedFloatMode ieee;
    kernels::DecodeCast(format_, payload.data(), output.size(), output.data());
    return Status::Ok();
  }

  Status DecodeAdd(ByteView payload, const CodecContext&,
                   std::span<float> accumulator) const override {
    GRADWIRE_RETURN_IF_ERROR(Validate(payload, accumulator.size()));
    const ScopedFloatMode ieee;
    kernels::DecodeAddCast(format_, payload.data(), accumulator.size(), accumulator.data());
    return Status::Ok();
  }

  void DecodeAddRange(ByteView payload, std::size_t n, const CodecContext&, std::size_t offset,
                      std::span<float> accumulator) const override {
    assert(offset + accumulator.size() <= n);
    static_cast<void>(n);
    const ScopedFloatMode ieee;
    kernels::DecodeAddCast(format_, payload.data() + offset * bytes_, accumulator.size(),
                           accumulator.data());
  }

  void Flush(Residual&) const override {}

  void Undo(ByteView payload, const CodecContext& context, Residual& residual) const override {
    const Status status = DecodeAdd(payload, context, residual.values);
    assert(status.ok());
    static_cast<void>(status);
  }

 private:
  const std::string_view name_;
  const kernels::CastFormat format_;
  const std::size_t bytes_;
  const CompressorTraits traits_;
};

}  // namespace

std::unique_ptr<const Compressor> MakeCastCodec(std::string_view name, kernels::CastFormat format,
                                                CompressorTraits traits) {
  return std::make_unique<CastCodec>(name, format, traits);
}

}  // namespace gradwire
