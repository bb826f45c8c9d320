#pragma once

#include <cstddef>
#include <cstdint>

#include "compressors/codecs/draws.h"

/// The inner loops of the codecs that round each element to a few levels. What kernels.h says of
/// its kernels holds here: no allocation, the same bits whatever the vector width, any address for
/// bytes, the float mode of ScopedFloatMode, safe from many threads.
///
/// Everywhere q = input + alpha * residual, or the input alone if residual is null. Element i of a
/// call is element first + i of the unit, which is what rounding draws go by; first is a multiple
/// of kDrawGroup.
namespace gradwire::kernels {

/// Bits of the largest |q|, 0 for none. From kInfinityBits on, some q is not finite.
std::uint32_t LargestMagnitude(const float* input, const float* residual, float alpha,
                               std::size_t count);
inline constexpr std::uint32_t kInfinityBits = 0x7f800000;

/// How levels are rounded: to nearest even, or up and down at random.
struct Int8Rounding {
  bool stochastic = false;
  DrawKey key{0};
};

/// Levels from -127 to 127 of q * inverse; residual <- q - level * scale. Every q is finite, and
/// |q| * inverse at most 127 but for rounding.
void EncodeInt8(const float* input, float* residual, float alpha, float scale, float inverse,
                const Int8Rounding& rounding, std::size_t first, std::size_t count,
                std::byte* levels);
/// out[i] = level * scale.
void DecodeInt8(const std::byte* levels, float scale, std::size_t count, float* out);
/// accumulator[i] += level * scale.
void DecodeAddInt8(const std::byte* levels, float scale, std::size_t count, float* accumulator);

}  // namespace gradwire::kernels
