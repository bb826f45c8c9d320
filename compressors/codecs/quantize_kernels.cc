#include "compressors/codecs/quantize_kernels.h"

// Compiled once for each target; see kernels.cc for why these are left out.
#ifndef HWY_DISABLED_TARGETS
#define HWY_DISABLED_TARGETS (HWY_SSE4 | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128)
#endif
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "compressors/codecs/quantize_kernels.cc"
#include <hwy/foreach_target.h>
//
#include <hwy/cache_control.h>
#include <hwy/highway.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>

#include "common/base/bytes.h"
#include "compressors/codecs/vectors-inl.h"

HWY_BEFORE_NAMESPACE();
namespace gradwire::kernels::HWY_NAMESPACE {

constexpr std::uint32_t kMagnitude = 0x7fffffff;

inline std::uint32_t MagnitudeBits(float value) {
  return std::bit_cast<std::uint32_t>(value) & kMagnitude;
}

/// What q has beside the input. Without a learning rate or a loss scale alpha is 1, and not to
/// multiply by it gives the same bits.
enum class Kept { kNothing, kAsIs, kWeighted };

template <Kept kKept>
float LoadQ(const float* input, const float* residual, float alpha, std::size_t i) {
  if constexpr (kKept == Kept::kNothing) return input[i];
  return input[i] + (kKept == Kept::kAsIs ? residual[i] : alpha * residual[i]);
}

/// Calls body.operator()<kKept>() with what a residual (or null) and alpha make it.
template <typename Body>
auto WithKept(const float* residual, float alpha, const Body& body) {
  if (residual == nullptr) return body.template operator()<Kept::kNothing>();
  if (alpha == 1) return body.template operator()<Kept::kAsIs>();
  return body.template operator()<Kept::kWeighted>();
}

#if GRADWIRE_VECTORS
using D8 = hn::Rebind<std::int8_t, D>;
using VI = hn::Vec<DI>;

template <Kept kKept>
HWY_INLINE V LoadQ(const float* input, const float* residual, V weight, std::size_t at) {
  const V q = hn::LoadU(d, input + at);
  if constexpr (kKept == Kept::kNothing) return q;
  const V e = hn::LoadU(d, residual + at);
  return hn::Add(q, kKept == Kept::kAsIs ? e : hn::Mul(weight, e));
}

HWY_INLINE VI MagnitudeBits(V q) {
  return hn::And(hn::BitCast(di, q), hn::Set(di, static_cast<std::int32_t>(kMagnitude)));
}

/// Vectors whose elements become bytes together, so that a whole vector of bytes is stored.
constexpr std::size_t kPacked = 4;

/// Lanes in which each 16 bytes hold four elements of each of four vectors -> the vectors' elements
/// one after the other.
HWY_INLINE VU FromBlocks(VU blocks) {
  if constexpr (N == 4) return blocks;
  HWY_ALIGN std::uint32_t lanes[N];
  for (std::size_t lane = 0; lane < N; ++lane) {
    lanes[lane] = static_cast<std::uint32_t>(lane % (N / 4) * 4 + lane / (N / 4));
  }
  return hn::TableLookupLanes(blocks, hn::SetTableIndices(du, lanes));
}

/// Writes the lowest byte of each lane of four vectors, in order.
HWY_INLINE void StoreLowBytes(const VU (&v)[kPacked], std::byte* to) {
  const hn::Repartition<std::uint16_t, D> dw;
  const hn::Repartition<std::uint8_t, D> db;
  const auto words = [dw](VU even, VU odd) HWY_ATTR {
    return hn::OddEven(hn::BitCast(dw, hn::ShiftLeft<16>(odd)), hn::BitCast(dw, even));
  };
  // Each lane then has one byte of each vector: 0, 2, 1, 3.
  const auto low = hn::And(words(v[0], v[1]), hn::Set(dw, 0x00ff));
  const auto high = hn::ShiftLeft<8>(words(v[2], v[3]));
  alignas(16) static constexpr std::uint8_t kOrder[16] = {0, 4, 8, 12, 2, 6, 10, 14,
                                                          1, 5, 9, 13, 3, 7, 11, 15};
  const auto order = hn::LoadDup128(db, kOrder);
  auto bytes = hn::TableLookupBytes(hn::BitCast(db, hn::Or(low, high)), order);
  bytes = hn::BitCast(db, FromBlocks(hn::BitCast(du, bytes)));
  hn::StoreU(bytes, db, reinterpret_cast<std::uint8_t*>(to));
}

using DW = hn::Repartition<std::uint16_t, D>;

/// The sign bit of each lane of four vectors, in order, as the top bit of a byte; the other bits
/// may be anything.
HWY_INLINE hn::Vec<DW> SignBytes(const V (&v)[kPacked]) {
  const DW dw;
  const hn::RepartitionToNarrow<DI> dn;
  const hn::Repartition<std::int8_t, D> db;
  const auto low = hn::ReorderDemote2To(dn, hn::BitCast(di, v[0]), hn::BitCast(di, v[1]));
  const auto high = hn::ReorderDemote2To(dn, hn::BitCast(di, v[2]), hn::BitCast(di, v[3]));
#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3
  const hn::Vec<decltype(db)> bytes{_mm512_packs_epi16(low.raw, high.raw)};
#elif HWY_TARGET == HWY_AVX2
  const hn::Vec<decltype(db)> bytes{_mm256_packs_epi16(low.raw, high.raw)};
#else
  const hn::Half<decltype(db)> half;
  const auto bytes = hn::Combine(db, hn::DemoteTo(half, high), hn::DemoteTo(half, low));
#endif
  return hn::BitCast(dw, FromBlocks(hn::BitCast(du, bytes)));
}

/// Elements that are drawn for and stored together: one group of draws or more.
constexpr std::size_t kDrawn = std::max(kDrawGroup, kPacked* N);

/// u(i) of kDrawn elements after the other.
class Draws {
 public:
  static constexpr std::size_t kVectors = kDrawn / N;

