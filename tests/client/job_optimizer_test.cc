// A method over the tensors of a job, with a client that is a plan and nothing else.

#include "worker/client/job_optimizer.h"

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tests/catch.h"
#include "tests/trainer/fake_clients.h"

namespace gradwire {
namespace {

/// Cuts a tensor of 100 elements or more into two units of two classes, which a filter that skips
/// sends apart.
class CuttingClient final : public trainer::FakeClientBase {
 public:
  CuttingClient() : FakeClientBase(0, 1) { plan_.filter.skips_inactive = true; }

  Result<std::vector<TensorId>> Declare(std::span<const TensorDeclaration> batch) override {
    auto ids = FakeClientBase::Declare(batch);
    for (const TensorId id : *ids) {
      const std::uint64_t n = plan_.tensors[id.index].num_elements();
      const std::uint32_t parts = n < 100 ? 1 : 2;
      for (std::uint32_t part = 0; part < parts; ++part) {
        Unit unit;
        unit.members = {{id.index, part * n / parts, 0, n / parts}};
        unit.filter_classes = {part};
        plan_.units.push_back(std::move(unit));
      }
    }
    return ids;
  }
  Result<Handle> PushPullAsync(TensorId tensor, ByteView, MutableBytes) override {
    return Handle{tensor, 1};
  }
  Status Wait(const Handle&) override { return Status::Ok(); }
  bool Poll(const Handle&) override { return true; }
  Status EndStep() override { return Status::Ok(); }
  Status Broadcast(const std::string&, MutableBytes, std::uint32_t) override {
    return Status::Ok();
  }
};

TEST_CASE("a tensor is added with all of its stretches, or not at all", "[client][method]") {
  CuttingClient client;
  TensorDeclaration small;
  small.name = "small";
  small.shape = {50};
  TensorDeclaration large = small;
  large.name = "large";
  large.shape = {100};
  const auto ids = client.Declare(std::vector{small, large});
  REQUIRE(ids.ok());
  CompressionRules job;
  job.filter.type = FilterType::kCovap;
  job.filter.interval = 2;
  job.filter.inactive = FilterInactive::kSkip;
  auto made = JobOptimizer::Create(client, "lans", job);
  REQUIRE(made.ok());
  JobOptimizer& optimizer = **made;
  // Has the name of a stretch of the other one, and not of the first.
  REQUIRE(optimizer.AddTensor((*ids)[0], "w[50:100]", 50, true).ok());
  CHECK(optimizer.AddTensor((*ids)[1], "w", 100, true).message() ==
        "method lans: tensor 'w[50:100]' is there already, with 50 values");
  CHECK(optimizer.state().num_tensors() == 1);
  // Under another name it is as if nothing had been.
  REQUIRE(optimizer.AddTensor((*ids)[1], "v", 100, true).ok());
  CHECK(optimizer.state().num_tensors() == 3);
}

}  // namespace
}  // namespace gradwire
