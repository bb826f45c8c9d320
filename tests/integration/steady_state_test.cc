// In steady state nothing of ours allocates: not the workers, not the server, on both transports.

#include <vector>

#include "tests/base/alloc_counter.h"
#include "tests/integration/cluster.h"

namespace gradwire::testing {
namespace {

TEST_CASE("push-pull rounds take no memory once the pools are full", "[integration][memory]") {
  const auto kind = GENERATE(TransportKind::kInproc, TransportKind::kZmq);
  const std::string spec = GENERATE("none", "fp16", "onebit", "topk(ratio=0.01)");
  CAPTURE(ToString(kind), spec);
  constexpr int kWarmUp = 60;
  constexpr int kRounds = 200;
  Config config = TestConfig(2);
  SetCompressor(config, spec);
  Cluster cluster(config, kind);
  Failures failures;
  std::uint64_t allocations = 0;
  cluster.Run([&](Client& client) {
    const std::vector<TensorDeclaration> batch = {Tensor("big", 100003), Tensor("a", 50),
                                                  Tensor("b", 70), Tensor("c", 5000)};
    const auto ids = client.Declare(batch);
    if (!failures.Ok(ids.status(), "declare")) return;
    std::vector<std::vector<float>> values;
    for (const auto& tensor : batch) values.emplace_back(tensor.num_elements(), 1.0F);
    std::vector<Handle> handles(batch.size());
    std::uint64_t before = 0;
    for (int round = 0; round < kWarmUp + kRounds; ++round) {
      if (round == kWarmUp) {
        if (!client.Barrier().ok()) return;
        before = NumAllocations();
      }
      for (std::size_t t = 0; t < batch.size(); ++t) {
        const auto handle =
            client.PushPullAsync(ids.value()[t], InputOf(values[t]), OutputOf(values[t]));
        if (!handle.ok()) return;
        handles[t] = *handle;
      }
      (void)client.EndStep();
      for (const Handle& handle : handles) {
        if (!client.Wait(handle).ok()) return;
      }
    }
    if (client.rank() == 0) allocations = NumAllocations() - before;
    failures.Ok(client.Barrier(), "barrier");
  });
  REQUIRE(failures.Take().empty());
  // Of 4000 units that were pushed and pulled. Heartbeats, once a second, and a pool that meets a
  // new worst case may take some; one for each unit, or each round, would be seen.
  CAPTURE(allocations);
  REQUIRE(allocations < 100);
}

}  // namespace
}  // namespace gradwire::testing
