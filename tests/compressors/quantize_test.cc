#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "common/base/bytes.h"
#include "common/base/random.h"
#include "compressors/codecs/draws.h"
#include "compressors/codecs/kernels.h"
#include "compressors/registry.h"
#include "tests/catch.h"
#include "tests/compressors/codec_testing.h"

// The codecs that round each element to a few levels, against the formulas of docs/payloads.md
// written down once more, plainly, and against what their classes promise in the mean.

namespace gradwire::testing {
namespace {

constexpr float kMax = std::numeric_limits<float>::max();

/// A payload by the formulas, and what it decodes to.
struct Expected {
  std::vector<std::byte> payload;
  std::vector<float> decoded;
};

void Append(std::vector<std::byte>& payload, float value) {
  payload.resize(payload.size() + sizeof value);
  StoreLe(payload.data() + payload.size() - sizeof value, value);
}

/// U(i) with the words of the document.
float Bound(std::size_t i, std::uint64_t seed) {
  const auto k0 = static_cast<std::uint32_t>(seed);
  const auto k1 = static_cast<std::uint32_t>(seed >> 32);
  const std::size_t j = i % 32;
  std::uint32_t x =
      static_cast<std::uint32_t>(16 * (i / 32) + (j < 16 ? j : j - 16)) * 0x9e3779b9U + k0;
  x = (x ^ (x >> 16)) * 0x7feb352dU;
  x = x ^ k1;
  x = (x ^ (x >> 15)) * 0x846ca68bU;
  x = x ^ (x >> 16);
  const std::uint32_t u = j < 16 ? x & 0xffff : x >> 16;
  return static_cast<float>(std::ldexp(2 * static_cast<double>(u) + 1, -17));
}

Expected ExpectInt8(std::span<const float> q, std::size_t block, bool stochastic,
                    std::uint64_t seed) {
  Expected expected;
  std::vector<std::byte> levels;
  for (std::size_t begin = 0; begin < q.size(); begin += block) {
    const std::size_t end = std::min(begin + block, q.size());
    float m = 0;
    for (std::size_t i = begin; i < end; ++i) m = std::max(m, std::fabs(q[i]));
    float s = m / 127;
    if (std::isinf(127 * s)) s = std::nextafter(s, 0.0F);
    if (s < 0x1.0p-126F) s = 0;
    Append(expected.payload, s);
    for (std::size_t i = begin; i < end; ++i) {
      float level = 0;
      if (s != 0) {
        const float r = 1 / s;
        const float y = q[i] * r;
        const float k = std::floor(y);
        level = stochastic ? (y - k > Bound(i, seed) ? k + 1 : k) : std::nearbyint(y);
        level = std::min(std::max(level, -127.0F), 127.0F);
      }
      levels.push_back(static_cast<std::byte>(static_cast<int>(level) & 0xff));
      expected.decoded.push_back((level == 0 ? 0.0F : level) * s);
    }
  }
  expected.payload.insert(expected.payload.end(), levels.begin(), levels.end());
  return expected;
}

/// Values of one order of magnitude after the other, from denormal ones to the largest, with zeros
/// of both signs and repeated values.
std::vector<float> AllOrders(std::size_t n, std::uint64_t seed) {
  CounterRng rng(seed);
  std::vector<float> values(n);
  for (std::size_t i = 0; i < n; ++i) {
    const auto bits = static_cast<std::uint32_t>(rng.Next());
    values[i] = std::bit_cast<float>(bits);
    if (!std::isfinite(values[i])) values[i] = bits % 2 == 0 ? kMax : -kMax;
    if (rng.NextBelow(16) == 0) values[i] = bits % 2 == 0 ? 0.0F : -0.0F;
    if (i > 0 && rng.NextBelow(8) == 0) values[i] = values[i - 1];
  }
  return values;
}

/// Inputs where rounding, saturation and underflow happen, and common ones.
std::vector<std::vector<float>> Inputs(std::size_t n) {
  std::vector<std::vector<float>> inputs = {Gradient(n, n + 1), AwkwardGradient(n, n + 2),
                                            AllOrders(n, n + 3)};
  // Everything within a few orders of the ends of the floats.
  for (const int shift : {-148, -140, -130, -118, -110, 120, 126}) {
    inputs.push_back(Gradient(n, n + 4));
    for (float& value : inputs.back()) {
      value = std::clamp(std::ldexp(value, shift), -kMax, kMax);
    }
  }
  // Multiples of half a step: ties.
  std::vector<float> ties(n);
  for (std::size_t i = 0; i < n; ++i) {
    ties[i] = static_cast<float>(static_cast<int>(i % 509) - 254) * 0.25F;
  }
  inputs.push_back(ties);
  return inputs;
}

/// Checks a codec against its formulas: plain and with feedback, on every instruction set.
template <typename Expect>
void CheckAgainst(const std::string& spec, Expect&& expect) {
  const auto codec = Make(spec);
  for (const std::size_t n : {1UL, 31UL, 32UL, 33UL, 1000UL, 4096UL, 9001UL, 40000UL}) {
    std::size_t kind = 0;
    for (const std::vector<float>& x : Inputs(n)) {
      CAPTURE(spec, n, kind++);
      const std::uint64_t seed = 0x123456789abcdef0U * n + kind;
      const Expected plain = expect(x, seed);
      // Feedback: e small beside x, so that q is another value of the same kind.
      std::vector<float> e(n);
      std::vector<float> q(n);
      for (std::size_t i = 0; i < n; ++i) {
        e[i] = x[n - 1 - i] * 0.125F;
        q[i] = x[i] * 0.5F + 0.75F * e[i];
      }
      const Expected fed = expect(q, seed);
      std::vector<float> g(n);
      for (std::size_t i = 0; i < n; ++i) g[i] = x[i] * 0.5F;
      for (const std::int64_t target : kernels::AvailableTargets()) {
        CAPTURE(kernels::TargetName(target));
        kernels::UseTarget(target);
        const Coded coded = Encode(*codec, x, nullptr, {.stream_seed = seed});
        const std::vector<float> decoded = Decode(*codec, plain.payload, n);
        std::vector<float> left = e;
        Residual residual{left, {}};
        const Coded coded_fed = Encode(*codec, g, &residual, {.stream_seed = seed, .alpha = 0.75F});
        kernels::UseTarget(0);
        REQUIRE(coded.finite);
        REQUIRE(coded.payload == plain.payload);
        REQUIRE(Bits(decoded) == Bits(plain.decoded));
        REQUIRE(coded_fed.finite);
        REQUIRE(coded_fed.payload == fed.payload);
        bool same = true;
        for (std::size_t i = 0; i < n; ++i) {
          same = same && std::bit_cast<std::uint32_t>(left[i]) ==
                             std::bit_cast<std::uint32_t>(q[i] - fed.decoded[i]);
        }
        REQUIRE(same);
      }
    }
  }
}

/// Checks that a payload is refused, with each of `words` in the message.
void CheckRefused(const Compressor& codec, const std::vector<std::byte>& payload, std::size_t n,
                  const std::vector<std::string>& words) {
  std::vector<float> output(n);
  const Status status = codec.Validate(payload, n);
  CAPTURE(status.ToString());
  CHECK(status.code() == StatusCode::kCorruptData);
  for (const std::string& word : words) {
    CAPTURE(word);
    CHECK(status.message().find(word) != std::string::npos);
  }
  CHECK(codec.Decode(payload, {}, output) == status);
  CHECK(codec.DecodeAdd(payload, {}, output) == status);
}

/// Scales that no encoder writes are refused, whichever scale of the payload it is.
void CheckScaleRefused(const Compressor& codec, std::size_t n, std::size_t index) {
  for (const auto& [scale, text] : {std::pair<float, std::string>{-1.5F, "-1.5"},
                                    {-0.0F, "-0"},
                                    {std::numeric_limits<float>::infinity(), "inf"},
                                    {std::numeric_limits<float>::quiet_NaN(), "nan"}}) {
    std::vector<std::byte> payload(codec.MaxEncodedSize(n), std::byte{0});
    REQUIRE(codec.Validate(payload, n).ok());
    StoreLe(payload.data() + index * sizeof(float), scale);
    CheckRefused(codec, payload, n, {text, "expected a finite number from 0"});
  }
}

// ------------------------------------------------------------------------------------------- int8

TEST_CASE("int8 gives the bytes of its formulas", "[compressors][quantize]") {
  for (const std::size_t block : {32UL, 1024UL, 4096UL, 16384UL}) {
    for (const bool stochastic : {false, true}) {
      const std::string spec = "int8(block=" + std::to_string(block) +
                               ",stochastic=" + (stochastic ? "true" : "false") + ")";
      CheckAgainst(spec, [&](std::span<const float> q, std::uint64_t seed) {
        return ExpectInt8(q, block, stochastic, seed);
      });
    }
  }
}

TEST_CASE("int8 rounds to the nearest level: an error of half a step at most",
          "[compressors][quantize]") {
  constexpr std::size_t n = 40000;
  for (const std::size_t block : {32UL, 1024UL, 16384UL}) {
    const auto codec = Make("int8(block=" + std::to_string(block) + ")");
    for (const bool awkward : {false, true}) {
      const std::vector<float> x = awkward ? AwkwardGradient(n, 2) : Gradient(n, 1);
      const std::vector<float> decoded = Decode(*codec, Encode(*codec, x).payload, n);
      double worst = 0;  // error over step
      for (std::size_t begin = 0; begin < n; begin += block) {
        double m = 0;
        const std::size_t end = std::min(begin + block, n);
        for (std::size_t i = begin; i < end; ++i) {
          m = std::max(m, std::fabs(static_cast<double>(x[i])));
        }
        for (std::size_t i = begin; i < end && m > 0; ++i) {
          const double error = static_cast<double>(decoded[i]) - static_cast<double>(x[i]);
          worst = std::max(worst, std::fabs(error) / (m / 127));
        }
      }
      // s, 1 / s, q / s and level * s round once each, relative to up to 127 steps.
      CHECK(worst <= 0.5 + 127 * 4 * 0x1.0p-24);
      if (!awkward) CHECK(worst > 0.49);
    }
  }
}

TEST_CASE("int8 says what class it is", "[compressors][quantize]") {
  const CompressorTraits nearest = Make("int8")->traits();
  CHECK(nearest.compressor_class == CompressorClass::kContractive);
  CHECK(nearest.feedback_by_default);
  CHECK(nearest.fixed_size);
  CHECK(nearest.block_access);
  const auto stochastic = Make("int8(block=2048,stochastic=true)");
  CHECK(stochastic->traits().compressor_class == CompressorClass::kUnbiased);
  CHECK_FALSE(stochastic->traits().feedback_by_default);
  CHECK(stochastic->FeedbackVariance(5) == 2048.0 / (4 * 127 * 127));
  CHECK(Make("int8")->MaxEncodedSize(1025) == 1025 + 2 * 4);
}

TEST_CASE("int8 refuses scales and levels that no encoder writes, and odd blocks",
          "[compressors][quantize]") {
  const auto codec = Make("int8(block=32)");
  constexpr std::size_t n = 10000;
  constexpr std::size_t kScales = (n + 31) / 32;
  CheckScaleRefused(*codec, n, 0);
  CheckScaleRefused(*codec, n, kScales - 1);
  for (const std::size_t at : {0UL, 4095UL, 4096UL, n - 1}) {
    std::vector<std::byte> payload(codec->MaxEncodedSize(n), std::byte{0x81});
    std::memset(payload.data(), 0, kScales * sizeof(float));
    REQUIRE(codec->Validate(payload, n).ok());
    payload[kScales * sizeof(float) + at] = std::byte{0x80};
    CheckRefused(*codec, payload, n,
                 {"element " + std::to_string(at) + " ", "-128", "expected -127 to 127"});
  }
  const Status status = BuiltinCompressors().Create("int8(block=96)").status();
  CHECK(status.code() == StatusCode::kInvalidArgument);
  CHECK(status.message().find("96, expected a power of two") != std::string::npos);
  CHECK_FALSE(BuiltinCompressors().Create("int8(block=16)").ok());
  CHECK_FALSE(BuiltinCompressors().Create("int8(block=32768)").ok());
}

}  // namespace
}  // namespace gradwire::testing
