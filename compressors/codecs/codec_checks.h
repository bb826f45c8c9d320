#pragma once

#include <cstddef>
#include <string_view>

#include "common/base/status.h"
#include "compressors/compressor.h"

namespace gradwire {

/// Checks what the caller of Encode gave.
/// Errors: BufferTooSmall; InvalidArgument if the residual is not n elements long.
Status CheckEncode(std::string_view name, std::size_t n, const Residual* residual,
                   std::size_t output_bytes, std::size_t needed_bytes);

/// Errors: InvalidArgument if the residual waits for another codec to flush it.
Status CheckExplicit(std::string_view name, const Residual* residual);

/// Errors: CorruptData with both sizes.
Status CheckPayloadSize(std::string_view name, std::size_t n, std::size_t got_bytes,
                        std::size_t expected_bytes);

}  // namespace gradwire
