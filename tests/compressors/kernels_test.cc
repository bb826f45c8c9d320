#include "compressors/codecs/kernels.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "common/base/bytes.h"
#include "common/base/random.h"
#include "compressors/codecs/half.h"
#include "compressors/codecs/quantize_kernels.h"
#include "compressors/compressor.h"
#include "tests/catch.h"

namespace gradwire {
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

float ReferenceFromHalf(std::uint16_t half) {
  const int exponent = (half >> 10) & 31;
  const auto mantissa = static_cast<double>(half & 1023);
  const double magnitude =
      exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25);
  return static_cast<float>((half & 0x8000) != 0 ? -magnitude : magnitude);
}

TEST_CASE("every float16 and bfloat16 survives the way to float and back",
          "[compressors][kernels]") {
  ForEachTarget([] {
    std::vector<std::uint16_t> halves(65536);
    for (std::size_t i = 0; i < halves.size(); ++i) halves[i] = static_cast<std::uint16_t>(i);
    const ByteView bytes = AsBytes(std::span<const std::uint16_t>(halves));
    std::vector<float> floats(halves.size());
    std::vector<std::byte> back(bytes.size());

    kernels::DecodeCast(kernels::CastFormat::kF16, bytes.data(), floats.size(), floats.data());
    kernels::EncodeCast(kernels::CastFormat::kF16, floats.data(), nullptr, 1, floats.size(),
                        back.data());
    for (std::size_t i = 0; i < halves.size(); ++i) {
      const std::uint16_t half = halves[i];
      const std::uint32_t got = std::bit_cast<std::uint32_t>(floats[i]);
      if ((half & 0x7c00) != 0x7c00) {
        REQUIRE(got == std::bit_cast<std::uint32_t>(ReferenceFromHalf(half)));
        REQUIRE(LoadLe<std::uint16_t>(back.data() + 2 * i) == half);
      } else {
        REQUIRE(std::isnan(floats[i]) == ((half & 0x3ff) != 0));
      }
      REQUIRE(got == std::bit_cast<std::uint32_t>(FloatFromHalf(half)));
    }

    kernels::DecodeCast(kernels::CastFormat::kBf16, bytes.data(), floats.size(), floats.data());
    kernels::EncodeCast(kernels::CastFormat::kBf16, floats.data(), nullptr, 1, floats.size(),
                        back.data());
    for (std::size_t i = 0; i < halves.size(); ++i) {
      REQUIRE(std::bit_cast<std::uint32_t>(floats[i]) == std::uint32_t{halves[i]} << 16);
      if ((halves[i] & 0x7f80) != 0x7f80) {
        REQUIRE(LoadLe<std::uint16_t>(back.data() + 2 * i) == halves[i]);
      }
    }
  });
}

TEST_CASE("casts round to nearest even and saturate", "[compressors][kernels]") {
  // The two neighbours of every border between halves, and the border itself.
  std::vector<float> values;
  for (std::uint32_t half = 0; half < 0x7bff; ++half) {
    const float low = ReferenceFromHalf(static_cast<std::uint16_t>(half));
    const float high = ReferenceFromHalf(static_cast<std::uint16_t>(half + 1));
    const float middle = low + (high - low) / 2;
    for (const float value : {std::nextafter(middle, low), middle, std::nextafter(middle, high)}) {
      values.push_back(half % 3 == 0 ? -value : value);
    }
  }
  for (const float value : {65504.0F, 65519.0F, 65520.0F, 1e10F, -65536.0F, 3.4e38F, 1e-45F}) {
    values.push_back(value);
  }
  ForEachTarget([&] {
    std::vector<std::byte> out(values.size() * 2);
    kernels::EncodeCast(kernels::CastFormat::kF16, values.data(), nullptr, 1, values.size(),
                        out.data());
    for (std::size_t i = 0; i < values.size(); ++i) {
      const auto got = LoadLe<std::uint16_t>(out.data() + 2 * i);
      REQUIRE(got == HalfFromFloat(values[i]));
      REQUIRE((got & 0x7fff) <= 0x7bff);
      if (i / 3 < 0x7bff) {
        // Three values a border: below it goes down, on it to the even one, above it up.
        const auto low = static_cast<std::uint32_t>(i / 3);
        const std::uint32_t expected = i % 3 == 0 ? low : i % 3 == 2 ? low + 1 : low + (low & 1);
        REQUIRE((got & 0x7fffU) == expected);
      }
    }
    kernels::EncodeCast(kernels::CastFormat::kBf16, values.data(), nullptr, 1, values.size(),
                        out.data());
    for (std::size_t i = 0; i < values.size(); ++i) {
      const auto got = LoadLe<std::uint16_t>(out.data() + 2 * i);
      REQUIRE(got == BfloatFromFloat(values[i]));
      const float back = FloatFromBfloat(got);
      REQUIRE(std::fabs(back - values[i]) <=
              std::max(std::ldexp(std::fabs(values[i]), -8), 0x1.0p-134F));
    }
  });
}

