#include "compressors/codecs/sparse_kernels.h"

// Compiled once for each target, as kernels.cc is and for the same targets.
#ifndef HWY_DISABLED_TARGETS
#define HWY_DISABLED_TARGETS (HWY_SSE4 | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128)
#endif
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "compressors/codecs/sparse_kernels.cc"
#include <hwy/foreach_target.h>
//
#include <hwy/highway.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>

#include "common/base/bytes.h"
#include "compressors/codecs/vectors-inl.h"

// What every target shares.
#ifndef GRADWIRE_SPARSE_TABLES
#define GRADWIRE_SPARSE_TABLES
namespace gradwire::kernels {

/// Four gaps of up to 24 bits, from either half of a byte on, fit a load of 16 bytes.
inline constexpr std::size_t kMaxVectorWidth = 24;

/// Where a lane finds its gap in the 16 bytes that it shares with three others: four bytes, and the
/// bit of the first of them. Eight gaps take `width` whole bytes, so that lanes repeat after eight.
struct LaneTable {
  alignas(64) std::uint8_t bytes[64];
  alignas(64) std::uint32_t shifts[16];
};

constexpr std::array<LaneTable, kMaxVectorWidth + 1> MakeLaneTables() {
  std::array<LaneTable, kMaxVectorWidth + 1> tables{};
  for (std::size_t width = 0; width <= kMaxVectorWidth; ++width) {
    for (std::size_t lane = 0; lane < 16; ++lane) {
      const std::size_t start = lane / 4 * 4 * width % 8;
      const std::size_t bit = start + lane % 4 * width;
      for (std::size_t byte = 0; byte < 4; ++byte) {
        tables[width].bytes[4 * lane + byte] = static_cast<std::uint8_t>(bit / 8 + byte);
      }
      tables[width].shifts[lane] = static_cast<std::uint32_t>(bit % 8);
    }
  }
  return tables;
}
inline constexpr auto kLaneTables = MakeLaneTables();

}  // namespace gradwire::kernels
#endif

