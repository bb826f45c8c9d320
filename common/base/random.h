#pragma once

#include <cstdint>
#include <string_view>

namespace gradwire {

/// Mixes 64 bits so that every input bit reaches every output bit.
/// Source: the finalizer of SplitMix64 (Steele, Lea, Flood 2014).
constexpr std::uint64_t Mix64(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15ULL;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}

/// Combines a hash with one more number. Order matters.
constexpr std::uint64_t HashCombine(std::uint64_t hash, std::uint64_t value) {
  return Mix64(hash ^ Mix64(value));
}

/// 64-bit FNV-1a of a text; the same on every machine.
constexpr std::uint64_t HashText(std::string_view text) {
  std::uint64_t hash = 0xcbf29ce484222325ULL;
  for (const char c : text) {
    hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3ULL;
  }
  return hash;
}

/// A number that no other process or life of a process has: from the system's entropy, never 0.
std::uint64_t RandomId();

/// Counter-based random numbers: draw i is Mix64(seed + i), so streams can be replayed and skipped.
class CounterRng {
 public:
  explicit constexpr CounterRng(std::uint64_t seed) : seed_(Mix64(seed)) {}

  constexpr std::uint64_t Next() { return Mix64(seed_ + counter_++); }
  /// Uniform in [0, 1).
  constexpr double NextUniform() { return static_cast<double>(Next() >> 11) * 0x1.0p-53; }
  /// Uniform in [0, bound); bound > 0.
  constexpr std::uint64_t NextBelow(std::uint64_t bound) {
    __extension__ using Wide = unsigned __int128;
    return static_cast<std::uint64_t>((static_cast<Wide>(Next()) * bound) >> 64);
  }
  /// Standard normal (Box-Muller; two draws each).
  double NextGaussian();

 private:
  std::uint64_t seed_;
  std::uint64_t counter_ = 0;
};

}  // namespace gradwire
