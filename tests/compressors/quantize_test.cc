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

Expected ExpectNatural(std::span<const float> q, std::uint64_t seed) {
  Expected expected;
  for (std::size_t i = 0; i < q.size(); ++i) {
    const auto magnitude = static_cast<double>(std::fabs(q[i]));
    const auto bound = static_cast<double>(Bound(i, seed));
    int code = 0;
    if (magnitude < 0x1.0p-109) {
      code = magnitude * 0x1.0p109 > bound ? 1 : 0;
    } else {
      int exponent = 0;
      const double mantissa = std::frexp(magnitude, &exponent);  // from 0.5 to 1
      code = std::min(exponent - 1 + 110 + (2 * mantissa - 1 > bound ? 1 : 0), 127);
    }
    expected.payload.push_back(static_cast<std::byte>((std::signbit(q[i]) ? 128 : 0) + code));
    const float value = code == 0 ? 0.0F : std::ldexp(1.0F, code - 110);
    expected.decoded.push_back(std::copysign(value, q[i]));
  }
  return expected;
}

/// sqrt(mean q^2) in double, in the order that docs/compressors.md says.
float Sigma(std::span<const float> q) {
  double sum = 0;
  for (std::size_t begin = 0; begin < q.size(); begin += 4096) {
    double lanes[16] = {};
    for (std::size_t i = begin; i < std::min<std::size_t>(begin + 4096, q.size()); ++i) {
      lanes[i % 16] += static_cast<double>(q[i]) * static_cast<double>(q[i]);
    }
    double block = 0;
    for (const double lane : lanes) block += lane;
    sum += block;
  }
  return static_cast<float>(std::sqrt(sum / static_cast<double>(q.size())));
}

Expected ExpectTerngrad(std::span<const float> q, float clip, std::uint64_t seed) {
  float m = 0;
  for (const float value : q) m = std::max(m, std::fabs(value));
  const float limit = clip == 0 ? std::numeric_limits<float>::infinity() : clip * Sigma(q);
  float s = std::min(m, limit);
  const float r = 1 / s;
  if (std::isinf(r)) s = 0;
  Expected expected;
  Append(expected.payload, s);
  int byte = 0;
  int weight = 1;
  for (std::size_t i = 0; i < q.size(); ++i) {
    int trit = 0;
    if (s != 0 && std::min(std::fabs(q[i]), limit) * r > Bound(i, seed)) {
      trit = std::signbit(q[i]) ? 2 : 1;
    }
    expected.decoded.push_back(trit == 0 ? 0.0F : trit == 1 ? s : -s);
    byte += trit * weight;
    weight *= 3;
    if (i % 5 == 4 || i + 1 == q.size()) {
      expected.payload.push_back(static_cast<std::byte>(byte));
      byte = 0;
      weight = 1;
    }
  }
  return expected;
}

Expected ExpectTwobit(std::span<const float> q, float theta) {
  Expected expected;
  expected.payload.resize((q.size() + 3) / 4);
  for (std::size_t i = 0; i < q.size(); ++i) {
    const unsigned code = q[i] >= theta ? 1 : q[i] <= -theta ? 2 : 0;
    expected.payload[i / 4] |= static_cast<std::byte>(code << (2 * (i % 4)));
    expected.decoded.push_back(code == 0 ? 0.0F : code == 1 ? theta : -theta);
  }
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

// ---------------------------------------------------------------------------------------- natural

TEST_CASE("natural gives the bytes of its formulas", "[compressors][quantize]") {
  CheckAgainst("natural", ExpectNatural);
}

TEST_CASE("natural says what class it is", "[compressors][quantize]") {
  const auto codec = Make("natural");
  CHECK(codec->traits().compressor_class == CompressorClass::kUnbiased);
  CHECK_FALSE(codec->traits().feedback_by_default);
  CHECK(codec->traits().fixed_size);
  CHECK(codec->traits().block_access);
  CHECK(codec->FeedbackVariance(1000) == 0.125);
  CHECK(codec->MaxEncodedSize(77) == 77);
}

TEST_CASE("natural keeps powers of two and zeros of both signs, and saturates",
          "[compressors][quantize]") {
  const auto codec = Make("natural");
  std::vector<float> x = {0.0F, -0.0F};
  for (int exponent = -109; exponent <= 17; ++exponent) {
    x.push_back(std::ldexp(exponent % 2 == 0 ? 1.0F : -1.0F, exponent));
  }
  std::vector<float> expected = x;
  for (const float large : {0x1.8p17F, 0x1.0p18F, 3e38F, kMax}) {
    x.push_back(large);
    expected.push_back(0x1.0p17F);
    x.push_back(-large);
    expected.push_back(-0x1.0p17F);
  }
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    const Coded coded = Encode(*codec, x, nullptr, {.stream_seed = seed});
    REQUIRE(Bits(Decode(*codec, coded.payload, x.size())) == Bits(expected));
  }
}

