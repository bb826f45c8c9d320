#include "compressors/codecs/cast_codec.h"
#include "compressors/registry.h"
#include "compressors/wire_ids.h"

namespace gradwire {

/// Sends float32 as it is.
/// Layout: f32[n]. Exact; payloads may be summed without decoding.
Status RegisterNone(CompressorRegistry& registry) {
  CompressorInfo info;
  info.name = "none";
  info.wire_id = wire_id::kNone;
  info.description = "every float as it is";
  info.source = "";
  info.create = [](const Parameters&) -> Result<std::unique_ptr<const Compressor>> {
    CompressorTraits traits;
    traits.compressor_class = CompressorClass::kExact;
    traits.summable = true;
    return MakeCastCodec("none", kernels::CastFormat::kF32, traits);
  };
  return registry.Register(std::move(info));
}

}  // namespace gradwire
