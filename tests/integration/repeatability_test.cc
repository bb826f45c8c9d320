// The same gradients give the same bits, whatever the number of servers, lanes, threads and the
// credit, and whatever the transport does to the timing.

#include <fmt/format.h>

#include <cstring>

#include "common/base/random.h"
#include "tests/integration/cluster.h"

namespace gradwire::testing {
namespace {

constexpr int kRounds = 12;

// Gradients of three tensors (cut, whole and small) over some rounds; a digest of all that the
// workers got.
std::uint64_t Digest(const Config& config, TransportKind kind) {
  Cluster cluster(config, kind);
  std::vector<std::uint64_t> digests(config.job.workers);
  Failures failures;
  cluster.Run([&](Client& client) {
    std::vector<TensorDeclaration> batch = {Tensor("big", 100003), Tensor("middle", 5000),
                                            Tensor("small", 33), Tensor("tiny", 1)};
    for (std::size_t t = 0; t < batch.size(); ++t) {
      batch[t].priority = -static_cast<std::int32_t>(t);
    }
    const auto ids = client.Declare(batch);
    if (!failures.Ok(ids.status(), "declare")) return;
    std::uint64_t digest = 0;
    std::vector<std::vector<float>> values;
    for (const auto& tensor : batch) values.emplace_back(tensor.num_elements());
    for (int round = 0; round < kRounds; ++round) {
      std::vector<Handle> handles;
      for (std::size_t t = batch.size(); t-- > 0;) {
        CounterRng rng(
            HashCombine(HashCombine(client.rank(), t), static_cast<std::uint64_t>(round)));
        for (float& value : values[t]) value = static_cast<float>(rng.NextGaussian());
        const auto handle =
            client.PushPullAsync(ids.value()[t], InputOf(values[t]), OutputOf(values[t]));
        if (failures.Ok(handle.status(), "push")) handles.push_back(*handle);
      }
      failures.Ok(client.EndStep(), "end of step");
      for (const Handle& handle : handles) failures.Ok(client.Wait(handle), "wait");
      for (const auto& tensor : values) {
        for (const float value : tensor) {
          digest = HashCombine(digest, std::bit_cast<std::uint32_t>(value));
        }
      }
    }
    digests[client.rank()] = digest;
  });
  const std::string text = failures.Take();
  INFO(text);
  REQUIRE(text.empty());
  for (const std::uint64_t digest : digests) REQUIRE(digest == digests[0]);
  return digests[0];
}

TEST_CASE("no speed knob changes a bit", "[integration][repeatability]") {
  const std::string spec = GENERATE("none", "fp16", "onebit", "topk(ratio=0.01)");
  const std::uint32_t workers = GENERATE(2U, 4U);
  CAPTURE(spec, workers);
  Config config = TestConfig(workers);
  SetCompressor(config, spec);
  const std::uint64_t expected = Digest(config, TransportKind::kInproc);
  REQUIRE(Digest(config, TransportKind::kInproc) == expected);
  REQUIRE(Digest(config, TransportKind::kZmq) == expected);

  Config servers = config;
  servers.job.servers = 3;
  REQUIRE(Digest(servers, TransportKind::kZmq) == expected);
  Config lanes = config;
  lanes.server.lanes = 3;
  REQUIRE(Digest(lanes, TransportKind::kZmq) == expected);
  Config threads = config;
  threads.server.threads = 3;
  threads.worker.threads = 3;
  threads.server.lanes = 2;
  REQUIRE(Digest(threads, TransportKind::kZmq) == expected);
  Config credit = config;
  credit.partition.credit = 64 * 1024;
  REQUIRE(Digest(credit, TransportKind::kZmq) == expected);
  credit.worker.threads = 2;
  REQUIRE(Digest(credit, TransportKind::kInproc) == expected);
}

TEST_CASE("other gradients give another digest", "[integration][repeatability]") {
  // The test above would pass if the digest looked at nothing.
  Config config = TestConfig(2);
  SetCompressor(config, "onebit");
  Config other = config;
  SetCompressor(other, "topk(ratio=0.01)");
  REQUIRE(Digest(config, TransportKind::kInproc) != Digest(other, TransportKind::kInproc));
}

}  // namespace
}  // namespace gradwire::testing