  HWY_INLINE Draws(std::size_t first, const DrawKey& key) : with_(key) {
    for (std::size_t v = 0; v < kWords; ++v) {
      products_[v] = DrawProducts(static_cast<std::uint32_t>(first / 2 + v * N), key);
    }
  }

  HWY_INLINE void Next(VU (&draws)[kVectors]) {
    constexpr std::size_t kHalf = kDrawGroup / 2 / N;  // vectors of a group's low halves
    for (std::size_t v = 0; v < kWords; ++v) {
      const VU mixes = DrawMixes(products_[v], with_);
      const VU high = hn::ShiftRight<16>(mixes);
      products_[v] = hn::Add(products_[v], hn::Set(du, kDrawStep * (kDrawn / 2)));
      const std::size_t at = v / kHalf * 2 * kHalf + v % kHalf;
      draws[at] = hn::And(hn::Xor(mixes, high), hn::Set(du, 0xffff));
      draws[at + kHalf] = high;
    }
  }

 private:
  static constexpr std::size_t kWords = kVectors / 2;
  const DrawVectors with_;
  VU products_[kWords];
};

/// U(i) of u(i): no step of it rounds.
HWY_INLINE V DrawBounds(VU draws) {
  const V u = hn::ConvertTo(d, hn::BitCast(di, draws));
  return hn::MulAdd(u, hn::Set(d, 0x1.0p-16F), hn::Set(d, 0x1.0p-17F));
}
#endif

// ------------------------------------------------------------------------------------- magnitudes

template <Kept kKept>
std::uint32_t LargestMagnitudeAs(const float* HWY_RESTRICT input,
                                 const float* HWY_RESTRICT residual, float alpha,
                                 std::size_t count) {
  std::uint32_t largest = 0;
  std::size_t i = 0;
#if GRADWIRE_VECTORS
  // Bits of absolute values are ordered like the values; NaN comes after infinity.
  const V weight = hn::Set(d, alpha);
  constexpr std::size_t kUnrolled = 4;
  VI all = hn::Zero(di);
  for (; i + kUnrolled * N <= count; i += kUnrolled * N) {
    for (std::size_t v = 0; v < kUnrolled; ++v) {
      all = hn::Max(all, MagnitudeBits(LoadQ<kKept>(input, residual, weight, i + v * N)));
    }
  }
  largest = static_cast<std::uint32_t>(hn::GetLane(hn::MaxOfLanes(di, all)));
#endif
  for (; i < count; ++i) {
    largest = std::max(largest, MagnitudeBits(LoadQ<kKept>(input, residual, alpha, i)));
  }
  return largest;
}

std::uint32_t LargestMagnitude(const float* input, const float* residual, float alpha,
                               std::size_t count) {
  return WithKept(residual, alpha, [=]<Kept kKept>() {
    return LargestMagnitudeAs<kKept>(input, residual, alpha, count);
  });
}

// ------------------------------------------------------------------------------------------- int8

// Adding this to a number of up to 2^22 rounds it to nearest even, and the lowest byte is that of
// the rounded number; subtracting it again gives the number.
constexpr float kRounder = 0x1.8p23F;

constexpr std::size_t kLine = 16;  // floats of a cache line

template <Kept kKept, bool kStochastic>
void EncodeInt8As(const float* HWY_RESTRICT input, float* HWY_RESTRICT residual, float alpha,
                  float scale, float inverse, const DrawKey& key, std::size_t first,
                  std::size_t count, std::byte* HWY_RESTRICT levels) {
  constexpr bool kFeedback = kKept != Kept::kNothing;
  std::size_t i = 0;
#if GRADWIRE_VECTORS
  const V weight = hn::Set(d, alpha);
  const V scales = hn::Set(d, scale);
  const V inverses = hn::Set(d, inverse);
  const V rounder = hn::Set(d, kRounder);
  const auto put = [&](V q, V rounded, std::size_t at) HWY_ATTR {
    if constexpr (kFeedback) {
      const V level = hn::Sub(rounded, rounder);
      hn::StoreU(hn::Sub(q, hn::Mul(level, scales)), d, residual + at);
    }
    return hn::BitCast(du, rounded);
  };
  VU packed[kPacked];
  if constexpr (kStochastic) {
    const V limit = hn::Set(d, 127.0F);
    Draws all_draws(first, key);
    for (; i + kDrawn <= count; i += kDrawn) {
      VU draws[Draws::kVectors];
      all_draws.Next(draws);
      for (std::size_t v = 0; v < Draws::kVectors; ++v) {
        const std::size_t at = i + v * N;
        const V q = LoadQ<kKept>(input, residual, weight, at);
        const V y = hn::Mul(q, inverses);
        const V floor = hn::Floor(y);
        const M up = hn::Gt(hn::Sub(y, floor), DrawBounds(draws[v]));
        const V level = hn::Add(floor, hn::IfThenElseZero(up, hn::Set(d, 1.0F)));
        const V clamped = hn::Max(hn::Min(level, limit), hn::Neg(limit));
        packed[v % kPacked] = put(q, hn::Add(clamped, rounder), at);
        if (v % kPacked == kPacked - 1) StoreLowBytes(packed, levels + i + (v + 1 - kPacked) * N);
      }
    }
  } else {
    // No clamp: |y| is at most 127 and a few units in the last place.
    for (; i + kPacked * N <= count; i += kPacked * N) {
      for (std::size_t v = 0; v < kPacked; ++v) {
        const std::size_t at = i + v * N;
        // The next block comes from memory while this one is in the first-level cache.
        if (at % kLine == 0) {
          hwy::Prefetch(input + at + count);
          if constexpr (kFeedback) hwy::Prefetch(residual + at + count);
        }
        const V q = LoadQ<kKept>(input, residual, weight, at);
        packed[v] = put(q, hn::Add(hn::Mul(q, inverses), rounder), at);
      }
      StoreLowBytes(packed, levels + i);
    }
  }
#endif
  for (; i < count; ++i) {
    const float q = LoadQ<kKept>(input, residual, alpha, i);
    const float y = q * inverse;
    float rounded = 0;
    if constexpr (kStochastic) {
      const float floor = std::floor(y);
      rounded = y - floor > DrawBound(Draw16(first + i, key)) ? floor + 1.0F : floor;
    } else {
      rounded = std::nearbyint(y);
    }
    const auto level = static_cast<std::int8_t>(std::clamp(rounded, -127.0F, 127.0F));
    levels[i] = static_cast<std::byte>(level);
    if constexpr (kFeedback) residual[i] = q - static_cast<float>(level) * scale;
  }
}

void EncodeInt8(const float* input, float* residual, float alpha, float scale, float inverse,
                const Int8Rounding& rounding, std::size_t first, std::size_t count,
                std::byte* levels) {
  WithKept(residual, alpha, [=, &rounding]<Kept kKept>() {
    const auto encode =
        rounding.stochastic ? EncodeInt8As<kKept, true> : EncodeInt8As<kKept, false>;
    encode(input, residual, alpha, scale, inverse, rounding.key, first, count, levels);
  });
}

template <bool kAdd>
void DecodeInt8As(const std::byte* HWY_RESTRICT levels, float scale, std::size_t count,
                  float* HWY_RESTRICT out) {
  std::size_t i = 0;
#if GRADWIRE_VECTORS
  const V scales = hn::Set(d, scale);
  for (; i + N <= count; i += N) {
    const VI level = hn::PromoteTo(di, LoadBytes(D8(), levels + i));
    V value = hn::Mul(hn::ConvertTo(d, level), scales);
    if constexpr (kAdd) value = hn::Add(hn::LoadU(d, out + i), value);
    hn::StoreU(value, d, out + i);
  }
#endif
  for (; i < count; ++i) {
    const float value = static_cast<float>(static_cast<std::int8_t>(levels[i])) * scale;
    out[i] = kAdd ? out[i] + value : value;
  }
}

void DecodeInt8(const std::byte* levels, float scale, std::size_t count, float* out) {
  DecodeInt8As<false>(levels, scale, count, out);
}

void DecodeAddInt8(const std::byte* levels, float scale, std::size_t count, float* out) {
  DecodeInt8As<true>(levels, scale, count, out);
}

// ---------------------------------------------------------------------------------------- natural

// Bits of the least power of two that is written, 2^-109 for c = 1, and what c is less than the
// exponent in a float.
constexpr std::uint32_t kNaturalExponents = 17;
constexpr std::uint32_t kNaturalLeast = (kNaturalExponents + 1) << 23;
constexpr std::uint32_t kNaturalLargest = 127;

/// A float's exponent rounded up where its fraction is above U: added to its bits, this carries
/// into the exponent then. (2 u + 1) / 2^17 is (u << 7) + 2^6 units of the last place.
constexpr std::uint32_t kNaturalCarry = 0x7fffff - 0x40;

inline std::uint32_t NaturalCode(float q, std::uint32_t u) {
  const std::uint32_t bits = MagnitudeBits(q);
  if (bits < kNaturalLeast) {
    return std::bit_cast<float>(bits) * 0x1.0p109F > DrawBound(u) ? 1 : 0;
  }
  const std::uint32_t exponent = (bits + (kNaturalCarry - (u << 7))) >> 23;
  return std::min(exponent - kNaturalExponents, kNaturalLargest);
}

/// The value of a code's bits placed where a float has them: the exponent is too small by 17, and
/// code 0 is zero.
inline float NaturalValue(std::uint32_t byte) {
  return std::bit_cast<float>((byte & 0x80) << 24 | (byte & 0x7f) << 23) * 0x1.0p17F;
}

#if GRADWIRE_VECTORS
HWY_INLINE VU NaturalCodes(V q, VU draws) {
  const VI bits = MagnitudeBits(q);
  const VU carry = hn::Xor(hn::ShiftLeft<7>(draws), hn::Set(du, kNaturalCarry));
  const VI exponent = hn::BitCast(di, hn::ShiftRight<23>(hn::Add(hn::BitCast(du, bits), carry)));
  // Zeros come out as 0; what is else below the least power of two is rare.
  VI code = hn::Max(hn::Sub(exponent, hn::Set(di, kNaturalExponents)), hn::Zero(di));
  code = hn::Min(code, hn::Set(di, kNaturalLargest));
  const auto small = hn::And(hn::Lt(bits, hn::Set(di, kNaturalLeast)), hn::Gt(bits, hn::Zero(di)));
  if (HWY_UNLIKELY(!hn::AllFalse(di, small))) {
    const V fraction = hn::Mul(hn::Abs(q), hn::Set(d, 0x1.0p109F));
    const auto up = hn::RebindMask(di, hn::Gt(fraction, DrawBounds(draws)));
    code = hn::IfThenElse(small, hn::IfThenElseZero(up, hn::Set(di, 1)), code);
  }
  return hn::BitCast(du, code);
}

HWY_INLINE VU SignsOf(V v) { return hn::And(hn::BitCast(du, v), hn::Set(du, 0x80000000)); }

HWY_INLINE V NaturalValues(VU signs, VU codes) {
  return hn::Mul(hn::BitCast(d, hn::Or(signs, hn::ShiftLeft<23>(codes))), hn::Set(d, 0x1.0p17F));
}
#endif

template <Kept kKept>
bool EncodeNaturalAs(const float* HWY_RESTRICT input, float* HWY_RESTRICT residual, float alpha,
                     const DrawKey& key, std::size_t first, std::size_t count,
                     std::byte* HWY_RESTRICT out) {
  constexpr bool kFeedback = kKept != Kept::kNothing;
  bool finite = true;
  std::size_t i = 0;
#if GRADWIRE_VECTORS
  M all = AllLanes();
  const V weight = hn::Set(d, alpha);
  Draws all_draws(first, key);
  VU packed[kPacked];
  for (; i + kDrawn <= count; i += kDrawn) {
    VU draws[Draws::kVectors];
    all_draws.Next(draws);
    for (std::size_t v = 0; v < Draws::kVectors; ++v) {
      const std::size_t at = i + v * N;
      V q = LoadQ<kKept>(input, residual, weight, at);
      const M ok = FiniteLanes(q);
      all = hn::And(all, ok);
      if constexpr (kFeedback) q = hn::IfThenElseZero(ok, q);
      const VU codes = NaturalCodes(q, draws[v]);
      const VU signs = SignsOf(q);
      packed[v % kPacked] = hn::Or(hn::ShiftRight<24>(signs), codes);
      if constexpr (kFeedback) {
        const V left = hn::Sub(q, NaturalValues(signs, codes));
        hn::StoreU(hn::IfThenElse(ok, left, hn::LoadU(d, residual + at)), d, residual + at);
      }
      if (v % kPacked == kPacked - 1) StoreLowBytes(packed, out + i + (v + 1 - kPacked) * N);
    }
  }
  finite = hn::AllTrue(d, all);
#endif
  for (; i < count; ++i) {
    float q = LoadQ<kKept>(input, residual, alpha, i);
    const bool ok = Finite(q);
    finite = finite && ok;
    if (!ok) q = 0;
    const std::uint32_t byte =
        (std::signbit(q) ? 0x80U : 0U) | NaturalCode(q, Draw16(first + i, key));
    out[i] = static_cast<std::byte>(byte);
    if constexpr (kFeedback) residual[i] = ok ? q - NaturalValue(byte) : residual[i];
  }
  return finite;
}

bool EncodeNatural(const float* input, float* residual, float alpha, const DrawKey& key,
                   std::size_t first, std::size_t count, std::byte* out) {
  return WithKept(residual, alpha, [=, &key]<Kept kKept>() {
    return EncodeNaturalAs<kKept>(input, residual, alpha, key, first, count, out);
  });
}

template <bool kAdd>
void DecodeNaturalAs(const std::byte* HWY_RESTRICT bytes, std::size_t count,
                     float* HWY_RESTRICT out) {
  std::size_t i = 0;
#if GRADWIRE_VECTORS
  const hn::Rebind<std::uint8_t, D> d8;
  for (; i + N <= count; i += N) {
    const VU byte = hn::PromoteTo(du, LoadBytes(d8, bytes + i));
    const VU signs = SignsOf(hn::BitCast(d, hn::ShiftLeft<24>(byte)));
    V value = NaturalValues(signs, hn::And(byte, hn::Set(du, 0x7f)));
    if constexpr (kAdd) value = hn::Add(hn::LoadU(d, out + i), value);
    hn::StoreU(value, d, out + i);
  }
#endif
  for (; i < count; ++i) {
    const float value = NaturalValue(std::to_integer<std::uint32_t>(bytes[i]));
    out[i] = kAdd ? out[i] + value : value;
  }
}

void DecodeNatural(const std::byte* bytes, std::size_t count, float* out) {
  DecodeNaturalAs<false>(bytes, count, out);
}

void DecodeAddNatural(const std::byte* bytes, std::size_t count, float* out) {
  DecodeNaturalAs<true>(bytes, count, out);
}

// --------------------------------------------------------------------------------------- terngrad

/// The square of a float is exact in double.
inline double Square(float value) {
  return static_cast<double>(value) * static_cast<double>(value);
}

template <Kept kKept>
Moments MeasureMomentsAs(const float* HWY_RESTRICT input, float* HWY_RESTRICT residual, float alpha,
                         std::size_t count) {
  constexpr bool kFeedback = kKept != Kept::kNothing;
  Moments moments;
  HWY_ALIGN double lanes[kLanes] = {};
  std::size_t i = 0;
#if GRADWIRE_VECTORS && HWY_HAVE_FLOAT64
  // Squares are exact, so it does not matter whether the multiply and add are fused.
  const hn::Repartition<double, D> dd;
  const hn::Half<D> half;
  constexpr std::size_t kVectors = kLanes / N;
  hn::Vec<decltype(dd)> low[kVectors];
  hn::Vec<decltype(dd)> high[kVectors];
  for (std::size_t v = 0; v < kVectors; ++v) low[v] = high[v] = hn::Zero(dd);
  VI largest = hn::Zero(di);
  const V weight = hn::Set(d, alpha);
  for (; i + kLanes <= count; i += kLanes) {
    for (std::size_t v = 0; v < kVectors; ++v) {
      const std::size_t at = i + v * N;
      const V q = LoadQ<kKept>(input, residual, weight, at);
      if constexpr (kFeedback) {
        const V kept = hn::IfThenElse(FiniteLanes(q), q, hn::LoadU(d, residual + at));
        hn::StoreU(kept, d, residual + at);
      }
      // Halves that are in memory come from there: faster than out of the vector.
      const auto first =
          hn::PromoteTo(dd, kFeedback ? hn::LowerHalf(half, q) : hn::LoadU(half, input + at));
      const auto second = hn::PromoteTo(
          dd, kFeedback ? hn::UpperHalf(half, q) : hn::LoadU(half, input + at + N / 2));
      low[v] = hn::MulAdd(first, first, low[v]);
      high[v] = hn::MulAdd(second, second, high[v]);
      largest = hn::Max(largest, MagnitudeBits(q));
    }
  }
  for (std::size_t v = 0; v < kVectors; ++v) {
    hn::Store(low[v], dd, lanes + v * N);
    hn::Store(high[v], dd, lanes + v * N + N / 2);
  }
  moments.largest = static_cast<std::uint32_t>(hn::GetLane(hn::MaxOfLanes(di, largest)));
#endif
  for (; i < count; ++i) {
    const float q = LoadQ<kKept>(input, residual, alpha, i);
    if constexpr (kFeedback) residual[i] = Finite(q) ? q : residual[i];
    lanes[i % kLanes] += Square(q);
    moments.largest = std::max(moments.largest, MagnitudeBits(q));
  }
  for (const double lane : lanes) moments.squares += lane;
  return moments;
}

Moments MeasureMoments(const float* input, float* residual, float alpha, std::size_t count) {
  return WithKept(residual, alpha, [=]<Kept kKept>() {
    return MeasureMomentsAs<kKept>(input, residual, alpha, count);
  });
}

template <bool kFeedback>
void EncodeTritsAs(const float* HWY_RESTRICT input, float* HWY_RESTRICT residual, float inverse,
                   float scale, const DrawKey& key, std::size_t first, std::size_t count,
                   std::byte* HWY_RESTRICT trits) {
  std::size_t i = 0;
#if GRADWIRE_VECTORS
  const V inverses = hn::Set(d, inverse);
  const V scales = hn::Set(d, scale);
  Draws all_draws(first, key);
  const DW dw;
  const auto ones = hn::Set(dw, 0x0101);
  V values[kPacked];
  V unsent[kPacked];  // U - p: negative where p is above, since no difference rounds to 0
  for (; i + kDrawn <= count; i += kDrawn) {
    VU draws[Draws::kVectors];
    all_draws.Next(draws);
    for (std::size_t v = 0; v < Draws::kVectors; ++v) {
      const std::size_t at = i + v * N;
      const V q = hn::LoadU(d, (kFeedback ? residual : input) + at);
      const V left = hn::Sub(DrawBounds(draws[v]), hn::Mul(hn::Abs(q), inverses));
      if constexpr (kFeedback) {
        const M sent = hn::RebindMask(d, SignBits(left));
        const V value = hn::Or(scales, hn::BitCast(d, SignsOf(q)));
        hn::StoreU(hn::Sub(q, hn::IfThenElseZero(sent, value)), d, residual + at);
      }
      values[v % kPacked] = q;
      unsent[v % kPacked] = left;
      if (v % kPacked == kPacked - 1) {
        const auto sent = hn::And(hn::ShiftRight<7>(SignBytes(unsent)), ones);
        const auto negative = hn::And(hn::ShiftRight<7>(SignBytes(values)), sent);
        StoreBytes(dw, hn::Add(sent, negative), trits + i + (v + 1 - kPacked) * N);
      }
    }
  }
#endif
  for (; i < count; ++i) {
    const float q = kFeedback ? residual[i] : input[i];
    const float p = std::fabs(q) * inverse;
    const bool sent = p > DrawBound(Draw16(first + i, key));
    trits[i] = !sent ? std::byte{0} : std::signbit(q) ? std::byte{2} : std::byte{1};
    if constexpr (kFeedback) residual[i] = q - (sent ? std::copysign(scale, q) : 0.0F);
  }
}

void EncodeTrits(const float* input, float* residual, float inverse, float scale,
                 const DrawKey& key, std::size_t first, std::size_t count, std::byte* trits) {
  return residual == nullptr
             ? EncodeTritsAs<false>(input, residual, inverse, scale, key, first, count, trits)
             : EncodeTritsAs<true>(input, residual, inverse, scale, key, first, count, trits);
}

void PackTrits(const std::byte* HWY_RESTRICT trits, std::size_t num_bytes,
               std::byte* HWY_RESTRICT out) {
  std::size_t b = 0;
#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX2
  // A lane of 64 bits has the trits of a byte: multiplied and added by twos, then all added. Each
  // 16 bytes of `bytes` become 16 bytes of the output, two of them at a time, the last ones first.
  constexpr std::size_t kStep = 32;
  constexpr std::size_t kReadBehind = 2;  // bytes whose trits may be read behind a step
  const __m256i spread = _mm256_broadcastsi128_si256(
      _mm_setr_epi8(0, 1, 2, 3, 4, -1, -1, -1, 5, 6, 7, 8, 9, -1, -1, -1));
  const __m256i in_order = _mm256_broadcastsi128_si256(
      _mm_setr_epi8(0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15));
  const __m256i weights = _mm256_set1_epi64x(0x511b090301);  // 81, 27, 9, 3, 1
  const auto load = [](const std::byte* from) HWY_ATTR {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  };
  for (; b + kStep + kReadBehind <= num_bytes; b += kStep) {
    __m256i bytes = _mm256_setzero_si256();
    for (std::size_t two = kStep / 2; two > 0; two -= 2) {
      const std::byte* const from = trits + 5 * (b + two - 2);
      const __m256i both = _mm256_inserti128_si256(_mm256_castsi128_si256(load(from)),
                                                   load(from + 5 * kStep / 2), 1);
      const __m256i sums = _mm256_maddubs_epi16(_mm256_shuffle_epi8(both, spread), weights);
      bytes = _mm256_or_si256(_mm256_slli_epi64(bytes, 8),
                              _mm256_sad_epu8(sums, _mm256_setzero_si256()));
    }
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + b), _mm256_shuffle_epi8(bytes, in_order));
  }
