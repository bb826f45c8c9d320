#include "compressors/filters/covap.h"

#include <algorithm>
#include <bit>
#include <cassert>
#include <cmath>
#include <numeric>

#include "compressors/codecs/float_mode.h"

namespace gradwire::covap {
namespace {

// Not std::isfinite: this the compiler turns into vector code.
bool IsFinite(float value) {
  constexpr std::uint32_t kExponent = 0x7f800000;
  return (std::bit_cast<std::uint32_t>(value) & kExponent) != kExponent;
}

/// e <- c * e + g for a block without a branch. Returns how many elements of g were left out.
template <bool kWeighs>
std::uint32_t AddBlock(const float* g, float c, float* e, std::size_t count) {
  std::uint32_t left_out = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const float kept = kWeighs ? c * e[i] : e[i];
    const float sum = kept + g[i];
    const bool is_finite = IsFinite(sum);
    e[i] = is_finite ? sum : kept;
    left_out += is_finite ? 0U : 1U;
  }
  return left_out;
}

}  // namespace

float Coefficient::At(std::uint64_t step) const {
  assert(every > 0);
  return static_cast<float>(std::min(1.0, initial + increment * static_cast<double>(step / every)));
}

Coefficient DefaultCoefficient(std::uint32_t interval) {
  return interval <= 8 ? Coefficient{0.5, 0.1, 50} : Coefficient{0.2, 0.1, 100};
}

std::vector<std::uint32_t> AssignBalanced(std::span<const std::uint64_t> sizes,
                                          std::span<std::uint64_t> loads) {
  std::vector<std::size_t> order(sizes.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return sizes[a] > sizes[b]; });
  std::vector<std::uint32_t> classes(sizes.size());
  for (const std::size_t i : order) {
    const auto least = std::min_element(loads.begin(), loads.end());
    *least += sizes[i];
    classes[i] = static_cast<std::uint32_t>(least - loads.begin());
  }
  return classes;
}

std::uint32_t NumShards(std::uint64_t size, std::uint64_t median, std::uint32_t interval) {
  const double ratio = static_cast<double>(size) / static_cast<double>(median);
  return static_cast<std::uint32_t>(
      std::clamp(std::floor(ratio + 0.7), 1.0, static_cast<double>(interval)));
}

std::uint32_t IntervalFor(double ccr, std::uint32_t most) {
  assert(most > 0);
  // A tenth of the time is left free: what is measured varies.
  const double wanted = ccr > 0 ? std::ceil(ccr / 0.9) : 1.0;
  return static_cast<std::uint32_t>(std::clamp(wanted, 1.0, static_cast<double>(most)));
}

std::optional<std::uint32_t> IntervalRule::Decide(double ccr, std::uint32_t current,
                                                  std::uint32_t most) {
  const std::uint32_t wanted = IntervalFor(ccr, most);
  if (wanted == current) return std::nullopt;
  if (ccr_of_last_change_ && std::abs(ccr - *ccr_of_last_change_) <= 0.2 * *ccr_of_last_change_) {
    return std::nullopt;
  }
  ccr_of_last_change_ = ccr;
  return wanted;
}

HeldBack HoldBack(BlockSource& input, float coefficient, std::span<float> e) {
  const ScopedFloatMode ieee;
  HeldBack held;
  ForEachBlock(e.size(), [&](std::size_t offset, std::size_t count) {
    const float* const g = input.Block(offset, count);
    float* const block = e.data() + offset;
    const std::uint32_t left_out = coefficient == 1.0F
                                       ? AddBlock<false>(g, 1.0F, block, count)
                                       : AddBlock<true>(g, coefficient, block, count);
    if (left_out == 0) return;
    held.nonfinite += left_out;
    for (std::size_t i = 0; !held.first && i < count; ++i) {
      // What was left out has left its e as it was weighed.
      if (!IsFinite(g[i]) || !IsFinite(block[i] + g[i])) held.first = offset + i;
    }
  });
  return held;
}

}  // namespace gradwire::covap
