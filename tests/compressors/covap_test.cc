#include "compressors/filters/covap.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "common/base/random.h"
#include "tests/catch.h"

namespace gradwire::covap {
namespace {

TEST_CASE("the interval is the ratio over 0.9, rounded up and bounded", "[compressors][covap]") {
  constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  struct Case {
    double ccr;
    std::uint32_t most;
    std::uint32_t interval;
  };
  for (const auto& [ccr, most, interval] :
       {Case{0, 10, 1}, Case{0.5, 10, 1}, Case{0.9, 10, 1}, Case{0.91, 10, 2}, Case{1.8, 10, 2},
        Case{1.81, 10, 3}, Case{3.5, 10, 4}, Case{8.95, 10, 10}, Case{9.5, 10, 10}, Case{9.5, 3, 3},
        Case{9.5, 1, 1}, Case{-1, 10, 1}, Case{kNan, 10, 1}, Case{kInfinity, 10, 10}}) {
    CAPTURE(ccr, most);
    CHECK(IntervalFor(ccr, most) == interval);
  }
}

TEST_CASE("an interval changes if the ratio has moved by a fifth since the last change",
          "[compressors][covap]") {
  IntervalRule rule;
  // Nothing to compare with before the first change.
  CHECK(rule.Decide(0.5, 1, 100) == std::nullopt);
  CHECK(rule.Decide(0.95, 1, 100) == 2U);
  // From 0.95: between 0.76 and 1.14 it stays, whatever the rule gives.
  CHECK(rule.Decide(0.77, 2, 100) == std::nullopt);
  CHECK(rule.Decide(1.13, 2, 100) == std::nullopt);
  // It moved, and the rule gives the same.
  CHECK(rule.Decide(1.7, 2, 100) == std::nullopt);
  CHECK(rule.Decide(2.8, 2, 100) == 4U);
  // From 2.8 now: that 1.7 changed nothing left no mark.
  CHECK(rule.Decide(2.3, 4, 100) == std::nullopt);
  CHECK(rule.Decide(3.3, 4, 100) == std::nullopt);
  CHECK(rule.Decide(2.2, 4, 100) == 3U);
  CHECK(rule.Decide(0.1, 3, 100) == 1U);
  // As many units as there are.
  CHECK(rule.Decide(50, 1, 7) == 7U);
  CHECK(rule.Decide(500, 7, 7) == std::nullopt);
}

TEST_CASE("in any I steps one after the other each class is active once", "[compressors][covap]") {
  for (std::uint32_t interval = 1; interval <= 9; ++interval) {
    for (std::uint64_t first : {std::uint64_t{0}, std::uint64_t{5}, std::uint64_t{1} << 40}) {
      for (std::uint32_t c = 0; c < interval; ++c) {
        int active = 0;
        for (std::uint64_t t = first; t < first + interval; ++t) active += IsActive(c, interval, t);
        CAPTURE(interval, first, c);
        CHECK(active == 1);
      }
    }
  }
  // By the formula: (class + t) mod I = 0.
  CHECK(IsActive(3, 4, 1));
  CHECK_FALSE(IsActive(3, 4, 0));
}

TEST_CASE("the weight grows by steps up to 1", "[compressors][covap]") {
  const Coefficient slow = DefaultCoefficient(8);
  CHECK(slow == Coefficient{0.5, 0.1, 50});
  CHECK(slow.At(0) == 0.5F);
  CHECK(slow.At(49) == 0.5F);
  CHECK(slow.At(50) == 0.6F);
  CHECK(slow.At(249) == 0.9F);
  CHECK(slow.At(250) == 1.0F);
  CHECK(slow.At(std::uint64_t{1} << 50) == 1.0F);
  CHECK(DefaultCoefficient(9) == Coefficient{0.2, 0.1, 100});
  CHECK(Coefficient{1, 0, 1}.At(7) == 1.0F);
}

TEST_CASE("balanced classes are filled longest first beside what is there",
          "[compressors][covap]") {
  const std::vector<std::uint64_t> sizes = {5, 9, 3, 4, 8};
  std::array<std::uint64_t, 3> loads = {0, 0, 2};
  // 9 -> 0, 8 -> 1, 5 -> 2 (7), 4 -> 2 (11), 3 -> 1 (11)
  CHECK(AssignBalanced(sizes, loads) == std::vector<std::uint32_t>{2, 0, 1, 2, 1});
  CHECK(loads == std::array<std::uint64_t, 3>{9, 11, 11});
}

TEST_CASE("the paper's rule cuts what is larger than the median", "[compressors][covap]") {
  CHECK(NumShards(10, 10, 4) == 1);
  CHECK(NumShards(12, 10, 4) == 1);
  CHECK(NumShards(13, 10, 4) == 2);
  CHECK(NumShards(22, 10, 4) == 2);
  CHECK(NumShards(24, 10, 4) == 3);
  CHECK(NumShards(1000, 10, 4) == 4);
  CHECK(NumShards(1, 10, 4) == 1);
  CHECK(NumShards(1000, 10, 1) == 1);
}

TEST_CASE("holding back adds the gradient to what is weighed, rounded as two operations",
          "[compressors][covap]") {
  for (const std::size_t n :
       {std::size_t{0}, std::size_t{1}, std::size_t{4095}, std::size_t{9001}}) {
    for (const float c : {1.0F, 0.5F, 0.3F}) {
      CAPTURE(n, c);
      CounterRng rng(7);
      std::vector<float> g(n);
      std::vector<float> e(n);
      for (float& value : g) value = static_cast<float>(rng.NextGaussian());
      for (float& value : e) value = static_cast<float>(rng.NextGaussian());
      std::vector<float> expected(n);
      for (std::size_t i = 0; i < n; ++i) {
        const volatile float kept = c * e[i];
        expected[i] = kept + g[i];
      }
      SpanSource source(g);
      const HeldBack held = HoldBack(source, c, e);
      CHECK(held.nonfinite == 0);
      CHECK_FALSE(held.first);
      CHECK(e == expected);
    }
  }
}

TEST_CASE("what is not finite is left out, counted and found", "[compressors][covap]") {
  constexpr float kMost = std::numeric_limits<float>::max();
  std::vector<float> g(5000, 1.0F);
  std::vector<float> e(5000, 2.0F);
  g[4097] = std::numeric_limits<float>::quiet_NaN();
  g[4100] = -std::numeric_limits<float>::infinity();
  g[4999] = kMost;
  e[4999] = kMost;  // finite, but not the sum
  SECTION("weighed") {
    SpanSource source(g);
    const HeldBack held = HoldBack(source, 0.5F, e);
    CHECK(held.nonfinite == 3);
    CHECK(held.first == std::size_t{4097});
    CHECK(e[4096] == 2.0F);  // 0.5 * 2 + 1
    CHECK(e[4097] == 1.0F);
    CHECK(e[4100] == 1.0F);
    CHECK(e[4999] == kMost / 2);
  }
  SECTION("with weight 1") {
    SpanSource source(g);
    const HeldBack held = HoldBack(source, 1.0F, e);
    CHECK(held.nonfinite == 3);
    CHECK(held.first == std::size_t{4097});
    CHECK(e[4097] == 2.0F);
    CHECK(e[4999] == kMost);
    CHECK(std::all_of(e.begin(), e.end(), [](float value) { return std::isfinite(value); }));
  }
  SECTION("an overflow alone") {
    g[4097] = g[4100] = 1.0F;
    SpanSource source(g);
    const HeldBack held = HoldBack(source, 1.0F, e);
    CHECK(held.nonfinite == 1);
    CHECK(held.first == std::size_t{4999});
  }
}

}  // namespace
}  // namespace gradwire::covap
