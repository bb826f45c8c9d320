// The overlap-aware filter: what is not sent now is sent later, and nothing is lost on the way.

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "common/base/random.h"
#include "tests/integration/cluster.h"

namespace gradwire::testing {
namespace {

Config FilterConfig(std::uint32_t workers, std::uint32_t interval, std::uint32_t servers = 1) {
  Config config = TestConfig(workers, servers);
  config.compression.filter.type = FilterType::kCovap;
  config.compression.filter.interval = interval;
  config.compression.filter.c0 = 1.0;
  return config;
}

// Cut with an odd tail, cut without one, without elements, fused.
std::vector<TensorDeclaration> Tensors(ReduceOp op) {
  return {Tensor("big", 40001, DType::kFloat32, op), Tensor("even", 32768, DType::kFloat32, op),
          Tensor("empty", 0, DType::kFloat32, op),   Tensor("a", 100, DType::kFloat32, op),
          Tensor("b", 31, DType::kFloat32, op),      Tensor("c", 600, DType::kFloat32, op)};
}

/// Never 0, so that an element of a sum is 0 just where nothing was sent.
float Integer(std::size_t i, std::uint32_t rank, std::size_t tensor, int step) {
  return static_cast<float>(1 + (i * 7 + rank * 3 + tensor + static_cast<std::size_t>(step)) % 9);
}

void RequireNone(Failures& failures) {
  const std::string text = failures.Take();
  INFO(text);
  REQUIRE(text.empty());
}

/// Marks the elements of a tensor that are in the ranges; false if one is there twice.
std::vector<bool> Marked(const std::vector<ElementRange>& ranges, std::size_t count) {
  std::vector<bool> marked(count, false);
  for (const ElementRange& range : ranges) {
    for (std::uint64_t i = range.offset; i < range.offset + range.count; ++i) {
      marked.at(static_cast<std::size_t>(i)) = true;
    }
  }
  return marked;
}

TEST_CASE(
    "of integers nothing is lost: sums that came plus residuals are the gradients, bit for bit",
    "[integration][covap]") {
  const std::uint32_t workers = GENERATE(1U, 2U, 3U, 4U);
  const auto assign = GENERATE(FilterAssign::kBalanced, FilterAssign::kIndex);
  const std::uint32_t interval = GENERATE(2U, 5U);
  const bool zmq = interval == 2 && workers == 2;
  CAPTURE(workers, static_cast<int>(assign), interval);
  constexpr int kSteps = 22;  // of each half
  const std::vector<TensorDeclaration> tensors = Tensors(ReduceOp::kSum);
  Doubles gradients;  // over all ranks and steps
  Doubles out;
  Doubles residuals;
  for (const auto& tensor : tensors) {
    gradients.emplace_back(tensor.num_elements());
    out.emplace_back(tensor.num_elements());
  }
  std::vector<std::vector<std::byte>> states(workers);
  std::mutex mu;
  Failures failures;

  // The second half starts everything anew from the saved state, cut otherwise and with another
  // interval.
  for (int half = 0; half < 2; ++half) {
    Config config = FilterConfig(workers, interval + static_cast<std::uint32_t>(half), 2);
    config.compression.filter.assign = assign;
    if (half == 1) config.partition.bytes = 48 * 1024;
    Cluster cluster(config, zmq ? TransportKind::kZmq : TransportKind::kInproc);
    residuals.clear();
    for (const auto& tensor : tensors) residuals.emplace_back(tensor.num_elements());
    cluster.Run([&](Client& client) {
      if (half == 1) failures.Ok(client.RestoreState(states[client.rank()]), "restore");
      const auto ids = client.Declare(tensors);
      if (!failures.Ok(ids.status(), "declare")) return;
      std::vector<std::vector<float>> values;
      for (const auto& tensor : tensors) values.emplace_back(tensor.num_elements());
      for (int step = half * kSteps; step < (half + 1) * kSteps; ++step) {
        // Every 7th step a push or a reply is lost, every 5th one element of one rank is a NaN: in
        // a unit that is sent it makes the round void, in another it is left out.
        if (client.rank() == 0 && step % 7 == 3 && !zmq) {
          cluster.network().CutAt("inproc://s0l0", [step](const Header& header) {
            return header.kind == (step % 2 == 0 ? MessageKind::kPush : MessageKind::kReply);
          });
        }
        const bool has_nan =
            step % 5 == 2 && client.rank() == static_cast<std::uint32_t>(step) % workers;
        for (std::size_t t = 0; t < tensors.size(); ++t) {
          for (std::size_t i = 0; i < values[t].size(); ++i) {
            values[t][i] = Integer(i, client.rank(), t, step);
          }
          if (has_nan && t == 0) values[t][20000] = std::numeric_limits<float>::quiet_NaN();
          const std::lock_guard lock(mu);
          for (std::size_t i = 0; i < values[t].size(); ++i) {
            if (std::isfinite(values[t][i])) gradients[t][i] += values[t][i];
          }
        }
        const std::vector<Handle> handles = PushAll(client, *ids, values, failures);
        if (client.rank() != 0 || handles.size() != tensors.size()) continue;
        for (std::size_t t = 0; t < tensors.size(); ++t) {
          const auto ranges = client.ActiveRanges(handles[t]);
          if (!failures.Ok(ranges.status(), "active ranges")) return;
          const std::vector<bool> active = Marked(*ranges, values[t].size());
          for (std::size_t i = 0; i < values[t].size(); ++i) {
            if (std::isnan(values[t][i])) continue;  // delivered nothing
            if (active[i] != (values[t][i] != 0.0F)) {
              failures.Add(fmt::format("step {} tensor {} element {}: {} and active {}", step, t, i,
                                       values[t][i], active[i] ? "yes" : "no"));
              return;
            }
            out[t][i] += values[t][i];
          }
        }
      }
      const auto saved = client.SaveState();
      if (failures.Ok(saved.status(), "save")) states[client.rank()] = *saved;
      const std::lock_guard lock(mu);
      AddResiduals(client, *ids, residuals);
      failures.Expect(client.stats().held_back_units > 0, "nothing was held back");
    });
    RequireNone(failures);
  }
  RequireConserved(tensors, out, residuals, gradients);
}

TEST_CASE("in any I steps each element of every tensor is sent once", "[integration][covap]") {
  const std::uint32_t interval = GENERATE(2U, 4U, 16U);
  const auto assign = GENERATE(FilterAssign::kBalanced, FilterAssign::kIndex);
  CAPTURE(interval, static_cast<int>(assign));
  Config config = FilterConfig(1, interval);
  config.compression.filter.assign = assign;
  Cluster cluster(config, TransportKind::kInproc);
  const std::vector<TensorDeclaration> tensors = Tensors(ReduceOp::kAverage);
  Failures failures;
  cluster.Run([&](Client& client) {
    const auto ids = client.Declare(tensors);
    if (!failures.Ok(ids.status(), "declare")) return;
    std::vector<std::vector<int>> sent;
    std::vector<std::vector<float>> values;
    for (const auto& tensor : tensors) {
      sent.emplace_back(tensor.num_elements());
      values.emplace_back(tensor.num_elements());
    }
    for (std::uint32_t step = 0; step < 3 * interval; ++step) {
      for (auto& tensor : values) std::fill(tensor.begin(), tensor.end(), 1.0F);
      const std::vector<Handle> handles = PushAll(client, *ids, values, failures);
      for (std::size_t t = 0; t < tensors.size(); ++t) {
        for (std::size_t i = 0; i < values[t].size(); ++i) sent[t][i] += values[t][i] != 0.0F;
      }
      if ((step + 1) % interval != 0) continue;
      for (std::size_t t = 0; t < tensors.size(); ++t) {
        const auto times = static_cast<int>((step + 1) / interval);
        failures.Expect(
            std::all_of(sent[t].begin(), sent[t].end(), [&](int count) { return count == times; }),
            fmt::format("{} after step {}", tensors[t].name, step));
      }
    }
    const auto stale = client.ActiveRanges({(*ids)[0], 1});
    failures.Expect(stale.status().code() == StatusCode::kInvalidArgument, "a stale handle");
  });
  RequireNone(failures);
}

/// Rank 0's results of some steps of random gradients.
std::vector<std::vector<std::byte>> Results(const Config& config) {
  std::vector<TensorDeclaration> tensors = Tensors(ReduceOp::kAverage);
  tensors.push_back(Tensor("double", 9000, DType::kFloat64));
  tensors.push_back(Tensor("half", 9000, DType::kFloat16));
  Cluster cluster(config, TransportKind::kInproc);
  std::vector<std::vector<std::byte>> results;
  Failures failures;
  cluster.Run([&](Client& client) {
    const auto ids = client.Declare(tensors);
    if (!failures.Ok(ids.status(), "declare")) return;
    for (std::uint64_t step = 0; step < 5; ++step) {
      std::vector<std::vector<std::byte>> values;
      std::vector<Handle> handles;
      for (std::size_t t = 0; t < tensors.size(); ++t) {
        CounterRng rng(HashCombine(HashCombine(client.rank(), t), step));
        values.emplace_back(tensors[t].num_elements() * SizeOf(tensors[t].dtype));
        for (std::size_t i = 0; i < tensors[t].num_elements(); ++i) {
          const double value = rng.NextGaussian();
          std::byte* const at = values[t].data() + i * SizeOf(tensors[t].dtype);
          if (tensors[t].dtype == DType::kFloat64) {
            StoreLe(at, value);
          } else if (tensors[t].dtype == DType::kFloat32) {
            StoreLe(at, i == 3 ? -0.0F : static_cast<float>(value));
          } else {
            StoreLe(at, static_cast<std::uint16_t>(rng.NextBelow(0x7c00)));
          }
        }
      }
      for (std::size_t t = 0; t < tensors.size(); ++t) {
        const auto handle =
            client.PushPullAsync((*ids)[t], InputOf(values[t]), OutputOf(values[t]));
        if (failures.Ok(handle.status(), "push")) handles.push_back(*handle);
      }
      failures.Ok(client.EndStep(), "end of step");
      for (const Handle& handle : handles) failures.Ok(client.Wait(handle), "wait");
      if (client.rank() == 0) results.insert(results.end(), values.begin(), values.end());
    }
  });
  RequireNone(failures);
  return results;
}

TEST_CASE("an interval of 1 gives the same bits as no filter", "[integration][covap]") {
  const std::string spec =
      GENERATE("none", "onebit", "randomk(ratio=0.1)", "fp16", "topk(ratio=0.05)");
  CAPTURE(spec);
  Config config = FilterConfig(2, 1);
  SetCompressor(config, spec);
  Config without = config;
  without.compression.filter = {};
  REQUIRE(Results(config) == Results(without));
}

TEST_CASE("what is not sent costs no message", "[integration][covap]") {
  // One unit, sent in step 0 alone.
  constexpr std::uint64_t kElements = 16384;
  constexpr int kSteps = 64;
  Config config = FilterConfig(1, kSteps);
  Cluster cluster(config, TransportKind::kZmq);
  const std::vector<TensorDeclaration> tensors = {Tensor("w", kElements)};
  Failures failures;
  cluster.Run([&](Client& client) {
    const auto ids = client.Declare(tensors);
    if (!failures.Ok(ids.status(), "declare")) return;
    std::vector<std::vector<float>> values = {std::vector<float>(kElements, 1.0F)};
    const ClientStats before = client.stats();
    for (int step = 0; step < kSteps; ++step) PushAll(client, *ids, values, failures);
    const ClientStats after = client.stats();
    failures.Expect(after.held_back_units == kSteps - 1, "units held back");
    const auto sent = after.traffic.sent_bytes - before.traffic.sent_bytes;
    const auto received = after.traffic.received_bytes - before.traffic.received_bytes;
    // Beside the one push, its receipt and reply: a heartbeat now and then.
    for (const auto& [what, bytes] : {std::pair{"sent", sent}, std::pair{"received", received}}) {
      failures.Expect(
          bytes >= kElements * sizeof(float) && bytes < kElements * sizeof(float) + 8192,
          fmt::format("{} {} bytes", what, bytes));
    }
    const auto messages = after.traffic.sent_messages - before.traffic.sent_messages;
    failures.Expect(messages < 20, fmt::format("{} messages", messages));
  });
  RequireNone(failures);
}

TEST_CASE("with skip the output of what is held back is left alone", "[integration][covap]") {
  Config config = FilterConfig(2, 3);
  config.compression.filter.inactive = FilterInactive::kSkip;
  Cluster cluster(config, TransportKind::kInproc);
  const std::vector<TensorDeclaration> tensors = Tensors(ReduceOp::kSum);
  Failures failures;
  cluster.Run([&](Client& client) {
    const auto ids = client.Declare(tensors);
    if (!failures.Ok(ids.status(), "declare")) return;
    for (int step = 0; step < 7; ++step) {
      for (std::size_t t = 0; t < tensors.size(); ++t) {
        const std::vector<float> in(tensors[t].num_elements(), 1.0F);
        std::vector<float> out(in.size(), -777.0F);
        const auto handle = client.PushPullAsync((*ids)[t], InputOf(in), OutputOf(out));
        if (!failures.Ok(handle.status(), "push")) return;
        failures.Ok(client.EndStep(), "end of step");  // each tensor in a step of its own
        failures.Ok(client.Wait(*handle), "wait");
        const auto ranges = client.ActiveRanges(*handle);
        if (!failures.Ok(ranges.status(), "active ranges")) return;
        const std::vector<bool> active = Marked(*ranges, in.size());
        for (std::size_t i = 0; i < in.size(); ++i) {
          if ((out[i] == -777.0F) == !active[i]) continue;
          failures.Add(fmt::format("step {}, {}[{}] is {}", step, tensors[t].name, i, out[i]));
          return;
        }
      }
    }
  });
  RequireNone(failures);
}

TEST_CASE("compressors with and without feedback take what was held back along",
          "[integration][covap]") {
  struct Case {
    std::string spec;
    FeedbackMode feedback;
    DType dtype;
    bool leaves_rest;
  };
  const auto test = GENERATE(Case{"onebit", FeedbackMode::kEf, DType::kFloat32, true},
                             Case{"topk(ratio=0.05)", FeedbackMode::kEf, DType::kFloat32, true},
                             Case{"terngrad", FeedbackMode::kOff, DType::kFloat32, false},
                             Case{"randomk(ratio=0.1)", FeedbackMode::kOff, DType::kFloat32, false},
                             Case{"none", FeedbackMode::kAuto, DType::kFloat32, false},
                             Case{"onebit", FeedbackMode::kEf, DType::kFloat64, true});
  CAPTURE(test.spec, static_cast<int>(test.dtype));
  Config config = FilterConfig(2, 2);
  const auto spec = ParseCompressorSpec(test.spec);
  REQUIRE(spec.ok());
  config.compression.uplink = {*spec, test.feedback};
  Cluster cluster(config, TransportKind::kInproc);
  constexpr std::size_t kElements = 9000;  // one unit, class 0: sent in even steps
  const std::vector<TensorDeclaration> tensors = {Tensor("w", kElements, test.dtype)};
  Failures failures;
  std::vector<double> gradients(kElements);
  std::vector<double> out(kElements);
  std::vector<double> residuals(kElements);
  std::mutex mu;
  cluster.Run([&](Client& client) {
    const auto ids = client.Declare(tensors);
    if (!failures.Ok(ids.status(), "declare")) return;
    const bool is_double = test.dtype == DType::kFloat64;
    for (int step = 0; step < 20; ++step) {
      CounterRng rng(HashCombine(client.rank(), static_cast<std::uint64_t>(step)));
      std::vector<double> g(kElements);
      for (double& value : g) value = static_cast<float>(rng.NextGaussian());
      std::vector<float> narrow(g.begin(), g.end());
      // A void round in step 10: what was not delivered stays.
      if (step == 10 && client.rank() == 1) {
        narrow[5] = std::numeric_limits<float>::infinity();
        g[5] = narrow[5];
      }
      {
        const std::lock_guard lock(mu);
        for (std::size_t i = 0; i < kElements; ++i) {
          if (std::isfinite(g[i])) gradients[i] += g[i] / 2;
        }
      }
      const Status status = is_double
                                ? PushPull(client, (*ids)[0], InputOf(g), OutputOf(g))
                                : PushPull(client, (*ids)[0], InputOf(narrow), OutputOf(narrow));
      failures.Ok(status, "push-pull");
      failures.Ok(client.EndStep(), "end of step");
      const std::vector<float> residual = client.ReadResidual((*ids)[0]);
      const bool is_zero =
          std::all_of(residual.begin(), residual.end(), [](float value) { return value == 0.0F; });
      const bool is_sent = step % 2 == 0 && step != 10;
      failures.Expect(is_zero == (is_sent && !test.leaves_rest),
                      fmt::format("residual after step {}", step));
      if (client.rank() != 0) continue;
      for (std::size_t i = 0; i < kElements; ++i) {
        const double value = is_double ? g[i] : static_cast<double>(narrow[i]);
        failures.Expect(std::isnan(value) == (step == 10), "a void round");
        if (!std::isnan(value)) out[i] += value;
      }
    }
    const std::lock_guard lock(mu);
    const std::vector<float> residual = client.ReadResidual((*ids)[0]);
    for (std::size_t i = 0; i < kElements; ++i) residuals[i] += residual[i] / 2;
  });
  RequireNone(failures);
  if (test.feedback == FeedbackMode::kOff) return;  // unbiased: right on average alone
  for (std::size_t i = 0; i < kElements; ++i) {
    CAPTURE(i);
    // Twenty roundings of values of some tens.
    REQUIRE(std::abs(gradients[i] - residuals[i] - out[i]) < 1e-4);
  }
}

TEST_CASE("what is held back is weighed by the schedule and follows the loss scale",
          "[integration][covap]") {
  Config config = FilterConfig(1, 2);
  config.compression.filter.c0 = 0.5;
  config.compression.filter.step = 0.5;
  config.compression.filter.every = 4;
  config.compression.filter.interval = 4;
  Cluster cluster(config, TransportKind::kInproc);
  const std::vector<TensorDeclaration> tensors = {Tensor("w", 1000)};
  Failures failures;
  std::vector<float> seen;
  cluster.Run([&](Client& client) {
    const auto ids = client.Declare(tensors);
    if (!failures.Ok(ids.status(), "declare")) return;
    for (int step = 0; step < 9; ++step) {
      // From step 6 on all is twice as large.
      const double scale = step < 6 ? 8 : 16;
      failures.Ok(client.SetLossScale(scale), "loss scale");
      std::vector<float> values(1000, static_cast<float>(scale));
      failures.Ok(PushPull(client, (*ids)[0], InputOf(values), OutputOf(values)), "push-pull");
      failures.Ok(client.EndStep(), "end of step");
      seen.push_back(values[999]);
    }
  });
  RequireNone(failures);
  // e: 8, 0.5 * 8 + 8 = 12, 0.5 * 12 + 8 = 14, sent 14 + 8; with weight 1 from step 4 on: e is 8 in
  // step 5, in step 6 twice of it and 16 more, in step 7 48, sent 64.
  REQUIRE(seen == std::vector<float>{8, 0, 0, 0, 22, 0, 0, 0, 64});
}

}  // namespace
}  // namespace gradwire::testing