#endif
  // Byte 4 of the product is t0 + 3 t1 + 9 t2 + 27 t3 + 81 t4: the bytes below it stay below 256,
  // and what follows the five trits only gets into the bytes above.
  constexpr std::uint64_t kWeights = 81 | 27U << 8 | 9U << 16 | 3U << 24 | std::uint64_t{1} << 32;
  for (; b < num_bytes; ++b) {
    const std::uint64_t product = LoadLe<std::uint64_t>(trits + 5 * b) * kWeights;
    out[b] = static_cast<std::byte>(product >> 32 & 0xff);
  }
}

constexpr std::size_t kTritsPerByte = 5;

/// A byte times this, modulo 2^16, is its share of 243 as a fraction of 16 bits, and 3^k times that
/// has dropped the k highest trits; three times the fraction then is the next trit and a rest. 270
/// is more than 2^16 / 243, by less than what 242 * 81 times of it would make a trit wrong.
constexpr std::uint16_t TritMultiplier(std::size_t trit) {
  unsigned multiplier = 270;
  for (; trit < kTritsPerByte - 1; ++trit) multiplier *= 3;
  return static_cast<std::uint16_t>(multiplier);
}

#if GRADWIRE_VECTORS
/// Where the trits of two vectors come from, if the first one is that many trits behind the begin
/// of a byte: lane i of 32 bits has element i in its low half and element N + i in its high one.
struct TritTable {
  alignas(64) std::uint8_t bytes[4 * N];
  alignas(64) std::uint16_t multipliers[2 * N];
};

