#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "compressors/compressor.h"

namespace gradwire::covap {

// The maths of the overlap-aware filter; docs/covap.md explains it. Source: COVAP (Meng et al.
// 2023), with classes filled from sizes beside the paper's own rule.

/// The weight that what was held back keeps when a new gradient is added to it:
/// c(t) = min(1, initial + increment * floor(t / every)).
struct Coefficient {
  double initial = 0.5;
  double increment = 0.1;
  std::uint64_t every = 50;  // steps, at least 1

  float At(std::uint64_t step) const;
  friend bool operator==(const Coefficient&, const Coefficient&) = default;
};

/// 0.5 and every 50 steps for intervals up to 8, above it 0.2 and every 100.
Coefficient DefaultCoefficient(std::uint32_t interval);

/// True in one of `interval` steps.
constexpr bool IsActive(std::uint32_t filter_class, std::uint32_t interval, std::uint64_t step) {
  return (filter_class + step) % interval == 0;
}

/// Gives each size a class, the largest first and each the class with the least bytes so far; the
/// lowest number among equals. loads[interval]: bytes of what has a class already; takes the new
/// sizes in. Returns a class for each size.
std::vector<std::uint32_t> AssignBalanced(std::span<const std::uint64_t> sizes,
                                          std::span<std::uint64_t> loads);

/// Into how many shards the paper's rule cuts a unit: clamp(floor(size / median + 0.7), 1,
/// interval). Sizes in any one measure; median not 0.
std::uint32_t NumShards(std::uint64_t size, std::uint64_t median, std::uint32_t interval);

/// The interval at which what is sent fits into the time that can hide it: max(1, ceil(ccr / 0.9)),
/// at most `most`. ccr: time to communicate every unit over that time; below 0 and NaN count as 0.
/// Precondition: most is at least 1.
std::uint32_t IntervalFor(double ccr, std::uint32_t most);

/// Decides from one measurement after the other when the interval changes.
class IntervalRule {
 public:
  /// The interval to change to: if IntervalFor gives another than `current` and ccr is more than
  /// 20 % away from that of the last change (there was none: always). None: it stays.
  std::optional<std::uint32_t> Decide(double ccr, std::uint32_t current, std::uint32_t most);

 private:
  std::optional<double> ccr_of_last_change_;
};

/// What HoldBack could not add.
struct HeldBack {
  std::size_t nonfinite = 0;         // elements
  std::optional<std::size_t> first;  // of these
};

/// e <- coefficient * e + g in one pass. Where the sum is not finite g is not added, so e stays
/// finite. Shapes: input and e of the same n.
HeldBack HoldBack(BlockSource& input, float coefficient, std::span<float> e);

}  // namespace gradwire::covap
