#pragma once

#include <string>
#include <vector>

#include "compressors/registry.h"

namespace gradwire {

/// What a codec does wrong, a sentence each: over many sizes zeros stay zeros, the same input gives
/// the same bytes, nothing is written beyond its buffers, payloads are read from odd addresses, a
/// damaged payload is refused or decodes to finite values, extreme values stay finite, and the
/// class holds (exact, contractive). Empty: nothing was found.
std::vector<std::string> CheckCodec(const Compressor& codec);

/// Compares with golden files in a folder. Of each case there are CASE.spec (three lines: the
/// written form, the number of elements, `encode` or `refuse`) and CASE.bin (the payload); of
/// encode cases also CASE.in and CASE.out (float32, little-endian: what is encoded, and what the
/// payload decodes to). Returns what differs; a folder without cases is a fault too.
std::vector<std::string> CheckGoldenFiles(const CompressorRegistry& registry,
                                          const std::string& folder);

}  // namespace gradwire