constexpr std::array<TritTable, kTritsPerByte> MakeTritTables() {
  std::array<TritTable, kTritsPerByte> tables{};
  for (std::size_t phase = 0; phase < kTritsPerByte; ++phase) {
    for (std::size_t half = 0; half < 2 * N; ++half) {
      const std::size_t trit = phase + half / 2 + half % 2 * N;
      tables[phase].bytes[2 * half] = static_cast<std::uint8_t>(trit / kTritsPerByte);
      tables[phase].bytes[2 * half + 1] = 0x80;  // looks up 0
      tables[phase].multipliers[half] = TritMultiplier(trit % kTritsPerByte);
    }
  }
  return tables;
}
constexpr auto kTritTables = MakeTritTables();
#endif

template <bool kAdd>
void DecodeTritsAs(const std::byte* HWY_RESTRICT bytes, [[maybe_unused]] std::size_t num_bytes,
                   std::size_t skip, float scale, std::size_t count, float* HWY_RESTRICT out) {
  std::size_t i = 0;
  HWY_ALIGN float values[kLanes] = {0, scale, -scale};
#if GRADWIRE_VECTORS
  constexpr std::size_t kStep = 2 * N;
  using Word = std::uint64_t;  // has the trits of a step, whatever the phase
  static_assert((kTritsPerByte - 1 + kStep - 1) / kTritsPerByte < sizeof(Word));
  const DW dw;
  const hn::Repartition<std::uint8_t, D> db;
  const hn::Repartition<Word, D> dq;
  const VU table = hn::BitCast(du, hn::Load(d, values));
  const auto three = hn::Set(dw, 3);
  const VU low = hn::Set(du, 0xffff);
  const auto put = [&](VU trits, float* to) HWY_ATTR {
    V value = hn::BitCast(d, hn::TableLookupLanes(table, hn::IndicesFromVec(du, trits)));
    if constexpr (kAdd) value = hn::Add(hn::LoadU(d, to), value);
    hn::StoreU(value, d, to);
  };
  std::size_t at = 0;
  std::size_t phase = skip;
  for (; i + kStep <= count && at + sizeof(Word) <= num_bytes; i += kStep) {
    const TritTable& from = kTritTables[phase];
    const auto word = hn::BitCast(db, hn::Set(dq, LoadLe<Word>(bytes + at)));
    const auto spread = hn::BitCast(dw, hn::TableLookupBytesOr0(word, hn::Load(db, from.bytes)));
    const auto fractions = hn::Mul(spread, hn::Load(dw, from.multipliers));
    const VU trits = hn::BitCast(du, hn::MulHigh(fractions, three));
    put(hn::And(trits, low), out + i);
    put(hn::ShiftRight<16>(trits), out + i + N);
    phase += kStep % kTritsPerByte;
    at += kStep / kTritsPerByte + phase / kTritsPerByte;
    phase %= kTritsPerByte;
  }
#endif
  for (; i < count; ++i) {
    const std::size_t trit = skip + i;
    const auto byte = std::to_integer<unsigned>(bytes[trit / kTritsPerByte]);
    const unsigned fraction = byte * TritMultiplier(trit % kTritsPerByte) & 0xffff;
    const float value = values[fraction * 3 >> 16];
    out[i] = kAdd ? out[i] + value : value;
  }
}

