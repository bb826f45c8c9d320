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

/// Bytes of `natural`: the sign bit and 7 bits of exponent; residual <- q - C(q). Where q is not
/// finite the residual keeps its value and what is written decodes to 0. Returns whether every q
/// was finite.
bool EncodeNatural(const float* input, float* residual, float alpha, const DrawKey& key,
                   std::size_t first, std::size_t count, std::byte* out);
void DecodeNatural(const std::byte* bytes, std::size_t count, float* out);
void DecodeAddNatural(const std::byte* bytes, std::size_t count, float* accumulator);

struct Moments {
  double squares = 0;         // their sum, in the order of SignSums but all in double
  std::uint32_t largest = 0;  // as LargestMagnitude
};

/// Of a block of at most kBlockElements; residual <- q where q is finite.
Moments MeasureMoments(const float* input, float* residual, float alpha, std::size_t count);

/// trits[i] = 0, 1 for + or 2 for -: not 0 where |q| * inverse > U. What is to be clipped to scale
/// need not be: it is above every U as it is. Here q is the input, or the residual if that is not
/// null: then residual <- q - scale * sign.
void EncodeTrits(const float* input, float* residual, float inverse, float scale,
                 const DrawKey& key, std::size_t first, std::size_t count, std::byte* trits);
/// Five trits a byte, the first one the lowest digit in base 3.
/// Shapes: trits[5 * num_bytes], readable for kTritSlack bytes more.
void PackTrits(const std::byte* trits, std::size_t num_bytes, std::byte* out);
inline constexpr std::size_t kTritSlack = 3;
/// out[i] = 0, scale or -scale for trit skip + i. Shapes: bytes[num_bytes], all readable, which
/// hold at least skip + count trits; skip below 5. Bytes are at most 242.
void DecodeTrits(const std::byte* bytes, std::size_t num_bytes, std::size_t skip, float scale,
                 std::size_t count, float* out);
/// accumulator[i] += 0, scale or -scale.
void DecodeAddTrits(const std::byte* bytes, std::size_t num_bytes, std::size_t skip, float scale,
                    std::size_t count, float* accumulator);

struct TwobitResult {
  bool finite = true;
  std::size_t out_of_bound = 0;  // with a residual: elements of |q| > 2 theta
};

/// Codes of 2 bits, the first element lowest: 1 where q >= theta, 2 where q <= -theta, else 0, also
/// where q is not finite; residual <- q - C(q), but where q is not finite it keeps its value.
TwobitResult EncodeTwobit(const float* input, float* residual, float alpha, float theta,
                          std::size_t count, std::byte* out);
void DecodeTwobit(const std::byte* bytes, float theta, std::size_t count, float* out);
void DecodeAddTwobit(const std::byte* bytes, float theta, std::size_t count, float* accumulator);

}  // namespace gradwire::kernels
