#pragma once

#include <cstddef>
#include <cstdint>

#include "compressors/codecs/draws.h"

/// The inner loops of the codecs that keep few elements. What kernels.h says holds here too: any
/// counts, the same bits whatever the vector width, nothing is allocated. Threads: safe.
namespace gradwire::kernels {

struct Collected {
  std::size_t found = 0;
  bool finite = true;
};

/// q = input + alpha * residual, kept in the residual where it is finite (input alone if residual
/// is null). Appends base + i and q[i], ascending, for every i with the bits of abs(q[i]) >=
/// threshold_bits; finite says whether every q was, and if not, what was appended is void.
/// Shapes: indices and values have room for count.
Collected CollectAtLeast(const float* input, float* residual, float alpha, std::size_t count,
                         std::uint32_t threshold_bits, std::uint32_t base, std::uint32_t* indices,
                         float* values);

bool AllFinite(const float* values, std::size_t count);

/// What is behind a block of gaps as well as its indices.
struct UnpackedGaps {
  std::uint64_t advance = 0;  // the sum of gap + 1: from `first` to the index after the last
  bool least_width = true;    // no smaller width would have done
};

/// Copies u32[count] from any address; returns whether each is above the one before.
bool CopyAscending(const std::byte* from, std::size_t count, std::uint32_t* indices);

/// How far UnpackGaps reads beyond the gaps.
inline constexpr std::size_t kUnpackSlackBytes = 16;
inline constexpr std::size_t kMostGaps = 128;

/// indices[i] = first + (the sum of gaps 0 to i) + i, modulo 2^32: gaps of `width` bits (0 to 32),
/// LSB first, that begin at a byte. Shapes: packed[ceil(count * width / 8)] and kUnpackSlackBytes
/// more that are readable; count at most kMostGaps.
UnpackedGaps UnpackGaps(const std::byte* packed, std::size_t width, std::size_t count,
                        std::uint32_t first, std::uint32_t* indices);

/// accumulator[index] += values[i] at each of these indices, while the next ones are unpacked.
/// Stops where `advance` exceeds `room`: no index from first + room on is touched. Shapes:
/// values[count].
UnpackedGaps AddAtGaps(const std::byte* packed, std::size_t width, std::size_t count,
                       std::uint32_t first, std::uint64_t room, const float* values,
                       float* accumulator);

/// A ring of n elements in k windows, 1 <= k <= n, which has one position drawn in each and is
/// turned: randomk's choice (docs/payloads.md).
struct Ring {
  std::uint32_t n = 1;
  std::uint32_t k = 1;
  std::uint32_t turn = 0;  // below n
  DrawKey key = DrawKey(0);
};

/// The elements drawn in windows first to first + count - 1, which are below ring.k.
void RingIndices(const Ring& ring, std::uint32_t first, std::size_t count, std::uint32_t* indices);

}  // namespace gradwire::kernels
