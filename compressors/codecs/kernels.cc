#include "compressors/codecs/kernels.h"

// This file is compiled once for each target: foreach_target.h includes it again with other
// instruction sets switched on. Old CPUs have SSSE3 (or plain code), so SSE4 is not worth its
// compile time; reductions need a vector of known width, so ARM uses NEON and not SVE.
#ifndef HWY_DISABLED_TARGETS
#define HWY_DISABLED_TARGETS (HWY_SSE4 | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128)
#endif
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "compressors/codecs/kernels.cc"
#include <hwy/foreach_target.h>
//
#include <hwy/highway.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "common/base/bytes.h"
#include "compressors/codecs/half.h"
#include "compressors/codecs/vectors-inl.h"

HWY_BEFORE_NAMESPACE();
namespace gradwire::kernels::HWY_NAMESPACE {

// ------------------------------------------------------------------------------------------ casts

/// How each format is written and read. Store2 writes two vectors and leaves in them what was
/// written.
struct F32 {
  static constexpr std::size_t kBytes = 4;
  static float Store(float q, std::byte* out) {
    StoreLe(out, q);
    return q;
  }
  static float Load(const std::byte* bytes) { return LoadLe<float>(bytes); }
#if GRADWIRE_VECTORS
  static HWY_INLINE void Store2(V& q0, V& q1, std::byte* out) {
    StoreBytes(d, q0, out);
    StoreBytes(d, q1, out + N * kBytes);
  }
  static HWY_INLINE V LoadVector(const std::byte* bytes) { return LoadBytes(d, bytes); }
#endif
};

struct F16 {
  static constexpr std::size_t kBytes = 2;
  static float Store(float q, std::byte* out) {
    const std::uint16_t half = HalfFromFloat(q);
    StoreLe(out, half);
    return FloatFromHalf(half);
  }
  static float Load(const std::byte* bytes) { return FloatFromHalf(LoadLe<std::uint16_t>(bytes)); }

#if GRADWIRE_VECTORS
  static HWY_INLINE void Store2(V& q0, V& q1, std::byte* out) {
    q0 = Store(q0, out);
    q1 = Store(q1, out + N * kBytes);
  }
#endif
#if GRADWIRE_VECTORS && GRADWIRE_NATIVE_HALF
  using DH = hn::Rebind<hwy::float16_t, D>;
  static HWY_INLINE V Store(V q, std::byte* out) {
    const V limit = hn::Set(d, std::bit_cast<float>(kMaxHalfAsFloat));
    const auto half = hn::DemoteTo(DH(), hn::Max(hn::Min(q, limit), hn::Neg(limit)));
    StoreBytes(DH(), half, out);
    return hn::PromoteTo(d, half);
  }
  static HWY_INLINE V LoadVector(const std::byte* bytes) {
    return hn::PromoteTo(d, LoadBytes(DH(), bytes));
  }
#elif GRADWIRE_VECTORS
  // The formulas of half.h, lane by lane.
  static HWY_INLINE V Store(V q, std::byte* out) {
    const VU bits = hn::BitCast(du, q);
    const VU sign = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 0x8000));
    const V clamped = hn::Min(hn::Abs(q), hn::Set(d, std::bit_cast<float>(kMaxHalfAsFloat)));
    const VU magnitude = hn::BitCast(du, clamped);
    const VU small =
        hn::Sub(hn::BitCast(du, hn::Add(clamped, hn::Set(d, 0.5F))), hn::Set(du, 0x3f000000));
    const VU odd = hn::And(hn::ShiftRight<13>(magnitude), hn::Set(du, 1));
    const VU normal =
        hn::ShiftRight<13>(hn::Add(hn::Sub(magnitude, hn::Set(du, 0x38000000 - 0xfff)), odd));
    const auto is_small = hn::RebindMask(du, hn::Lt(clamped, hn::Set(d, 0x1.0p-14F)));
    const VU half = hn::Or(sign, hn::IfThenElse(is_small, small, normal));
    StoreBytes(d16, hn::DemoteTo(d16, hn::BitCast(di, half)), out);
    return Expand(half);
  }
  static HWY_INLINE V LoadVector(const std::byte* bytes) {
    return Expand(hn::PromoteTo(du, LoadBytes(d16, bytes)));
  }
  static HWY_INLINE V Expand(VU half) {
    const VU sign = hn::ShiftLeft<16>(hn::And(half, hn::Set(du, 0x8000)));
    const VU magnitude = hn::And(half, hn::Set(du, 0x7fff));
    const auto signed_magnitude = hn::BitCast(di, magnitude);
    const VU small =
        hn::BitCast(du, hn::Mul(hn::ConvertTo(d, signed_magnitude), hn::Set(d, 0x1.0p-24F)));
    const VU shifted = hn::ShiftLeft<13>(magnitude);
    const VU normal = hn::Add(shifted, hn::Set(du, 0x38000000));
    const auto is_nan = hn::RebindMask(du, hn::Gt(signed_magnitude, hn::Set(di, 0x7c00)));
    const VU special = hn::Or(hn::Add(shifted, hn::Set(du, 0x70000000)),
                              hn::IfThenElseZero(is_nan, hn::Set(du, 0x400000)));
    const auto is_small = hn::RebindMask(du, hn::Lt(signed_magnitude, hn::Set(di, 0x400)));
    const auto is_special = hn::RebindMask(du, hn::Gt(signed_magnitude, hn::Set(di, 0x7bff)));
    const VU finite = hn::IfThenElse(is_small, small, normal);
    return hn::BitCast(d, hn::Or(sign, hn::IfThenElse(is_special, special, finite)));
  }
