#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "common/base/bytes.h"
#include "common/base/random.h"
#include "compressors/codecs/dither_kernels.h"
#include "compressors/codecs/kernels.h"
#include "compressors/registry.h"
#include "tests/catch.h"
#include "tests/compressors/codec_testing.h"

namespace gradwire::testing {
namespace {

constexpr float kMax = std::numeric_limits<float>::max();
constexpr float kInf = std::numeric_limits<float>::infinity();

struct Case {
  unsigned bits = 5;
  bool natural = false;
  bool l2 = false;

  std::string spec() const {
    return "dithering(bits=" + std::to_string(bits) +
           ",levels=" + (natural ? "natural" : "linear") + ",norm=" + (l2 ? "l2" : "max") + ")";
  }
  int s() const {
    const int most = (1 << (bits - 1)) - 1;
    return natural ? std::min(most, 127) : most;
  }
};

std::vector<Case> Cases(std::initializer_list<unsigned> all_bits) {
  std::vector<Case> cases;
  for (const unsigned bits : all_bits) {
    for (const bool natural : {false, true}) {
      for (const bool l2 : {false, true}) cases.push_back({bits, natural, l2});
    }
  }
  return cases;
}

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

// ----------------------------------------------------------------- the formulas, written plainly

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

float NormOf(std::span<const float> q, bool l2) {
  if (!l2) {
    float most = 0;
    for (const float value : q) most = std::max(most, std::fabs(value));
    return most;
  }
  double total = 0;
  for (std::size_t begin = 0; begin < q.size(); begin += kBlockElements) {
    double lanes[16] = {};
    for (std::size_t i = begin; i < std::min(q.size(), begin + kBlockElements); ++i) {
      lanes[i % 16] += static_cast<double>(q[i]) * static_cast<double>(q[i]);
    }
    double sum = 0;
    for (const double lane : lanes) sum += lane;
    total += sum;
  }
  return static_cast<float>(std::min(std::sqrt(total), static_cast<double>(kMax)));
}

std::uint32_t LevelOf(const Case& c, float q, float norm, float bound) {
  const auto s = static_cast<float>(c.s());
  if (!c.natural) {
    const float r = s / norm;
    const float y = std::min(std::fabs(q) * r, s);
    const float k = std::floor(y);
    return static_cast<std::uint32_t>(y - k > bound ? k + 1 : k);
  }
  const float r = 1 / norm;
  const float t = std::min(std::fabs(q) * r, 1.0F);
  if (t < std::ldexp(1.0F, 1 - c.s())) return std::ldexp(t, c.s() - 1) > bound ? 1 : 0;
  const int e = std::ilogb(t);
  const float f = std::ldexp(t, -e) - 1;
  return static_cast<std::uint32_t>(e + c.s() + (f > bound ? 1 : 0));
}

float ValueOf(const Case& c, std::uint32_t level, bool negative, float norm) {
  float value = 0;
  if (c.natural) {
    if (level > 0) value = norm * std::ldexp(1.0F, static_cast<int>(level) - c.s());
  } else {
    const auto s = static_cast<float>(c.s());
    float step = norm / s;
    if (std::isinf(s * step)) step = std::nextafter(step, 0.0F);
    value = static_cast<float>(level) * step;
  }
  return negative ? -value : value;
}

/// Sets bits [at, at + width), one by one.
void PutBits(std::vector<std::byte>& bytes, std::size_t at, unsigned width, std::uint32_t value) {
  for (unsigned b = 0; b < width; ++b) {
    if ((value >> b & 1) != 0) bytes[(at + b) / 8] |= std::byte{1} << ((at + b) % 8);
  }
}

struct Expected {
  std::vector<std::byte> payload;
  std::vector<float> decoded;
};

Expected Expect(const Case& c, std::span<const float> q, std::uint64_t seed) {
  Expected expected;
  expected.payload.resize(4 + (q.size() * c.bits + 7) / 8);
  float norm = NormOf(q, c.l2);
  const float one = c.natural ? 1.0F : static_cast<float>(c.s());
  const bool all_zero = norm == 0 || std::isinf(one / norm);
  if (all_zero) norm = 0;
  StoreLe(expected.payload.data(), norm);
  for (std::size_t i = 0; i < q.size(); ++i) {
    const std::uint32_t level = all_zero ? 0 : LevelOf(c, q[i], norm, Bound(i, seed));
    const bool negative = !all_zero && std::signbit(q[i]);
    PutBits(expected.payload, 32 + i * c.bits, c.bits, level << 1 | (negative ? 1U : 0U));
    expected.decoded.push_back(ValueOf(c, level, negative, norm));
  }
  return expected;
}

/// Bits of any kind: all orders of magnitude, with zeros of both signs.
std::vector<float> AllOrders(std::size_t n, std::uint64_t seed) {
  CounterRng rng(seed);
  std::vector<float> values(n);
  for (float& value : values) {
    const auto bits = static_cast<std::uint32_t>(rng.Next());
    value = std::bit_cast<float>(bits);
    if (!std::isfinite(value)) value = bits % 2 == 0 ? kMax : -kMax;
    if (rng.NextBelow(16) == 0) value = bits % 2 == 0 ? 0.0F : -0.0F;
  }
  return values;
}

std::vector<std::vector<float>> Inputs(std::size_t n) {
  std::vector<std::vector<float>> inputs = {Gradient(n, n + 1), AwkwardGradient(n, n + 2),
                                            AllOrders(n, n + 3)};
  for (const int shift : {-146, -130, -120, 127}) {
    inputs.push_back(Gradient(n, n + 4));
    for (float& value : inputs.back()) value = std::clamp(std::ldexp(value, shift), -kMax, kMax);
  }
  return inputs;
}

TEST_CASE("dithering does what its formulas say, on every instruction set",
          "[compressors][dithering]") {
  for (const Case& c : Cases({2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 15, 16})) {
    const auto codec = Make(c.spec());
    for (const std::size_t n : {1UL, 8UL, 31UL, 33UL, 127UL, 1001UL, 4096UL, 9001UL}) {
      std::size_t kind = 0;
      for (const std::vector<float>& x : Inputs(n)) {
        CAPTURE(c.spec(), n, kind++);
        const std::uint64_t seed = 0x123456789abcdef1U * (n + kind);
        const Expected expected = Expect(c, x, seed);
        std::vector<float> g(n);
        std::vector<float> e(n);
        std::vector<float> q(n);
        for (std::size_t i = 0; i < n; ++i) {
          g[i] = x[i] * 0.5F;
          e[i] = x[n - 1 - i] * 0.125F;
          q[i] = g[i] + 0.75F * e[i];
        }
        const Expected fed = Expect(c, q, seed);
        for (std::size_t i = 0; i < n; ++i) q[i] -= fed.decoded[i];
        ForEachTarget([&] {
          const Coded coded = Encode(*codec, x, nullptr, {.stream_seed = seed});
          REQUIRE(coded.finite);
          REQUIRE(coded.payload == expected.payload);
          REQUIRE(Bits(Decode(*codec, coded.payload, n)) == Bits(expected.decoded));
          std::vector<float> left = e;
          Residual residual{left, {}};
          const Coded coded_fed =
              Encode(*codec, g, &residual, {.stream_seed = seed, .alpha = 0.75F});
          REQUIRE(coded_fed.payload == fed.payload);
          REQUIRE(Bits(left) == Bits(q));
        });
      }
    }
  }
}

// ---------------------------------------------------------------------------------------- packing

TEST_CASE("codes of every width are packed and unpacked at any length and address",
          "[compressors][dithering]") {
  for (unsigned bits = 2; bits <= 16; ++bits) {
    const kernels::DitherFormat format{bits, false};
    // Values that are levels: no draw moves them. All codes, then a mix.
    const kernels::DitherScale scale{1.0F, 1.0F};
    std::vector<float> values;
    CounterRng rng(bits);
    for (std::size_t i = 0; i < 4096; ++i) {
      const std::uint64_t code = i < 1U << bits ? i : rng.NextBelow(1U << bits);
      const auto level = static_cast<float>(code >> 1);
      values.push_back((code & 1) != 0 ? -level : level);
    }
    std::vector<std::size_t> counts = {4096, 4095, 4033, 1000};
    for (std::size_t count = 1; count <= 140; ++count) counts.push_back(count);
    for (const std::size_t count : counts) {
      // From the end too, where the large codes are.
      for (const std::size_t begin : {std::size_t{0}, values.size() - count}) {
        const float* const q = values.data() + begin;
        const std::size_t size = (count * bits + 7) / 8;
        std::vector<std::byte> expected(size);
        std::uint32_t largest = 0;
        for (std::size_t i = 0; i < count; ++i) {
          const auto level = static_cast<std::uint32_t>(std::fabs(q[i]));
          largest = std::max(largest, level);
          PutBits(expected, i * bits, bits, level << 1 | (std::signbit(q[i]) ? 1U : 0U));
        }
        ForEachTarget([&] {
          const std::size_t shift = count % 3;
          CAPTURE(bits, count, begin, shift);
          // Exactly the bytes that are needed between two guards.
          std::vector<std::byte> storage(shift + size + 1, std::byte{0xa5});
          const MutableBytes bytes = MutableBytes(storage).subspan(shift, size);
          kernels::EncodeDither(format, scale, q, nullptr, 0, count, DrawKey(7), bytes);
          REQUIRE(std::equal(bytes.begin(), bytes.end(), expected.begin()));
          REQUIRE(storage.back() == std::byte{0xa5});
          if (shift > 0) REQUIRE(storage[shift - 1] == std::byte{0xa5});
          // A copy of exactly this size, so that a sanitizer sees any read beyond it.
          const std::vector<std::byte> exact(bytes.begin(), bytes.end());
          std::vector<float> decoded(count + 1, 5.0F);
          kernels::DecodeDither(format, 1.0F, exact, count, decoded.data());
          REQUIRE(decoded.back() == 5.0F);
          decoded.pop_back();
          REQUIRE(Bits(decoded) == Bits(std::span(q, count)));
          std::vector<float> sum(count, 0.25F);
          kernels::DecodeAddDither(format, 1.0F, bytes, count, sum.data());
          bool same = true;
          for (std::size_t i = 0; i < count; ++i) same = same && sum[i] == q[i] + 0.25F;
          REQUIRE(same);
          REQUIRE(kernels::LargestDitherLevel(bits, exact, count) == largest);
        });
      }
    }
  }
}

TEST_CASE("a dithering payload has 4 bytes and the codes' bits", "[compressors][dithering]") {
  for (const Case& c : Cases({2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16})) {
    const auto codec = Make(c.spec());
    CHECK(codec->MaxEncodedSize(0) == 0);
    for (const std::size_t n : {1UL, 2UL, 3UL, 7UL, 8UL, 9UL, 1000UL, 4097UL}) {
      CAPTURE(c.spec(), n);
      const std::size_t size = 4 + (n * c.bits) / 8 + ((n * c.bits) % 8 == 0 ? 0 : 1);
      CHECK(codec->MaxEncodedSize(n) == size);
      CHECK(Encode(*codec, Gradient(n, 1)).payload.size() == size);
    }
  }
}

TEST_CASE("dithering of values near the largest float decodes to finite ones at all widths",
          "[compressors][dithering]") {
  for (const Case& c : Cases({2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16})) {
    CAPTURE(c.spec());
    const auto codec = Make(c.spec());
    for (const float most : {kMax, std::nextafter(kMax, 0.0F), 0.75F * kMax}) {
      const std::vector<float> x = {most, -most, most / 2, 1.0F};
      const std::vector<float> decoded = Decode(*codec, Encode(*codec, x).payload, x.size());
      for (const float value : decoded) CHECK(std::isfinite(value));
      // The largest level is the norm, but for the rounding of a step.
      if (!c.l2) CHECK(decoded[0] >= most * (1 - 0x1.0p-22F));
    }
  }
}

// ------------------------------------------------------------------------------- bias and variance

/// The distance of the two levels that |q| lies between.
double Gap(const Case& c, float q, double norm) {
  if (!c.natural) return norm / c.s();
  const double t = std::fabs(static_cast<double>(q)) / norm;
  const double lowest = std::ldexp(1.0, 1 - c.s());
  return norm * (t < lowest ? lowest : std::ldexp(1.0, std::ilogb(t)));
}

// Random tests below have fixed seeds. Had they not, each check would fail with a probability of at
// most kFalseAlarm by Hoeffding's inequality: for R independent draws of values that lie in ranges
// of widths w_i, the sum of their means is off by more than
//   sqrt(ln(2 / kFalseAlarm) sum w_i^2 / (2 R))
// that seldom. There are fewer than 10^5 checks: 10^-7 for all of them.
constexpr double kFalseAlarm = 1e-12;
double Hoeffding(double sum_of_squared_widths, double rounds) {
  return std::sqrt(std::log(2 / kFalseAlarm) * sum_of_squared_widths / (2 * rounds));
}

TEST_CASE("dithering is right in the mean", "[compressors][dithering]") {
  constexpr std::size_t n = 256;
  constexpr int kRounds = 20000;
  const std::vector<float> x = Gradient(n, 21);
  for (const Case& c : Cases({2, 3, 5, 8, 12})) {
    CAPTURE(c.spec());
    const auto codec = Make(c.spec());
    const auto norm = static_cast<double>(NormOf(x, c.l2));
    std::vector<double> sums(n, 0.0);
    for (int round = 0; round < kRounds; ++round) {
      const CodecContext context{.stream_seed = HashCombine(17, static_cast<std::uint64_t>(round))};
      const Coded coded = Encode(*codec, x, nullptr, context);
      const std::vector<float> decoded = Decode(*codec, coded.payload, n);
      for (std::size_t i = 0; i < n; ++i) sums[i] += static_cast<double>(decoded[i]);
    }
    // Draws have 16 bits, which is a bias of at most 2^-17 of a gap; floats round by 2^-22 of q.
    double along = 0;  // of all elements, in gaps, away from zero
    double worst = 0;  // of one, in what is allowed
    for (std::size_t i = 0; i < n; ++i) {
      const double gap = Gap(c, x[i], norm);
      const double off = sums[i] / kRounds - static_cast<double>(x[i]);
      const double size = std::fabs(static_cast<double>(x[i]));
      const double allowed = Hoeffding(gap * gap, kRounds) + 0x1.0p-17 * gap + 0x1.0p-22 * size;
      worst = std::max(worst, std::fabs(off) / allowed);
      along += std::copysign(off, std::signbit(x[i]) ? -off : off) / gap;
    }
    CHECK(worst <= 1);
    // All elements together show a bias that one alone hides: here of 0.0017 gaps.
    CHECK(std::fabs(along) <= Hoeffding(n, kRounds) + n * (0x1.0p-17 + 0x1.0p-14));
  }
}

/// Vectors of n elements: common ones, and such that the bounds are nearly reached.
std::vector<std::vector<float>> VarianceInputs(const Case& c, std::size_t n) {
  std::vector<std::vector<float>> all = {Gradient(n, 31)};
  std::vector<float> normal(n);
  CounterRng rng(32);
  for (float& value : normal) value = static_cast<float>(rng.NextGaussian());
  all.push_back(normal);
  for (float& value : normal) value = value * value * value;
  all.push_back(normal);
  // In the middle of the lowest two levels, with one large element.
  const double lowest = c.natural ? std::ldexp(1.0, 1 - c.s()) : 1.0 / c.s();
  std::vector<float> middle(n, static_cast<float>(lowest / 2));
  middle[n / 2] = 1.0F;
  all.push_back(middle);
  // A third above a power of two.
  std::vector<float> third(n, 2.0F / 3);
  third[0] = 1.0F;
  all.push_back(third);
  return all;
}

TEST_CASE("dithering's variance is below what it says, and comes near it",
          "[compressors][dithering]") {
  constexpr int kRounds = 200;
  for (const Case& c : Cases({2, 3, 4, 5, 8, 10})) {
    const auto codec = Make(c.spec());
    double nearest = 0;
    for (const std::size_t n : {4UL, 100UL, 5000UL}) {
      for (const std::vector<float>& x : VarianceInputs(c, n)) {
        CAPTURE(c.spec(), n);
        const auto norm = static_cast<double>(NormOf(x, c.l2));
        double error = 0;
        for (int round = 0; round < kRounds; ++round) {
          const CodecContext context{.stream_seed =
                                         HashCombine(18, static_cast<std::uint64_t>(round))};
          const Coded coded = Encode(*codec, x, nullptr, context);
          const std::vector<float> decoded = Decode(*codec, coded.payload, n);
          for (std::size_t i = 0; i < n; ++i) {
            const double off = static_cast<double>(decoded[i]) - static_cast<double>(x[i]);
            error += off * off;
          }
        }
        // An element's squared error lies between 0 and its gap squared. Floats add 2^-20.
        double widths = 0;
        for (std::size_t i = 0; i < n; ++i) widths += std::pow(Gap(c, x[i], norm), 4);
        const double slack = (Hoeffding(widths, kRounds)) / SquaredNorm(x) + 0x1.0p-20;
        const double omega = error / kRounds / SquaredNorm(x);
        const auto count = static_cast<double>(n);
        const double s = c.s();
        CHECK(omega <= codec->FeedbackVariance(n) + slack);
        if (!c.natural) {
          CHECK(codec->FeedbackVariance(n) ==
                Approx(std::min(count / (4 * s * s), std::sqrt(count) / s)).epsilon(1e-12));
        }
        nearest = std::max(nearest, (omega + slack) / codec->FeedbackVariance(n));
      }
    }
    // Some input shows that the bound is not a matter of course.
    CAPTURE(c.spec(), nearest);
    CHECK(nearest >= 0.5);
  }
}

TEST_CASE("dithering says what its feedback would grow by", "[compressors][dithering]") {
  CHECK(Make("dithering(bits=8)")->FeedbackVariance(10000) == Approx(10000 / (4 * 127.0 * 127)));
  CHECK(Make("dithering(bits=2)")->FeedbackVariance(10000) == Approx(100));
  CHECK(Make("dithering(bits=3,levels=natural)")->FeedbackVariance(64) == Approx(0.125 + 1));
  CHECK(Make("dithering(bits=3,levels=natural)")->FeedbackVariance(10000) == Approx(0.125 + 25));
  CHECK(Make("dithering(bits=8,levels=natural)")->FeedbackVariance(1 << 30) == Approx(0.125));
  CHECK_FALSE(Make("dithering")->traits().feedback_by_default);
  CHECK(Make("dithering")->traits().compressor_class == CompressorClass::kUnbiased);
}

// --------------------------------------------------------------------------------------- refusals

void CheckRefused(const Compressor& codec, ByteView payload, std::size_t n,
                  const std::string& text) {
  const Status status = codec.Validate(payload, n);
  INFO(status.ToString());
  CHECK(status.code() == StatusCode::kCorruptData);
  CHECK(status.message().find(text) != std::string::npos);
  std::vector<float> output(n);
  CHECK(codec.Decode(payload, {}, output).code() == StatusCode::kCorruptData);
  CHECK(codec.DecodeAdd(payload, {}, output).code() == StatusCode::kCorruptData);
}

TEST_CASE("dithering refuses norms, bits and levels that no encoder writes",
          "[compressors][dithering]") {
  const std::vector<float> x = Gradient(9, 41);
  const auto codec = Make("dithering");
  const std::vector<std::byte> good = Encode(*codec, x).payload;
  REQUIRE(codec->Validate(good, 9).ok());
  for (const auto& [norm, text] : {std::pair<float, std::string>{-1.5F, "norm is -1.5,"},
                                   {-0.0F, "norm is -0"},
                                   {kInf, "norm is inf"},
                                   {std::numeric_limits<float>::quiet_NaN(), "norm is nan"}}) {
    std::vector<std::byte> bad = good;
    StoreLe(bad.data(), norm);
    CheckRefused(*codec, bad, 9, text);
  }
  // 45 bits: the last byte has 5.
  for (const unsigned bit : {5U, 7U}) {
    std::vector<std::byte> bad = good;
    bad.back() = std::byte{1} << bit;
    CheckRefused(*codec, bad, 9, bit == 5 ? "byte 0x20, expected 3 bits of 0" : "byte 0x80");
  }

  for (const unsigned bits : {9U, 12U, 16U}) {
    const auto natural = Make("dithering(levels=natural,bits=" + std::to_string(bits) + ")");
    for (const std::size_t n : {1UL, 9UL, 40UL, 1000UL}) {
      std::vector<std::byte> payload = Encode(*natural, std::vector<float>(n, 1.0F)).payload;
      REQUIRE(natural->Validate(payload, n).ok());  // all are level 127
      for (const std::size_t at : {std::size_t{0}, n / 2, n - 1}) {
        CAPTURE(bits, n, at);
        std::vector<std::byte> codes((n * bits + 7) / 8);
        PutBits(codes, at * bits, bits, 128 << 1);
        std::copy(codes.begin(), codes.end(), payload.begin() + 4);
        CheckRefused(*natural, payload, n, "level 128, expected at most 127");
      }
    }
  }
  for (const std::string spec :
       {"dithering(bits=1)", "dithering(bits=17)", "dithering(levels=cubic)"}) {
    CHECK(BuiltinCompressors().Create(spec).status().code() == StatusCode::kInvalidArgument);
  }
}

TEST_CASE("a void round leaves q itself in a dithering residual", "[compressors][dithering]") {
  for (const Case& c : Cases({5, 12})) {
    CAPTURE(c.spec());
    const auto codec = Make(c.spec());
    constexpr std::size_t n = 5000;
    const std::vector<float> e = Gradient(n, 51);
    std::vector<float> g = Gradient(n, 52);
    g[3] = kInf;
    g[4990] = std::numeric_limits<float>::quiet_NaN();
    std::vector<float> left = e;
    Residual residual{left, {}};
    REQUIRE_FALSE(Encode(*codec, g, &residual).finite);
    REQUIRE(residual.is_explicit());
    std::vector<float> q(n);
    for (std::size_t i = 0; i < n; ++i) q[i] = std::isfinite(g[i]) ? g[i] + e[i] : e[i];
    CHECK(Bits(left) == Bits(q));
  }
}

}  // namespace
}  // namespace gradwire::testing
