#pragma once

#include <memory>
#include <string_view>

#include "compressors/codecs/kernels.h"
#include "compressors/compressor.h"

namespace gradwire {

/// A codec that writes every element by itself: none, fp16 and bf16.
/// Shapes: n elements -> n * BytesOf(format) bytes.
/// Under feedback the residual is explicit. In a round with a non-finite element it gets back what
/// the payload took, e + C(q), which is q except where a cast saturated (there to rounding).
/// A payload's own NaN and infinities decode as they are; the pass that reads the sum finds them.
/// `name` is stored: a literal.
std::unique_ptr<const Compressor> MakeCastCodec(std::string_view name, kernels::CastFormat format,
                                                CompressorTraits traits);

}  // namespace gradwire