TEST_CASE("sums of signs have 16 float lanes and are added in double", "[compressors][kernels]") {
  CounterRng rng(11);
  for (const std::size_t n : {1UL, 15UL, 16UL, 17UL, 100UL, 4095UL, 4096UL}) {
    std::vector<float> x(n);
    for (float& value : x) value = static_cast<float>(rng.NextGaussian() * 1000);
    float lanes[16] = {};
    float negative_lanes[16] = {};
    std::uint64_t negatives = 0;
    for (std::size_t i = 0; i < n; ++i) {
      float* const own_lanes = x[i] < 0 ? negative_lanes : lanes;
      own_lanes[i % 16] += std::fabs(x[i]);
      negatives += x[i] < 0 ? 1 : 0;
    }
    double rest = 0;
    double negative = 0;
    for (int lane = 0; lane < 16; ++lane) {
      rest += static_cast<double>(lanes[lane]);
      negative += static_cast<double>(negative_lanes[lane]);
    }
    ForEachTarget([&] {
      std::vector<std::byte> bits((n + 7) / 8, std::byte{0xff});
      const kernels::SignSums sums = kernels::EncodeSigns(kernels::SignSum::kTwoAbs, x.data(),
                                                          nullptr, 1, 0, 0, n, bits.data());
      REQUIRE(sums.rest == rest);
      REQUIRE(sums.negative == negative);
      REQUIRE(sums.negatives == negatives);
      for (std::size_t i = 0; i < bits.size() * 8; ++i) {
        const bool bit = ((bits[i / 8] >> (i % 8)) & std::byte{1}) != std::byte{0};
        REQUIRE(bit == (i < n && x[i] < 0));
      }
    });
  }
}

TEST_CASE("signs keep what is finite, also where its sum is not", "[compressors][kernels]") {
  constexpr float kMax = std::numeric_limits<float>::max();
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  constexpr std::size_t kCount = 203;
  for (const auto sum :
       {kernels::SignSum::kAbs, kernels::SignSum::kSquares, kernels::SignSum::kTwoAbs}) {
    CAPTURE(static_cast<int>(sum));
    for (const std::size_t bad : {std::size_t{5}, std::size_t{77}, std::size_t{202}, kCount}) {
      CAPTURE(bad);
      std::vector<float> x(kCount);
      for (std::size_t i = 0; i < kCount; ++i) x[i] = i % 3 == 0 ? -kMax : kMax / 2;
      if (bad < kCount) x[bad] = kNan;
      ForEachTarget([&] {
        std::vector<float> values(kCount);
        for (std::size_t i = 0; i < kCount; ++i) values[i] = i % 2 == 0 ? -3.0F : 4.0F;
        std::vector<std::byte> bits((kCount + 7) / 8);
        const kernels::SignSums sums =
            kernels::EncodeSigns(sum, x.data(), values.data(), 1, -2.0F, 2.0F, kCount, bits.data());
        REQUIRE(sums.finite == (bad == kCount));
        for (std::size_t i = 0; i < kCount; ++i) {
          REQUIRE(values[i] == (i == bad ? (i % 2 == 0 ? -1.0F : 2.0F) : x[i]));
        }
      });
    }
  }
}