void DecodeTrits(const std::byte* bytes, std::size_t num_bytes, std::size_t skip, float scale,
                 std::size_t count, float* out) {
  DecodeTritsAs<false>(bytes, num_bytes, skip, scale, count, out);
}

void DecodeAddTrits(const std::byte* bytes, std::size_t num_bytes, std::size_t skip, float scale,
                    std::size_t count, float* out) {
  DecodeTritsAs<true>(bytes, num_bytes, skip, scale, count, out);
}

// ----------------------------------------------------------------------------------------- twobit

/// The 16 low bits of `positive` at even places, of `negative` at odd ones.
inline std::uint32_t Interleave(std::uint32_t positive, std::uint32_t negative) {
#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3  // where this instruction is fast
  return _pdep_u32(positive, 0x55555555) | _pdep_u32(negative, 0xaaaaaaaa);
#else
  std::uint64_t x = positive | std::uint64_t{negative} << 32;
  x = (x | x << 8) & 0x00ff00ff00ff00ff;
  x = (x | x << 4) & 0x0f0f0f0f0f0f0f0f;
  x = (x | x << 2) & 0x3333333333333333;
  x = (x | x << 1) & 0x5555555555555555;
  return static_cast<std::uint32_t>(x | x >> 31);
#endif
}

template <Kept kKept>
TwobitResult EncodeTwobitAs(const float* HWY_RESTRICT input, float* HWY_RESTRICT residual,
                            float alpha, float theta, std::size_t count,
                            std::byte* HWY_RESTRICT out) {
  constexpr bool kFeedback = kKept != Kept::kNothing;
  TwobitResult result;
  std::size_t i = 0;
#if GRADWIRE_VECTORS
  constexpr std::size_t kWord = 16;
  M all = AllLanes();
  const V weight = hn::Set(d, alpha);
  const V upper = hn::Set(d, theta);
  const V lower = hn::Neg(upper);
  const V bound = hn::Set(d, 2 * theta);
  for (; i + kWord <= count; i += kWord) {
    std::uint32_t positives = 0;
    std::uint32_t negatives = 0;
    for (std::size_t v = 0; v < kWord / N; ++v) {
      const std::size_t at = i + v * N;
      V q = LoadQ<kKept>(input, residual, weight, at);
      const M ok = FiniteLanes(q);
      all = hn::And(all, ok);
      if constexpr (kFeedback) q = hn::IfThenElseZero(ok, q);
      const M positive = hn::Ge(q, upper);
      const M negative = hn::Le(q, lower);
      positives |= MaskBits(hn::RebindMask(di, positive)) << (v * N);
      negatives |= MaskBits(hn::RebindMask(di, negative)) << (v * N);
      if constexpr (kFeedback) {
        const V sent = hn::IfThenElse(positive, upper, hn::IfThenElseZero(negative, lower));
        const V e = hn::LoadU(d, residual + at);
        hn::StoreU(hn::IfThenElse(ok, hn::Sub(q, sent), e), d, residual + at);
        result.out_of_bound += hn::CountTrue(d, hn::Gt(hn::Abs(q), bound));
      }
    }
    StoreLe(out + i / 4, Interleave(positives, negatives));
  }
  result.finite = hn::AllTrue(d, all);
#endif
  for (; i < count; ++i) {
    float q = LoadQ<kKept>(input, residual, alpha, i);
    const bool ok = Finite(q);
    result.finite = result.finite && ok;
    if (!ok) q = 0;
    const unsigned code = q >= theta ? 1 : q <= -theta ? 2 : 0;
    if (i % 4 == 0) out[i / 4] = std::byte{0};
    out[i / 4] |= std::byte{static_cast<std::uint8_t>(code << (i % 4 * 2))};
    if constexpr (kFeedback) {
      const float sent = code == 1 ? theta : code == 2 ? -theta : 0.0F;
      residual[i] = ok ? q - sent : residual[i];
      result.out_of_bound += std::fabs(q) > 2 * theta ? 1 : 0;
    }
  }
  return result;
}

