#include "compressors/codecs/dither_kernels.h"

// Compiled once for each target; see kernels.cc for why these are left out.
#ifndef HWY_DISABLED_TARGETS
#define HWY_DISABLED_TARGETS (HWY_SSE4 | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128)
#endif
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "compressors/codecs/dither_kernels.cc"
#include <hwy/foreach_target.h>
//
#include <hwy/highway.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "common/base/bytes.h"
#include "compressors/codecs/vectors-inl.h"

HWY_BEFORE_NAMESPACE();
namespace gradwire::kernels::HWY_NAMESPACE {

// ------------------------------------------------------------------------------------------ norms

#if GRADWIRE_VECTORS
/// q of a vector, written to the residual where it is finite.
template <bool kFeedback>
HWY_INLINE V MakeQ(const float* input, float* residual, V weight, std::size_t at) {
  V q = hn::LoadU(d, input + at);
  if constexpr (kFeedback) {
    const V e = hn::LoadU(d, residual + at);
    q = hn::Add(q, hn::Mul(weight, e));
    hn::StoreU(hn::IfThenElse(FiniteLanes(q), q, e), d, residual + at);
  }
  return q;
}
#endif

template <bool kFeedback>
float MakeQ(const float* input, float* residual, float alpha, std::size_t i) {
  float q = input[i];
  if constexpr (kFeedback) {
    q = q + alpha * residual[i];
    if (Finite(q)) residual[i] = q;
  }
  return q;
}

template <bool kFeedback>
std::uint32_t LargestAs(const float* HWY_RESTRICT input, float* HWY_RESTRICT residual, float alpha,
                        std::size_t count) {
  std::uint32_t largest = 0;
  std::size_t i = 0;
#if GRADWIRE_VECTORS
  // Bits of absolute values are ordered like the values; NaN comes after infinity. Several maxima,
  // since one would wait for itself.
  constexpr std::size_t kVectors = 4;
  const V weight = hn::Set(d, alpha);
  const auto magnitude = hn::Set(di, 0x7fffffff);
  hn::Vec<DI> all[kVectors];
  for (auto& one : all) one = hn::Zero(di);
  for (; i + kVectors * N <= count; i += kVectors * N) {
    for (std::size_t v = 0; v < kVectors; ++v) {
      const V q = MakeQ<kFeedback>(input, residual, weight, i + v * N);
      all[v] = hn::Max(all[v], hn::And(hn::BitCast(di, q), magnitude));
    }
  }
  const auto most = hn::Max(hn::Max(all[0], all[1]), hn::Max(all[2], all[3]));
  largest = static_cast<std::uint32_t>(hn::GetLane(hn::MaxOfLanes(di, most)));
#endif
  for (; i < count; ++i) {
    const float q = MakeQ<kFeedback>(input, residual, alpha, i);
    largest = std::max(largest, std::bit_cast<std::uint32_t>(q) & 0x7fffffff);
  }
  return largest;
}

std::uint32_t DitherLargest(const float* input, float* residual, float alpha, std::size_t count) {
  return residual == nullptr ? LargestAs<false>(input, residual, alpha, count)
                             : LargestAs<true>(input, residual, alpha, count);
}

template <bool kFeedback>
double SquaresAs(const float* HWY_RESTRICT input, float* HWY_RESTRICT residual, float alpha,
                 std::size_t count) {
  HWY_ALIGN double lanes[kLanes] = {};
  std::size_t i = 0;
#if GRADWIRE_VECTORS
  const hn::Repartition<double, D> dd;
  constexpr std::size_t kHalf = N / 2;
  constexpr std::size_t kVectors = kLanes / kHalf;
  const V weight = hn::Set(d, alpha);
  hn::Vec<decltype(dd)> sums[kVectors];
  for (auto& sum : sums) sum = hn::Zero(dd);
  for (; i + kLanes <= count; i += kLanes) {
    for (std::size_t v = 0; v < kVectors; v += 2) {
      const V q = MakeQ<kFeedback>(input, residual, weight, i + v * kHalf);
      const auto low = hn::PromoteTo(dd, hn::LowerHalf(q));
      const auto high = hn::PromoteTo(dd, hn::UpperHalf(hn::Half<D>(), q));
      sums[v] = hn::Add(sums[v], hn::Mul(low, low));
      sums[v + 1] = hn::Add(sums[v + 1], hn::Mul(high, high));
    }
  }
  for (std::size_t v = 0; v < kVectors; ++v) hn::Store(sums[v], dd, lanes + v * kHalf);
#endif
  for (; i < count; ++i) {
    const auto q = static_cast<double>(MakeQ<kFeedback>(input, residual, alpha, i));
    lanes[i % kLanes] += q * q;
  }
  double total = 0;
  for (const double lane : lanes) total += lane;
  return total;
}

double DitherSquares(const float* input, float* residual, float alpha, std::size_t count) {
  return residual == nullptr ? SquaresAs<false>(input, residual, alpha, count)
                             : SquaresAs<true>(input, residual, alpha, count);
}

// ----------------------------------------------------------------------------------------- levels

// As mantissa bits u * 2^7, with 2^6 below them and the exponent of 1, are the float 1 + U.
constexpr std::uint32_t kHalfDraw = 0x40;
constexpr std::uint32_t kOneBits = 0x3f800000;

#if GRADWIRE_VECTORS
// Vectors of codes have a code in the high half of each lane, and anything in the low half.

/// u * 2^kShift of the low or high halves of words, from mixes; other bits may be anything.
template <bool kLow, int kShift>
HWY_INLINE VU RoughDraws(VU mixes) {
  const VU high = hn::ShiftRight<16 - kShift>(mixes);
  if constexpr (kLow) return hn::Xor(hn::ShiftLeft<kShift>(mixes), high);
  return high;
}
/// u * 2^7.
template <bool kLow>
HWY_INLINE VU MantissaDraws(VU mixes) {
  return hn::And(RoughDraws<kLow, 7>(mixes), hn::Set(du, 0x7fff80));
}
HWY_INLINE V DrawBounds(VU mantissas) {
  return hn::Sub(hn::BitCast(d, hn::Or(mantissas, hn::Set(du, kOneBits | kHalfDraw))),
                 hn::Set(d, 1.0F));
}

/// `level_bits` have the level from bit 17 on and 0 in bit 16, where the sign goes.
HWY_INLINE VU CodesOf(VU level_bits, V q) {
  return hn::Or(level_bits, hn::ShiftRight<15>(hn::BitCast(du, q)));
}
/// The same where a mask leaves the level of `level_bits`.
HWY_INLINE VU CodesOf(VU level_bits, VU mask, V q) {
  return hn::OrAnd(hn::ShiftRight<15>(hn::BitCast(du, q)), level_bits, mask);
}

HWY_INLINE V WithSign(V magnitude, VU code) {
  return hn::Xor(magnitude, hn::BitCast(d, hn::ShiftLeft<31>(code)));
}

/// Toward zero, of numbers that integers have; hn::ConvertTo looks at the others as well.
HWY_INLINE hn::Vec<DI> Truncate(V v) {
#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3
  return hn::Vec<DI>{_mm512_cvttps_epi32(v.raw)};
#elif HWY_TARGET == HWY_AVX2
  return hn::Vec<DI>{_mm256_cvttps_epi32(v.raw)};
#else
  return hn::ConvertTo(di, v);
#endif
}
#endif

inline float WithSign(float magnitude, std::uint32_t code) {
  return (code & 1) != 0 ? -magnitude : magnitude;
}

/// Levels at multiples of a step. kFew: at most 127 of them.
template <bool kFew>
struct Linear {
  Linear(const DitherFormat& format, const DitherScale& scale)
      : inverse(scale.inverse), unit(scale.unit), limit(static_cast<float>(format.levels())) {}

