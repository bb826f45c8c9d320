#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "compressors/compressor.h"

namespace gradwire::testing {

/// The written form of every codec variant to test, made from what the registry says of its
/// parameters: all combinations of choices, and every number parameter at a few values of its
/// range. What a codec refuses by itself is left out; a codec whose defaults do not work is not.
std::vector<std::string> Variants();

std::unique_ptr<const Compressor> Make(const std::string& spec);

/// The sizes at which codecs go wrong: around bytes, words, gap blocks and blocks of 4096.
const std::vector<std::size_t>& Sizes();

/// Normal values, magnitudes spread over orders, signs even. The same for the same seed.
std::vector<float> Gradient(std::size_t n, std::uint64_t seed);

/// Gradient with zeros of both signs, denormals, ties and values beyond float16 mixed in.
std::vector<float> AwkwardGradient(std::size_t n, std::uint64_t seed);

/// The payload of an encode call that must succeed.
struct Coded {
  std::vector<std::byte> payload;
  bool finite = true;
};
Coded Encode(const Compressor& codec, std::span<const float> input, Residual* residual = nullptr,
             const CodecContext& context = {});

/// Decode of a payload that must be valid.
std::vector<float> Decode(const Compressor& codec, ByteView payload, std::size_t n);

/// Bits, so that zeros of different signs differ and NaN equals itself.
std::vector<std::uint32_t> Bits(std::span<const float> values);

/// An explicit copy of the residual's values: e.
std::vector<float> Explicit(const Compressor& codec, const Residual& residual);

double SquaredNorm(std::span<const float> values);

}  // namespace gradwire::testing