#endif
};

struct Bf16 {
  static constexpr std::size_t kBytes = 2;
  static float Store(float q, std::byte* out) {
    const std::uint16_t bfloat = BfloatFromFloat(q);
    StoreLe(out, bfloat);
    return FloatFromBfloat(bfloat);
  }
  static float Load(const std::byte* bytes) {
    return FloatFromBfloat(LoadLe<std::uint16_t>(bytes));
  }
#if GRADWIRE_VECTORS
  /// The upper halves are what is written: rounded, or cut off where that would reach infinity.
  static HWY_INLINE VU Rounded(V q) {
    const VU bits = hn::BitCast(du, q);
    const auto beyond = hn::Gt(Magnitude(q), hn::Set(di, 0x7f7f7fff));
    const VU odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 1));
    const VU up = hn::Add(odd, hn::Set(du, 0x7fff));
    return hn::Add(bits, hn::IfThenZeroElse(hn::RebindMask(du, beyond), up));
  }
  static HWY_INLINE void Store2(V& q0, V& q1, std::byte* out) {
    const hn::Repartition<std::uint16_t, D> both;
    const VU bits0 = Rounded(q0);
    const VU bits1 = Rounded(q1);
    StoreBytes(both, hn::ConcatOdd(both, hn::BitCast(both, bits1), hn::BitCast(both, bits0)), out);
    const VU upper = hn::Set(du, 0xffff0000);
    q0 = hn::BitCast(d, hn::And(bits0, upper));
    q1 = hn::BitCast(d, hn::And(bits1, upper));
  }
  static HWY_INLINE V LoadVector(const std::byte* bytes) {
    return hn::BitCast(d, hn::ShiftLeft<16>(hn::PromoteTo(du, LoadBytes(d16, bytes))));
  }
#endif
};

