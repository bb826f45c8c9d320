// What compression saves and costs, as a client counts it.

#include <fmt/format.h>

#include "tests/integration/cluster.h"

namespace gradwire::testing {
namespace {

// The stats of rank 0 after some steps.
ClientStats StatsAfter(const Config& config, TransportKind kind, int steps) {
  Cluster cluster(config, kind);
  Failures failures;
  ClientStats stats;
  cluster.Run([&](Client& client) {
    const auto ids = client.Declare(std::vector{Tensor("w", 40000)});
    if (!failures.Ok(ids.status(), "declare")) return;
    std::vector<float> values(40000, 1.0F);
    for (int step = 0; step < steps; ++step) {
      failures.Ok(PushPull(client, ids.value()[0], InputOf(values), OutputOf(values)), "push-pull");
      failures.Ok(client.EndStep(), "end of step");
    }
    if (client.rank() == 0) stats = client.stats();
  });
  REQUIRE(failures.Take().empty());
  return stats;
}

TEST_CASE("a client counts what compression saves and costs a step", "[integration][worth]") {
  const auto kind = GENERATE(TransportKind::kInproc, TransportKind::kZmq);
  const std::uint32_t threads = GENERATE(0U, 2U);
  const std::uint64_t warmup = GENERATE(0U, 15U);
  CAPTURE(ToString(kind), threads, warmup);
  Config config = TestConfig(2);
  config.worker.threads = threads;
  config.compression.warmup_steps = warmup;
  SetCompressor(config, "onebit");
  const ClientStats stats = StatsAfter(config, kind, 40);
  REQUIRE(stats.compression_costs_ms > 0.0);
  REQUIRE(stats.goodput > 0.0);
  // 160000 bytes become 5000 and 4 for each unit's scale, either way.
  const double saved = 2.0 * (160000 - 5000 - 4 * 3);
  REQUIRE(stats.compression_saves_ms == Approx(saved / stats.goodput * 1e3));
}

TEST_CASE("a client measures how much of its communication can be hidden", "[integration][worth]") {
  const auto kind = GENERATE(TransportKind::kInproc, TransportKind::kZmq);
  const bool is_compressed = GENERATE(false, true);
  CAPTURE(ToString(kind), is_compressed);
  Config config = TestConfig(2);
  SetCompressor(config, is_compressed ? "onebit" : "none");
  const OverlapFigures overlap = StatsAfter(config, kind, 40).overlap;
  CHECK(overlap.steps == 16);
  CHECK(overlap.up_bytes == Approx(is_compressed ? 5000 + 4 * 3 : 160000));
  CHECK(overlap.down_bytes == Approx(overlap.up_bytes));
  CHECK(overlap.goodput > 0.0);
  CHECK(overlap.comm_ms == Approx(overlap.up_bytes / overlap.goodput * 1e3));
  CHECK(overlap.ccr() == Approx(overlap.comm_ms / overlap.compute_ms));
  // It waits for each push-pull at once.
  CHECK(overlap.exposed_ms > 0.0);
  CHECK(overlap.compute_ms > 0.0);
  CHECK(overlap.step_ms >= Approx(overlap.exposed_ms + overlap.compute_ms));
  // A step is known when the next one begins.
  CHECK(StatsAfter(config, kind, 1).overlap.steps == 0);
}

TEST_CASE("without compression there is nothing to save and no cost", "[integration][worth]") {
  const auto kind = GENERATE(TransportKind::kInproc, TransportKind::kZmq);
  Config config = TestConfig(2);
  config.compression.warmup_steps = GENERATE(0U, 100U);
  SetCompressor(config, config.compression.warmup_steps == 0 ? "none" : "onebit");
  const ClientStats stats = StatsAfter(config, kind, 20);
  REQUIRE(stats.goodput > 0.0);
  REQUIRE(stats.compression_saves_ms == 0.0);
  REQUIRE(stats.compression_costs_ms == 0.0);
}

}  // namespace
}  // namespace gradwire::testing