  std::uint32_t Level(float magnitude, std::uint32_t u) const {
    const float y = std::min(magnitude * inverse, limit);
    const auto k = static_cast<std::uint32_t>(y);
    return y - static_cast<float>(k) > DrawBound(u) ? k + 1 : k;
  }
  float Magnitude(std::uint32_t level) const { return static_cast<float>(level) * unit; }

#if GRADWIRE_VECTORS
  template <bool kLow>
  HWY_INLINE VU Codes(V q, VU mixes) const {
    V y = hn::Mul(hn::Abs(q), hn::Set(d, inverse));
    if constexpr (kFew) {
      // |q| is at most the norm, so y is above the limit by one unit of its last place at most, or
      // by 2^-22: not more than the least U, 2^-17. It need not be clamped.
      // In units of 2^-17, of which y has fewer than 2^24, U is c = 2 u + 1; y rounds up if what is
      // above its whole steps is more than c, and so if it is when y is rounded up to whole units.
      // That is one more than the float before y, rounded down; the exponent multiplies by 2^17. (0
      // becomes a small number, which is 1 unit and not more than c.)
      const VU before = hn::Add(hn::BitCast(du, y), hn::Set(du, times_units));
      const VU units = hn::BitCast(du, Truncate(hn::BitCast(d, before)));
      // c - 2^17: what units + 1 reach the next step with, if they are more than c.
      const VU draws = hn::Or(RoughDraws<kLow, 1>(mixes), hn::Set(du, all_but_draw));
      return CodesOf(hn::Sub(units, draws), hn::Set(du, level_mask), q);
    } else {
      y = hn::Min(y, hn::Set(d, limit));
      const V k = hn::Floor(y);
      const M up = hn::Gt(hn::Sub(y, k), DrawBounds(MantissaDraws<kLow>(mixes)));
      const V level = hn::Add(k, hn::IfThenElseZero(up, hn::Set(d, 1.0F)));
      // Beside 2^22 the last bit of a float is worth a half.
      const VU shifted = hn::BitCast(du, hn::Add(level, hn::Set(d, 0x1.0p22F)));
      return CodesOf(hn::ShiftLeft<16>(shifted), q);
    }
  }
  HWY_INLINE V Magnitude(VU level) const {
    return hn::Mul(hn::ConvertTo(d, hn::BitCast(di, level)), hn::Set(d, unit));
  }
#endif