template <typename Format, bool kFeedback>
bool EncodeCastAs(const float* HWY_RESTRICT input, float* HWY_RESTRICT residual, float alpha,
                  std::size_t count, std::byte* HWY_RESTRICT out) {
  bool finite = true;
  std::size_t i = 0;
#if GRADWIRE_VECTORS
  M all = AllLanes();
  auto most = hn::Zero(di);
  const V weight = hn::Set(d, alpha);
  for (; i + 2 * N <= count; i += 2 * N) {
    std::byte* const to = out + i * Format::kBytes;
    V q0 = hn::LoadU(d, input + i);
    V q1 = hn::LoadU(d, input + i + N);
    if constexpr (kFeedback) {
      const V e0 = hn::LoadU(d, residual + i);
      const V e1 = hn::LoadU(d, residual + i + N);
      q0 = hn::Add(q0, hn::Mul(weight, e0));
      q1 = hn::Add(q1, hn::Mul(weight, e1));
      const M ok0 = FiniteLanes(q0);
      const M ok1 = FiniteLanes(q1);
      all = hn::And(all, hn::And(ok0, ok1));
      V decoded0 = hn::IfThenElseZero(ok0, q0);
      V decoded1 = hn::IfThenElseZero(ok1, q1);
      Format::Store2(decoded0, decoded1, to);
      hn::StoreU(hn::IfThenElse(ok0, hn::Sub(q0, decoded0), e0), d, residual + i);
      hn::StoreU(hn::IfThenElse(ok1, hn::Sub(q1, decoded1), e1), d, residual + i + N);
    } else {
      most = hn::Max(most, hn::Max(Magnitude(q0), Magnitude(q1)));
      Format::Store2(q0, q1, to);
    }
  }
  finite = hn::AllTrue(d, all) && hn::AllTrue(di, hn::Lt(most, hn::Set(di, 0x7f800000)));
#endif
  for (; i < count; ++i) {
    float q = input[i];
    if constexpr (kFeedback) q = q + alpha * residual[i];
    const bool ok = Finite(q);
    finite = finite && ok;
    const float decoded = Format::Store(ok ? q : 0.0F, out + i * Format::kBytes);
    if constexpr (kFeedback) residual[i] = ok ? q - decoded : residual[i];
  }
  return finite;
}

template <typename Format, bool kAdd>
void DecodeCastAs(const std::byte* HWY_RESTRICT bytes, std::size_t count, float* HWY_RESTRICT out) {
  std::size_t i = 0;
#if GRADWIRE_VECTORS
  for (; i + N <= count; i += N) {
    V value = Format::LoadVector(bytes + i * Format::kBytes);
    if constexpr (kAdd) value = hn::Add(hn::LoadU(d, out + i), value);
    hn::StoreU(value, d, out + i);
  }
#endif
  for (; i < count; ++i) {
    const float value = Format::Load(bytes + i * Format::kBytes);
    out[i] = kAdd ? out[i] + value : value;
  }
}

template <typename Format>
bool EncodeCastChoose(const float* input, float* residual, float alpha, std::size_t count,
                      std::byte* out) {
  return residual == nullptr ? EncodeCastAs<Format, false>(input, residual, alpha, count, out)
                             : EncodeCastAs<Format, true>(input, residual, alpha, count, out);
}

bool EncodeCast(CastFormat format, const float* input, float* residual, float alpha,
                std::size_t count, std::byte* out) {
  switch (format) {
    case CastFormat::kF32:
      return EncodeCastChoose<F32>(input, residual, alpha, count, out);
    case CastFormat::kF16:
      return EncodeCastChoose<F16>(input, residual, alpha, count, out);
    case CastFormat::kBf16:
      return EncodeCastChoose<Bf16>(input, residual, alpha, count, out);
  }
  return false;
}

template <bool kAdd>
void DecodeCastChoose(CastFormat format, const std::byte* bytes, std::size_t count, float* out) {
  switch (format) {
    case CastFormat::kF32:
      return DecodeCastAs<F32, kAdd>(bytes, count, out);
    case CastFormat::kF16:
      return DecodeCastAs<F16, kAdd>(bytes, count, out);
    case CastFormat::kBf16:
      return DecodeCastAs<Bf16, kAdd>(bytes, count, out);
  }
}

void DecodeCast(CastFormat format, const std::byte* bytes, std::size_t count, float* out) {
  DecodeCastChoose<false>(format, bytes, count, out);
}

void DecodeAddCast(CastFormat format, const std::byte* bytes, std::size_t count, float* out) {
  DecodeCastChoose<true>(format, bytes, count, out);
}

