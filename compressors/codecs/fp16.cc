#include "compressors/codecs/cast_codec.h"
#include "compressors/registry.h"
#include "compressors/wire_ids.h"

namespace gradwire {

/// Rounds to float16, nearest even; finite overflow saturates at +-65504.
/// Layout: f16[n]. Contractive with a tiny error, but for values under 2^-24, which go to zero.
Status RegisterFp16(CompressorRegistry& registry) {
  CompressorInfo info;
  info.name = "fp16";
  info.wire_id = wire_id::kFp16;
  info.description = "half precision, saturating at 65504";
  info.source = "IEEE 754 binary16";
  info.create = [](const Parameters&) -> Result<std::unique_ptr<const Compressor>> {
    CompressorTraits traits;
    traits.compressor_class = CompressorClass::kContractive;
    traits.summable = false;
    return MakeCastCodec("fp16", kernels::CastFormat::kF16, traits);
  };
  return registry.Register(std::move(info));
}

}  // namespace gradwire
