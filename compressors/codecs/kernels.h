#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

/// The inner loops of the codecs, vectorized with Highway and dispatched at run time. The sums are
/// those of a block of at most kBlockElements; else counts are free. Each allocates nothing and
/// gives the same bits whatever the vector width: elements are independent, and reductions have 16
/// fixed lanes. Bytes may sit at any address. Expects the float mode of ScopedFloatMode. Threads:
/// safe.
namespace gradwire::kernels {

/// How one float is written: 4 bytes as it is, or 2 bytes rounded to nearest even, saturating.
enum class CastFormat { kF32, kF16, kBf16 };

constexpr std::size_t BytesOf(CastFormat format) { return format == CastFormat::kF32 ? 4 : 2; }

/// q = input + alpha * residual (input alone if residual is null), written to `out`;
/// residual <- q - C(q). Where q is not finite the residual keeps its value and zero is written.
/// Returns whether every q was finite.
bool EncodeCast(CastFormat format, const float* input, float* residual, float alpha,
                std::size_t count, std::byte* out);
void DecodeCast(CastFormat format, const std::byte* bytes, std::size_t count, float* out);
void DecodeAddCast(CastFormat format, const std::byte* bytes, std::size_t count,
                   float* accumulator);

/// residual <- q = input + alpha * residual where that is finite. Returns whether every q was.
bool AddFeedback(const float* input, float* residual, float alpha, std::size_t count);

/// What the sums of a sign block are made of.
enum class SignSum { kAbs, kSquares, kTwoAbs };

struct SignSums {
  double rest = 0;      // of all elements, or with kTwoAbs of those without a sign bit
  double negative = 0;  // kTwoAbs: of those with a sign bit
  std::uint64_t negatives = 0;
  bool finite = true;
};

/// Sign bits of q = input + alpha * e, and their block's sums. If `values` is not null, e = values
/// - (take_off_negative where the sign bit of values is set, else take_off_rest), and values <- q,
/// or e where q is not finite. But with kTwoAbs the two take_off have the same magnitude. Writes
/// ceil(count / 8) bytes, unused bits 0. The order of sums: lane i mod 16 in float for element i,
/// the lanes from 0 up in double.
SignSums EncodeSigns(SignSum sum, const float* input, float* values, float alpha,
                     float take_off_negative, float take_off_rest, std::size_t count,
                     std::byte* bits);

/// out[i] = negative if bit i is set, else rest.
void DecodeSigns(const std::byte* bits, float negative, float rest, std::size_t count, float* out);
/// accumulator[i] += negative if bit i is set, else rest.
void DecodeAddSigns(const std::byte* bits, float negative, float rest, std::size_t count,
                    float* accumulator);

/// The instruction sets that this build has kernels for and this machine can run, best first.
std::vector<std::int64_t> AvailableTargets();
std::string_view TargetName(std::int64_t target);
/// Makes every kernel use one of AvailableTargets(), or the best again for 0. For tests; call while
/// nothing else runs kernels.
void UseTarget(std::int64_t target);

}  // namespace gradwire::kernels