  float inverse;
  float unit;
  float limit;
#if GRADWIRE_VECTORS
  std::uint32_t times_units = Hidden((17U << 23) - 1);
  std::uint32_t all_but_draw = Hidden(0xfffe0001);
  std::uint32_t level_mask = Hidden(0xfffe0000);
#endif
};

/// Levels at powers of two: s is the norm, each one below it half as much, 0 is 0.
struct Natural {
  Natural(const DitherFormat& format, const DitherScale& scale)
      : inverse(scale.inverse),
        unit(scale.unit),
        bias(127 - format.levels()),
        lowest(std::bit_cast<float>((bias + 1) << 23)),
        to_lowest(std::bit_cast<float>((253 - bias) << 23)) {}

  std::uint32_t Level(float magnitude, std::uint32_t u) const {
    const float t = std::min(magnitude * inverse, 1.0F);
    if (t < lowest) return t * to_lowest > DrawBound(u) ? 1 : 0;
    return ((std::bit_cast<std::uint32_t>(t) + kRoundUp - (u << 7)) >> 23) - bias;
  }
  float Magnitude(std::uint32_t level) const {
    return level == 0 ? 0.0F : unit * std::bit_cast<float>((level + bias) << 23);
  }

#if GRADWIRE_VECTORS
  template <bool kLow>
  HWY_INLINE VU Codes(V q, VU mixes) const {
    const V t = hn::Min(hn::Mul(hn::Abs(q), hn::Set(d, inverse)), hn::Set(d, 1.0F));
    const VU draws = MantissaDraws<kLow>(mixes);
    const VU rounded = hn::Sub(hn::Add(hn::BitCast(du, t), hn::Set(du, kRoundUp)), draws);
    const VU level = hn::Sub(hn::ShiftRight<23>(rounded), hn::Set(du, bias));
    const M up = hn::Gt(hn::Mul(t, hn::Set(d, to_lowest)), DrawBounds(draws));
    const VU below = hn::IfThenElseZero(hn::RebindMask(du, up), hn::Set(du, 1));
    const auto is_below = hn::RebindMask(du, hn::Lt(t, hn::Set(d, lowest)));
    return CodesOf(hn::ShiftLeft<17>(hn::IfThenElse(is_below, below, level)), q);
  }
  HWY_INLINE V Magnitude(VU level) const {
    const VU power = hn::ShiftLeft<23>(hn::Add(level, hn::Set(du, bias)));
    const V value = hn::Mul(hn::BitCast(d, power), hn::Set(d, unit));
    return hn::IfThenZeroElse(hn::RebindMask(d, hn::Eq(level, hn::Zero(du))), value);
  }
#endif

  // The mantissa m of t is above that of 1 + U <=> this and m, less the draw, carry into the
  // exponent.
  static constexpr std::uint32_t kRoundUp = 0x7fffff - kHalfDraw;