HWY_BEFORE_NAMESPACE();
namespace gradwire::kernels::HWY_NAMESPACE {

// ---------------------------------------------------------------------------------------- largest

inline std::uint32_t AbsBits(float value) {
  return std::bit_cast<std::uint32_t>(value) & 0x7fffffff;
}

#if GRADWIRE_VECTORS
/// Appends index and value of the set bits of 64 elements; returns how many. Writes whole vectors,
/// no further than those of 64 elements that all pass.
HWY_INLINE std::size_t CompressGroup(const float* q, std::uint64_t word, std::uint32_t base,
                                     std::uint32_t* HWY_RESTRICT indices,
                                     float* HWY_RESTRICT values) {
  std::size_t found = 0;
  VU own = hn::Add(hn::Iota(du, 0), hn::Set(du, base));
  for (std::size_t v = 0; v < 64; v += N) {
    const std::uint64_t here = word >> v & ((std::uint64_t{1} << N) - 1);
    std::uint8_t bytes[8];
    StoreLe(bytes, here);
    hn::StoreU(hn::Compress(own, hn::LoadMaskBits(du, bytes)), du, indices + found);
    hn::StoreU(hn::Compress(hn::LoadU(d, q + v), hn::LoadMaskBits(d, bytes)), d, values + found);
    found += static_cast<std::size_t>(hwy::PopCount(here));
    own = hn::Add(own, hn::Set(du, static_cast<std::uint32_t>(N)));
  }
  return found;
}
#endif

template <bool kFeedback>
Collected CollectAs(const float* HWY_RESTRICT input, float* HWY_RESTRICT residual, float alpha,
                    std::size_t count, std::uint32_t threshold_bits, std::uint32_t base,
                    std::uint32_t* HWY_RESTRICT indices, float* HWY_RESTRICT values) {
  Collected result;
  const float* const q = kFeedback ? residual : input;
  std::size_t found = 0;
  std::size_t i = 0;
#if GRADWIRE_VECTORS
  // First a bit an element for some of them, then the set bits one after the other: a loop that
  // compares and goes on where something is found mispredicts at 1 %. Bits of absolute values are
  // ordered like the values, as signed numbers too.
  constexpr std::size_t kGroup = 64;
  constexpr std::size_t kGroups = 16;
  constexpr std::size_t kVectors = kGroup / N;
  const auto absolute = hn::Set(di, 0x7fffffff);
  const auto below = hn::Set(di, static_cast<std::int32_t>(threshold_bits) - 1);
  const V weight = hn::Set(d, alpha);
  M all = AllLanes();
  while (i + kGroup <= count) {
    std::uint64_t words[kGroups];
    const std::size_t groups = HWY_MIN(kGroups, (count - i) / kGroup);
    for (std::size_t group = 0; group < groups; ++group) {
      std::uint64_t word = 0;
      for (std::size_t v = 0; v < kVectors; ++v) {
        const std::size_t at = i + group * kGroup + v * N;
        V x = hn::LoadU(d, input + at);
        if constexpr (kFeedback) {
          const V e = hn::LoadU(d, residual + at);
          x = hn::Add(x, hn::Mul(weight, e));
          const M ok = FiniteLanes(x);
          hn::StoreU(hn::IfThenElse(ok, x, e), d, residual + at);
          all = hn::And(all, ok);
        } else {
          all = hn::And(all, FiniteLanes(x));
        }
        const auto passes = hn::Gt(hn::And(hn::BitCast(di, x), absolute), below);
        word |= std::uint64_t{MaskBits(passes)} << (v * N);
      }
      words[group] = word;
    }
    for (std::size_t group = 0; group < groups; ++group, i += kGroup) {
      std::uint64_t word = words[group];
      const auto here = static_cast<std::size_t>(hwy::PopCount(word));
      const auto take = [&](std::size_t to) HWY_ATTR {
        // The top bit is for words that have none left; what is written then is written over.
        const auto at =
            i + static_cast<std::size_t>(std::countr_zero(word | std::uint64_t{1} << 63));
        indices[to] = base + static_cast<std::uint32_t>(at);
        values[to] = q[at];
        word &= word - 1;
      };
      constexpr std::size_t kDense = 12;  // from here on compressing vectors is faster
      if (here >= kDense) {
        found += CompressGroup(q + i, words[group], base + static_cast<std::uint32_t>(i),
                               indices + found, values + found);
        continue;
      }
      // Two without asking: of 1 % one word in thirty has more.
      constexpr std::size_t kUnasked = 2;
      for (std::size_t to = 0; to < kUnasked; ++to) take(found + to);
      for (std::size_t to = kUnasked; to < here; ++to) take(found + to);
      found += here;
    }
  }
  result.finite = hn::AllTrue(d, all);
#endif
  for (; i < count; ++i) {
    float x = input[i];
    if constexpr (kFeedback) {
      x = x + alpha * residual[i];
      residual[i] = Finite(x) ? x : residual[i];
    }
    result.finite = result.finite && Finite(x);
    indices[found] = base + static_cast<std::uint32_t>(i);
    values[found] = q[i];
    found += AbsBits(x) >= threshold_bits ? 1 : 0;
  }
  result.found = found;
  return result;
}

Collected CollectAtLeast(const float* input, float* residual, float alpha, std::size_t count,
                         std::uint32_t threshold_bits, std::uint32_t base, std::uint32_t* indices,
                         float* values) {
  return residual == nullptr ? CollectAs<false>(input, residual, alpha, count, threshold_bits, base,
                                                indices, values)
                             : CollectAs<true>(input, residual, alpha, count, threshold_bits, base,
                                               indices, values);
}

bool AllFinite(const float* values, std::size_t count) {
  bool finite = true;
  std::size_t i = 0;
#if GRADWIRE_VECTORS
  M all = AllLanes();
  for (; i + N <= count; i += N) all = hn::And(all, FiniteLanes(hn::LoadU(d, values + i)));
  finite = hn::AllTrue(d, all);
#endif
  for (; i < count; ++i) finite = finite && Finite(values[i]);
  return finite;
}

// ---------------------------------------------------------------------------------------- indices

bool CopyAscending(const std::byte* HWY_RESTRICT from, std::size_t count,
                   std::uint32_t* HWY_RESTRICT indices) {
  if (count == 0) return true;
  indices[0] = LoadLe<std::uint32_t>(from);
  bool ascending = true;
  std::size_t i = 1;
#if GRADWIRE_VECTORS
  auto all = hn::Eq(hn::Zero(du), hn::Zero(du));
  for (; i + N <= count; i += N) {
    const VU before = LoadBytes(du, from + (i - 1) * sizeof(std::uint32_t));
    const VU own = LoadBytes(du, from + i * sizeof(std::uint32_t));
    all = hn::And(all, hn::Gt(own, before));
    hn::StoreU(own, du, indices + i);
  }
  ascending = hn::AllTrue(du, all);
#endif
  for (; i < count; ++i) {
    indices[i] = LoadLe<std::uint32_t>(from + i * sizeof(std::uint32_t));
    ascending = ascending && indices[i] > indices[i - 1];
  }
  return ascending;
}

#if GRADWIRE_VECTORS
/// Gaps from gap i on, each in its lane with bits of others around it: four come from one load.
template <typename DX>
HWY_INLINE hn::Vec<DX> LoadGaps(DX dx, const std::byte* packed, std::size_t width, std::size_t i) {
  if constexpr (hn::MaxLanes(DX()) == 4) {
    return LoadBytes(dx, packed + i * width / 8);
  } else {
    const hn::Half<DX> half;
    return hn::Combine(dx, LoadGaps(half, packed, width, i + hn::MaxLanes(half)),
                       LoadGaps(half, packed, width, i));
  }
}

/// Lane l: the sum of lanes 0 to l.
HWY_INLINE VU PrefixSums(VU x) {
  x = hn::Add(x, hn::ShiftLeftLanes<1>(du, x));
  x = hn::Add(x, hn::ShiftLeftLanes<2>(du, x));
  // Now within four lanes. The last one of a four goes to all of a later four, 1 and then 2 on.
  for (std::size_t on = 1; 4 * on < N; on *= 2) {
    const VU four = hn::ShiftRight<2>(hn::Iota(du, 0));
    const VU last = hn::Set(du, static_cast<std::uint32_t>(4 * on - 3));
    const VU from = hn::Sub(hn::ShiftLeft<2>(four), last);
    const auto has = hn::Gt(hn::BitCast(di, four), hn::Set(di, static_cast<std::int32_t>(on) - 1));
    const VU safe = hn::IfThenElseZero(hn::RebindMask(du, has), from);
    const VU sums = hn::TableLookupLanes(x, hn::IndicesFromVec(du, safe));
    x = hn::Add(x, hn::IfThenElseZero(hn::RebindMask(du, has), sums));
  }
  return x;
}
#endif

/// As UnpackGaps, and calls use(begin, end) for all indices one after the other. Stops where
/// `advance` exceeds `room`: all that were used are below first + room.
template <typename Use>
HWY_INLINE UnpackedGaps UnpackGapsAs(const std::byte* HWY_RESTRICT packed, std::size_t width,
                                     std::size_t count, std::uint32_t first, std::uint64_t room,
                                     std::uint32_t* HWY_RESTRICT indices, Use&& use) {
  UnpackedGaps result;
  const std::uint64_t top_bit = (std::uint64_t{1} << width) >> 1;
  bool has_top_bit = width == 0;
  std::size_t i = 0;
#if GRADWIRE_VECTORS
  if (width <= kMaxVectorWidth) {  // 128 of them add up to no more than 2^31
    // Indices that are used right after they were stored have to be waited for.
    constexpr std::size_t kWaiting = 4 * kLanes;
    const LaneTable& table = kLaneTables[width];
    const VU mask = hn::Set(du, (std::uint32_t{1} << width) - 1);
    const VU one = hn::Set(du, 1);
    const VU before = hn::Set(du, first - 1);
    const auto last_lane = hn::IndicesFromVec(du, hn::Set(du, static_cast<std::uint32_t>(N - 1)));
    const hn::Repartition<std::uint8_t, DU> d8;
    VU all = hn::Zero(du);
    VU sum = hn::Zero(du);
    for (; i + kLanes <= count; i += kLanes) {
      for (std::size_t v = 0; v < kLanes; v += N) {
        const auto bytes = hn::LoadU(d8, table.bytes + 4 * v);
        const VU shifts = hn::LoadU(du, table.shifts + v);
        const VU loaded = hn::BitCast(
            du, hn::TableLookupBytes(hn::BitCast(d8, LoadGaps(du, packed, width, i + v)), bytes));
        const VU gaps = hn::And(hn::Shr(loaded, shifts), mask);
        all = hn::Or(all, gaps);
        const VU sums = PrefixSums(hn::Add(gaps, one));
        hn::StoreU(hn::Add(hn::Add(sums, sum), before), du, indices + i + v);
        sum = hn::Add(sum, hn::TableLookupLanes(sums, last_lane));
      }
      result.advance = hn::GetLane(sum);
      if (result.advance > room) return result;
      if (i >= kWaiting) use(i - kWaiting, i - kWaiting + kLanes);
    }
    use(i - std::min(i, kWaiting), i);
    const VU top_bits = hn::And(all, hn::Set(du, static_cast<std::uint32_t>(top_bit)));
    has_top_bit = has_top_bit || !hn::AllTrue(du, hn::Eq(top_bits, hn::Zero(du)));
  }
#endif
  const std::uint64_t mask = (std::uint64_t{1} << width) - 1;
  for (; i < count; ++i) {
    const std::size_t bit = i * width;
    const std::uint64_t gap = (LoadLe<std::uint64_t>(packed + bit / 8) >> (bit % 8)) & mask;
    has_top_bit = has_top_bit || (gap & top_bit) != 0;
    result.advance += gap + 1;
    if (result.advance > room) return result;
    indices[i] = static_cast<std::uint32_t>(first + result.advance - 1);
    use(i, i + 1);
  }
  result.least_width = has_top_bit;
  return result;
}

UnpackedGaps UnpackGaps(const std::byte* packed, std::size_t width, std::size_t count,
                        std::uint32_t first, std::uint32_t* indices) {
  constexpr auto kAnyRoom = std::numeric_limits<std::uint64_t>::max();
  return UnpackGapsAs(packed, width, count, first, kAnyRoom, indices,
                      [](std::size_t, std::size_t) {});
}

UnpackedGaps AddAtGaps(const std::byte* packed, std::size_t width, std::size_t count,
                       std::uint32_t first, std::uint64_t room, const float* HWY_RESTRICT values,
                       float* HWY_RESTRICT accumulator) {
  HWY_ALIGN std::uint32_t indices[kMostGaps];
  return UnpackGapsAs(packed, width, count, first, room, indices,
                      [&](std::size_t begin, std::size_t end) HWY_ATTR {
                        for (std::size_t i = begin; i < end; ++i) {
                          accumulator[indices[i]] += values[i];
                        }
                      });
}

// ------------------------------------------------------------------------------------------- ring

#if GRADWIRE_VECTORS
/// The upper halves of the products.
HWY_INLINE VU MulHigh(VU a, VU b) {
  const hn::Repartition<std::uint64_t, DU> d64;
  const auto even = hn::ShiftRight<32>(hn::MulEven(a, b));
  const VU odd_a = hn::BitCast(du, hn::ShiftRight<32>(hn::BitCast(d64, a)));
  const VU odd_b = hn::BitCast(du, hn::ShiftRight<32>(hn::BitCast(d64, b)));
  const auto odd = hn::And(hn::MulEven(odd_a, odd_b), hn::Set(d64, 0xffffffff00000000));
  return hn::BitCast(du, hn::Or(even, odd));
}
#endif

/// Window j begins at floor(j n / k). Its remainder goes along, so that nothing is divided: a step
/// of some windows adds the quotient, and one more where the remainders carry.
void RingIndices(const Ring& ring, std::uint32_t first, std::size_t count,
                 std::uint32_t* HWY_RESTRICT indices) {
  const std::uint32_t n = ring.n;
  const std::uint32_t k = ring.k;
  const std::uint32_t turn = ring.turn;
  const std::uint32_t wrap = n - turn;  // at least 1
  const std::uint32_t size = n / k;
  const std::uint32_t carry_from = k - n % k;
  auto begin = static_cast<std::uint32_t>(std::uint64_t{first} * n / k);
  auto rest = static_cast<std::uint32_t>(std::uint64_t{first} * n % k);
  const auto next_window = [&] {
    const bool carry = rest >= carry_from;
    begin += size + (carry ? 1 : 0);
    rest = carry ? rest - carry_from : rest + n % k;
  };
  std::size_t i = 0;
#if GRADWIRE_VECTORS
  if (count >= N) {
    HWY_ALIGN std::uint32_t begin_lanes[N];
    HWY_ALIGN std::uint32_t rest_lanes[N];
    for (std::size_t lane = 0; lane < N; ++lane) {
      begin_lanes[lane] = begin;
      rest_lanes[lane] = rest;
      next_window();
    }
    VU begins = hn::Load(du, begin_lanes);
    VU rests = hn::Load(du, rest_lanes);
    VU products = DrawProducts(first, ring.key);
    const auto step_size = static_cast<std::uint32_t>(std::uint64_t{N} * n / k);
    const auto step_rest = static_cast<std::uint32_t>(std::uint64_t{N} * n % k);
    const VU product_step = hn::Set(du, static_cast<std::uint32_t>(kDrawStep * N));
    const VU sizes = hn::Set(du, size);
    const VU sizes_carried = hn::Set(du, size + 1);
    const VU carries_from = hn::Set(du, carry_from);
    const VU steps = hn::Set(du, step_size);
    const VU steps_carried = hn::Set(du, step_size + 1);
    const VU step_carries_from = hn::Set(du, k - step_rest);
    const VU step_rests = hn::Set(du, step_rest);
    const VU turns = hn::Set(du, turn);
    const VU wraps = hn::Set(du, wrap);
    for (; i + N <= count; i += N) {
      const VU own_sizes = hn::IfThenElse(hn::Lt(rests, carries_from), sizes, sizes_carried);
      const VU positions = hn::Add(begins, MulHigh(DrawWords(products, ring.key), own_sizes));
      hn::StoreU(hn::IfThenElse(hn::Lt(positions, wraps), hn::Add(positions, turns),
                                hn::Sub(positions, wraps)),
                 du, indices + i);
      products = hn::Add(products, product_step);
      const auto stays = hn::Lt(rests, step_carries_from);
      begins = hn::Add(begins, hn::IfThenElse(stays, steps, steps_carried));
      rests = hn::IfThenElse(stays, hn::Add(rests, step_rests), hn::Sub(rests, step_carries_from));
    }
    begin = hn::GetLane(begins);
    rest = hn::GetLane(rests);
  }
#endif
  for (; i < count; ++i) {
    const std::uint64_t own_size = std::uint64_t{size} + (rest >= carry_from ? 1 : 0);
    const std::uint32_t word = DrawWord(first + static_cast<std::uint32_t>(i), ring.key);
    const auto position = begin + static_cast<std::uint32_t>(word * own_size >> 32);
    indices[i] = position < wrap ? position + turn : position - wrap;
    next_window();
  }
}

}  // namespace gradwire::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace gradwire::kernels {

