#pragma once

#include <cstddef>
#include <cstdint>

#include "common/base/bytes.h"
#include "compressors/codecs/draws.h"

/// The inner loops of the dithering codec. What kernels.h says of its kernels holds here: no
/// allocation, the same bits whatever the vector width, any address for bytes, the float mode of
/// ScopedFloatMode, safe from many threads. The arithmetic is that of docs/payloads.md.
///
/// A payload's codes lie one after the other, `bits` bits each. Element i of a call is element
/// first + i of the unit; first is a multiple of kDrawGroup, so its code begins at a byte. Bytes
/// reach from there to the end of the payload: the kernels read and write several codes at a time.
namespace gradwire::kernels {

/// What a code is made of.
struct DitherFormat {
  unsigned bits = 2;  // 2 to 16: the sign, lowest, and a level
  bool natural = false;

  /// s, the largest level. Level s decodes to the norm.
  constexpr std::uint32_t levels() const {
    const std::uint32_t most = (std::uint32_t{1} << (bits - 1)) - 1;
    return natural && most > 127 ? 127 : most;
  }
};

/// How a unit's values become levels and back.
struct DitherScale {
  float inverse = 0;  // |q| * inverse is in levels (linear) or in norms (natural)
  float unit = 0;     // what level 1 decodes to (linear), or the norm (natural)
};

/// Bits of the largest |q|, q = input + alpha * residual (input alone if residual is null), which
/// is written to the residual where it is finite. 0x7f800000 or more: some q is not finite.
std::uint32_t DitherLargest(const float* input, float* residual, float alpha, std::size_t count);
/// The same with the sum of q^2 of a block of at most kBlockElements, in double: 16 lanes, element
/// i in lane i mod 16, added from lane 0 up. Not finite if and only if some q is not.
double DitherSquares(const float* input, float* residual, float alpha, std::size_t count);

/// Writes the codes of finite values, of which none is above the norm. If `left` is not null it
/// becomes q - C(q); it may be q. Shapes: bytes at least ceil(count * bits / 8); some bytes behind
/// these may be overwritten.
void EncodeDither(const DitherFormat& format, const DitherScale& scale, const float* q, float* left,
                  std::size_t first, std::size_t count, const DrawKey& key, MutableBytes bytes);
/// out[i] = C(q). Shapes: bytes at least ceil(count * bits / 8).
void DecodeDither(const DitherFormat& format, float unit, ByteView bytes, std::size_t count,
                  float* out);
/// accumulator[i] += C(q).
void DecodeAddDither(const DitherFormat& format, float unit, ByteView bytes, std::size_t count,
                     float* accumulator);
/// The largest level of count codes, 0 for none.
std::uint32_t LargestDitherLevel(unsigned bits, ByteView bytes, std::size_t count);

}  // namespace gradwire::kernels