  float inverse;
  float unit;
  std::uint32_t bias;  // level + bias is the exponent's field
  float lowest;        // 2^(1-s)
  float to_lowest;     // 2^(s-1)
};

// ---------------------------------------------------------------------------------------- packing

/// Eight codes are `bits` bytes, whatever the bits.
constexpr std::size_t kCodesTogether = 8;

#if GRADWIRE_VECTORS
/// Vectors whose codes are packed together.
constexpr std::size_t kPacked = 4;
/// Bytes behind its codes that Packer may write to.
constexpr std::size_t kPackerSlack = 16;

/// Packs the codes of four vectors. Codes are brought together by twos: two become one of twice
/// the width in a lane of twice the width.
template <bool kWide>
class Packer {
  using D64 = hn::Repartition<std::uint64_t, D>;
  using D16s = hn::Repartition<std::uint16_t, D>;
  using D8 = hn::Repartition<std::uint8_t, D>;
  using V8 = hn::Vec<D8>;
  using V16 = hn::Vec<D16s>;

 public:
  explicit Packer(unsigned bits) : bits_(bits) {
    // Where the quads of codes are that belong to each lane; see InOrder.
    constexpr std::size_t kBlocks = N / 4;
    constexpr std::size_t kParts = kWide ? 2 : 4;  // quads of a block of 16 bytes
    constexpr std::size_t kLanesOfPart = 4 / kParts;
    for (std::size_t lane = 0; lane < N; ++lane) {
      const std::size_t part = lane / kLanesOfPart;
      const std::size_t from = part % kBlocks * kParts + part / kBlocks;
      lanes_[lane] = static_cast<std::uint32_t>(from * kLanesOfPart + lane % kLanesOfPart);
    }
    for (std::size_t byte = 0; byte < 4 * N; ++byte) {
      const std::size_t at = byte % 16;  // what is behind two words is not used
      together_[byte] = static_cast<std::uint8_t>((at < bits ? at : at - bits + 8) % 16);
    }
  }

  /// Codes on their way: packing takes long enough that the next ones can be made meanwhile.
  struct Waiting {
    V16 parts[kWide ? 2 : 1];
  };

  HWY_INLINE Waiting Mix(const VU* codes) const {
    const V16 low = Pairs(codes[0], codes[1]);
    const V16 high = Pairs(codes[2], codes[3]);
    if constexpr (kWide) return {{low, high}};
    return {{hn::Or(low, hn::ShiftLeft<8>(high))}};
  }
  HWY_INLINE void Store(const Waiting& mixed, std::byte* to) const {
    StorePart(InOrder(mixed.parts[0]), to);
    if constexpr (kWide) StorePart(InOrder(mixed.parts[1]), to + N * bits_ / 4);
  }

 private:
  /// Lanes with a code of each of two vectors, 16 bits apart.
  HWY_INLINE V16 Pairs(VU first, VU second) const {
    const D16s d16s;
    return hn::OddEven(hn::BitCast(d16s, second), hn::BitCast(d16s, hn::ShiftRight<16>(first)));
  }
  /// Lanes with one code of each vector -> the vectors' codes one after the other.
  HWY_INLINE V8 InOrder(V16 mixed) const {
    const D8 d8;
    // Narrow lanes have the codes of vectors 0, 2, 1, 3.
    alignas(16) static constexpr std::uint8_t kOrder8[16] = {0, 4, 8, 12, 2, 6, 10, 14,
                                                             1, 5, 9, 13, 3, 7, 11, 15};
    alignas(16) static constexpr std::uint8_t kOrder16[16] = {0, 1, 4, 5, 8,  9,  12, 13,
                                                              2, 3, 6, 7, 10, 11, 14, 15};
    const V8 order = hn::LoadDup128(d8, kWide ? kOrder16 : kOrder8);
    V8 bytes = hn::TableLookupBytes(hn::BitCast(d8, mixed), order);
    if constexpr (N > 4) {
      const auto lanes = hn::SetTableIndices(du, lanes_);
      bytes = hn::BitCast(d8, hn::TableLookupLanes(hn::BitCast(du, bytes), lanes));
    }
    return bytes;
  }

  /// Codes of 16 bits are in order already, narrower ones are brought together.
  HWY_INLINE void StorePart(V8 codes, std::byte* to) const {
    if (bits_ == (kWide ? 16 : 8)) {
      hn::StoreU(codes, D8(), reinterpret_cast<std::uint8_t*>(to));
    } else if constexpr (kWide) {
      StoreWide(hn::BitCast(du, codes), to);
    } else {
      StoreNarrow(codes, to);
    }
  }

