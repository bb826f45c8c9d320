// The same inner loops twice: as plain loops under g++'s target_clones, and as the kernels with
// Highway. GB/s of fp32 over those of a += b, medians of interleaved repeats, one thread. What
// docs/decisions/0003-vector-kernels.md is decided by; run it again with a new compiler.

#include <algorithm>
#include <bit>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <string>
#include <vector>

#include "common/base/bytes.h"
#include "common/base/random.h"
#include "compressors/codecs/half.h"
#include "compressors/codecs/kernels.h"
#include "compressors/codecs/sparse_kernels.h"

#define GRADWIRE_CLONES \
  __attribute__((target_clones("arch=skylake-avx512", "arch=haswell", "default")))

namespace gradwire {
namespace {

GRADWIRE_CLONES void Add(const float* __restrict b, std::size_t n, float* __restrict a) {
  for (std::size_t i = 0; i < n; ++i) a[i] += b[i];
}

GRADWIRE_CLONES void ToBfloat(const float* __restrict x, std::size_t n,
                              std::uint16_t* __restrict out) {
  for (std::size_t i = 0; i < n; ++i) out[i] = BfloatFromFloat(x[i]);
}

GRADWIRE_CLONES void ToHalf(const float* __restrict x, std::size_t n,
                            std::uint16_t* __restrict out) {
  for (std::size_t i = 0; i < n; ++i) out[i] = HalfFromFloat(x[i]);
}

/// Sign bits and the sum of magnitudes in 16 lanes, as kernels::EncodeSigns does.
GRADWIRE_CLONES float Signs(const float* __restrict x, std::size_t n,
                            std::uint16_t* __restrict bits) {
  float lanes[16] = {};
  for (std::size_t i = 0; i + 16 <= n; i += 16) {
    std::uint32_t word = 0;
    for (std::size_t lane = 0; lane < 16; ++lane) {
      lanes[lane] += std::fabs(x[i + lane]);
      word |= std::bit_cast<std::uint32_t>(x[i + lane]) >> 31 << lane;
    }
    bits[i / 16] = static_cast<std::uint16_t>(word);
  }
  float sum = 0;
  for (const float lane : lanes) sum += lane;
  return sum;
}

/// The other way: accumulator[i] += bit i set ? -scale : scale.
GRADWIRE_CLONES void AddSigns(const std::uint8_t* __restrict bits, float scale, std::size_t n,
                              float* __restrict out) {
  for (std::size_t i = 0; i < n; ++i) {
    out[i] += (bits[i / 8] >> (i % 8) & 1) != 0 ? -scale : scale;
  }
}

GRADWIRE_CLONES std::size_t Collect(const float* __restrict x, std::size_t n, std::uint32_t least,
                                    std::uint32_t* __restrict indices, float* __restrict values) {
  std::size_t found = 0;
  for (std::size_t i = 0; i < n; ++i) {
    indices[found] = static_cast<std::uint32_t>(i);
    values[found] = x[i];
    found += (std::bit_cast<std::uint32_t>(x[i]) & 0x7fffffff) >= least ? 1 : 0;
  }
  return found;
}

struct Contender {
  std::string name;
  std::function<void()> run;
  std::vector<double> seconds = {};
};

double Median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2),
                   values.end());
  return values[values.size() / 2];
}

void Compare(std::size_t n) {
  CounterRng rng(1);
  std::vector<float> x(n);
  for (float& value : x) value = static_cast<float>(rng.NextGaussian());
  std::vector<float> sum(n);
  std::vector<std::uint32_t> words(n);
  auto* const halves = reinterpret_cast<std::uint16_t*>(words.data());
  auto* const bytes = reinterpret_cast<std::byte*>(words.data());
  const auto* const signs = reinterpret_cast<const std::uint8_t*>(words.data());
  const auto least = std::bit_cast<std::uint32_t>(2.576F);  // 1 % of N(0,1)
  const auto blocks = [&](auto&& body) {
    for (std::size_t at = 0; at < n; at += 4096) body(at, std::min<std::size_t>(4096, n - at));
  };
  using kernels::CastFormat;
  std::vector<Contender> all = {
      {"a += b", [&] { Add(x.data(), n, sum.data()); }},
      {"bf16 encode, clones", [&] { ToBfloat(x.data(), n, halves); }},
      {"bf16 encode, Highway",
       [&] { kernels::EncodeCast(CastFormat::kBf16, x.data(), nullptr, 1, n, bytes); }},
      {"fp16 encode, clones", [&] { ToHalf(x.data(), n, halves); }},
      {"fp16 encode, Highway",
       [&] { kernels::EncodeCast(CastFormat::kF16, x.data(), nullptr, 1, n, bytes); }},
      {"signs and sum, clones", [&] { (void)Signs(x.data(), n, halves); }},
      {"signs and sum, Highway",
       [&] {
         blocks([&](std::size_t at, std::size_t count) {
           (void)kernels::EncodeSigns(kernels::SignSum::kAbs, x.data() + at, nullptr, 1, 0, 0,
                                      count, bytes + at / 8);
         });
       }},
      {"add signs, clones", [&] { AddSigns(signs, 0.5F, n, sum.data()); }},
      {"add signs, Highway", [&] { kernels::DecodeAddSigns(bytes, -0.5F, 0.5F, n, sum.data()); }},
      {"collect 1 %, clones", [&] { (void)Collect(x.data(), n, least, words.data(), sum.data()); }},
      {"collect 1 %, Highway",
       [&] {
         std::size_t found = 0;
         blocks([&](std::size_t at, std::size_t count) {
           found += kernels::CollectAtLeast(x.data() + at, nullptr, 1, count, least,
                                            static_cast<std::uint32_t>(at), words.data() + found,
                                            sum.data() + found)
                        .found;
         });
       }},
  };
  const int calls = static_cast<int>(std::max<std::size_t>(1, (std::size_t{1} << 24) / n));
  for (int repeat = 0; repeat < 15; ++repeat) {
    for (Contender& contender : all) {
      contender.run();
      const auto begin = std::chrono::steady_clock::now();
      for (int call = 0; call < calls; ++call) contender.run();
      const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
      contender.seconds.push_back(took.count() / calls);
    }
  }
  const double base = Median(all[0].seconds);
  for (const Contender& contender : all) {
    const double seconds = Median(contender.seconds);
    std::printf("%8zu KiB  %-24s %6.1f GB/s  %5.2f of a += b\n", n * sizeof(float) / 1024,
                contender.name.c_str(), static_cast<double>(n * sizeof(float)) / seconds / 1e9,
                base / seconds);
  }
}

}  // namespace
}  // namespace gradwire

int main(int argc, char** argv) {
  using namespace gradwire;
  for (const std::int64_t target : kernels::AvailableTargets()) {
    if (argc > 1 && kernels::TargetName(target) == argv[1]) kernels::UseTarget(target);
  }
  Compare(std::size_t{1} << 20);
  Compare(std::size_t{1} << 24);
}
