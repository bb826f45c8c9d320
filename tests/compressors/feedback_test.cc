#include <cmath>
#include <cstring>
#include <limits>

#include "common/base/random.h"
#include "compressors/feedback/residual_store.h"
#include "compressors/registry.h"
#include "tests/catch.h"
#include "tests/compressors/codec_testing.h"

namespace gradwire::testing {
namespace {

/// Feedback as the formulas say it, with plain arithmetic and no state but e.
struct EagerFeedback {
  explicit EagerFeedback(std::size_t n) : e(n, 0.0F), q(n) {}

  std::vector<std::byte> Round(const Compressor& codec, std::span<const float> g, float alpha) {
    for (std::size_t i = 0; i < e.size(); ++i) q[i] = g[i] + alpha * e[i];
    // As q is encoded with feedback: randomk leaves it in its scale.
    const Coded coded = Encode(codec, q, nullptr, {.of_same_choice = true});
    const std::vector<float> sent = Decode(codec, coded.payload, e.size());
    for (std::size_t i = 0; i < e.size(); ++i) e[i] = q[i] - sent[i];
    return coded.payload;
  }

  std::vector<float> e;
  std::vector<float> q;
};

TEST_CASE("the fused pass equals the formulas bit for bit over 50 rounds",
          "[compressors][feedback]") {
  for (const std::string& spec : Variants()) {
    for (const std::size_t n : {std::size_t{1}, std::size_t{129}, std::size_t{8209}}) {
      CAPTURE(spec, n);
      const auto codec = Make(spec);
      std::vector<float> values(n, 0.0F);
      Residual residual{values, {}};
      EagerFeedback eager(n);
      for (std::uint64_t round = 0; round < 50; ++round) {
        CAPTURE(round);
        const std::vector<float> g =
            round % 7 == 6 ? std::vector<float>(n, 0.0F) : AwkwardGradient(n, round * 31);
        const float alpha = round % 5 == 4 ? 0.3F : 1.0F;
        const Coded coded = Encode(*codec, g, &residual, {0, alpha});
        REQUIRE(coded.payload == eager.Round(*codec, g, alpha));
        REQUIRE(Bits(Explicit(*codec, residual)) == Bits(eager.e));
      }
    }
  }
}

TEST_CASE("lazy onebit equals eager through lost rounds, flushes and non-finite rounds",
          "[compressors][feedback]") {
  const std::string scaling = GENERATE("l1", "l2", "two_means", "none");
  const std::string block = GENERATE("0", "4096");
  const auto codec = Make("onebit(block=" + block + ",scaling=" + scaling + ")");
  constexpr std::size_t n = 9001;
  std::vector<float> values(n, 0.0F);
  Residual residual{values, {}};
  EagerFeedback eager(n);
  CounterRng rng(99);
  for (std::uint64_t round = 0; round < 50; ++round) {
    const std::uint64_t event = rng.NextBelow(5);
    CAPTURE(scaling, block, round, event);
    std::vector<float> g = Gradient(n, round + 1000);
    if (event == 0) {
      // A gradient with a NaN: nothing is delivered, its finite part stays.
      g[rng.NextBelow(n)] = std::numeric_limits<float>::quiet_NaN();
      REQUIRE_FALSE(Encode(*codec, g, &residual).finite);
      for (std::size_t i = 0; i < n; ++i) {
        const float q = g[i] + eager.e[i];
        if (std::isfinite(q)) eager.e[i] = q;
      }
      REQUIRE(Bits(values) == Bits(eager.e));
      continue;
    }
    const Coded coded = Encode(*codec, g, &residual);
    REQUIRE_FALSE(residual.is_explicit());
    REQUIRE(coded.payload == eager.Round(*codec, g, 1.0F));
    if (event == 1) {
      codec->Undo(coded.payload, {}, residual);
      eager.e = eager.q;
      REQUIRE(residual.is_explicit());
    } else if (event == 2) {
      codec->Flush(residual);
      REQUIRE(residual.is_explicit());
      REQUIRE(Bits(values) == Bits(eager.e));
    }
    REQUIRE(Bits(Explicit(*codec, residual)) == Bits(eager.e));
  }
}

TEST_CASE("undo gives back what a payload took, also after a flush", "[compressors][feedback]") {
  for (const std::string& spec : Variants()) {
    CAPTURE(spec);
    const auto codec = Make(spec);
    constexpr std::size_t n = 5000;
    std::vector<float> values = Gradient(n, 5);
    const std::vector<float> before = values;
    Residual residual{values, {}};
    const std::vector<float> g = Gradient(n, 6);
    const Coded coded = Encode(*codec, g, &residual);
    const bool flush = GENERATE(false, true);
    if (flush) codec->Flush(residual);
    codec->Undo(coded.payload, {}, residual);
    const std::vector<float> after = Explicit(*codec, residual);
    const std::vector<float> sent = Decode(*codec, coded.payload, n);
    bool same = true;
    for (std::size_t i = 0; i < n; ++i) {
      // (q - C(q)) + C(q): each operation rounds once, relative to the larger of q and C(q).
      const float q = g[i] + before[i];
      const float tolerance = 0x1.0p-22F * std::max(std::fabs(q), std::fabs(sent[i]));
      same = same && std::fabs(after[i] - q) <= tolerance;
    }
    CHECK(same);
  }
}

TEST_CASE("over 200 rounds what came out and what is left add up to what went in",
          "[compressors][feedback]") {
  for (const std::string& spec : Variants()) {
    CAPTURE(spec);
    const auto codec = Make(spec);
    constexpr std::size_t n = 700;
    constexpr std::uint64_t kRounds = 200;
    std::vector<float> values(n, 0.0F);
    Residual residual{values, {}};
    std::vector<double> in(n, 0.0);
    std::vector<double> out(n, 0.0);
    double largest = 0;
    for (std::uint64_t round = 0; round < kRounds; ++round) {
      const std::vector<float> g = Gradient(n, round + 1);
      const std::vector<float> e = Explicit(*codec, residual);
      const Coded coded = Encode(*codec, g, &residual);
      const std::vector<float> sent = Decode(*codec, coded.payload, n);
      for (std::size_t i = 0; i < n; ++i) {
        in[i] += static_cast<double>(g[i]);
        out[i] += static_cast<double>(sent[i]);
        largest = std::max({largest, std::fabs(static_cast<double>(g[i] + e[i])),
                            std::fabs(static_cast<double>(sent[i]))});
      }
    }
    const std::vector<float> left = Explicit(*codec, residual);
    double worst = 0;
    for (std::size_t i = 0; i < n; ++i) {
      worst = std::max(worst, std::fabs(in[i] - out[i] - static_cast<double>(left[i])));
    }
    // Each round rounds twice (q, and q - C(q) of up to twice the size).
    CHECK(worst <= kRounds * 3 * 0x1.0p-24 * largest);
  }
}

std::vector<std::vector<float>> Distributions(std::size_t n) {
  std::vector<std::vector<float>> all;
  all.push_back(Gradient(n, 1));
  std::vector<float> normal(n);
  CounterRng rng(2);
  for (float& value : normal) value = static_cast<float>(rng.NextGaussian());
  all.push_back(normal);
  std::vector<float> heavy = normal;
  for (float& value : heavy) value = value * value * value * value * value;
  all.push_back(heavy);
  std::vector<float> one_hot(n, 0.0F);
  one_hot[n / 3] = -3.0F;
  all.push_back(one_hot);
  all.push_back(std::vector<float>(n, -0.75F));
  return all;
}

/// 1 - |C(x) - x|^2 / |x|^2: the delta of this x.
double MeasuredDelta(const Compressor& codec, std::span<const float> x) {
  const std::vector<float> decoded = Decode(codec, Encode(codec, x).payload, x.size());
  double error = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    const double difference = static_cast<double>(decoded[i]) - static_cast<double>(x[i]);
    error += difference * difference;
  }
  return 1 - error / SquaredNorm(x);
}

TEST_CASE("onebit l1 contracts by |x|_1^2 / (n |x|_2^2)", "[compressors][contraction]") {
  constexpr std::size_t n = 10000;
  const auto codec = Make("onebit");
  for (const auto& x : Distributions(n)) {
    double l1 = 0;
    for (const float value : x) l1 += std::fabs(static_cast<double>(value));
    const double claimed = l1 * l1 / (static_cast<double>(n) * SquaredNorm(x));
    // Equality in exact arithmetic; float lanes and the float scale cost a few units of 2^-24.
    CHECK(std::fabs(MeasuredDelta(*codec, x) - claimed) <= 1e-5);
  }
}

TEST_CASE("a scale a block contracts at least as much as one for all",
          "[compressors][contraction]") {
  std::vector<float> x = Gradient(3 * kBlockElements, 4);
  for (std::size_t i = 0; i < kBlockElements; ++i) x[i] *= 50.0F;
  CHECK(MeasuredDelta(*Make("onebit(block=4096)"), x) >
        MeasuredDelta(*Make("onebit(block=0)"), x) + 0.01);
  CHECK(MeasuredDelta(*Make("onebit(scaling=two_means)"), x) >=
        MeasuredDelta(*Make("onebit(scaling=l1)"), x) - 1e-6);
}

TEST_CASE("topk contracts by at least k / n", "[compressors][contraction]") {
  constexpr std::size_t n = 10000;
  for (const std::string ratio : {"0.001", "0.01", "0.1", "1"}) {
    const double claimed = std::stod(ratio);
    for (const auto& x : Distributions(n)) {
      CAPTURE(ratio);
      CHECK(MeasuredDelta(*Make("topk(ratio=" + ratio + ",value=fp32)"), x) >= claimed - 1e-12);
      // Values of 11 bits lose at most (2^-11)^2 of the kept energy.
      CHECK(MeasuredDelta(*Make("topk(ratio=" + ratio + ")"), x) >= claimed - 0x1.0p-21);
    }
  }
}

TEST_CASE("the casts' relative error is half a unit in the last place",
          "[compressors][contraction]") {
  for (const auto& [spec, bits] : {std::pair<std::string, int>{"fp16", 11}, {"bf16", 8}}) {
    std::vector<float> x = Gradient(10000, 8);
    // Below 2^-14 float16 has steps of its own.
    for (float& value : x) value += std::copysign(0.001F, value);
    const auto codec = Make(spec);
    const std::vector<float> decoded = Decode(*codec, Encode(*codec, x).payload, x.size());
    bool within = true;
    for (std::size_t i = 0; i < x.size(); ++i) {
      within = within && std::fabs(decoded[i] - x[i]) <= std::ldexp(std::fabs(x[i]), -bits);
    }
    CHECK(within);
  }
}

TEST_CASE("a void round on the server gives the residual back", "[compressors][feedback]") {
  for (const std::string& spec : Variants()) {
    CAPTURE(spec);
    const auto codec = Make(spec);
    constexpr std::size_t n = 5000;
    std::vector<float> values(n, 0.0F);
    Residual residual{values, {}};
    Encode(*codec, Gradient(n, 1), &residual);
    const std::vector<float> before = Explicit(*codec, residual);
    std::vector<float> sum = Gradient(n, 2);
    sum[17] = std::numeric_limits<float>::infinity();
    sum[4999] = std::numeric_limits<float>::quiet_NaN();
    REQUIRE_FALSE(Encode(*codec, sum, &residual).finite);
    SpanSource source(sum);
    RestoreAfterVoidRound(source, residual);
    REQUIRE(residual.is_explicit());
    CHECK(values[17] == before[17]);
    CHECK(values[4999] == before[4999]);
    bool same = true;
    for (std::size_t i = 0; i < n; ++i) {
      const float size = std::fabs(before[i]) + (std::isfinite(sum[i]) ? std::fabs(sum[i]) : 0.0F);
      same = same && std::fabs(values[i] - before[i]) <= 0x1.0p-22F * size;
    }
    CHECK(same);
  }
}

}  // namespace
}  // namespace gradwire::testing
