#pragma once

#include <cstddef>
#include <cstdint>

namespace gradwire {

// Counter-based draws for stochastic rounding; docs/payloads.md, "Rounding draws". The vector form
// is DrawWords in vectors-inl.h.

/// The two halves of a stream's seed.
struct DrawKey {
  explicit constexpr DrawKey(std::uint64_t seed)
      : k0(static_cast<std::uint32_t>(seed)), k1(static_cast<std::uint32_t>(seed >> 32)) {}
  std::uint32_t k0;
  std::uint32_t k1;
};

inline constexpr std::uint32_t kDrawStep = 0x9e3779b9;
/// Elements that share kDrawGroup / 2 words: the first half takes the low 16 bits, the second the
/// high ones.
inline constexpr std::size_t kDrawGroup = 32;

/// 32 random bits: a mix of c and the key. Source: the constants of lowbias32 (Wellons 2018).
constexpr std::uint32_t DrawWord(std::uint32_t c, const DrawKey& key) {
  std::uint32_t x = c * kDrawStep + key.k0;
  x = (x ^ (x >> 16)) * 0x7feb352d;
  x ^= key.k1;
  x = (x ^ (x >> 15)) * 0x846ca68b;
  return x ^ (x >> 16);
}

/// u(i): 16 bits for element i of a unit.
constexpr std::uint32_t Draw16(std::size_t i, const DrawKey& key) {
  const std::size_t half = kDrawGroup / 2;
  const std::size_t lane = i % half;
  const std::uint32_t word =
      DrawWord(static_cast<std::uint32_t>(i / kDrawGroup * half + lane), key);
  return i % kDrawGroup < half ? word & 0xffff : word >> 16;
}

/// U(i) = (2 u + 1) / 2^17, strictly between 0 and 1: a fraction above it rounds up.
constexpr float DrawBound(std::uint32_t u) { return static_cast<float>(2 * u + 1) * 0x1.0p-17F; }

}  // namespace gradwire
