#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>

#include "common/base/bytes.h"
#include "common/base/random.h"
#include "tests/catch.h"
#include "tests/compressors/codec_testing.h"

namespace gradwire::testing {
namespace {

/// The indices of the k largest magnitudes by a stable sort, ascending.
std::vector<std::uint32_t> NaiveLargest(std::span<const float> x, std::size_t k) {
  std::vector<std::uint32_t> order(x.size());
  std::iota(order.begin(), order.end(), 0U);
  std::stable_sort(order.begin(), order.end(), [&](std::uint32_t a, std::uint32_t b) {
    return std::fabs(x[a]) > std::fabs(x[b]);
  });
  order.resize(k);
  std::sort(order.begin(), order.end());
  return order;
}

std::vector<std::uint32_t> IndicesOf(ByteView payload, std::size_t k) {
  std::vector<std::uint32_t> indices(k);
  for (std::size_t i = 0; i < k; ++i) {
    indices[i] = LoadLe<std::uint32_t>(payload.data() + 4 * k + 4 * i);
  }
  return indices;
}

void CheckAgainstSort(const std::vector<float>& x, std::size_t k) {
  const std::string suffix = ",k=" + std::to_string(k) + ",value=fp32)";
  const auto codec = Make("topk(index=u32" + suffix);
  k = std::min(k, x.size());
  const Coded coded = Encode(*codec, x);
  REQUIRE(coded.payload.size() == 8 * k);
  const std::vector<std::uint32_t> expected = NaiveLargest(x, k);
  REQUIRE(IndicesOf(coded.payload, k) == expected);
  for (std::size_t i = 0; i < k; ++i) {
    REQUIRE(LoadLe<float>(coded.payload.data() + 4 * i) == x[expected[i]]);
  }
  // Packed indices say the same.
  const auto packed = Make("topk(index=packed" + suffix);
  REQUIRE(Bits(Decode(*packed, Encode(*packed, x).payload, x.size())) ==
          Bits(Decode(*codec, coded.payload, x.size())));
}

/// Inputs that aiming goes wrong with, or where the cut falls among equals.
std::vector<std::vector<float>> AdversarialInputs(std::size_t n) {
  std::vector<std::vector<float>> inputs;
  inputs.push_back(Gradient(n, n));
  inputs.push_back(AwkwardGradient(n, n));
  CounterRng rng(n);
  // Ties: few different magnitudes, so that the cut falls among equals.
  std::vector<float> ties(n);
  for (float& value : ties) {
    value = static_cast<float>(rng.NextBelow(3)) * (rng.NextBelow(2) == 0 ? 1.0F : -1.0F);
  }
  inputs.push_back(ties);
  inputs.push_back(std::vector<float>(n, -0.5F));
  inputs.push_back(std::vector<float>(n, 0.0F));
  // Mostly zeros, as an embedding's gradient.
  std::vector<float> sparse(n, 0.0F);
  for (std::size_t i = 0; i < n / 500; ++i) {
    sparse[rng.NextBelow(n)] = static_cast<float>(rng.NextGaussian());
  }
  inputs.push_back(sparse);
  // Sorted both ways, and all large ones in one place.
  std::vector<float> rising(n);
  for (std::size_t i = 0; i < n; ++i) rising[i] = static_cast<float>(i);
  inputs.push_back(rising);
  std::reverse(rising.begin(), rising.end());
  inputs.push_back(rising);
  std::vector<float> clustered = Gradient(n, n + 1);
  for (std::size_t i = n / 2; i < n / 2 + n / 50; ++i) clustered[i] *= 1000.0F;
  inputs.push_back(clustered);
  // A magnitude that most have and the sample sees nothing but.
  std::vector<float> spikes(n, 1.0F);
  for (std::size_t i = 3; i < n; i += 9973) spikes[i] = 2.0F;
  inputs.push_back(spikes);
  // Blocks of their own scale: some samples see large ones where there are few, others the reverse;
  // where scales rise, what was collected has to be cut again and again.
  std::vector<float> scaled = Gradient(n, n + 2);
  std::vector<float> growing = scaled;
  for (std::size_t block = 0; block * kBlockElements < n; ++block) {
    const auto scale = static_cast<float>(std::exp(3 * rng.NextGaussian()));
    const auto larger = static_cast<float>(std::exp(0.4 * static_cast<double>(block)));
    for (std::size_t i = block * kBlockElements; i < std::min(n, (block + 1) * kBlockElements);
         ++i) {
      scaled[i] *= scale;
      growing[i] *= larger;
    }
  }
  inputs.push_back(scaled);
  inputs.push_back(growing);
  return inputs;
}

TEST_CASE("topk keeps exactly what a stable sort puts first", "[compressors][topk]") {
  // 16384 and below nothing is sampled; 200000 has several ways through.
  for (const std::size_t n : {10UL, 1000UL, 16384UL, 16385UL, 40000UL, 200000UL}) {
    const std::vector<std::vector<float>> inputs = AdversarialInputs(n);
    for (std::size_t which = 0; which < inputs.size(); ++which) {
      for (const std::size_t k : {std::size_t{1}, n / 1000 + 1, n / 100 + 1, n / 3, n - 1, n}) {
        CAPTURE(n, which, k);
        CheckAgainstSort(inputs[which], k);
      }
    }
  }
}

TEST_CASE("under feedback topk keeps what a stable sort of gradient and residual puts first",
          "[compressors][topk]") {
  for (const std::size_t n : {1000UL, 20000UL, 150000UL}) {
    const std::vector<std::vector<float>> inputs = AdversarialInputs(n);
    for (const std::size_t k : {n / 1000 + 1, n / 50, n / 2}) {
      const auto codec = Make("topk(index=u32,k=" + std::to_string(k) + ",value=fp32)");
      std::vector<float> values(n, 0.0F);
      Residual residual{values, {}};
      std::vector<float> q(n, 0.0F);
      for (std::size_t round = 0; round < 2 * inputs.size(); ++round) {
        CAPTURE(n, k, round);
        // The kind of data changes from round to round, its sign with each pass over the kinds.
        const std::vector<float>& kind = inputs[round * 5 % inputs.size()];
        const float alpha = std::array{1.0F, 0.5F, 0.875F}[round % 3];
        std::vector<float> g(n);
        for (std::size_t i = 0; i < n; ++i) {
          g[i] = round < inputs.size() ? kind[i] : -0.75F * kind[n - 1 - i];
          q[i] = g[i] + alpha * q[i];
        }
        const Coded coded = Encode(*codec, g, &residual, {0, alpha});
        const std::vector<std::uint32_t> expected = NaiveLargest(q, k);
        REQUIRE(IndicesOf(coded.payload, k) == expected);
        bool same = true;
        for (std::size_t i = 0; i < k; ++i) {
          same = same && Bits({&q[expected[i]], 1})[0] ==
                             LoadLe<std::uint32_t>(coded.payload.data() + 4 * i);
          q[expected[i]] = 0.0F;
        }
        REQUIRE(same);
        REQUIRE(Bits(values) == Bits(q));
      }
    }
  }
}

TEST_CASE("topk keeps floor(n * ratio + 0.5), at least one", "[compressors][topk]") {
  const auto kept = [](const std::string& ratio, std::size_t n) {
    return Make("topk(index=u32,ratio=" + ratio + ",value=fp32)")->MaxEncodedSize(n) / 8;
  };
  CHECK(kept("0.001", 0) == 0);
  CHECK(kept("0.001", 1) == 1);
  CHECK(kept("0.001", 1499) == 1);
  CHECK(kept("0.001", 1500) == 2);
  CHECK(kept("0.5", 5) == 3);
  CHECK(kept("1", 77) == 77);
  CHECK(Make("topk")->MaxEncodedSize(1000) == Make("topk(ratio=0.001)")->MaxEncodedSize(1000));
  CHECK(Make("topk(k=5)")->MaxEncodedSize(3) == Make("topk(ratio=1)")->MaxEncodedSize(3));
}

TEST_CASE("packed indices cost at most their bound, and about 10 bits at 0.1 %",
          "[compressors][topk]") {
  constexpr std::size_t n = 524288;
  const auto codec = Make("topk(ratio=0.001)");
  const Coded coded = Encode(*codec, Gradient(n, 3));
  CHECK(coded.payload.size() <= codec->MaxEncodedSize(n));
  CHECK(coded.payload.size() < 524 * 2 + 524 * 14 / 8);
  // The worst case: the last k elements.
  std::vector<float> x(n, 0.0F);
  for (std::size_t i = n - 524; i < n; ++i) x[i] = 1.0F;
  CHECK(Encode(*codec, x).payload.size() <= codec->MaxEncodedSize(n));
}

TEST_CASE("a kept element of normal values costs at most 4 bytes at 0.1 % and 3.5 at 1 %",
          "[compressors][topk]") {
  for (const std::size_t n : {std::size_t{1} << 19, std::size_t{1} << 20, std::size_t{1} << 22}) {
    CounterRng rng(n);
    std::vector<float> x(n);
    for (float& value : x) value = static_cast<float>(rng.NextGaussian());
    const auto bytes_per_kept = [&](const std::string& ratio) {
      const std::size_t kept =
          Make("topk(index=u32,ratio=" + ratio + ",value=fp32)")->MaxEncodedSize(n) / 8;
      const auto size = Encode(*Make("topk(ratio=" + ratio + ")"), x).payload.size();
      return static_cast<double>(size) / static_cast<double>(kept);
    };
    CAPTURE(n);
    CHECK(bytes_per_kept("0.001") <= 4.0);
    CHECK(bytes_per_kept("0.01") <= 3.5);
  }
}

TEST_CASE("u32 indices that do not ascend are refused", "[compressors][topk]") {
  const auto codec = Make("topk(index=u32,k=3)");
  Coded coded = Encode(*codec, std::vector<float>{1, 2, 3, 4, 5, 6});
  std::byte* const indices = coded.payload.data() + 6;
  StoreLe<std::uint32_t>(indices + 4, LoadLe<std::uint32_t>(indices));
  const Status status = codec->Validate(coded.payload, 6);
  CHECK(status.code() == StatusCode::kCorruptData);
  CHECK(status.message().find("is 3, expected 4 to 5") != std::string::npos);
}

}  // namespace
}  // namespace gradwire::testing
