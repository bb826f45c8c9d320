#include <benchmark/benchmark.h>

#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "common/base/random.h"
#include "compressors/codecs/kernels.h"
#include "compressors/registry.h"

// GB/s of float32 that one thread compresses, beside memcpy and a += b of the same size, which are
// what codecs are judged by. Compare figures of one run only. GRADWIRE_BENCH_TARGET=AVX2 (or
// another name that this machine can run) measures the kernels of older machines.

namespace gradwire {
namespace {

std::vector<float> Normal(std::size_t n, std::uint64_t seed) {
  CounterRng rng(seed);
  std::vector<float> values(n);
  for (float& value : values) value = static_cast<float>(rng.NextGaussian());
  return values;
}

void Report(benchmark::State& state, std::size_t n) {
  state.SetBytesProcessed(static_cast<std::int64_t>(state.iterations()) *
                          static_cast<std::int64_t>(n * sizeof(float)));
}

void BenchMemcpy(benchmark::State& state, std::size_t n) {
  const std::vector<float> from = Normal(n, 1);
  std::vector<float> to(n);
  for (auto _ : state) {
    std::memcpy(to.data(), from.data(), n * sizeof(float));
    benchmark::ClobberMemory();
  }
  Report(state, n);
}

/// a += b with the kernels' own vectors.
void BenchAdd(benchmark::State& state, std::size_t n) {
  const std::vector<float> b = Normal(n, 1);
  std::vector<float> a(n, 0.0F);
  const auto* bytes = reinterpret_cast<const std::byte*>(b.data());
  for (auto _ : state) {
    kernels::DecodeAddCast(kernels::CastFormat::kF32, bytes, n, a.data());
    benchmark::ClobberMemory();
  }
  Report(state, n);
}

struct Fixture {
  Fixture(const std::string& spec, std::size_t n)
      : codec(std::move(BuiltinCompressors().Create(spec)).value()),
        input(Normal(n, 1)),
        values(n, 0.0F),
        residual{values, {}},
        output(codec->MaxEncodedSize(n)),
        sum(n, 0.0F) {}
  std::unique_ptr<const Compressor> codec;
  std::vector<float> input;
  std::vector<float> values;
  Residual residual;
  std::vector<std::byte> output;
  std::vector<float> sum;
};

void BenchEncode(benchmark::State& state, const std::string& spec, std::size_t n, bool feedback) {
  Fixture f(spec, n);
  std::size_t payload_bytes = 0;
  for (auto _ : state) {
    const Result<Encoded> encoded = feedback
                                        ? EncodeSpan(*f.codec, f.input, {}, f.residual, f.output)
                                        : EncodeSpan(*f.codec, f.input, {}, f.output);
    payload_bytes = encoded->payload_bytes;
    benchmark::ClobberMemory();
  }
  Report(state, n);
  state.counters["bytes_per_element"] = static_cast<double>(payload_bytes) / static_cast<double>(n);
}

void BenchDecode(benchmark::State& state, const std::string& spec, std::size_t n, bool add) {
  Fixture f(spec, n);
  const Result<Encoded> encoded = EncodeSpan(*f.codec, f.input, {}, f.output);
  const ByteView payload(f.output.data(), encoded->payload_bytes);
  for (auto _ : state) {
    const Status status =
        add ? f.codec->DecodeAdd(payload, {}, f.sum) : f.codec->Decode(payload, {}, f.sum);
    if (!status.ok()) state.SkipWithError("decode failed");
    benchmark::ClobberMemory();
  }
  Report(state, n);
}

const bool registered = [] {
  if (const char* wanted = std::getenv("GRADWIRE_BENCH_TARGET")) {
    for (const std::int64_t target : kernels::AvailableTargets()) {
      if (kernels::TargetName(target) == wanted) kernels::UseTarget(target);
    }
  }
  for (const std::size_t n : {std::size_t{1} << 18, std::size_t{1} << 20, std::size_t{1} << 24}) {
    const std::string size = '/' + std::to_string(n * sizeof(float) / 1024) + "KiB";
    benchmark::RegisterBenchmark(("memcpy" + size).c_str(), BenchMemcpy, n);
    benchmark::RegisterBenchmark(("a+=b" + size).c_str(), BenchAdd, n);
    for (const std::string spec :
         {"none", "fp16", "bf16", "onebit", "onebit(scaling=two_means)", "topk(ratio=0.01)",
          "topk(ratio=0.001)", "int8", "natural", "terngrad", "twobit", "dithering"}) {
      benchmark::RegisterBenchmark((spec + "/encode" + size).c_str(), BenchEncode, spec, n, false);
      benchmark::RegisterBenchmark((spec + "/encode+feedback" + size).c_str(), BenchEncode, spec, n,
                                   true);
      benchmark::RegisterBenchmark((spec + "/decode" + size).c_str(), BenchDecode, spec, n, false);
      benchmark::RegisterBenchmark((spec + "/decode-add" + size).c_str(), BenchDecode, spec, n,
                                   true);
    }
  }
  return true;
}();

}  // namespace
}  // namespace gradwire