  HWY_INLINE void StoreWide(VU pairs, std::byte* to) const {
    const D64 d64;
    const VU quads = hn::Or(hn::And(pairs, hn::Set(du, 0xffff)),
                            hn::Shl(hn::ShiftRight<16>(pairs), hn::Set(du, bits_)));
    const auto halves = hn::BitCast(d64, quads);
    const auto words = hn::Or(hn::And(halves, hn::Set(d64, 0xffffffff)),
                              hn::Shl(hn::ShiftRight<32>(halves), hn::Set(d64, 2 * bits_)));
    HWY_ALIGN std::uint64_t stored[N / 2];
    hn::Store(words, d64, stored);
    for (std::size_t w = 0; w < N / 2; w += 2) {
      StoreLe(to, stored[w] | stored[w + 1] << (4 * bits_));
      StoreLe(to + 8, stored[w + 1] >> (64 - 4 * bits_));
      to += bits_;
    }
  }

  /// Two codes are in a lane of 16 bits, then four in one of 32 and eight in one of 64: the lower
  /// half of a lane is shifted up to the higher one, and both down.
  HWY_INLINE void StoreNarrow(V8 codes, std::byte* to) const {
    const D16s d16s;
    const D64 d64;
    const auto gaps = static_cast<int>(8 - bits_);
    const V16 pairs = MergeBytes(codes);
    const auto up16 = hn::BitCast(d16s, hn::Set(du, 1U << 16 | 1U << (2 * gaps)));
    const VU quads = hn::ShiftRightSame(hn::BitCast(du, hn::Mul(pairs, up16)), 2 * gaps);
    const VU up32 = hn::BitCast(du, hn::Set(d64, static_cast<std::uint64_t>(4 * gaps)));
    const auto words = hn::ShiftRightSame(hn::BitCast(d64, hn::Shl(quads, up32)), 4 * gaps);
    // Each 16 bytes hold two words of `bits` bytes.
    const V8 bytes = hn::TableLookupBytes(hn::BitCast(D8(), words), hn::Load(D8(), together_));
    StoreBlocks(bytes, to);
  }

  /// Lanes of a code and, 8 bits above it, another one -> the latter right above the former.
  HWY_INLINE V16 MergeBytes(V8 codes) const {
    const D16s d16s;
#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX2
    const auto weights =
        hn::BitCast(D8(), hn::Set(d16s, static_cast<std::uint16_t>(1U | 256U << bits_)));
#if HWY_TARGET <= HWY_AVX3
    return V16{_mm512_maddubs_epi16(weights.raw, codes.raw)};
#else
    return V16{_mm256_maddubs_epi16(weights.raw, codes.raw)};
#endif
#else
    const auto both = hn::BitCast(d16s, codes);
    const auto too_far = hn::Set(d16s, static_cast<std::uint16_t>(256U - (1U << bits_)));
    return hn::Sub(both, hn::Mul(hn::ShiftRight<8>(both), too_far));
#endif
  }

  /// Writes 2 * bits bytes of each 16.
  HWY_INLINE void StoreBlocks(V8 v, std::byte* to) const {
    const auto store = [&](auto block, std::size_t index) HWY_ATTR {
      hn::StoreU(block, hn::Full128<std::uint8_t>(),
                 reinterpret_cast<std::uint8_t*>(to + 2 * bits_ * index));
    };
    const auto store_two = [&](auto blocks, std::size_t index) HWY_ATTR {
      store(hn::LowerHalf(blocks), index);
      store(hn::UpperHalf(hn::Full128<std::uint8_t>(), blocks), index + 1);
    };
    if constexpr (N == 4) {
      store(v, 0);
    } else if constexpr (N == 8) {
      store_two(v, 0);
    } else {
      store_two(hn::LowerHalf(v), 0);
      store_two(hn::UpperHalf(hn::Half<D8>(), v), 2);
    }
  }

  const unsigned bits_;
  HWY_ALIGN std::uint32_t lanes_[N];
  HWY_ALIGN std::uint8_t together_[4 * N];
};

/// Takes codes out of their bytes. A code lies in 4 bytes from the one that it begins in: these are
/// brought to its lane, shifted and masked.
template <bool kWide>
class Unpacker {
  using D8 = hn::Repartition<std::uint8_t, D>;
  using V8 = hn::Vec<D8>;

 public:
  /// Elements of a step: whole bytes.
  static constexpr std::size_t kStep = std::max(kCodesTogether, N);
  static constexpr std::size_t kVectors = kStep / N;
  /// Bytes that a step may read from.
  static constexpr std::size_t kReads = kWide ? 40 : 16;

