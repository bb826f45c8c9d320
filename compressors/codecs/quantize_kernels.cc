#include "compressors/codecs/quantize_kernels.h"

// Compiled once for each target; see kernels.cc for why these are left out.
#ifndef HWY_DISABLED_TARGETS
#define HWY_DISABLED_TARGETS (HWY_SSE4 | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128)
#endif
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "compressors/codecs/quantize_kernels.cc"
#include <hwy/foreach_target.h>
//
#include <hwy/highway.h>

#include <algorithm>
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

template <bool kFeedback>
float LoadQ(const float* input, const float* residual, float alpha, std::size_t i) {
  return kFeedback ? input[i] + alpha * residual[i] : input[i];
}

#if GRADWIRE_VECTORS
using D8 = hn::Rebind<std::int8_t, D>;
using VI = hn::Vec<DI>;

template <bool kFeedback>
HWY_INLINE V LoadQ(const float* input, const float* residual, V weight, std::size_t at) {
  const V q = hn::LoadU(d, input + at);
  if constexpr (kFeedback) return hn::Add(q, hn::Mul(weight, hn::LoadU(d, residual + at)));
  return q;
}

HWY_INLINE VI MagnitudeBits(V q) {
  return hn::And(hn::BitCast(di, q), hn::Set(di, static_cast<std::int32_t>(kMagnitude)));
}

/// Vectors whose elements become bytes together, so that a whole vector of bytes is stored.
constexpr std::size_t kPacked = 4;

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
  if constexpr (N > 4) {
    // In order inside of 16 bytes; now across them.
    HWY_ALIGN std::uint32_t lanes[N];
    for (std::size_t lane = 0; lane < N; ++lane) {
      lanes[lane] = static_cast<std::uint32_t>(lane % (N / 4) * 4 + lane / (N / 4));
    }
    bytes = hn::BitCast(
        db, hn::TableLookupLanes(hn::BitCast(du, bytes), hn::SetTableIndices(du, lanes)));
  }
  hn::StoreU(bytes, db, reinterpret_cast<std::uint8_t*>(to));
}

/// Elements that are drawn for and stored together: one group of draws or more.
constexpr std::size_t kDrawn = std::max(kDrawGroup, kPacked* N);

/// u(i) of kDrawn elements after the other.
class Draws {
 public:
  static constexpr std::size_t kVectors = kDrawn / N;

  HWY_INLINE Draws(std::size_t first, const DrawKey& key) : key_(key) {
    for (std::size_t v = 0; v < kWords; ++v) {
      products_[v] = DrawProducts(static_cast<std::uint32_t>(first / 2 + v * N), key);
    }
  }

  HWY_INLINE void Next(VU (&draws)[kVectors]) {
    constexpr std::size_t kHalf = kDrawGroup / 2 / N;  // vectors of a group's low halves
    for (std::size_t v = 0; v < kWords; ++v) {
      const VU words = DrawWords(products_[v], key_);
      products_[v] = hn::Add(products_[v], hn::Set(du, kDrawStep * (kDrawn / 2)));
      const std::size_t at = v / kHalf * 2 * kHalf + v % kHalf;
      draws[at] = hn::And(words, hn::Set(du, 0xffff));
      draws[at + kHalf] = hn::ShiftRight<16>(words);
    }
  }

 private:
  static constexpr std::size_t kWords = kVectors / 2;
  const DrawKey key_;
  VU products_[kWords];
};

/// U(i) of u(i): no step of it rounds.
HWY_INLINE V DrawBounds(VU draws) {
  const V u = hn::ConvertTo(d, hn::BitCast(di, draws));
  return hn::Add(hn::Mul(u, hn::Set(d, 0x1.0p-16F)), hn::Set(d, 0x1.0p-17F));
}
#endif

// ------------------------------------------------------------------------------------- magnitudes

template <bool kFeedback>
std::uint32_t LargestMagnitudeAs(const float* HWY_RESTRICT input,
                                 const float* HWY_RESTRICT residual, float alpha,
                                 std::size_t count) {
  std::uint32_t largest = 0;
  std::size_t i = 0;
#if GRADWIRE_VECTORS
  // Bits of absolute values are ordered like the values; NaN comes after infinity.
  const V weight = hn::Set(d, alpha);
  VI all = hn::Zero(di);
  for (; i + N <= count; i += N) {
    all = hn::Max(all, MagnitudeBits(LoadQ<kFeedback>(input, residual, weight, i)));
  }
  largest = static_cast<std::uint32_t>(hn::GetLane(hn::MaxOfLanes(di, all)));
#endif
  for (; i < count; ++i) {
    largest = std::max(largest, MagnitudeBits(LoadQ<kFeedback>(input, residual, alpha, i)));
  }
  return largest;
}

std::uint32_t LargestMagnitude(const float* input, const float* residual, float alpha,
                               std::size_t count) {
  return residual == nullptr ? LargestMagnitudeAs<false>(input, residual, alpha, count)
                             : LargestMagnitudeAs<true>(input, residual, alpha, count);
}

// ------------------------------------------------------------------------------------------- int8

// Adding this to a number of up to 2^22 rounds it to nearest even, and the lowest byte is that of
// the rounded number; subtracting it again gives the number.
constexpr float kRounder = 0x1.8p23F;

template <bool kFeedback, bool kStochastic>
void EncodeInt8As(const float* HWY_RESTRICT input, float* HWY_RESTRICT residual, float alpha,
                  float scale, float inverse, const DrawKey& key, std::size_t first,
                  std::size_t count, std::byte* HWY_RESTRICT levels) {
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
        const V q = LoadQ<kFeedback>(input, residual, weight, at);
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
        const V q = LoadQ<kFeedback>(input, residual, weight, at);
        packed[v] = put(q, hn::Add(hn::Mul(q, inverses), rounder), at);
      }
      StoreLowBytes(packed, levels + i);
    }
  }
#endif
  for (; i < count; ++i) {
    const float q = LoadQ<kFeedback>(input, residual, alpha, i);
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

template <bool kFeedback>
void EncodeInt8Choose(const float* input, float* residual, float alpha, float scale, float inverse,
                      const Int8Rounding& rounding, std::size_t first, std::size_t count,
                      std::byte* levels) {
  return rounding.stochastic
             ? EncodeInt8As<kFeedback, true>(input, residual, alpha, scale, inverse, rounding.key,
                                             first, count, levels)
             : EncodeInt8As<kFeedback, false>(input, residual, alpha, scale, inverse, rounding.key,
                                              first, count, levels);
}

void EncodeInt8(const float* input, float* residual, float alpha, float scale, float inverse,
                const Int8Rounding& rounding, std::size_t first, std::size_t count,
                std::byte* levels) {
  return residual == nullptr ? EncodeInt8Choose<false>(input, residual, alpha, scale, inverse,
                                                       rounding, first, count, levels)
                             : EncodeInt8Choose<true>(input, residual, alpha, scale, inverse,
                                                      rounding, first, count, levels);
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

}  // namespace gradwire::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace gradwire::kernels {

HWY_EXPORT(LargestMagnitude);
HWY_EXPORT(EncodeInt8);
HWY_EXPORT(DecodeInt8);
HWY_EXPORT(DecodeAddInt8);

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

}  // namespace gradwire::kernels
#endif  // HWY_ONCE