TwobitResult EncodeTwobit(const float* input, float* residual, float alpha, float theta,
                          std::size_t count, std::byte* out) {
  return WithKept(residual, alpha, [=]<Kept kKept>() {
    return EncodeTwobitAs<kKept>(input, residual, alpha, theta, count, out);
  });
}

template <bool kAdd>
void DecodeTwobitAs(const std::byte* HWY_RESTRICT bytes, float theta, std::size_t count,
                    float* HWY_RESTRICT out) {
  std::size_t i = 0;
#if GRADWIRE_VECTORS
  // A word of 16 codes is broadcast, and each lane tests its own bits of it.
  constexpr std::size_t kWord = 16;
  const V upper = hn::Set(d, theta);
  const V lower = hn::Neg(upper);
  HWY_ALIGN std::uint32_t own_bit[kWord];
  for (std::size_t b = 0; b < kWord; ++b) own_bit[b] = std::uint32_t{1} << (2 * b);
  for (; i + kWord <= count; i += kWord) {
    const VU word = hn::Set(du, LoadLe<std::uint32_t>(bytes + i / 4));
    for (std::size_t v = 0; v < kWord / N; ++v) {
      const VU bit = hn::Load(du, own_bit + v * N);
      const M positive = hn::RebindMask(d, hn::TestBit(word, bit));
      const M negative = hn::RebindMask(d, hn::TestBit(word, hn::ShiftLeft<1>(bit)));
      V value = hn::Or(hn::IfThenElseZero(positive, upper), hn::IfThenElseZero(negative, lower));
      float* const to = out + i + v * N;
      if constexpr (kAdd) value = hn::Add(hn::LoadU(d, to), value);
      hn::StoreU(value, d, to);
    }
  }
#endif
  for (; i < count; ++i) {
    const unsigned code = std::to_integer<unsigned>(bytes[i / 4]) >> (i % 4 * 2) & 3;
    const float value = code == 1 ? theta : code == 2 ? -theta : 0.0F;
    out[i] = kAdd ? out[i] + value : value;
  }
}