  explicit Unpacker(unsigned bits) : bits_(bits), mask_(hn::Set(du, (1U << bits) - 1)) {
    for (std::size_t v = 0; v < kVectors; ++v) {
      const VU element = hn::Add(hn::Iota(du, 0), hn::Set(du, static_cast<std::uint32_t>(v * N)));
      const VU width = hn::Set(du, bits);
      VU begin = hn::Mul(element, width);
      if constexpr (kWide) {  // of each four lanes by themselves, which have bytes of their own
        const VU own = hn::Mul(hn::And(element, hn::Set(du, 3)), width);
        begin = hn::Add(own, hn::And(hn::Sub(begin, own), hn::Set(du, 7)));
      }
      const VU byte = hn::ShiftRight<3>(begin);
      const VU bytes = hn::Add(hn::Mul(byte, hn::Set(du, 0x01010101)), hn::Set(du, 0x03020100));
      // A byte behind the 16 is never needed.
      index_[v] = hn::BitCast(D8(), hn::And(bytes, hn::Set(du, 0x0f0f0f0f)));
      shift_[v] = hn::And(begin, hn::Set(du, 7));
    }
  }

  /// The codes of vector v of the step that begins at `from`.
  HWY_INLINE VU Codes(const std::byte* from, std::size_t v) const {
    const V8 bytes = kWide ? LoadQuads(from, v) : LoadOnce(from);
    const VU windows = hn::BitCast(du, hn::TableLookupBytes(bytes, index_[v]));
    return hn::And(hn::Shr(windows, shift_[v]), mask_);
  }

 private:
  HWY_INLINE V8 LoadOnce(const std::byte* from) const {
    return hn::LoadDup128(D8(), reinterpret_cast<const std::uint8_t*>(from));
  }
  /// The 16 bytes from those on that each four lanes begin in.
  HWY_INLINE V8 LoadQuads(const std::byte* from, std::size_t v) const {
    const auto quad = [&](std::size_t q) HWY_ATTR {
      const auto* bytes = reinterpret_cast<const std::uint8_t*>(from + q * bits_ / 2);
      return hn::LoadU(hn::Full128<std::uint8_t>(), bytes);
    };
    const D8 d8;
    if constexpr (N == 4) {
      return quad(v);
    } else if constexpr (N == 8) {
      return hn::Combine(d8, quad(1), quad(0));
    } else {
      const hn::Half<D8> half;
      return hn::Combine(d8, hn::Combine(half, quad(3), quad(2)),
                         hn::Combine(half, quad(1), quad(0)));
    }
  }

