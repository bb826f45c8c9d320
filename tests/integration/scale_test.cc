// The scale in which a residual lives: learning rates (`ef_lr`) and loss scales that change from
// round to round, against a model in double that is written from the formulas.

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <thread>

#include "common/base/random.h"
#include "tests/integration/cluster.h"

namespace gradwire::testing {
namespace {

constexpr std::uint32_t kWorkers = 3;
constexpr std::size_t kElements = 300;
constexpr int kRounds = 40;
constexpr std::size_t kKept = 20;  // of topk

using Vector = std::vector<double>;

/// A run: what compresses, and which numbers hold in a round.
struct Setup {
  std::string spec;
  FeedbackMode feedback = FeedbackMode::kEfLr;
  std::function<double(int)> rate = [](int) { return 0.1; };
  std::function<double(int)> scale = [](int) { return 0.0; };  // 0: none is given
  int void_round = -1;  // rank 1 pushes a NaN at element 5 in it
  int cut = -1;         // before this round everything is saved, stopped, and started anew
};

struct Outcome {
  std::vector<std::vector<float>> out;  // [round]
  Vector mean_residual;                 // of the workers, after the last round
  Vector server_residual;
};

double ScaleAt(const Setup& setup, int round) {
  const double scale = setup.scale(round);
  return scale == 0 ? 1 : scale;
}

/// The gradient of a rank, times the loss scale.
std::vector<float> GradientAt(const Setup& setup, std::uint32_t rank, int round) {
  CounterRng rng(HashCombine(1000 + rank, static_cast<std::uint64_t>(round)));
  std::vector<float> values(kElements);
  for (float& value : values) {
    value = static_cast<float>(rng.NextGaussian()) * static_cast<float>(ScaleAt(setup, round));
  }
  if (rank == 1 && round == setup.void_round) values[5] = std::numeric_limits<float>::quiet_NaN();
  return values;
}

Outcome RunJob(const Setup& setup) {
  Config config = TestConfig(kWorkers);
  SetCompressor(config, setup.spec);
  config.compression.uplink.feedback = setup.feedback;
  config.compression.downlink.feedback = setup.feedback;
  Outcome outcome;
  outcome.out.resize(kRounds);
  outcome.mean_residual.assign(kElements, 0);
  std::vector<std::vector<std::byte>> states(kWorkers);
  Failures failures;
  std::mutex mu;
  std::vector<std::pair<int, int>> parts = {{0, kRounds}};
  if (setup.cut > 0) parts = {{0, setup.cut}, {setup.cut, kRounds}};
  for (const auto& [begin, end] : parts) {
    Cluster cluster(config, TransportKind::kInproc);
    cluster.Run([&, first = begin, last = end](Client& client) {
      const TensorDeclaration tensor = Tensor("w", kElements);
      const auto ids = client.Declare(std::span(&tensor, 1));
      if (!failures.Ok(ids.status(), "declare")) return;
      if (first > 0) failures.Ok(client.RestoreState(states[client.rank()]), "restore");
      std::vector<float> out(kElements);
      for (int round = first; round < last; ++round) {
        failures.Ok(client.SetLearningRate(*ids, setup.rate(round)), "rate");
        failures.Ok(client.SetLossScale(setup.scale(round)), "scale");
        const std::vector<float> g = GradientAt(setup, client.rank(), round);
        failures.Ok(PushPull(client, ids.value()[0], InputOf(g), OutputOf(out)), "push-pull");
        failures.Ok(client.EndStep(), "end of step");
        if (client.rank() == 0) outcome.out[static_cast<std::size_t>(round)] = out;
      }
      failures.Ok(client.Barrier(), "barrier");
      const auto saved = client.SaveState();
      if (failures.Ok(saved.status(), "save")) states[client.rank()] = saved.value();
      const std::lock_guard lock(mu);
      const std::vector<float> residual = client.ReadResidual(ids.value()[0]);
      for (std::size_t i = 0; i < kElements && last == kRounds; ++i) {
        outcome.mean_residual[i] += static_cast<double>(residual[i]) / kWorkers;
      }
    });
    const std::vector<float> residual = cluster.server(0).ReadResidual("w", kElements);
    outcome.server_residual.assign(residual.begin(), residual.end());
  }
  const std::string text = failures.Take();
  INFO(text);
  REQUIRE(text.empty());
  return outcome;
}

// --- the model ----------------------------------------------------------------------------------

Vector Compressed(const std::string& spec, const Vector& q) {
  Vector c(q.size(), 0.0);
  if (spec == "onebit") {
    double sum = 0;
    for (const double value : q) sum += std::abs(value);
    for (std::size_t i = 0; i < q.size(); ++i) {
      c[i] = std::copysign(sum / static_cast<double>(q.size()), q[i]);
    }
    return c;
  }
  std::vector<std::size_t> order(q.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::sort(order.begin(), order.end(),
            [&](std::size_t a, std::size_t b) { return std::abs(q[a]) > std::abs(q[b]); });
  for (std::size_t i = 0; i < kKept; ++i) c[order[i]] = q[order[i]];
  return c;
}

/// A residual and the numbers it was last kept with.
struct ModelResidual {
  Vector e = Vector(kElements, 0.0);
  double rate = 0;
  double scale = 0;

  double Alpha(double rate_now, double scale_now) {
    double alpha = rate == 0 || rate_now == 0 ? 1 : rate / rate_now;
    if (scale != 0 && scale_now != 0) alpha *= scale_now / scale;
    rate = rate_now;
    scale = scale_now;
    return alpha;
  }
};

/// What comes out of each round; empty: it was void.
std::vector<Vector> Model(const Setup& setup) {
  std::vector<ModelResidual> workers(kWorkers);
  ModelResidual server;
  std::vector<Vector> out;
  for (int round = 0; round < kRounds; ++round) {
    const double rate = setup.feedback == FeedbackMode::kEfLr ? setup.rate(round) : 0;
    const double scale = setup.scale(round);
    const bool is_void = round == setup.void_round;
    Vector sum(kElements, 0.0);
    for (std::uint32_t rank = 0; rank < kWorkers; ++rank) {
      ModelResidual& worker = workers[rank];
      const double alpha = worker.Alpha(rate, scale);
      const std::vector<float> g = GradientAt(setup, rank, round);
      Vector q(kElements);
      for (std::size_t i = 0; i < kElements; ++i) {
        q[i] = (std::isfinite(g[i]) ? static_cast<double>(g[i]) : 0.0) + alpha * worker.e[i];
      }
      const Vector c = is_void ? Vector(kElements, 0.0) : Compressed(setup.spec, q);
      for (std::size_t i = 0; i < kElements; ++i) {
        sum[i] += c[i];
        worker.e[i] = q[i] - c[i];
      }
    }
    if (is_void) {
      out.emplace_back();
      continue;  // the server's residual stays, with the numbers of its last round
    }
    const double alpha = server.Alpha(rate, scale);
    Vector q(kElements);
    for (std::size_t i = 0; i < kElements; ++i) q[i] = sum[i] / kWorkers + alpha * server.e[i];
    const Vector c = Compressed(setup.spec, q);
    for (std::size_t i = 0; i < kElements; ++i) server.e[i] = q[i] - c[i];
    out.push_back(c);
  }
  return out;
}

// --- the schedules ------------------------------------------------------------------------------

double HalvingRate(int round) { return std::ldexp(0.3, -round / 6); }
double CosineRate(int round) { return 0.1 * (1.0 + std::cos(round * 0.07)); }
double RateWithPause(int round) {
  return round < 3 || (round >= 12 && round < 17) ? 0.0 : CosineRate(round);
}
/// What a scaler of mixed precision does, faster: up by two every seven rounds, down now and then.
double PowerOfTwoScale(int round) { return std::ldexp(1.0, 10 + round / 7 - 3 * (round / 16)); }
double AnyScale(int round) { return 1000.0 * (1.0 + 0.37 * (round % 5)); }

TEST_CASE("results follow the formulas for every schedule of rates and loss scales",
          "[integration][scale]") {
  Setup setup;
  setup.spec = GENERATE("onebit", "topk(k=20,value=fp32)");
  const std::string schedule = GENERATE("constant", "halving", "cosine", "pause", "scale",
                                        "scale and rate", "scale under ef");
  setup.void_round = GENERATE(-1, 12);
  CAPTURE(setup.spec, schedule, setup.void_round);
  if (schedule == "halving") setup.rate = HalvingRate;
  if (schedule == "cosine" || schedule == "scale and rate") setup.rate = CosineRate;
  if (schedule == "pause") setup.rate = RateWithPause;
  if (schedule.rfind("scale", 0) == 0) setup.scale = AnyScale;
  if (schedule == "scale under ef") setup.feedback = FeedbackMode::kEf;
  const Outcome run = RunJob(setup);
  const std::vector<Vector> model = Model(setup);
  for (int round = 0; round < kRounds; ++round) {
    const auto r = static_cast<std::size_t>(round);
    CAPTURE(round);
    if (round == setup.void_round) {
      REQUIRE(
          std::all_of(run.out[r].begin(), run.out[r].end(), [](float v) { return std::isnan(v); }));
      continue;
    }
    double error = 0;
    double size = 0;
    for (std::size_t i = 0; i < kElements; ++i) {
      error = std::max(error, std::abs(model[r][i] - static_cast<double>(run.out[r][i])));
      size = std::max(size, std::abs(model[r][i]));
    }
    CAPTURE(error, size);
    // Floats of 2^-24, added up over the rounds; a residual in the wrong scale is off by a tenth.
    REQUIRE(error < 1e-4 * size);
  }
}

TEST_CASE("under a constant rate ef_lr is ef, bit for bit", "[integration][scale]") {
  Setup setup;
  setup.spec = GENERATE("onebit", "topk(k=20,value=fp32)", "fp16");
  const Outcome with_rate = RunJob(setup);
  setup.feedback = FeedbackMode::kEf;
  setup.rate = CosineRate;  // which ef does not look at
  const Outcome plain = RunJob(setup);
  REQUIRE(with_rate.out == plain.out);
  REQUIRE(with_rate.server_residual == plain.server_residual);
}

TEST_CASE("a loss scale of powers of two changes no bit of the unscaled result",
          "[integration][scale]") {
  Setup setup;
  setup.spec = GENERATE("onebit", "topk(k=20,value=fp32)");
  setup.rate = CosineRate;
  setup.feedback = GENERATE(FeedbackMode::kEf, FeedbackMode::kEfLr);
  const Outcome plain = RunJob(setup);
  setup.scale = PowerOfTwoScale;
  const Outcome scaled = RunJob(setup);
  for (int round = 0; round < kRounds; ++round) {
    std::vector<float> unscaled = scaled.out[static_cast<std::size_t>(round)];
    for (float& value : unscaled) value /= static_cast<float>(PowerOfTwoScale(round));
    REQUIRE(unscaled == plain.out[static_cast<std::size_t>(round)]);
  }
}

TEST_CASE("nothing is lost, in units of rate over loss scale", "[integration][scale]") {
  Setup setup;
  setup.spec = GENERATE("onebit", "topk(k=20,value=fp32)", "fp16");
  setup.rate = HalvingRate;
  setup.scale = AnyScale;
  const Outcome run = RunJob(setup);
  const auto unit = [&](int round) { return setup.rate(round) / ScaleAt(setup, round); };
  Vector balance(kElements, 0.0);
  for (int round = 0; round < kRounds; ++round) {
    for (std::uint32_t rank = 0; rank < kWorkers; ++rank) {
      const std::vector<float> g = GradientAt(setup, rank, round);
      for (std::size_t i = 0; i < kElements; ++i) {
        balance[i] += unit(round) * static_cast<double>(g[i]) / kWorkers;
      }
    }
    for (std::size_t i = 0; i < kElements; ++i) {
      balance[i] -= unit(round) * static_cast<double>(run.out[static_cast<std::size_t>(round)][i]);
    }
  }
  for (std::size_t i = 0; i < kElements; ++i) {
    balance[i] -= unit(kRounds - 1) * (run.mean_residual[i] + run.server_residual[i]);
    REQUIRE(std::abs(balance[i]) < 1e-5);
  }
}

TEST_CASE("saved in the middle and restored is the same as uninterrupted", "[integration][scale]") {
  Setup setup;
  setup.spec = GENERATE("onebit", "topk(k=20,value=fp32)");
  setup.rate = CosineRate;
  setup.scale = AnyScale;
  setup.void_round = 19;  // so that worker and server were last kept with other numbers
  const Outcome whole = RunJob(setup);
  setup.cut = 20;
  const Outcome cut = RunJob(setup);
  for (std::size_t round = 20; round < kRounds; ++round)
    REQUIRE(cut.out[round] == whole.out[round]);
  REQUIRE(cut.server_residual == whole.server_residual);
}

TEST_CASE("a loss scale without residuals changes nothing", "[integration][scale]") {
  Setup setup;
  setup.spec = GENERATE("none", "onebit");
  setup.feedback = FeedbackMode::kOff;
  const Outcome plain = RunJob(setup);
  setup.scale = PowerOfTwoScale;
  const Outcome scaled = RunJob(setup);
  for (std::size_t round = 0; round < kRounds; ++round) {
    std::vector<float> unscaled = scaled.out[round];
    for (float& value : unscaled)
      value /= static_cast<float>(PowerOfTwoScale(static_cast<int>(round)));
    REQUIRE(unscaled == plain.out[round]);
  }
}

// --- what is refused ----------------------------------------------------------------------------

Config RefusalConfig() {
  Config config = TestConfig(2);
  SetCompressor(config, "onebit");
  config.compression.downlink.feedback = FeedbackMode::kEfLr;
  return config;
}

/// Pushes one tensor with a rank's own numbers; the first error.
Status PushWith(Cluster& cluster, std::uint32_t rank, double rate, double scale) {
  const auto client = cluster.ConnectWorker(rank);
  if (!client.ok()) return client.status();
  const TensorDeclaration tensor = Tensor("w", 5000);
  const auto ids = (*client)->Declare(std::span(&tensor, 1));
  if (!ids.ok()) return ids.status();
  GRADWIRE_RETURN_IF_ERROR((*client)->SetLearningRate(*ids, rate));
  GRADWIRE_RETURN_IF_ERROR((*client)->SetLossScale(scale));
  std::vector<float> values(5000, 1.0F);
  return PushPull(**client, ids.value()[0], InputOf(values), OutputOf(values));
}

TEST_CASE("ranks with another learning rate or loss scale are named to all",
          "[integration][scale]") {
  const bool by_rate = GENERATE(true, false);
  Cluster cluster(RefusalConfig(), TransportKind::kInproc);
  std::array<Status, 2> outcomes;
  std::thread other(
      [&] { outcomes[1] = PushWith(cluster, 1, by_rate ? 0.05 : 0.1, by_rate ? 1024 : 512); });
  outcomes[0] = PushWith(cluster, 0, 0.1, 1024);
  other.join();
  // Which rank's push comes first nobody can know.
  const std::array<std::string, 2> expected =
      by_rate
          ? std::array<std::string, 2>{"rank 0 pushes it with learning rate 0.1, rank 1 with 0.05",
                                       "rank 1 pushes it with learning rate 0.05, rank 0 with 0.1"}
          : std::array<std::string, 2>{"rank 0 pushes it with loss scale 1024, rank 1 with 512",
                                       "rank 1 pushes it with loss scale 512, rank 0 with 1024"};
  for (const Status& outcome : outcomes) {
    const std::string text = outcome.message();
    CAPTURE(text);
    CHECK(outcome.code() == StatusCode::kInvalidArgument);
    CHECK(text.find("tensor 'w'") != std::string::npos);
    CHECK((text.find(expected[0]) != std::string::npos ||
           text.find(expected[1]) != std::string::npos));
  }
}

TEST_CASE("a missing rate and fused tensors of other rates are refused to the caller",
          "[integration][scale]") {
  Cluster cluster(RefusalConfig(), TransportKind::kInproc);
  Failures failures;
  cluster.Run([&](Client& client) {
    const std::vector<TensorDeclaration> tensors = {Tensor("a", 100), Tensor("b", 50)};
    const auto ids = client.Declare(tensors);
    if (!failures.Ok(ids.status(), "declare")) return;
    std::vector<float> a(100, 1.0F);
    std::vector<float> b(50, 1.0F);
    const auto push = [&](std::size_t index, std::vector<float>& values) {
      return client.PushPullAsync(ids.value()[index], InputOf(values), OutputOf(values));
    };
    const auto refused = [&](const Status& status, const std::string& part) {
      failures.Expect(status.code() == StatusCode::kInvalidArgument &&
                          status.message().find(part) != std::string::npos,
                      status.ToString() + ", expected " + part);
    };
    const std::string rank = std::to_string(client.rank());
    refused(push(0, a).status(), "tensor 'a' on rank " + rank + " has feedback ef_lr, and no");
    refused(client.SetLearningRate(*ids, -1), "learning rate is -1");
    refused(client.SetLearningRate(*ids, std::nan("")), "learning rate is nan");
    refused(client.SetLossScale(HUGE_VAL), "loss scale is inf");
    const std::vector<TensorId> unknown = {ids.value()[0], {7}};
    refused(client.SetLearningRate(unknown, 0.1), "tensor id 7, 2 are declared");
    refused(push(0, a).status(), "no learning rate was given");  // nothing of it was taken

    failures.Ok(client.SetLearningRate(std::span(*ids).first(1), 0.1), "rate of a");
    failures.Ok(client.SetLearningRate(std::span(*ids).subspan(1), 0.2), "rate of b");
    const auto first = push(0, a);
    failures.Ok(first.status(), "push of a");
    refused(push(1, b).status(), "tensor 'b' on rank " + rank +
                                     " is fused with 'a', but is pushed with learning rate 0.2, "
                                     "that with 0.1");
    failures.Ok(client.SetLearningRate(std::span(*ids).subspan(1), 0.1), "rate of b");
    failures.Ok(client.SetLossScale(1024), "scale");
    refused(push(1, b).status(), "is pushed with loss scale 1024, that with 0");
    failures.Ok(client.SetLossScale(0), "scale");
    const auto second = push(1, b);
    failures.Ok(second.status(), "push of b");
    failures.Ok(client.EndStep(), "end of step");
    failures.Ok(client.Wait(*first), "wait");
    failures.Ok(client.Wait(*second), "wait");
  });
  const std::string text = failures.Take();
  INFO(text);
  REQUIRE(text.empty());
}

}  // namespace
}  // namespace gradwire::testing