TEST_CASE("feedback is added where q is finite, whatever its neighbours are",
          "[compressors][kernels]") {
  constexpr std::size_t kCount = 150;
  constexpr float kMax = std::numeric_limits<float>::max();
  for (const float bad : {std::numeric_limits<float>::infinity(),
                          std::numeric_limits<float>::quiet_NaN(), kMax, 1.0F}) {
    CAPTURE(bad);
    for (const std::size_t at : {0UL, 63UL, 64UL, 149UL}) {
      CAPTURE(at);
      std::vector<float> x(kCount, kMax / 4);
      x[at] = bad;
      ForEachTarget([&] {
        std::vector<float> residual(kCount, kMax / 2);  // kMax + kMax / 2 overflows
        REQUIRE(kernels::AddFeedback(x.data(), residual.data(), 1, kCount) == (bad == 1.0F));
        for (std::size_t i = 0; i < kCount; ++i) {
          REQUIRE(residual[i] == (i == at ? kMax / 2 : kMax / 4 * 3));
        }
      });
    }
  }
}

TEST_CASE("zeros keep their sign where nothing is taken off", "[compressors][kernels]") {
  const std::vector<float> x(67, -0.0F);
  ForEachTarget([&] {
    for (const bool lazy : {false, true}) {
      CAPTURE(lazy);  // of scale 0: -0 - -0 is +0
      std::vector<float> values(x.size(), -0.0F);
      std::vector<std::byte> bits((x.size() + 7) / 8);
      kernels::EncodeSigns(kernels::SignSum::kAbs, x.data(), values.data(), 1, lazy ? -0.0F : 0.0F,
                           0.0F, x.size(), bits.data());
      for (std::size_t i = 0; i < x.size(); ++i) {
        const bool bit = ((bits[i / 8] >> (i % 8)) & std::byte{1}) != std::byte{0};
        REQUIRE(bit == !lazy);
        REQUIRE(std::signbit(values[i]) == !lazy);
      }
    }
  });
}

TEST_CASE("trits of every byte are decoded from any of them on", "[compressors][kernels]") {
  constexpr std::size_t kBytes = 243;
  constexpr float kLevels[3] = {0, 1.5F, -1.5F};
  std::vector<std::byte> bytes(kBytes);
  std::vector<float> expected;
  for (std::size_t b = 0; b < kBytes; ++b) {
    bytes[b] = static_cast<std::byte>(b * 100 % kBytes);
    std::size_t digits = b * 100 % kBytes;
    for (int trit = 0; trit < 5; ++trit, digits /= 3) expected.push_back(kLevels[digits % 3]);
  }
  ForEachTarget([&] {
    for (std::size_t skip = 0; skip < 5; ++skip) {
      for (const std::size_t count : {0UL, 1UL, 7UL, 31UL, 32UL, 33UL, 1100UL, 1210UL}) {
        CAPTURE(skip, count);
        std::vector<float> out(count, 7.0F);
        std::vector<float> sum(count, 0.25F);
        // No byte behind the last one may be read.
        const std::size_t num_bytes = (skip + count + 4) / 5;
        const std::vector<std::byte> exact(bytes.begin(),
                                           bytes.begin() + static_cast<std::ptrdiff_t>(num_bytes));
        kernels::DecodeTrits(exact.data(), num_bytes, skip, 1.5F, count, out.data());
        kernels::DecodeAddTrits(exact.data(), num_bytes, skip, 1.5F, count, sum.data());
        for (std::size_t i = 0; i < count; ++i) {
          REQUIRE(out[i] == expected[skip + i]);
          REQUIRE(sum[i] == expected[skip + i] + 0.25F);
        }
      }
    }
  });
}

TEST_CASE("there is plain code beside the vector kernels", "[compressors][kernels]") {
  const std::vector<std::int64_t> targets = kernels::AvailableTargets();
  REQUIRE_FALSE(targets.empty());
#if defined(__x86_64__)
  CHECK(targets.size() >= 2);
#endif
}

}  // namespace
}  // namespace gradwire