  const unsigned bits_;
  const VU mask_;
  V8 index_[kVectors];
  VU shift_[kVectors];
};
#endif

/// The code of element i.
inline std::uint32_t CodeAt(unsigned bits, const std::byte* bytes, std::size_t i) {
  const std::size_t begin = i * bits;
  const std::size_t end = begin + bits;
  std::uint32_t window = 0;
  for (std::size_t byte = begin / 8; byte * 8 < end; ++byte) {
    window |= std::to_integer<std::uint32_t>(bytes[byte]) << (8 * (byte - begin / 8));
  }
  return window >> (begin % 8) & ((1U << bits) - 1);
}

// ------------------------------------------------------------------------------- encode and decode

template <typename Levels, bool kFeedback, bool kWide>
void EncodeAs(const Levels& levels, unsigned bits, const float* q, float* left, std::size_t first,
              std::size_t count, const DrawKey& key, MutableBytes bytes) {
  std::size_t i = 0;
#if GRADWIRE_VECTORS
  // Whole groups of draws, and whole groups of packed vectors.
  constexpr std::size_t kStep = std::max(kDrawGroup, kPacked * N);
  constexpr std::size_t kVectors = kStep / N;
  constexpr std::size_t kWords = kVectors / 2;
  constexpr std::size_t kHalfGroup = kDrawGroup / 2 / N;  // vectors that take the low halves
  const Packer<kWide> packer(bits);
  const DrawVectors draw_vectors(key);
  const VU next = hn::Set(du, Hidden(kDrawStep * static_cast<std::uint32_t>(kStep / 2)));
  VU products[kWords];
  for (std::size_t w = 0; w < kWords; ++w) {
    products[w] = DrawProducts(static_cast<std::uint32_t>(first / 2 + w * N), key);
  }
  VU mixes[kWords];
  const auto draw = [&]() HWY_ATTR {
    for (std::size_t w = 0; w < kWords; ++w) {
      mixes[w] = DrawMixes(products[w], draw_vectors);
      products[w] = hn::Add(products[w], next);
    }
  };
  draw();
  typename Packer<kWide>::Waiting waiting;
  std::byte* to = nullptr;  // where they go
  for (; i + kStep <= count && (i + kStep) * bits / 8 + kPackerSlack <= bytes.size(); i += kStep) {
    VU codes[kVectors];
    const auto leave = [&](V value, std::size_t v) HWY_ATTR {
      if constexpr (kFeedback) {
        const V magnitude = levels.Magnitude(hn::ShiftRight<17>(codes[v]));
        hn::StoreU(hn::Sub(value, hn::CopySignToAbs(magnitude, value)), d, left + i + v * N);
      }
    };
    for (std::size_t w = 0; w < kWords; ++w) {
      const std::size_t low = w / kHalfGroup * 2 * kHalfGroup + w % kHalfGroup;
      const std::size_t high = low + kHalfGroup;
      const V low_values = hn::LoadU(d, q + i + low * N);
      const V high_values = hn::LoadU(d, q + i + high * N);
      codes[low] = levels.template Codes<true>(low_values, mixes[w]);
      codes[high] = levels.template Codes<false>(high_values, mixes[w]);
      leave(low_values, low);
      leave(high_values, high);
    }
    draw();
    for (std::size_t v = 0; v < kVectors; v += kPacked) {
      if (to != nullptr) packer.Store(waiting, to);
      waiting = packer.Mix(codes + v);
      to = bytes.data() + (i + v * N) * bits / 8;
    }
  }
  if (to != nullptr) packer.Store(waiting, to);
#endif
  for (; i < count; i += kCodesTogether) {
    const std::size_t together = std::min(kCodesTogether, count - i);
    std::uint64_t words[2] = {};
    for (std::size_t j = 0; j < together; ++j) {
      const float value = q[i + j];
      const std::uint32_t level = levels.Level(std::fabs(value), Draw16(first + i + j, key));
      const std::uint64_t code = level << 1 | (std::signbit(value) ? 1U : 0U);
      if constexpr (kFeedback) {
        left[i + j] = value - WithSign(levels.Magnitude(level), static_cast<std::uint32_t>(code));
      }
      const std::size_t at = j * bits;
      words[at / 64] |= code << (at % 64);
      if (at % 64 + bits > 64) words[1] |= code >> (64 - at);
    }
    std::memcpy(bytes.data() + i * bits / 8, words, (together * bits + 7) / 8);
  }
}

template <typename Levels, bool kWide>
void EncodeChoose(const DitherFormat& format, const DitherScale& scale, const float* q, float* left,
                  std::size_t first, std::size_t count, const DrawKey& key, MutableBytes bytes) {
  const Levels levels(format, scale);
  return left == nullptr ? EncodeAs<Levels, false, kWide>(levels, format.bits, q, left, first,
                                                          count, key, bytes)
                         : EncodeAs<Levels, true, kWide>(levels, format.bits, q, left, first, count,
                                                         key, bytes);
}

void EncodeDither(const DitherFormat& format, const DitherScale& scale, const float* q, float* left,
                  std::size_t first, std::size_t count, const DrawKey& key, MutableBytes bytes) {
  const bool wide = format.bits > 8;
  const auto encode =
      format.natural
          ? (wide ? EncodeChoose<Natural, true> : EncodeChoose<Natural, false>)
          : (wide ? EncodeChoose<Linear<false>, true> : EncodeChoose<Linear<true>, false>);
  encode(format, scale, q, left, first, count, key, bytes);
}

template <typename Levels, bool kAdd, bool kWide>
void DecodeAs(const Levels& levels, unsigned bits, ByteView bytes, std::size_t count,
              float* HWY_RESTRICT out) {
  std::size_t i = 0;
#if GRADWIRE_VECTORS
  const Unpacker<kWide> unpacker(bits);
  constexpr std::size_t kStep = Unpacker<kWide>::kStep;
  for (; i + kStep <= count && i * bits / 8 + Unpacker<kWide>::kReads <= bytes.size(); i += kStep) {
    for (std::size_t v = 0; v < Unpacker<kWide>::kVectors; ++v) {
      const VU code = unpacker.Codes(bytes.data() + i * bits / 8, v);
      V value = WithSign(levels.Magnitude(hn::ShiftRight<1>(code)), code);
      float* const to = out + i + v * N;
      if constexpr (kAdd) value = hn::Add(hn::LoadU(d, to), value);
      hn::StoreU(value, d, to);
    }
  }
#endif
  for (; i < count; ++i) {
    const std::uint32_t code = CodeAt(bits, bytes.data(), i);
    const float value = WithSign(levels.Magnitude(code >> 1), code);
    out[i] = kAdd ? out[i] + value : value;
  }
}

template <bool kAdd>
void DecodeChoose(const DitherFormat& format, float unit, ByteView bytes, std::size_t count,
                  float* out) {
  const bool wide = format.bits > 8;
  const DitherScale scale{0, unit};
  if (format.natural) {
    const auto decode = wide ? DecodeAs<Natural, kAdd, true> : DecodeAs<Natural, kAdd, false>;
    return decode(Natural(format, scale), format.bits, bytes, count, out);
  }
  const auto decode =
      wide ? DecodeAs<Linear<false>, kAdd, true> : DecodeAs<Linear<false>, kAdd, false>;
  decode(Linear<false>(format, scale), format.bits, bytes, count, out);
}

void DecodeDither(const DitherFormat& format, float unit, ByteView bytes, std::size_t count,
                  float* out) {
  DecodeChoose<false>(format, unit, bytes, count, out);
}

void DecodeAddDither(const DitherFormat& format, float unit, ByteView bytes, std::size_t count,
                     float* out) {
  DecodeChoose<true>(format, unit, bytes, count, out);
}

template <bool kWide>
std::uint32_t LargestLevelAs(unsigned bits, ByteView bytes, std::size_t count) {
  std::uint32_t largest = 0;
  std::size_t i = 0;
#if GRADWIRE_VECTORS
  const Unpacker<kWide> unpacker(bits);
  constexpr std::size_t kStep = Unpacker<kWide>::kStep;
  auto all = hn::Zero(di);
  for (; i + kStep <= count && i * bits / 8 + Unpacker<kWide>::kReads <= bytes.size(); i += kStep) {
    for (std::size_t v = 0; v < Unpacker<kWide>::kVectors; ++v) {
      all = hn::Max(all, hn::BitCast(di, unpacker.Codes(bytes.data() + i * bits / 8, v)));
    }
  }
  largest = static_cast<std::uint32_t>(hn::GetLane(hn::MaxOfLanes(di, all)));
#endif
  for (; i < count; ++i) largest = std::max(largest, CodeAt(bits, bytes.data(), i));
  return largest >> 1;
}

std::uint32_t LargestDitherLevel(unsigned bits, ByteView bytes, std::size_t count) {
  return bits > 8 ? LargestLevelAs<true>(bits, bytes, count)
                  : LargestLevelAs<false>(bits, bytes, count);
}

}  // namespace gradwire::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace gradwire::kernels {