void DecodeTwobit(const std::byte* bytes, float theta, std::size_t count, float* out) {
  DecodeTwobitAs<false>(bytes, theta, count, out);
}

void DecodeAddTwobit(const std::byte* bytes, float theta, std::size_t count, float* out) {
  DecodeTwobitAs<true>(bytes, theta, count, out);
}

}  // namespace gradwire::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace gradwire::kernels {

HWY_EXPORT(LargestMagnitude);
HWY_EXPORT(EncodeInt8);
HWY_EXPORT(DecodeInt8);
HWY_EXPORT(DecodeAddInt8);
HWY_EXPORT(EncodeNatural);
HWY_EXPORT(DecodeNatural);
HWY_EXPORT(DecodeAddNatural);
HWY_EXPORT(MeasureMoments);
HWY_EXPORT(EncodeTrits);
HWY_EXPORT(PackTrits);
HWY_EXPORT(DecodeTrits);
HWY_EXPORT(DecodeAddTrits);
HWY_EXPORT(EncodeTwobit);
HWY_EXPORT(DecodeTwobit);
HWY_EXPORT(DecodeAddTwobit);

std::uint32_t LargestMagnitude(const float* input, const float* residual, float alpha,
                               std::size_t count) {
  return HWY_DYNAMIC_DISPATCH(LargestMagnitude)(input, residual, alpha, count);
}

