// Nothing of a gradient is lost: sum of what came out = sum of the mean gradients - mean of the
// workers' residuals - the server's residual, over what was not dropped.

#include <fmt/format.h>

#include <cmath>
#include <limits>

#include "common/base/random.h"
#include "tests/integration/cluster.h"

namespace gradwire::testing {
namespace {

constexpr std::uint32_t kWorkers = 3;
constexpr int kRounds = 200;
constexpr std::size_t kElements = 20011;  // two units; and a fused pair beside it

struct Ledger {
  std::vector<double> gradients;  // sum over rounds and ranks of what was not dropped
  std::vector<double> out;
};

std::vector<TensorDeclaration> Tensors(ReduceOp op) {
  return {Tensor("big", kElements, DType::kFloat32, op), Tensor("a", 100, DType::kFloat32, op),
          Tensor("b", 31, DType::kFloat32, op)};
}

TEST_CASE("conservation over 200 rounds with void rounds, cuts, and a save and restore",
          "[integration][conservation]") {
  const std::string spec = GENERATE("onebit", "onebit(scaling=l2)", "topk(ratio=0.01)",
                                    "topk(ratio=0.01,value=fp32,index=u32)", "fp16");
  const auto op = GENERATE(ReduceOp::kAverage, ReduceOp::kSum);
  CAPTURE(spec, static_cast<int>(op));
  Config config = TestConfig(kWorkers);
  config.server.lanes = op == ReduceOp::kAverage ? 1 : 2;
  SetCompressor(config, spec);
  config.compression.uplink.feedback = FeedbackMode::kEf;
  config.compression.downlink.feedback = FeedbackMode::kEf;

  const std::vector<TensorDeclaration> tensors = Tensors(op);
  std::vector<std::vector<double>> gradients;  // [tensor][element], over all ranks
  std::vector<std::vector<double>> out;
  std::vector<std::vector<double>> worker_residuals;
  std::vector<std::vector<float>> server_residuals;
  for (const auto& tensor : tensors) {
    gradients.emplace_back(tensor.num_elements());
    out.emplace_back(tensor.num_elements());
  }
  std::vector<std::vector<std::byte>> worker_states(kWorkers);
  std::mutex mu;
  Failures failures;

  // Two halves: the second starts everything anew from the saved state.
  for (int half = 0; half < 2; ++half) {
    Cluster cluster(config, TransportKind::kInproc);
    worker_residuals.assign(tensors.size(), {});
    for (std::size_t t = 0; t < tensors.size(); ++t) {
      worker_residuals[t].resize(tensors[t].num_elements());
    }
    cluster.Run([&](Client& client) {
      if (half == 1) failures.Ok(client.RestoreState(worker_states[client.rank()]), "restore");
      const auto ids = client.Declare(tensors);
      if (!failures.Ok(ids.status(), "declare")) return;
      std::vector<std::vector<float>> values;
      for (const auto& tensor : tensors) values.emplace_back(tensor.num_elements());
      for (int round = half * kRounds / 2; round < (half + 1) * kRounds / 2; ++round) {
        // Every 17th round one rank has a NaN or an infinity in one tensor: that element's gradient
        // is dropped, everything else stays in the residuals. Every 23rd a message is lost.
        const bool is_void = round % 17 == 5;
        const std::uint32_t culprit = static_cast<std::uint32_t>(round) % kWorkers;
        if (client.rank() == 0 && round % 23 == 7) {
          cluster.network().CutAt("inproc://s0l0", [round](const Header& header) {
            return round % 2 == 0 ? header.kind == MessageKind::kPush
                                  : header.kind == MessageKind::kReply;
          });
        }
        std::vector<Handle> handles;
        for (std::size_t t = 0; t < tensors.size(); ++t) {
          CounterRng rng(HashCombine(HashCombine(TestSeed() + client.rank(), t),
                                     static_cast<std::uint64_t>(round)));
          for (float& value : values[t]) value = static_cast<float>(rng.NextGaussian());
          const bool mine = is_void && t == 0 && client.rank() == culprit;
          if (mine) {
            values[t][7] = round % 2 == 0 ? std::numeric_limits<float>::quiet_NaN()
                                          : std::numeric_limits<float>::infinity();
          }
          {
            const std::lock_guard lock(mu);
            for (std::size_t i = 0; i < values[t].size(); ++i) {
              if (std::isfinite(values[t][i])) gradients[t][i] += values[t][i];
            }
          }
          const auto handle =
              client.PushPullAsync(ids.value()[t], InputOf(values[t]), OutputOf(values[t]));
          if (failures.Ok(handle.status(), "push")) handles.push_back(*handle);
        }
        failures.Ok(client.EndStep(), "end of step");
        for (const Handle& handle : handles) failures.Ok(client.Wait(handle), "wait");
        if (client.rank() == 0) {
          for (std::size_t t = 0; t < tensors.size(); ++t) {
            std::size_t nans = 0;
            for (std::size_t i = 0; i < values[t].size(); ++i) {
              if (std::isnan(values[t][i])) {
                ++nans;  // delivered nothing
              } else {
                out[t][i] += values[t][i];
              }
            }
            failures.Expect((nans > 0) == (is_void && t == 0),
                            fmt::format("NaNs in round {}", round));
          }
        }
      }
      failures.Ok(client.Barrier(), "barrier");
      const auto saved = client.SaveState();
      if (failures.Ok(saved.status(), "save")) worker_states[client.rank()] = saved.value();
      const std::lock_guard lock(mu);
      for (std::size_t t = 0; t < tensors.size(); ++t) {
        const std::vector<float> residual = client.ReadResidual(ids.value()[t]);
        for (std::size_t i = 0; i < residual.size(); ++i) worker_residuals[t][i] += residual[i];
      }
      if (half == 0) {
        failures.Expect(client.stats().nonfinite_units > 0, "void rounds were counted");
      }
    });
    server_residuals.clear();
    for (const auto& tensor : tensors) {
      server_residuals.push_back(
          cluster.server(0).ReadResidual(tensor.name, tensor.num_elements()));
    }
    const std::string text = failures.Take();
    INFO(text);
    REQUIRE(text.empty());
  }

  const double scale = op == ReduceOp::kAverage ? kWorkers : 1.0;
  double largest_residual = 0.0;
  for (std::size_t t = 0; t < tensors.size(); ++t) {
    double error = 0.0;
    for (std::size_t i = 0; i < out[t].size(); ++i) {
      const double expected =
          (gradients[t][i] - worker_residuals[t][i]) / scale - server_residuals[t][i];
      error = std::max(error, std::abs(out[t][i] - expected));
      largest_residual = std::max(largest_residual, std::abs(worker_residuals[t][i]));
    }
    CAPTURE(tensors[t].name, error);
    REQUIRE(error < 1e-3);
  }
  // Otherwise there was nothing to conserve.
  if (spec != "fp16") REQUIRE(largest_residual > 0.1);
}

}  // namespace
}  // namespace gradwire::testing
