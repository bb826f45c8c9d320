// Every compressor of the registry in a whole job, in both directions.

#include <cmath>
#include <cstring>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "common/base/random.h"
#include "compressors/registry.h"
#include "tests/integration/cluster.h"

namespace gradwire::testing {
namespace {

constexpr std::uint32_t kWorkers = 2;
constexpr std::size_t kLarge = 70000;  // several units, the last one odd
constexpr std::size_t kSmall = 300;    // fused
constexpr std::uint64_t kSteps = 3;

/// A value that every float dtype holds exactly: 7 bits of mantissa.
float Exact(std::uint64_t seed, std::size_t i) {
  const std::uint64_t word = Mix64(seed + i);
  const auto mantissa = static_cast<float>(static_cast<int>(word & 0xff) - 128);
  return std::ldexp(mantissa, -8 - static_cast<int>((word >> 8) & 3));
}

/// The values in another dtype, rounded to nearest even.
std::vector<std::byte> Converted(DType dtype, std::span<const float> values) {
  std::vector<std::byte> bytes(values.size() * SizeOf(dtype));
  if (dtype == DType::kFloat64) {
    for (std::size_t i = 0; i < values.size(); ++i) {
      StoreLe(bytes.data() + i * sizeof(double), static_cast<double>(values[i]));
    }
    return bytes;
  }
  const std::string written = dtype == DType::kFloat32   ? "none"
                              : dtype == DType::kFloat16 ? "fp16"
                                                         : "bf16";
  const auto codec = BuiltinCompressors().Create(written);
  REQUIRE(codec.ok());
  REQUIRE(EncodeSpan(**codec, values, {}, bytes).ok());
  return bytes;
}

/// The gradients of a job: [rank][step] for each tensor.
std::vector<float> GradientOf(std::uint32_t rank, std::uint64_t step, std::size_t tensor,
                              std::size_t n) {
  std::vector<float> values(n);
  const std::uint64_t seed = HashCombine(HashCombine(rank + 1, step), tensor) << 20;
  for (std::size_t i = 0; i < n; ++i) values[i] = Exact(seed, i);
  return values;
}

/// What rank 0 has after each step, all tensors one after the other; all ranks have the same.
std::vector<std::vector<std::byte>> RunJob(const std::string& spec, DType dtype) {
  Config config = TestConfig(kWorkers);
  SetCompressor(config, spec);
  std::vector<std::vector<std::byte>> outs[kWorkers];
  // Converted beforehand, since Catch2 is for one thread.
  const std::vector<std::size_t> sizes = {kLarge, kSmall, kSmall + 1};
  std::map<std::tuple<std::uint32_t, std::uint64_t, std::size_t>, std::vector<std::byte>> inputs;
  for (std::uint32_t rank = 0; rank < kWorkers; ++rank) {
    for (std::uint64_t step = 0; step < kSteps; ++step) {
      for (std::size_t t = 0; t < sizes.size(); ++t) {
        inputs[{rank, step, t}] = Converted(dtype, GradientOf(rank, step, t, sizes[t]));
      }
    }
  }
  Failures failures;
  Cluster cluster(config, TransportKind::kInproc);
  cluster.Run([&](Client& client) {
    std::vector<TensorDeclaration> tensors;
    for (std::size_t t = 0; t < sizes.size(); ++t) {
      tensors.push_back(Tensor("t" + std::to_string(t), sizes[t], dtype));
    }
    const auto ids = client.Declare(tensors);
    if (!failures.Ok(ids.status(), "declare")) return;
    for (std::uint64_t step = 0; step < kSteps; ++step) {
      std::vector<std::vector<std::byte>> out(sizes.size());
      std::vector<Handle> handles;
      for (std::size_t t = 0; t < sizes.size(); ++t) {
        out[t].resize(sizes[t] * SizeOf(dtype));
        const auto handle =
            client.PushPullAsync((*ids)[t], inputs.at({client.rank(), step, t}), out[t]);
        if (!failures.Ok(handle.status(), "push")) return;
        handles.push_back(*handle);
      }
      failures.Ok(client.EndStep(), "end of step");
      for (const Handle& handle : handles) failures.Ok(client.Wait(handle), "wait");
      std::vector<std::byte> all;
      for (const auto& part : out) all.insert(all.end(), part.begin(), part.end());
      outs[client.rank()].push_back(std::move(all));
    }
  });
  REQUIRE(failures.Take() == "");
  for (std::uint32_t rank = 1; rank < kWorkers; ++rank) REQUIRE(outs[rank] == outs[0]);
  return outs[0];
}

TEST_CASE("every compressor carries every float dtype both ways, alike on every rank",
          "[integration]") {
  for (const CompressorInfo& info : BuiltinCompressors().entries()) {
    const auto expected = RunJob(info.name, DType::kFloat32);
    REQUIRE(expected.size() == kSteps);
    for (const DType dtype : {DType::kFloat16, DType::kBFloat16, DType::kFloat64}) {
      CAPTURE(info.name, DTypeName(dtype));
      const auto got = RunJob(info.name, dtype);
      if (info.name == "none" && dtype == DType::kFloat64) continue;  // summed in fp64
      // The gradients are the same numbers, so the payloads are the same bytes, and the result is
      // that of fp32 rounded once.
      for (std::uint64_t step = 0; step < kSteps; ++step) {
        std::vector<float> values(expected[step].size() / sizeof(float));
        std::memcpy(values.data(), expected[step].data(), expected[step].size());
        REQUIRE(got[step] == Converted(dtype, values));
      }
    }
  }
}

}  // namespace
}  // namespace gradwire::testing