void EncodeInt8(const float* input, float* residual, float alpha, float scale, float inverse,
                const Int8Rounding& rounding, std::size_t first, std::size_t count,
                std::byte* levels) {
  HWY_DYNAMIC_DISPATCH(EncodeInt8)
  (input, residual, alpha, scale, inverse, rounding, first, count, levels);
}

void DecodeInt8(const std::byte* levels, float scale, std::size_t count, float* out) {
  HWY_DYNAMIC_DISPATCH(DecodeInt8)(levels, scale, count, out);
}

void DecodeAddInt8(const std::byte* levels, float scale, std::size_t count, float* accumulator) {
  HWY_DYNAMIC_DISPATCH(DecodeAddInt8)(levels, scale, count, accumulator);
}

bool EncodeNatural(const float* input, float* residual, float alpha, const DrawKey& key,
                   std::size_t first, std::size_t count, std::byte* out) {
  return HWY_DYNAMIC_DISPATCH(EncodeNatural)(input, residual, alpha, key, first, count, out);
}

void DecodeNatural(const std::byte* bytes, std::size_t count, float* out) {
  HWY_DYNAMIC_DISPATCH(DecodeNatural)(bytes, count, out);
}

void DecodeAddNatural(const std::byte* bytes, std::size_t count, float* accumulator) {
  HWY_DYNAMIC_DISPATCH(DecodeAddNatural)(bytes, count, accumulator);
}

Moments MeasureMoments(const float* input, float* residual, float alpha, std::size_t count) {
  return HWY_DYNAMIC_DISPATCH(MeasureMoments)(input, residual, alpha, count);
}

void EncodeTrits(const float* input, float* residual, float inverse, float scale,
                 const DrawKey& key, std::size_t first, std::size_t count, std::byte* trits) {
  HWY_DYNAMIC_DISPATCH(EncodeTrits)
  (input, residual, inverse, scale, key, first, count, trits);
}

TwobitResult EncodeTwobit(const float* input, float* residual, float alpha, float theta,
                          std::size_t count, std::byte* out) {
  return HWY_DYNAMIC_DISPATCH(EncodeTwobit)(input, residual, alpha, theta, count, out);
}

void DecodeTwobit(const std::byte* bytes, float theta, std::size_t count, float* out) {
  HWY_DYNAMIC_DISPATCH(DecodeTwobit)(bytes, theta, count, out);
}

void DecodeAddTwobit(const std::byte* bytes, float theta, std::size_t count, float* accumulator) {
  HWY_DYNAMIC_DISPATCH(DecodeAddTwobit)(bytes, theta, count, accumulator);
}

void PackTrits(const std::byte* trits, std::size_t num_bytes, std::byte* out) {
  HWY_DYNAMIC_DISPATCH(PackTrits)(trits, num_bytes, out);
}

void DecodeTrits(const std::byte* bytes, std::size_t num_bytes, std::size_t skip, float scale,
                 std::size_t count, float* out) {
  HWY_DYNAMIC_DISPATCH(DecodeTrits)(bytes, num_bytes, skip, scale, count, out);
}

void DecodeAddTrits(const std::byte* bytes, std::size_t num_bytes, std::size_t skip, float scale,
                    std::size_t count, float* accumulator) {
  HWY_DYNAMIC_DISPATCH(DecodeAddTrits)(bytes, num_bytes, skip, scale, count, accumulator);
}

}  // namespace gradwire::kernels
#endif  // HWY_ONCE