HWY_EXPORT(CollectAtLeast);
HWY_EXPORT(AllFinite);
HWY_EXPORT(CopyAscending);
HWY_EXPORT(UnpackGaps);
HWY_EXPORT(AddAtGaps);
HWY_EXPORT(RingIndices);

Collected CollectAtLeast(const float* input, float* residual, float alpha, std::size_t count,
                         std::uint32_t threshold_bits, std::uint32_t base, std::uint32_t* indices,
                         float* values) {
  return HWY_DYNAMIC_DISPATCH(CollectAtLeast)(input, residual, alpha, count, threshold_bits, base,
                                              indices, values);
}

bool AllFinite(const float* values, std::size_t count) {
  return HWY_DYNAMIC_DISPATCH(AllFinite)(values, count);
}

bool CopyAscending(const std::byte* from, std::size_t count, std::uint32_t* indices) {
  return HWY_DYNAMIC_DISPATCH(CopyAscending)(from, count, indices);
}

UnpackedGaps UnpackGaps(const std::byte* packed, std::size_t width, std::size_t count,
                        std::uint32_t first, std::uint32_t* indices) {
  return HWY_DYNAMIC_DISPATCH(UnpackGaps)(packed, width, count, first, indices);
}

UnpackedGaps AddAtGaps(const std::byte* packed, std::size_t width, std::size_t count,
                       std::uint32_t first, std::uint64_t room, const float* values,
                       float* accumulator) {
  return HWY_DYNAMIC_DISPATCH(AddAtGaps)(packed, width, count, first, room, values, accumulator);
}

void RingIndices(const Ring& ring, std::uint32_t first, std::size_t count, std::uint32_t* indices) {
  HWY_DYNAMIC_DISPATCH(RingIndices)(ring, first, count, indices);
}

}  // namespace gradwire::kernels
#endif  // HWY_ONCE