// --------------------------------------------------------------------------------------- terngrad

TEST_CASE("terngrad gives the bytes of its formulas", "[compressors][quantize]") {
  for (const std::string clip : {"2.5", "0", "1", "0.3"}) {
    CheckAgainst("terngrad(clip=" + clip + ")", [&](std::span<const float> q, std::uint64_t seed) {
      return ExpectTerngrad(q, std::stof(clip), seed);
    });
  }
}

TEST_CASE("terngrad says what class it is", "[compressors][quantize]") {
  const auto codec = Make("terngrad");
  CHECK(codec->traits().compressor_class == CompressorClass::kUnbiased);
  CHECK_FALSE(codec->traits().feedback_by_default);
  CHECK(codec->traits().fixed_size);
  CHECK(codec->traits().block_access);
  CHECK(std::isinf(codec->FeedbackVariance(1)));
  CHECK(codec->MaxEncodedSize(0) == 0);
  CHECK(codec->MaxEncodedSize(5) == 4 + 1);
  CHECK(codec->MaxEncodedSize(6) == 4 + 2);
}

TEST_CASE("terngrad refuses a scale, bytes and trits that no encoder writes",
          "[compressors][quantize]") {
  const auto codec = Make("terngrad");
  constexpr std::size_t n = 20003;
  constexpr std::size_t kBytes = 4001;  // three trits in the last one
  CheckScaleRefused(*codec, n, 0);
  std::vector<std::byte> payload(codec->MaxEncodedSize(n), std::byte{242});
  REQUIRE(payload.size() == sizeof(float) + kBytes);
  StoreLe(payload.data(), 1.5F);
  payload.back() = std::byte{26};
  REQUIRE(codec->Validate(payload, n).ok());
  for (const std::size_t at : {0UL, 818UL, 819UL, 820UL, kBytes - 1}) {
    for (const unsigned byte : {243U, 255U}) {
      std::vector<std::byte> wrong = payload;
      wrong[sizeof(float) + at] = static_cast<std::byte>(byte);
      CheckRefused(
          *codec, wrong, n,
          {"byte " + std::to_string(at) + " is " + std::to_string(byte), "expected at most 242"});
    }
  }
  payload.back() = std::byte{27};
  CheckRefused(*codec, payload, n, {"byte 27", "expected at most 26 for 3 trits"});
}

// ----------------------------------------------------------------------------------------- twobit

TEST_CASE("twobit gives the bytes of its formulas", "[compressors][quantize]") {
  for (const std::string theta : {"0.5", "0.25", "3", "1e-30", "1e30"}) {
    CheckAgainst("twobit(theta=" + theta + ")", [&](std::span<const float> q, std::uint64_t) {
      return ExpectTwobit(q, std::stof(theta));
    });
  }
}

TEST_CASE("twobit says what class it is", "[compressors][quantize]") {
  const auto codec = Make("twobit");
  CHECK(codec->traits().compressor_class == CompressorClass::kBounded);
  CHECK(codec->traits().feedback_by_default);
  CHECK(codec->traits().fixed_size);
  CHECK(codec->traits().block_access);
  CHECK(codec->MaxEncodedSize(9) == 3);
  CHECK_FALSE(BuiltinCompressors().Create("twobit(theta=0)").ok());
  CHECK_FALSE(BuiltinCompressors().Create("twobit(theta=-1)").ok());
}

TEST_CASE("twobit's residual stays within theta while |q| is within two of them",
          "[compressors][quantize]") {
  constexpr std::size_t n = 5003;
  constexpr float kTheta = 0.3F;
  const auto codec = Make("twobit(theta=0.3)");
  std::vector<float> values(n, 0.0F);
  Residual residual{values, {}};
  std::vector<std::byte> output(codec->MaxEncodedSize(n));
  CounterRng rng(5);
  float largest = 0;
  for (int round = 0; round < 200; ++round) {
    std::vector<float> g(n);
    // |g| <= theta and |e| <= theta, so |q| <= 2 theta.
    for (float& value : g) {
      value = std::clamp(static_cast<float>(rng.NextGaussian()), -kTheta, kTheta);
    }
    const Result<Encoded> encoded = EncodeSpan(*codec, g, {}, residual, output);
    REQUIRE(encoded.ok());
    REQUIRE(encoded->out_of_bound == 0);
    for (const float e : values) largest = std::max(largest, std::fabs(e));
    REQUIRE(largest <= kTheta);
  }
  CHECK(largest > 0.9F * kTheta);
}

