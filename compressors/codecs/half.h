#pragma once

#include <bit>
#include <cstdint>

namespace gradwire {

// One element at a time; the vector forms in kernels.cc give the same bits.

/// The largest finite float16, 65504, and bfloat16, as the bits of a float32. Casts saturate there.
inline constexpr std::uint32_t kMaxHalfAsFloat = 0x477fe000;
inline constexpr std::uint32_t kMaxBfloatAsFloat = 0x7f7f0000;

/// float32 to float16: nearest even, finite overflow saturates. NaN in, anything out.
inline std::uint16_t HalfFromFloat(float value) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t sign = (bits >> 16) & 0x8000;
  std::uint32_t magnitude = bits & 0x7fffffff;
  if (magnitude > kMaxHalfAsFloat) magnitude = kMaxHalfAsFloat;
  std::uint32_t half;
  if (magnitude < 0x38800000) {
    // Below 2^-14 halves are multiples of 2^-24, which is what floats are between 0.5 and 1: the
    // addition rounds as wanted.
    const float shifted = std::bit_cast<float>(magnitude) + 0.5F;
    half = std::bit_cast<std::uint32_t>(shifted) - 0x3f000000;
  } else {
    // Rebias the exponent by 127 - 15 and round 13 bits away.
    half = (magnitude - 0x38000000 + 0xfff + ((magnitude >> 13) & 1)) >> 13;
  }
  return static_cast<std::uint16_t>(sign | half);
}

/// float16 to float32, exact; a signalling NaN becomes quiet.
inline float FloatFromHalf(std::uint16_t half) {
  const std::uint32_t sign = (half & 0x8000U) << 16;
  const std::uint32_t magnitude = half & 0x7fffU;
  std::uint32_t bits;
  if (magnitude < 0x400) {
    bits = std::bit_cast<std::uint32_t>(static_cast<float>(magnitude) * 0x1.0p-24F);
  } else if (magnitude < 0x7c00) {
    bits = (magnitude << 13) + 0x38000000;
  } else {
    bits = (magnitude << 13) + 0x70000000;
    if (magnitude > 0x7c00) bits |= 0x400000;
  }
  return std::bit_cast<float>(sign | bits);
}

/// float32 to bfloat16: nearest even, finite overflow saturates. NaN in, anything out.
inline std::uint16_t BfloatFromFloat(float value) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  std::uint32_t magnitude = bits & 0x7fffffff;
  if (magnitude > kMaxBfloatAsFloat) magnitude = kMaxBfloatAsFloat;
  const std::uint32_t rounded = (magnitude + 0x7fff + ((magnitude >> 16) & 1)) >> 16;
  return static_cast<std::uint16_t>(((bits >> 16) & 0x8000) | rounded);
}

/// bfloat16 to float32, exact.
inline float FloatFromBfloat(std::uint16_t bfloat) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(bfloat) << 16);
}

}  // namespace gradwire
