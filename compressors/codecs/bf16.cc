#include "compressors/codecs/cast_codec.h"
#include "compressors/registry.h"
#include "compressors/wire_ids.h"

namespace gradwire {

/// Rounds to bfloat16, nearest even; finite overflow saturates.
/// Layout: bf16[n]. Contractive: relative error at most 2^-8 for normal numbers.
Status RegisterBf16(CompressorRegistry& registry) {
  CompressorInfo info;
  info.name = "bf16";
  info.wire_id = wire_id::kBf16;
  info.description = "the upper half of float32, rounded, saturating";
  info.source = "bfloat16, as in Kalamkar et al. 2019";
  info.create = [](const Parameters&) -> Result<std::unique_ptr<const Compressor>> {
    CompressorTraits traits;
    traits.compressor_class = CompressorClass::kContractive;
    traits.summable = false;
    return MakeCastCodec("bf16", kernels::CastFormat::kBf16, traits);
  };
  return registry.Register(std::move(info));
}

}  // namespace gradwire