HWY_EXPORT(DitherLargest);
HWY_EXPORT(DitherSquares);
HWY_EXPORT(EncodeDither);
HWY_EXPORT(DecodeDither);
HWY_EXPORT(DecodeAddDither);
HWY_EXPORT(LargestDitherLevel);

std::uint32_t DitherLargest(const float* input, float* residual, float alpha, std::size_t count) {
  return HWY_DYNAMIC_DISPATCH(DitherLargest)(input, residual, alpha, count);
}

double DitherSquares(const float* input, float* residual, float alpha, std::size_t count) {
  return HWY_DYNAMIC_DISPATCH(DitherSquares)(input, residual, alpha, count);
}

void EncodeDither(const DitherFormat& format, const DitherScale& scale, const float* q, float* left,
                  std::size_t first, std::size_t count, const DrawKey& key, MutableBytes bytes) {
  HWY_DYNAMIC_DISPATCH(EncodeDither)(format, scale, q, left, first, count, key, bytes);
}

void DecodeDither(const DitherFormat& format, float unit, ByteView bytes, std::size_t count,
                  float* out) {
  HWY_DYNAMIC_DISPATCH(DecodeDither)(format, unit, bytes, count, out);
}

void DecodeAddDither(const DitherFormat& format, float unit, ByteView bytes, std::size_t count,
                     float* accumulator) {
  HWY_DYNAMIC_DISPATCH(DecodeAddDither)(format, unit, bytes, count, accumulator);
}

std::uint32_t LargestDitherLevel(unsigned bits, ByteView bytes, std::size_t count) {
  return HWY_DYNAMIC_DISPATCH(LargestDitherLevel)(bits, bytes, count);
}

}  // namespace gradwire::kernels
#endif  // HWY_ONCE