TEST_CASE("twobit counts the elements beyond two theta under feedback, on every instruction set",
          "[compressors][quantize]") {
  constexpr float kTheta = 0.5F;
  const float inside = 2 * kTheta;
  const float beyond = std::nextafter(inside, 2.0F);
  const auto codec = Make("twobit(theta=0.5)");
  for (const std::size_t n : {3UL, 16UL, 4096UL, 9001UL}) {
    std::vector<float> g(n, 0.25F);
    std::size_t expected = 0;
    for (std::size_t i = 0; i < n; i += 3) {
      const std::size_t kind = i % 4;
      g[i] = kind == 0 ? beyond : kind == 1 ? -beyond : kind == 2 ? inside : -inside;
      expected += kind < 2 ? 1 : 0;
    }
    for (const std::int64_t target : kernels::AvailableTargets()) {
      CAPTURE(n, kernels::TargetName(target));
      std::vector<float> values(n, 0.0F);
      Residual residual{values, {}};
      std::vector<std::byte> output(codec->MaxEncodedSize(n));
      kernels::UseTarget(target);
      const Result<Encoded> fed = EncodeSpan(*codec, g, {}, residual, output);
      const Result<Encoded> plain = EncodeSpan(*codec, g, {}, output);
      kernels::UseTarget(0);
      REQUIRE(fed.ok());
      REQUIRE(plain.ok());
      CHECK(fed->out_of_bound == expected);
      CHECK(plain->out_of_bound == 0);  // nothing is left over that could grow
    }
  }
}

TEST_CASE("twobit refuses code 3 and bits after the last code", "[compressors][quantize]") {
  const auto codec = Make("twobit");
  constexpr std::size_t n = 20003;
  std::vector<std::byte> payload(codec->MaxEncodedSize(n), std::byte{0b10011000});
  payload.back() = std::byte{0b00100110};
  REQUIRE(codec->Validate(payload, n).ok());
  for (const std::size_t at : {0UL, 1UL, 4095UL, 4096UL, n - 1}) {
    std::vector<std::byte> wrong = payload;
    wrong[at / 4] |= std::byte{3} << (at % 4 * 2);
    CheckRefused(*codec, wrong, n, {"element " + std::to_string(at) + " is 3", "expected 0 to 2"});
  }
  payload.back() = std::byte{0b01100110};
  CheckRefused(*codec, payload, n, {"0x66", "expected 2 bits of 0"});
}

// --------------------------------------------------------------------------------------- the mean

/// What is known of an element's random rounding.
struct Moment {
  double mean = 0;
  double variance = 0;
};

/// Encodes x with many seeds and compares what comes out with `moments`.
void CheckMoments(const Compressor& codec, const std::vector<float>& x,
                  const std::vector<Moment>& moments) {
  const std::size_t n = x.size();
  constexpr std::uint64_t kSeeds = 300;
  constexpr std::size_t kGroups = 64;
  std::vector<double> sums(kGroups, 0.0);
  std::vector<double> variances(kGroups, 0.0);
  double squares = 0;
  double expected_squares = 0;
  for (std::size_t i = 0; i < n; ++i) {
    variances[i % kGroups] += kSeeds * moments[i].variance;
    expected_squares += kSeeds * moments[i].variance;
  }
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    const CodecContext context{.stream_seed = (seed + 1) * 0x9e3779b97f4a7c15U};
    const std::vector<float> decoded = Decode(codec, Encode(codec, x, nullptr, context).payload, n);
    for (std::size_t i = 0; i < n; ++i) {
      const double error = static_cast<double>(decoded[i]) - moments[i].mean;
      sums[i % kGroups] += error;
      squares += error * error;
    }
  }
  // A group's sum over its sigma is normal, being made of more than 10^4 independent bounded terms:
  // beyond 5.5 with a probability of 4e-8, so 3e-6 for one of 64 in one call. The draws are off by
  // 2^-17 at most, less than 0.01 sigma here.
  double worst = 0;
  for (std::size_t group = 0; group < kGroups; ++group) {
    worst = std::max(worst, std::fabs(sums[group]) / std::sqrt(variances[group]));
  }
  CHECK(worst <= 5.5);
  // 64 of them that are all tiny would mean that seeds or elements do not draw independently.
  CHECK(worst >= 1.0);
  // The sum of 10^6 squares: its sigma is below 0.5 % for the inputs here, so 3 % is 6 sigma.
  CHECK(std::fabs(squares / expected_squares - 1) <= 0.03);
}

