#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>

#include "common/base/bytes.h"
#include "common/base/random.h"
#include "compressors/codecs/kernels.h"
#include "compressors/codecs/sparse_kernels.h"
#include "compressors/registry.h"
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

TEST_CASE("values are added where gaps say, and none beyond the room",
          "[compressors][kernels][sparse]") {
  CounterRng rng(22);
  for (const std::size_t width : {0UL, 1UL, 5UL, 11UL, 24UL, 25UL}) {
    for (const std::size_t count : {1UL, 16UL, 17UL, 80UL, 127UL, 128UL}) {
      // Large gaps lead far: there all but the last one are small.
      std::vector<std::uint32_t> gaps(count, 0);
      for (std::uint32_t& gap : gaps) {
        gap = static_cast<std::uint32_t>(
            rng.NextBelow(std::uint64_t{1} << std::min<std::size_t>(width, 6)));
      }
      if (width > 11) gaps[count - 1] = (1U << (width - 1)) + 5;
      std::vector<std::byte> packed = PackBits(gaps, width);
      packed.resize(packed.size() + kernels::kUnpackSlackBytes, std::byte{0xff});
      constexpr std::uint32_t kFirst = 3;
      std::vector<float> values(count);
      std::vector<std::size_t> indices(count);
      std::uint64_t advance = 0;
      for (std::size_t i = 0; i < count; ++i) {
        values[i] = static_cast<float>(i + 1);
        advance += std::uint64_t{gaps[i]} + 1;
        indices[i] = kFirst + advance - 1;
      }
      CAPTURE(width, count);
      std::vector<float> expected(kFirst + advance, 0.5F);
      for (std::size_t i = 0; i < count; ++i) expected[indices[i]] += values[i];
      ForEachTarget([&] {
        std::vector<float> sum(kFirst + advance, 0.5F);
        const kernels::UnpackedGaps added = kernels::AddAtGaps(packed.data(), width, count, kFirst,
                                                               advance, values.data(), sum.data());
        REQUIRE(added.advance == advance);
        REQUIRE(sum == expected);
        // The last index is beyond the end now.
        sum.assign(kFirst + advance - 1, 0.5F);
        const kernels::UnpackedGaps stopped = kernels::AddAtGaps(
            packed.data(), width, count, kFirst, advance - 1, values.data(), sum.data());
        REQUIRE(stopped.advance > advance - 1);
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

// ---------------------------------------------------------------------------------------- layout

TEST_CASE("an index out of range is named with what may be there", "[compressors][sparse]") {
  for (const std::string index : {"packed", "u32"}) {
    std::vector<float> x(1000, 0.0F);
    for (const std::size_t at : {10UL, 500UL, 900UL}) x[at] = 1.0F;
    for (const std::string& codec :
         {"topk(index=" + index + ",k=3)", "threshold(index=" + index + ",theta=0.5)"}) {
      CAPTURE(codec);
      const Coded coded = Encode(*Make(codec), x);
      const std::string name = codec.substr(0, codec.find('('));
      std::vector<float> output(600);
      for (const Status& status : {Make(codec)->Validate(coded.payload, 600),
                                   Make(codec)->Decode(coded.payload, {}, output),
                                   Make(codec)->DecodeAdd(coded.payload, {}, output)}) {
        CHECK(status.code() == StatusCode::kCorruptData);
        CHECK(status.message() == name + " index 2 of 3 is 900, expected 501 to 599");
      }
    }
  }
}

// --------------------------------------------------------------------------------------- randomk

std::string RandomkSpec(std::size_t k, const std::string& value = "fp32") {
  return "randomk(k=" + std::to_string(k) + ",value=" + value + ")";
}

/// The elements that a seed chooses, in the order of the payload's values.
std::vector<std::uint32_t> Chosen(std::size_t n, std::size_t k, std::uint64_t shared_seed) {
  std::vector<float> numbers(k);  // the value says its place
  for (std::size_t i = 0; i < k; ++i) numbers[i] = static_cast<float>(i + 1);
  std::vector<float> output(n);
  REQUIRE(
      Make(RandomkSpec(k))
          ->Decode(AsBytes(std::span<const float>(numbers)), {.shared_seed = shared_seed}, output)
          .ok());
  std::vector<std::uint32_t> chosen(k);
  std::size_t found = 0;
  for (std::size_t i = 0; i < n; ++i) {
    if (output[i] == 0.0F) continue;
    ++found;
    chosen.at(static_cast<std::size_t>(output[i]) - 1) = static_cast<std::uint32_t>(i);
  }
  REQUIRE(found == k);  // so they are distinct
  return chosen;
}

TEST_CASE("randomk's choices ascend, and each element has the chance k / n",
          "[compressors][sparse]") {
  const std::vector<std::pair<std::size_t, std::size_t>> cases = {
      {5, 1}, {10, 3}, {7, 6}, {64, 2}, {100, 7}, {33, 32}, {130, 130}, {1000, 999}, {4097, 128}};
  std::size_t elements = 0;
  for (const auto& [n, k] : cases) elements += n;
  // A count of R rounds with chance p is off by t with a probability of at most
  // 2 exp(-t^2 / (2 (R p (1 - p) + t / 3))), Bernstein. That is solved for t where all elements
  // together raise a false alarm once in 10^9 choices of seeds.
  const double log_rate = std::log(2 * static_cast<double>(elements) / 1e-9);
  for (const auto& [n, k] : cases) {
    CAPTURE(n, k);
    const std::size_t rounds = n > 200 ? 2000 : 10000;
    std::vector<std::size_t> counts(n, 0);
    for (std::size_t round = 0; round < rounds; ++round) {
      const std::vector<std::uint32_t> chosen = Chosen(n, k, Mix64(round));
      REQUIRE(std::is_sorted(chosen.begin(), chosen.end()));
      for (const std::uint32_t index : chosen) ++counts[index];
    }
    const double p = static_cast<double>(k) / static_cast<double>(n);
    const double expected = static_cast<double>(rounds) * p;
    const double off =
        log_rate / 3 + std::sqrt(log_rate * log_rate / 9 + 2 * log_rate * expected * (1 - p));
    for (std::size_t i = 0; i < n; ++i) {
      CAPTURE(i);
      REQUIRE(std::fabs(static_cast<double>(counts[i]) - expected) <= off);
    }
  }
}

TEST_CASE("ring indices are those of the formula, up to 2^32 - 1 elements",
          "[compressors][kernels][sparse]") {
  constexpr std::uint32_t kMost = std::numeric_limits<std::uint32_t>::max();
  CounterRng rng(31);
  for (const auto& [n, k] : {std::pair<std::uint32_t, std::uint32_t>{1, 1},
                             {100, 7},
                             {4096, 128},
                             {1000, 999},
                             {kMost, 1},
                             {kMost, 77},
                             {kMost, 1U << 31},
                             {kMost, kMost - 1},
                             {kMost, kMost}}) {
    for (const std::uint32_t turn : {0U, n / 3, n - 1}) {
      const kernels::Ring ring{n, k, turn, DrawKey(rng.Next())};
      for (const std::uint32_t from : {0U, k / 2, k - std::min(k, 100U)}) {
        const std::size_t count = std::min<std::size_t>(100, k - from);
        CAPTURE(n, k, turn, from);
        std::vector<std::uint32_t> expected;
        for (std::uint64_t j = from; j < from + count; ++j) {
          const std::uint64_t begin = j * n / k;
          const std::uint64_t size = (j + 1) * n / k - begin;
          const std::uint64_t word = DrawWord(static_cast<std::uint32_t>(j), ring.key);
          expected.push_back(static_cast<std::uint32_t>((begin + (word * size >> 32) + turn) % n));
        }
        ForEachTarget([&] {
          std::vector<std::uint32_t> indices(count);
          kernels::RingIndices(ring, from, count, indices.data());
          REQUIRE(indices == expected);
        });
      }
    }
  }
}

TEST_CASE("randomk chooses alike for all senders, and anew in each round",
          "[compressors][sparse]") {
  constexpr std::size_t n = 1000;
  constexpr std::size_t k = 31;
  const auto codec = Make(RandomkSpec(k));
  std::vector<std::uint32_t> before;
  for (std::uint64_t round = 0; round < 50; ++round) {
    const std::uint64_t seed = RoundSeed(1, 2, round);
    const std::vector<std::uint32_t> chosen = Chosen(n, k, PushContext(seed, 0).shared_seed);
    // Two rounds agree with a chance of about 32^-31.
    CHECK(chosen != before);
    before = chosen;
    for (const std::uint64_t rank : {0U, 1U, 7U}) {
      const std::vector<float> x = Gradient(n, rank + 10 * round);
      CodecContext context = PushContext(seed, rank);
      context.of_same_choice = true;
      const Coded coded = Encode(*codec, x, nullptr, context);
      for (std::size_t i = 0; i < k; ++i) {
        REQUIRE(LoadLe<float>(coded.payload.data() + 4 * i) == x[chosen[i]]);
      }
    }
  }
}

TEST_CASE("randomk scales by n / k without feedback alone, and not what was chosen before",
          "[compressors][sparse]") {
  constexpr std::size_t n = 1000;
  constexpr std::size_t k = 30;  // n / k is not a float
  const auto factor = static_cast<float>(1000.0 / 30.0);
  const auto codec = Make(RandomkSpec(k));
  const std::vector<float> x = Gradient(n, 1);
  const CodecContext context{.shared_seed = 99};
  const std::vector<std::uint32_t> chosen = Chosen(n, k, 99);
  std::vector<float> values(n, 0.0F);
  Residual residual{values, {}};
  CodecContext same = context;
  same.of_same_choice = true;
  const std::vector<std::byte> plain = Encode(*codec, x, nullptr, context).payload;
  const std::vector<std::byte> again = Encode(*codec, x, nullptr, same).payload;
  const std::vector<std::byte> feedback = Encode(*codec, x, &residual, context).payload;
  for (std::size_t i = 0; i < k; ++i) {
    CHECK(LoadLe<float>(plain.data() + 4 * i) == x[chosen[i]] * factor);
    CHECK(LoadLe<float>(again.data() + 4 * i) == x[chosen[i]]);
    CHECK(LoadLe<float>(feedback.data() + 4 * i) == x[chosen[i]]);
    CHECK(values[chosen[i]] == 0.0F);
  }
  // Products beyond the largest float become that.
  const std::vector<float> large(n, -3e38F);
  const std::vector<std::byte> saturated = Encode(*codec, large, nullptr, context).payload;
  CHECK(LoadLe<float>(saturated.data()) == -std::numeric_limits<float>::max());
}

TEST_CASE("randomk is unbiased with omega n / k - 1, and under feedback contracts by k / n",
          "[compressors][sparse]") {
  constexpr std::size_t n = 600;
  constexpr std::size_t k = 37;
  constexpr std::size_t kRounds = 4000;
  const double ratio = static_cast<double>(n) / k;
  const auto codec = Make(RandomkSpec(k));
  CHECK(codec->FeedbackVariance(n) == 1 - static_cast<double>(k) / n);
  const std::vector<float> x = Gradient(n, 5);
  const double norm = SquaredNorm(x);
  for (const bool feedback : {false, true}) {
    CAPTURE(feedback);
    double mean = 0;
    double squares = 0;
    std::vector<double> sum(n, 0.0);
    for (std::uint64_t round = 0; round < kRounds; ++round) {
      std::vector<float> values(n, 0.0F);
      Residual residual{values, {}};
      const CodecContext context{.shared_seed = Mix64(round)};
      const Coded coded = Encode(*codec, x, feedback ? &residual : nullptr, context);
      std::vector<float> decoded(n);
      REQUIRE(codec->Decode(coded.payload, context, decoded).ok());
      double error = 0;
      for (std::size_t i = 0; i < n; ++i) {
        const double off = static_cast<double>(decoded[i]) - static_cast<double>(x[i]);
        error += off * off;
        sum[i] += static_cast<double>(decoded[i]);
      }
      mean += error / norm / kRounds;
      squares += error / norm * (error / norm) / kRounds;
    }
    const double expected = feedback ? 1 - 1 / ratio : ratio - 1;
    // Six standard errors of the mean: a false alarm once in 5 * 10^8 choices of seeds.
    CHECK(std::fabs(mean - expected) <= 6 * std::sqrt((squares - mean * mean) / kRounds));
    if (feedback) continue;
    // One element is x n/k with the chance k/n: its mean has the variance x^2 (n/k - 1) / R. Eight
    // standard errors: 600 of them raise a false alarm once in 10^12.
    for (std::size_t i = 0; i < n; ++i) {
      const double own = static_cast<double>(x[i]);
      REQUIRE(std::fabs(sum[i] / kRounds - own) <=
              8 * std::fabs(own) * std::sqrt((ratio - 1) / kRounds) + 1e-6 * std::fabs(own));
    }
  }
  // Where magnitudes are equal every choice is off by exactly omega.
  const std::vector<float> ones(n, 1.0F);
  const std::vector<float> decoded = Decode(*codec, Encode(*codec, ones).payload, n);
  double error = 0;
  for (const float value : decoded) {
    error += (static_cast<double>(value) - 1) * (static_cast<double>(value) - 1);
  }
  CHECK(std::fabs(error / n - (ratio - 1)) <= 1e-5);
}

TEST_CASE("randomk decodes with the seed that it was encoded with, block by block too",
          "[compressors][sparse]") {
  for (const std::string value : {"fp32", "fp16"}) {
    for (const std::size_t n : {1UL, 2UL, 4096UL, 4097UL, 20000UL}) {
      for (const std::size_t k : {std::size_t{1}, n / 32 + 1, n / 2 + 1, n}) {
        const auto codec = Make(RandomkSpec(k, value));
        for (std::uint64_t seed = 0; seed < 40; ++seed) {
          CAPTURE(value, n, k, seed);
          std::vector<float> x(n);
          for (std::size_t i = 0; i < n; ++i) x[i] = static_cast<float>(i % 2000 + 1);
          const CodecContext context{.shared_seed = Mix64(seed), .of_same_choice = true};
          const Coded coded = Encode(*codec, x, nullptr, context);
          std::vector<float> decoded(n);
          REQUIRE(codec->Decode(coded.payload, context, decoded).ok());
          std::size_t kept = 0;
          bool same = true;
          for (std::size_t i = 0; i < n; ++i) {
            same = same && (decoded[i] == 0.0F || decoded[i] == x[i]);
            kept += decoded[i] == 0.0F ? 0 : 1;
          }
          REQUIRE(same);
          REQUIRE(kept == std::min(k, n));
          std::vector<float> whole(n, 1.0F);
          std::vector<float> blocks(n, 1.0F);
          REQUIRE(codec->DecodeAdd(coded.payload, context, whole).ok());
          ForEachBlock(n, [&](std::size_t offset, std::size_t count) {
            codec->DecodeAddRange(coded.payload, n, context, offset,
                                  std::span(blocks).subspan(offset, count));
          });
          for (std::size_t i = 0; i < n; ++i) decoded[i] += 1.0F;
          REQUIRE(whole == decoded);
          REQUIRE(blocks == decoded);
        }
      }
    }
  }
  const auto codec = Make(RandomkSpec(100));
  const std::vector<float> x = Gradient(1000, 1);
  const Coded coded = Encode(*codec, x, nullptr, {.shared_seed = 1});
  std::vector<float> right(1000);
  std::vector<float> wrong(1000);
  REQUIRE(codec->Decode(coded.payload, {.shared_seed = 1}, right).ok());
  REQUIRE(codec->Decode(coded.payload, {.shared_seed = 2}, wrong).ok());
  CHECK(right != wrong);
}

TEST_CASE("randomk payloads of fp32 may be added before they are decoded",
          "[compressors][sparse]") {
  constexpr std::size_t n = 5000;
  const auto codec = Make("randomk");
  CHECK(codec->traits().summable);
  CHECK_FALSE(Make("randomk(value=fp16)")->traits().summable);
  const CodecContext context{.shared_seed = 3};
  const Coded a = Encode(*codec, Gradient(n, 1), nullptr, context);
  const Coded b = Encode(*codec, Gradient(n, 2), nullptr, context);
  std::vector<std::byte> sum(a.payload.size());
  for (std::size_t i = 0; i < sum.size(); i += 4) {
    StoreLe(sum.data() + i,
            LoadLe<float>(a.payload.data() + i) + LoadLe<float>(b.payload.data() + i));
  }
  std::vector<float> of_sum(n);
  std::vector<float> added(n, 0.0F);
  REQUIRE(codec->Decode(sum, context, of_sum).ok());
  REQUIRE(codec->DecodeAdd(a.payload, context, added).ok());
  REQUIRE(codec->DecodeAdd(b.payload, context, added).ok());
  CHECK(of_sum == added);
}

// ------------------------------------------------------------------------------------- threshold

TEST_CASE("threshold keeps what is above theta, and the residual stays within it",
          "[compressors][sparse]") {
  constexpr std::size_t n = 9001;
  constexpr float kTheta = 0.3F;
  for (const std::string value : {"fp32", "fp16"}) {
    const auto codec = Make("threshold(theta=0.3,value=" + value + ")");
    std::vector<float> values(n, 0.0F);
    Residual residual{values, {}};
    std::vector<float> e(n, 0.0F);
    for (std::uint64_t round = 0; round < 20; ++round) {
      CAPTURE(value, round);
      std::vector<float> g = Gradient(n, round);
      g[5] = round % 2 == 0 ? kTheta - e[5] : -kTheta - e[5];  // at theta is not above it
      const float alpha = round % 4 == 3 ? 0.5F : 1.0F;
      const Coded coded = Encode(*codec, g, &residual, {0, alpha});
      const std::vector<float> sent = Decode(*codec, coded.payload, n);
      bool right = true;
      std::uint32_t count = 0;
      for (std::size_t i = 0; i < n; ++i) {
        const float q = g[i] + alpha * e[i];
        e[i] = q - sent[i];
        const bool kept = std::fabs(q) > kTheta;
        count += kept ? 1 : 0;
        // Halves above 2^-14 are off by at most 2^-11 of themselves.
        const float bound = kept ? (value == "fp32" ? 0.0F : 0x1.0p-11F * std::fabs(q)) : kTheta;
        right = right && (sent[i] != 0.0F) == kept && std::fabs(e[i]) <= bound;
      }
      CHECK(right);
      CHECK(LoadLe<std::uint32_t>(coded.payload.data()) == count);
      REQUIRE(Bits(values) == Bits(e));
    }
  }
}

TEST_CASE("threshold may keep nothing, or all", "[compressors][sparse]") {
  for (const std::string index : {"packed", "u32"}) {
    for (const std::size_t n : {1UL, 128UL, 129UL, 5000UL}) {
      CAPTURE(index, n);
      const std::vector<float> x(n, 0.5F);
      const Coded none = Encode(*Make("threshold(index=" + index + ",theta=0.5)"), x);
      CHECK(none.payload == std::vector<std::byte>(4, std::byte{0}));
      const auto codec = Make("threshold(index=" + index + ",theta=0.25)");
      CHECK(SquaredNorm(Decode(*codec, none.payload, n)) == 0);
      const Coded all = Encode(*codec, x);
      CHECK(LoadLe<std::uint32_t>(all.payload.data()) == n);
      const std::size_t index_bytes = index == "u32" ? 4 * n : (n + 127) / 128;
      CHECK(all.payload.size() == 4 + 2 * n + index_bytes);
      CHECK(Decode(*codec, all.payload, n) == x);
    }
  }
}

TEST_CASE("no threshold payload is longer than its bound, and the worst comes near it",
          "[compressors][sparse]") {
  CounterRng rng(41);
  for (const std::string value : {"fp16", "fp32"}) {
    const auto codec = Make("threshold(theta=0.5,value=" + value + ")");
    // Blocks of 128 gaps, one of which needs a width and the rest are 0.
    std::size_t longest = 0;
    constexpr std::size_t n = 100000;
    for (std::size_t gap = 0; gap < 40; ++gap) {
      std::vector<float> x(n, 0.0F);
      for (std::size_t at = 0, i = 0; at < n; ++at, ++i) {
        if (i % 128 == 0) at += gap;
        if (at < n) x[at] = 1.0F;
      }
      const std::size_t size = Encode(*codec, x).payload.size();
      CHECK(size <= codec->MaxEncodedSize(n));
      longest = std::max(longest, size);
    }
    CHECK(static_cast<double>(longest) > 0.999 * static_cast<double>(codec->MaxEncodedSize(n)));
    // Few elements: last blocks of any count and width.
    for (std::size_t few = 1; few < 300; ++few) {
      for (int attempt = 0; attempt < 20; ++attempt) {
        std::vector<float> x(few, 1.0F);
        for (std::uint64_t zeros = rng.NextBelow(20); zeros > 0; --zeros) {
          x[rng.NextBelow(few)] = 0.0F;
        }
        CAPTURE(value, few);
        REQUIRE(Encode(*codec, x).payload.size() <= codec->MaxEncodedSize(few));
      }
    }
  }
}

TEST_CASE("threshold refuses counts that the payload does not bear out", "[compressors][sparse]") {
  for (const std::string index : {"packed", "u32"}) {
    CAPTURE(index);
    const auto codec = Make("threshold(index=" + index + ",theta=0.5)");
    std::vector<float> x(1000, 0.0F);
    for (const std::size_t at : {3UL, 400UL, 999UL}) x[at] = 1.0F;
    const std::vector<std::byte> payload = Encode(*codec, x).payload;
    REQUIRE(codec->Validate(payload, 1000).ok());
    const auto message_of = [&](std::uint32_t count) {
      std::vector<std::byte> lying = payload;
      StoreLe(lying.data(), count);
      std::vector<float> output(1000);
      const Status status = codec->Validate(lying, 1000);
      CHECK(status.code() == StatusCode::kCorruptData);
      CHECK(codec->Decode(lying, {}, output).message() == status.message());
      CHECK(codec->DecodeAdd(lying, {}, output).message() == status.message());
      return status.message();
    };
    for (const std::uint32_t count : {0U, 2U, 4U, 1000U}) message_of(count);
    CHECK(message_of(1001) == "threshold count is 1001, expected at most 1000");
    CHECK(message_of(0xffffffff) == "threshold count is 4294967295, expected at most 1000");
    CHECK(codec->Validate(ByteView(payload).first(3), 1000).message() ==
          "threshold payload is 3 bytes, expected at least 4");
    CHECK(codec->Validate(payload, 0).code() == StatusCode::kCorruptData);
  }
}

TEST_CASE("theta has to be positive and finite", "[compressors][sparse]") {
  for (const std::string theta : {"0", "-0.5", "inf", "nan", "1e39"}) {
    CAPTURE(theta);
    CHECK(BuiltinCompressors().Create("threshold(theta=" + theta + ")").status().code() ==
          StatusCode::kInvalidArgument);
  }
  CHECK(BuiltinCompressors().Create("threshold").ok());
}

}  // namespace
}  // namespace gradwire::testing
