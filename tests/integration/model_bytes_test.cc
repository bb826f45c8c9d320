// How many bytes a step of a large model takes on the wire, headers and receipts included: the
// tensors of BERT-base under configs/topk.yaml.

#include <cstdint>
#include <string>
#include <vector>

#include "common/base/random.h"
#include "common/plan/model_list.h"
#include "tests/integration/cluster.h"

namespace gradwire::testing {
namespace {

constexpr std::uint32_t kWorkers = 2;

/// Cheap values with a gradient's bell shape: a sum of four 16-bit draws.
void FillGradient(std::uint64_t seed, std::vector<float>& values) {
  for (std::size_t i = 0; i < values.size(); ++i) {
    const std::uint64_t word = Mix64(seed + i);
    const auto part = [&](int shift) { return static_cast<float>((word >> shift) & 0xffff); };
    values[i] = (part(0) + part(16) + part(32) + part(48) - 131070.0F) * 1e-6F;
  }
}

TEST_CASE("BERT-base under topk at 0.1 % takes 333 times fewer bytes than fp16, headers included",
          "[integration]") {
  const std::string source = GRADWIRE_SOURCE_DIR;
  auto config = LoadConfig(source + "/configs/topk.yaml");
  INFO(config.status().ToString());
  REQUIRE(config.ok());
  for (LinkCompression* link : {&config->compression.uplink, &config->compression.downlink}) {
    REQUIRE(link->compressor.name == "topk");
    link->compressor.parameters["ratio"] = "0.001";
  }
  REQUIRE(config->compression.rules.empty());  // biases too
  config->compression.warmup_steps = 0;
  config->job.workers = kWorkers;
  config->job.servers = 2;

  const auto tensors = ReadModelList(source + "/configs/models/bert_base.txt");
  INFO(tensors.status().ToString());
  REQUIRE(tensors.ok());
  std::uint64_t elements = 0;
  for (const TensorDeclaration& tensor : *tensors) elements += tensor.num_elements();

  struct Bytes {
    std::uint64_t sent = 0;
    std::uint64_t received = 0;
  };
  constexpr std::uint64_t kSteps = 2;  // the second has residuals on both sides
  std::vector<Bytes> first(kWorkers);
  std::vector<Bytes> last(kWorkers);
  std::vector<float> gradient(elements);  // the workers read the same
  FillGradient(1, gradient);
  Failures failures;
  Cluster cluster(*config, TransportKind::kInproc);
  cluster.Run([&](Client& client) {
    const auto ids = client.Declare(*tensors);
    if (!failures.Ok(ids.status(), "declare")) return;
    const auto note = [&](std::vector<Bytes>& bytes) {
      const TrafficCounters traffic = client.stats().traffic;
      bytes[client.rank()] = {traffic.sent_bytes, traffic.received_bytes};
    };
    std::vector<float> out(elements);
    note(first);
    for (std::uint64_t step = 0; step < kSteps; ++step) {
      std::vector<Handle> handles;
      std::size_t at = 0;
      for (std::size_t t = 0; t < tensors->size(); ++t) {
        const std::size_t n = (*tensors)[t].num_elements();
        auto handle =
            client.PushPullAsync((*ids)[t], std::as_bytes(std::span(gradient).subspan(at, n)),
                                 std::as_writable_bytes(std::span(out).subspan(at, n)));
        if (!failures.Ok(handle.status(), "push-pull")) return;
        handles.push_back(*handle);
        at += n;
      }
      failures.Ok(client.EndStep(), "end of step");
      for (const Handle& handle : handles) failures.Ok(client.Wait(handle), "wait");
    }
    note(last);
  });
  REQUIRE(failures.Take() == "");
  for (std::uint32_t rank = 0; rank < kWorkers; ++rank) {
    const auto fp16 = static_cast<double>(2 * elements * kSteps);
    const double up = fp16 / static_cast<double>(last[rank].sent - first[rank].sent);
    const double down = fp16 / static_cast<double>(last[rank].received - first[rank].received);
    WARN("rank " << rank << ": " << up << " times fewer bytes than fp16 up, " << down << " down");
    CHECK(up >= 333);
    CHECK(down >= 333);
  }
}

}  // namespace
}  // namespace gradwire::testing
