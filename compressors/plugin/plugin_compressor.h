#pragma once

#include <memory>
#include <string>

#include "compressors/plugin/gradwire_plugin.h"
#include "compressors/registry.h"

namespace gradwire {

/// Makes a codec of a plug-in's compressor. It gathers blocks into an array, finds what is not
/// finite, does the feedback (q = g + alpha * e, e <- q - C(q) by decoding), and checks what comes
/// back from the plug-in: sizes beyond the bound, values that are not finite. A thread keeps
/// working memory of up to 8 bytes an element of its largest unit; beyond that nothing is
/// allocated here.
/// `library` is for messages; `description` must outlive the codec.
/// Errors: what the plug-in says of the parameters; a bound of sizes that cannot be right.
Result<std::unique_ptr<const Compressor>> MakePluginCompressor(
    std::string library, const gradwire_compressor& description, const Parameters& parameters);

}  // namespace gradwire
