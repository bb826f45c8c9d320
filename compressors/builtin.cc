#include <cassert>

#include "compressors/registry.h"

namespace gradwire {

// One declaration a compressor; each is defined in codecs/<name>.cc. An explicit list, since
// objects that register themselves are dropped from static libraries.
Status RegisterNone(CompressorRegistry& registry);
Status RegisterFp16(CompressorRegistry& registry);
Status RegisterBf16(CompressorRegistry& registry);
Status RegisterOnebit(CompressorRegistry& registry);
Status RegisterTopk(CompressorRegistry& registry);
Status RegisterInt8(CompressorRegistry& registry);
Status RegisterRandomk(CompressorRegistry& registry);
Status RegisterThreshold(CompressorRegistry& registry);
Status RegisterDithering(CompressorRegistry& registry);
Status RegisterNatural(CompressorRegistry& registry);
Status RegisterTerngrad(CompressorRegistry& registry);
Status RegisterTwobit(CompressorRegistry& registry);

Status RegisterBuiltinCompressors(CompressorRegistry& registry) {
  for (const auto register_one : {
           RegisterNone,
           RegisterFp16,
           RegisterBf16,
           RegisterOnebit,
           RegisterTopk,
           RegisterInt8,
           RegisterRandomk,
           RegisterThreshold,
           RegisterDithering,
           RegisterNatural,
           RegisterTerngrad,
           RegisterTwobit,
       }) {
    GRADWIRE_RETURN_IF_ERROR(register_one(registry));
  }
  return Status::Ok();
}

const CompressorRegistry& BuiltinCompressors() {
  static const CompressorRegistry registry = [] {
    CompressorRegistry all;
    const Status status = RegisterBuiltinCompressors(all);
    assert(status.ok());
    static_cast<void>(status);
    return all;
  }();
  return registry;
}

}  // namespace gradwire
