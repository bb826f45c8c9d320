#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>

#include "common/base/bytes.h"
#include "common/base/random.h"
#include "compressors/codecs/kernels.h"
#include "compressors/codecs/sparse_kernels.h"
#include "tests/catch.h"
#include "tests/compressors/codec_testing.h"

// What the codecs that keep few elements share: their kernels and their layout.

namespace gradwire::testing {
namespace {

/// Runs body once for every instruction set of this machine.
template <typename Body>
void ForEachTarget(Body&& body) {
  for (const std::int64_t target : kernels::AvailableTargets()) {
    CAPTURE(kernels::TargetName(target));
    kernels::UseTarget(target);
    body();
    kernels::UseTarget(0);
  }
}

std::vector<float> Normal(std::size_t n, std::uint64_t seed) {
  CounterRng rng(seed);
  std::vector<float> values(n);
  for (float& value : values) value = static_cast<float>(rng.NextGaussian());
  return values;
}

TEST_CASE("collecting finds what reaches the threshold, in order, and adds the residual",
          "[compressors][kernels][sparse]") {
  for (const std::size_t n : {0UL, 1UL, 63UL, 64UL, 200UL, 1100UL, 4096UL}) {
    const std::vector<float> g = Normal(n, 12);
    const std::vector<float> e = Normal(n, 13);
    const bool feedback = GENERATE(false, true);
    constexpr float kAlpha = 0.7F;
    std::vector<float> q = g;
    if (feedback) {
      for (std::size_t i = 0; i < n; ++i) q[i] = g[i] + kAlpha * e[i];
    }
    for (const float threshold : {0.0F, 0.5F, 2.5F, 100.0F}) {
      CAPTURE(n, feedback, threshold);
      std::vector<std::uint32_t> expected;
      std::vector<float> expected_values;
      for (std::size_t i = 0; i < n; ++i) {
        if (std::fabs(q[i]) < threshold) continue;
        expected.push_back(static_cast<std::uint32_t>(i + 7));
        expected_values.push_back(q[i]);
      }
      ForEachTarget([&] {
        std::vector<std::uint32_t> indices(n);
        std::vector<float> values(n);
        std::vector<float> residual = e;
        const kernels::Collected collected = kernels::CollectAtLeast(
            g.data(), feedback ? residual.data() : nullptr, kAlpha, n,
            std::bit_cast<std::uint32_t>(threshold), 7, indices.data(), values.data());
        CHECK(collected.finite);
        indices.resize(collected.found);
        values.resize(collected.found);
        REQUIRE(indices == expected);
        REQUIRE(Bits(values) == Bits(expected_values));
        if (feedback) REQUIRE(Bits(residual) == Bits(q));
      });
    }
  }
}

TEST_CASE("collecting says of any element that it is not finite",
          "[compressors][kernels][sparse]") {
  constexpr std::size_t n = 1100;
  for (const float bad :
       {std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity(),
        std::numeric_limits<float>::quiet_NaN()}) {
    for (const std::size_t at : {0UL, 63UL, 64UL, 1030UL, 1099UL}) {
      std::vector<float> g = Normal(n, 3);
      g[at] = bad;
      ForEachTarget([&] {
        std::vector<std::uint32_t> indices(n);
        std::vector<float> values(n);
        std::vector<float> residual(n, 0.25F);
        CHECK_FALSE(
            kernels::CollectAtLeast(g.data(), nullptr, 1, n, 1, 0, indices.data(), values.data())
                .finite);
        CHECK_FALSE(kernels::CollectAtLeast(g.data(), residual.data(), 1, n, 1, 0, indices.data(),
                                            values.data())
                        .finite);
        CHECK(residual[at] == 0.25F);
        CHECK_FALSE(kernels::AllFinite(g.data(), n));
        CHECK(kernels::AllFinite(residual.data(), n));
      });
    }
  }
}

/// Writes gaps bit by bit.
std::vector<std::byte> PackBits(std::span<const std::uint32_t> gaps, std::size_t width) {
  std::vector<std::byte> bytes((gaps.size() * width + 7) / 8, std::byte{0});
  for (std::size_t i = 0; i < gaps.size(); ++i) {
    for (std::size_t bit = 0; bit < width; ++bit) {
      const std::size_t at = i * width + bit;
      if ((gaps[i] >> bit & 1) != 0) bytes[at / 8] |= std::byte{1} << (at % 8);
    }
  }
  return bytes;
}

TEST_CASE("gaps of every width and count are unpacked", "[compressors][kernels][sparse]") {
  CounterRng rng(21);
  for (std::size_t width = 0; width <= 32; ++width) {
    for (const std::size_t count : {1UL, 15UL, 16UL, 17UL, 100UL, 127UL, 128UL}) {
      const auto kind = GENERATE(0, 1, 2);  // any, all as large as possible, one too narrow
      const std::uint64_t bound = std::uint64_t{1} << (kind == 2 && width > 0 ? width - 1 : width);
      std::vector<std::uint32_t> gaps(count);
      bool has_top_bit = width == 0;
      for (std::uint32_t& gap : gaps) {
        gap = static_cast<std::uint32_t>(kind == 1 ? bound - 1 : rng.NextBelow(bound));
        has_top_bit = has_top_bit || gap >> (width - 1) != 0;
      }
      const std::uint32_t first = 4'000'000'000U;  // indices wrap, as they may
      std::vector<std::uint32_t> expected;
      std::uint64_t advance = 0;
      for (const std::uint32_t gap : gaps) {
        advance += std::uint64_t{gap} + 1;
        expected.push_back(static_cast<std::uint32_t>(first + advance - 1));
      }
      std::vector<std::byte> packed = PackBits(gaps, width);
      packed.resize(packed.size() + kernels::kUnpackSlackBytes, std::byte{0xff});
      CAPTURE(width, count, kind);
      ForEachTarget([&] {
        std::vector<std::uint32_t> indices(count);
        const kernels::UnpackedGaps unpacked =
            kernels::UnpackGaps(packed.data(), width, count, first, indices.data());
        REQUIRE(indices == expected);
        REQUIRE(unpacked.advance == advance);
        REQUIRE(unpacked.least_width == has_top_bit);
      });
    }
  }
}

TEST_CASE("any index that does not ascend is found", "[compressors][kernels][sparse]") {
  for (const std::size_t count : {0UL, 1UL, 2UL, 17UL, 128UL}) {
    std::vector<std::uint32_t> from(count);
    for (std::size_t i = 0; i < count; ++i) {
      from[i] = static_cast<std::uint32_t>(2'147'483'600 + 3 * i);
    }
    ForEachTarget([&] {
      std::vector<std::uint32_t> to(count);
      const auto copy = [&](const std::vector<std::uint32_t>& values) {
        return kernels::CopyAscending(AsBytes(std::span<const std::uint32_t>(values)).data(), count,
                                      to.data());
      };
      CHECK(copy(from));
      CHECK(to == from);
      for (std::size_t i = 1; i < count; ++i) {
        std::vector<std::uint32_t> wrong = from;
        wrong[i] = wrong[i - 1];
        REQUIRE_FALSE(copy(wrong));
      }
    });
  }
}

}  // namespace
}  // namespace gradwire::testing