bool AddFeedback(const float* HWY_RESTRICT input, float* HWY_RESTRICT residual, float alpha,
                 std::size_t count) {
  bool finite = true;
  std::size_t i = 0;
#if GRADWIRE_VECTORS
  // Zero times q, added up, is a number while all q are finite, which is looked at for some vectors
  // together; each q is where it is not.
  constexpr std::size_t kTogether = 4;
  V zeros = hn::Zero(d);
  const V weight = hn::Set(d, alpha);
  for (; i + kTogether * N <= count; i += kTogether * N) {
    V q[kTogether];
    for (std::size_t v = 0; v < kTogether; ++v) {
      const std::size_t at = i + v * N;
      q[v] = hn::Add(hn::LoadU(d, input + at), hn::Mul(weight, hn::LoadU(d, residual + at)));
      zeros = hn::MulAdd(q[v], hn::Zero(d), zeros);
    }
    if (HWY_UNLIKELY(!hn::AllTrue(d, hn::Eq(zeros, zeros)))) {
      finite = false;
      for (std::size_t v = 0; v < kTogether; ++v) {
        q[v] = hn::IfThenElse(FiniteLanes(q[v]), q[v], hn::LoadU(d, residual + i + v * N));
      }
    }
    for (std::size_t v = 0; v < kTogether; ++v) hn::StoreU(q[v], d, residual + i + v * N);
  }
#endif
  for (; i < count; ++i) {
    const float q = input[i] + alpha * residual[i];
    if (Finite(q)) {
      residual[i] = q;
    } else {
      finite = false;
    }
  }
  return finite;
}

// ------------------------------------------------------------------------------------------ signs

#if GRADWIRE_VECTORS
/// e of a stored q. `differs` has the bits in which the two that are taken off differ: but for
/// kTwoAbs the sign bit alone or none.
template <SignSum kSum>
HWY_INLINE V TakeOff(V stored, V off_negative, V off_rest, V differs) {
  if constexpr (kSum == SignSum::kTwoAbs) {
    const M was_negative = hn::RebindMask(d, SignBits(stored));
    return hn::Sub(stored, hn::IfThenElse(was_negative, off_negative, off_rest));
  } else {
    return hn::Sub(stored, hn::Xor(hn::And(stored, differs), off_rest));
  }
}
#endif

template <SignSum kSum, bool kFeedback>
SignSums EncodeSignsAs(const float* HWY_RESTRICT input, float* HWY_RESTRICT values, float alpha,
                       float take_off_negative, float take_off_rest, std::size_t count,
                       std::byte* HWY_RESTRICT bits) {
  SignSums sums;
  HWY_ALIGN float rest_lanes[kLanes] = {};
  HWY_ALIGN float negative_lanes[kLanes] = {};
  std::size_t i = 0;
#if GRADWIRE_VECTORS
  constexpr std::size_t kVectors = kLanes / N;
  constexpr std::size_t kTogether = 4;  // vectors of a step, kLanes elements or a multiple of that
  V rest[kVectors];
  V negative[kVectors];
  for (std::size_t v = 0; v < kVectors; ++v) rest[v] = negative[v] = hn::Zero(d);
  const V weight = hn::Set(d, alpha);
  const V off_negative = hn::Set(d, take_off_negative);
  const V off_rest = hn::Set(d, take_off_rest);
  const V differs = hn::Xor(off_negative, off_rest);
  for (; i + kTogether * N <= count; i += kTogether * N) {
    V q[kTogether];
    std::uint64_t word = 0;
    for (std::size_t v = 0; v < kTogether; ++v) {
      const std::size_t at = i + v * N;
      q[v] = hn::LoadU(d, input + at);
      if constexpr (kFeedback) {
        const V e = TakeOff<kSum>(hn::LoadU(d, values + at), off_negative, off_rest, differs);
        q[v] = hn::Add(q[v], hn::Mul(weight, e));
      }
      const auto is_negative = SignBits(q[v]);
      word |= std::uint64_t{MaskBits(is_negative)} << (v * N);
      V& sum = rest[v % kVectors];
      const V magnitude = hn::Abs(q[v]);
      if constexpr (kSum == SignSum::kAbs) {
        sum = hn::Add(sum, magnitude);
      } else if constexpr (kSum == SignSum::kSquares) {
        sum = hn::Add(sum, hn::Mul(q[v], q[v]));
      } else {
        V& negative_sum = negative[v % kVectors];
        const M is_negative_float = hn::RebindMask(d, is_negative);
        sum = hn::Add(sum, hn::IfThenZeroElse(is_negative_float, magnitude));
        negative_sum = hn::Add(negative_sum, hn::IfThenElseZero(is_negative_float, magnitude));
      }
    }
    if constexpr (kSum == SignSum::kTwoAbs) {
      sums.negatives += static_cast<std::uint64_t>(std::popcount(word));
    }
    std::memcpy(bits + i / 8, &word, kTogether * N / 8);
    // While the sums are finite, all q are. They may overflow where no q does, so each is looked at
    // then.
    M all = AllLanes();
    for (std::size_t v = 0; v < kVectors; ++v) {
      all = hn::And(all, FiniteLanes(rest[v]));
      if constexpr (kSum == SignSum::kTwoAbs) all = hn::And(all, FiniteLanes(negative[v]));
    }
    if (HWY_UNLIKELY(!hn::AllTrue(d, all))) {
      for (std::size_t v = 0; v < kTogether; ++v) {
        const M ok = FiniteLanes(q[v]);
        sums.finite = sums.finite && hn::AllTrue(d, ok);
        if constexpr (kFeedback) {
          const V stored = hn::LoadU(d, values + i + v * N);
          q[v] = hn::IfThenElse(ok, q[v], TakeOff<kSum>(stored, off_negative, off_rest, differs));
        }
      }
    }
    if constexpr (kFeedback) {
      for (std::size_t v = 0; v < kTogether; ++v) hn::StoreU(q[v], d, values + i + v * N);
    }
  }
  for (std::size_t v = 0; v < kVectors; ++v) {
    hn::Store(rest[v], d, rest_lanes + v * N);
    hn::Store(negative[v], d, negative_lanes + v * N);
  }
#endif
  for (; i < count; ++i) {
    float q = input[i];
    if constexpr (kFeedback) {
      const float stored = values[i];
      const float e = stored - (std::signbit(stored) ? take_off_negative : take_off_rest);
      q = q + alpha * e;
      values[i] = Finite(q) ? q : e;
    }
    sums.finite = sums.finite && Finite(q);
    const bool is_negative = std::signbit(q);
    if (i % 8 == 0) bits[i / 8] = std::byte{0};
    bits[i / 8] |= std::byte{is_negative} << (i % 8);
    const float magnitude = std::fabs(q);
    if constexpr (kSum == SignSum::kAbs) {
      rest_lanes[i % kLanes] += magnitude;
    } else if constexpr (kSum == SignSum::kSquares) {
      rest_lanes[i % kLanes] += q * q;
    } else {
      float* const lanes = is_negative ? negative_lanes : rest_lanes;
      lanes[i % kLanes] += magnitude;
      sums.negatives += is_negative ? 1 : 0;
    }
  }
  for (std::size_t lane = 0; lane < kLanes; ++lane) {
    sums.rest += static_cast<double>(rest_lanes[lane]);
    sums.negative += static_cast<double>(negative_lanes[lane]);
  }
  return sums;
}