constexpr std::size_t kMomentElements = 4096 + 1000;

TEST_CASE("natural is right in the mean, and its variance at most an eighth of the square",
          "[compressors][quantize]") {
  const auto codec = Make("natural");
  // Small ones too, that end in 0 or 2^-109; and 4/3, where the variance is largest.
  std::vector<float> spread = Gradient(kMomentElements, 1);
  std::vector<float> small = spread;
  for (float& value : small) value = value * 0x1.0p-110F;
  const std::vector<float> worst(kMomentElements, 4.0F / 3);
  for (const auto& x : {spread, small, worst}) {
    std::vector<Moment> moments;
    double omega = 0;
    for (const float value : x) {
      const auto magnitude = std::fabs(static_cast<double>(value));
      const double below = magnitude < 0x1.0p-109 ? 0 : std::exp2(std::floor(std::log2(magnitude)));
      const double above = below == 0 ? 0x1.0p-109 : 2 * below;
      moments.push_back({static_cast<double>(value), (magnitude - below) * (above - magnitude)});
      omega = std::max(omega, moments.back().variance / (magnitude * magnitude));
    }
    CheckMoments(*codec, x, moments);
    if (x != small) CHECK(omega <= codec->FeedbackVariance(x.size()) * (1 + 1e-12));
    if (x == worst) CHECK(omega >= 0.125 * (1 - 1e-6));
  }
}

TEST_CASE("terngrad is right in the mean, after the clip", "[compressors][quantize]") {
  const std::vector<float> x = Gradient(kMomentElements, 2);
  for (const std::string clip : {"2.5", "0", "0.5"}) {
    const auto codec = Make("terngrad(clip=" + clip + ")");
    const auto scale = static_cast<double>(LoadLe<float>(Encode(*codec, x).payload.data()));
    double m = 0;
    for (const float value : x) m = std::max(m, std::fabs(static_cast<double>(value)));
    const float limit = std::stof(clip) * Sigma(x);
    CHECK(scale == (clip == "0" ? m : std::min(m, static_cast<double>(limit))));
    std::vector<Moment> moments;
    std::size_t clipped = 0;
    for (const float value : x) {
      const double kept = std::clamp(static_cast<double>(value), -scale, scale);
      clipped += std::fabs(static_cast<double>(value)) > scale ? 1 : 0;
      moments.push_back({kept, std::fabs(kept) * (scale - std::fabs(kept))});
    }
    CHECK((clip == "0") == (clipped == 0));
    CheckMoments(*codec, x, moments);
  }
}

TEST_CASE("stochastic int8 is right in the mean, and its variance within the bound",
          "[compressors][quantize]") {
  for (const std::size_t block : {64UL, 1024UL}) {
    const auto codec = Make("int8(block=" + std::to_string(block) + ",stochastic=true)");
    std::vector<float> halves(kMomentElements, 0.5F);  // the most variance: half a step each
    for (std::size_t i = 0; i < halves.size(); i += block) halves[i] = -127.0F;
    const std::vector<float> normal = Gradient(kMomentElements, 3);
    for (const auto& x : {normal, halves}) {
      std::vector<Moment> moments;
      double variance = 0;
      for (std::size_t i = 0; i < x.size(); ++i) {
        const std::size_t begin = i / block * block;
        float m = 0;
        for (std::size_t j = begin; j < std::min(begin + block, x.size()); ++j) {
          m = std::max(m, std::fabs(x[j]));
        }
        const auto step = static_cast<double>(m / 127);
        const double y = static_cast<double>(x[i]) / step;
        const double fraction = y - std::floor(y);
        moments.push_back({static_cast<double>(x[i]), step * step * fraction * (1 - fraction)});
        variance += moments.back().variance;
      }
      CheckMoments(*codec, x, moments);
      const double omega = variance / SquaredNorm(x);
      CHECK(omega <= codec->FeedbackVariance(x.size()));
      if (x == halves) CHECK(omega >= 0.9 * codec->FeedbackVariance(x.size()));
    }
  }
}

}  // namespace
}  // namespace gradwire::testing
