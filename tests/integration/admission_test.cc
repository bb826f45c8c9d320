// The admission rule: neither credits nor tokens ever wait for another worker, so two workers that
// fill their windows with different keys still finish.

#include <fmt/format.h>

#include <chrono>
#include <thread>

#include "common/pipeline/admission.h"
#include "tests/integration/cluster.h"

namespace gradwire::testing {
namespace {

TEST_CASE("two workers with a credit of one partition finish a timed backward pass",
          "[integration][admission]") {
  const auto kind = GENERATE(TransportKind::kInproc, TransportKind::kZmq);
  const std::string spec = GENERATE("none", "fp16", "onebit");
  const std::uint32_t servers = GENERATE(1U, 2U);
  const std::uint32_t threads = GENERATE(0U, 2U);
  CAPTURE(ToString(kind), spec, servers, threads);
  constexpr std::size_t kTensors = 24;
  constexpr std::size_t kElements = 40000;  // three units of 64 KiB each
  Config config = TestConfig(2, servers);
  config.partition.credit = 64 * 1024;
  config.worker.threads = threads;
  config.server.threads = threads;
  SetCompressor(config, spec);
  Cluster cluster(config, kind);
  Failures failures;
  cluster.Run([&](Client& client) {
    std::vector<TensorDeclaration> batch;
    for (std::size_t t = 0; t < kTensors; ++t) {
      batch.push_back(Tensor(fmt::format("layer{}", t), kElements));
      batch.back().priority = -static_cast<std::int32_t>(t);  // front layers first
    }
    const auto ids = client.Declare(batch);
    if (!failures.Ok(ids.status(), "declare")) return;
    std::vector<std::vector<float>> values(kTensors, std::vector<float>(kElements));
    for (int step = 0; step < 6; ++step) {
      std::vector<Handle> handles(kTensors);
      for (std::size_t i = kTensors; i-- > 0;) {
        // The workers' backward passes are out of step, one after the other.
        const bool slow = (step + static_cast<int>(client.rank())) % 2 == 0;
        if (slow) std::this_thread::sleep_for(std::chrono::microseconds(300));
        std::fill(values[i].begin(), values[i].end(), static_cast<float>(client.rank()) * 2 + 1);
        const auto handle =
            client.PushPullAsync(ids.value()[i], InputOf(values[i]), OutputOf(values[i]));
        if (!failures.Ok(handle.status(), "push")) return;
        handles[i] = *handle;
      }
      failures.Ok(client.EndStep(), "end of step");
      for (std::size_t i = 0; i < kTensors; ++i) {
        if (!failures.Ok(client.Wait(handles[i]), fmt::format("wait {}", i))) return;
        failures.Expect(values[i][kElements - 1] == 2.0F || spec == "onebit", "average");
      }
    }
  });
  const std::string text = failures.Take();
  INFO(text);
  REQUIRE(text.empty());
}

TEST_CASE("workers that hand gradients over in opposite orders finish",
          "[integration][admission]") {
  // Rank 0 starts from the first tensor and waits for each before it hands over the last ones; rank
  // 1 the other way round. Each fills its credit with keys that the other has not pushed yet.
  const auto kind = GENERATE(TransportKind::kInproc, TransportKind::kZmq);
  CAPTURE(ToString(kind));
  constexpr std::size_t kTensors = 16;
  constexpr std::size_t kElements = 16384;
  Config config = TestConfig(2);
  config.partition.credit = 64 * 1024;
  Cluster cluster(config, kind);
  Failures failures;
  cluster.Run([&](Client& client) {
    std::vector<TensorDeclaration> batch;
    for (std::size_t t = 0; t < kTensors; ++t) {
      batch.push_back(Tensor(fmt::format("t{}", t), kElements));
    }
    const auto ids = client.Declare(batch);
    if (!failures.Ok(ids.status(), "declare")) return;
    std::vector<std::vector<float>> values(kTensors, std::vector<float>(kElements, 3.0F));
    std::vector<Handle> handles(kTensors);
    const auto push = [&](std::size_t t) {
      const auto handle =
          client.PushPullAsync(ids.value()[t], InputOf(values[t]), OutputOf(values[t]));
      if (failures.Ok(handle.status(), "push")) handles[t] = *handle;
    };
    for (std::size_t i = 0; i < kTensors; ++i) {
      push(client.rank() == 0 ? i : kTensors - 1 - i);
      std::this_thread::sleep_for(std::chrono::microseconds(500));
    }
    for (std::size_t t = 0; t < kTensors; ++t) failures.Ok(client.Wait(handles[t]), "wait");
  });
  const std::string text = failures.Take();
  INFO(text);
  REQUIRE(text.empty());
}

TEST_CASE("the admission queue is one total order: priority, then key", "[pipeline][unit]") {
  AdmissionQueue queue;
  for (const std::uint64_t key : {5U, 1U, 9U, 3U}) queue.Push({0, key});
  queue.Push({2, 7});
  queue.Push({-1, 0});
  std::vector<std::uint64_t> order;
  while (!queue.empty()) order.push_back(queue.Pop().key);
  REQUIRE(order == std::vector<std::uint64_t>{7, 1, 3, 5, 9, 0});
}

TEST_CASE("a window admits up to its limit, and anything when it is empty", "[pipeline][unit]") {
  ByteWindow window(100);
  REQUIRE(window.Admits(1000));
  window.Take(60);
  REQUIRE(window.Admits(40));
  REQUIRE(!window.Admits(41));
  window.Take(40);
  REQUIRE(!window.Admits(1));
  window.Give(100);
  REQUIRE(window.Admits(1000));
}

}  // namespace
}  // namespace gradwire::testing