template <SignSum kSum>
SignSums EncodeSignsChoose(const float* input, float* values, float alpha, float take_off_negative,
                           float take_off_rest, std::size_t count, std::byte* bits) {
  return values == nullptr ? EncodeSignsAs<kSum, false>(input, values, alpha, take_off_negative,
                                                        take_off_rest, count, bits)
                           : EncodeSignsAs<kSum, true>(input, values, alpha, take_off_negative,
                                                       take_off_rest, count, bits);
}

SignSums EncodeSigns(SignSum sum, const float* input, float* values, float alpha,
                     float take_off_negative, float take_off_rest, std::size_t count,
                     std::byte* bits) {
  switch (sum) {
    case SignSum::kAbs:
      return EncodeSignsChoose<SignSum::kAbs>(input, values, alpha, take_off_negative,
                                              take_off_rest, count, bits);
    case SignSum::kSquares:
      return EncodeSignsChoose<SignSum::kSquares>(input, values, alpha, take_off_negative,
                                                  take_off_rest, count, bits);
    case SignSum::kTwoAbs:
      return EncodeSignsChoose<SignSum::kTwoAbs>(input, values, alpha, take_off_negative,
                                                 take_off_rest, count, bits);
  }
  return {};
}

template <bool kAdd>
void DecodeSignsAs(const std::byte* HWY_RESTRICT bits, float negative, float rest,
                   std::size_t count, float* HWY_RESTRICT out) {
  std::size_t i = 0;
#if GRADWIRE_VECTORS
  // A word of 32 signs is broadcast, and each lane tests its own bit of it.
  constexpr std::size_t kWordBits = 32;
  constexpr std::size_t kVectors = kWordBits / N;
  const V negatives = hn::Set(d, negative);
  const V rests = hn::Set(d, rest);
  HWY_ALIGN std::uint32_t own_bit[kWordBits];
  for (std::size_t b = 0; b < kWordBits; ++b) own_bit[b] = std::uint32_t{1} << b;
  for (; i + kWordBits <= count; i += kWordBits) {
    const VU word = hn::Set(du, LoadLe<std::uint32_t>(bits + i / 8));
    for (std::size_t v = 0; v < kVectors; ++v) {
      const auto is_negative = hn::TestBit(word, hn::Load(du, own_bit + v * N));
      V value = hn::IfThenElse(hn::RebindMask(d, is_negative), negatives, rests);
      float* to = out + i + v * N;
      if constexpr (kAdd) value = hn::Add(hn::LoadU(d, to), value);
      hn::StoreU(value, d, to);
    }
  }
#endif
  for (; i < count; ++i) {
    const bool is_negative = (bits[i / 8] >> (i % 8) & std::byte{1}) != std::byte{0};
    const float value = is_negative ? negative : rest;
    out[i] = kAdd ? out[i] + value : value;
  }
}

void DecodeSigns(const std::byte* bits, float negative, float rest, std::size_t count, float* out) {
  DecodeSignsAs<false>(bits, negative, rest, count, out);
}

void DecodeAddSigns(const std::byte* bits, float negative, float rest, std::size_t count,
                    float* out) {
  DecodeSignsAs<true>(bits, negative, rest, count, out);
}

}  // namespace gradwire::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace gradwire::kernels {

HWY_EXPORT(EncodeCast);
HWY_EXPORT(DecodeCast);
HWY_EXPORT(DecodeAddCast);
HWY_EXPORT(AddFeedback);
HWY_EXPORT(EncodeSigns);
HWY_EXPORT(DecodeSigns);
HWY_EXPORT(DecodeAddSigns);

bool EncodeCast(CastFormat format, const float* input, float* residual, float alpha,
                std::size_t count, std::byte* out) {
  return HWY_DYNAMIC_DISPATCH(EncodeCast)(format, input, residual, alpha, count, out);
}

void DecodeCast(CastFormat format, const std::byte* bytes, std::size_t count, float* out) {
  HWY_DYNAMIC_DISPATCH(DecodeCast)(format, bytes, count, out);
}

void DecodeAddCast(CastFormat format, const std::byte* bytes, std::size_t count,
                   float* accumulator) {
  HWY_DYNAMIC_DISPATCH(DecodeAddCast)(format, bytes, count, accumulator);
}

bool AddFeedback(const float* input, float* residual, float alpha, std::size_t count) {
  return HWY_DYNAMIC_DISPATCH(AddFeedback)(input, residual, alpha, count);
}

SignSums EncodeSigns(SignSum sum, const float* input, float* values, float alpha,
                     float take_off_negative, float take_off_rest, std::size_t count,
                     std::byte* bits) {
  return HWY_DYNAMIC_DISPATCH(EncodeSigns)(sum, input, values, alpha, take_off_negative,
                                           take_off_rest, count, bits);
}

void DecodeSigns(const std::byte* bits, float negative, float rest, std::size_t count, float* out) {
  HWY_DYNAMIC_DISPATCH(DecodeSigns)(bits, negative, rest, count, out);
}

void DecodeAddSigns(const std::byte* bits, float negative, float rest, std::size_t count,
                    float* accumulator) {
  HWY_DYNAMIC_DISPATCH(DecodeAddSigns)(bits, negative, rest, count, accumulator);
}

std::vector<std::int64_t> AvailableTargets() {
  std::vector<std::int64_t> targets = hwy::SupportedAndGeneratedTargets();
  // The compiler's own baseline runs wherever this library does.
  if (targets.empty() || targets.back() != HWY_STATIC_TARGET) targets.push_back(HWY_STATIC_TARGET);
  return targets;
}

std::string_view TargetName(std::int64_t target) { return hwy::TargetName(target); }

void UseTarget(std::int64_t target) {
  hwy::GetChosenTarget().Update(target == 0 ? hwy::SupportedTargets() : target);
}

}  // namespace gradwire::kernels
#endif  // HWY_ONCE
