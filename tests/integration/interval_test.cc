// Another interval of the filter in mid-run: it begins in the same step everywhere, and nothing is
// lost.

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <functional>
#include <future>
#include <thread>

#include "common/base/random.h"
#include "common/plan/plan.h"
#include "tests/integration/cluster.h"
#include "tests/integration/scripted_root.h"
#include "tests/transport/tcp_proxy.h"

namespace gradwire::testing {
namespace {

using std::chrono::seconds;

Config AutoConfig(std::uint32_t workers, std::uint32_t servers = 1) {
  Config config = TestConfig(workers, servers);
  config.compression.filter.type = FilterType::kCovap;
  config.compression.filter.interval = 0;
  config.compression.filter.c0 = 1.0;
  return config;
}

std::vector<TensorDeclaration> Tensors(ReduceOp op) {
  std::vector<TensorDeclaration> tensors;
  for (std::size_t t = 0; t < 10; ++t) {
    tensors.push_back(Tensor(fmt::format("w{}", t), 5000 + 1111 * t, DType::kFloat32, op));
  }
  return tensors;
}

void RequireNone(Failures& failures) {
  const std::string text = failures.Take();
  INFO(text);
  REQUIRE(text.empty());
}

std::size_t NumStages(const Client& client) { return client.plan()->filter.stages.size(); }

/// Rank 0 asks, and waits until its plan has the change.
void Change(Client& client, std::uint32_t interval, Failures& failures) {
  const std::size_t before = NumStages(client);
  if (!failures.Ok(client.AskForInterval(interval), "ask")) return;
  const auto deadline = std::chrono::steady_clock::now() + seconds(30);
  while (NumStages(client) == before) {
    if (!failures.Expect(std::chrono::steady_clock::now() < deadline, "no change came")) return;
    std::this_thread::yield();
  }
  failures.Expect(client.plan()->filter.stages.back().interval == interval, "another interval");
}

struct Asked {
  int step;
  std::uint32_t interval;
};

// Each change has begun before the next one is asked for, and the last one holds for some time.
constexpr Asked kChanges[] = {{10, 4}, {45, 2}, {80, 8}};
constexpr int kSteps = 140;

void ChangeIfDue(Client& client, int step, Failures& failures) {
  if (client.rank() != 0) return;
  for (const auto& [at, interval] : kChanges) {
    if (at == step) Change(client, interval, failures);
  }
}

/// What a run has handed over, got and held back, and what it took.
struct Sums {
  Doubles handed_over;             // over all ranks and steps
  std::vector<Doubles> delivered;  // by rank
  Doubles residuals;
  std::uint64_t reconnects = 0;
  std::uint64_t resent_pushes = 0;
};

/// Sums of integers while the interval changes as kChanges says; `disturb` runs before each of rank
/// 0's steps. Looks at what is sent in a step, at the plan's stages and at the counters.
Sums SumIntegers(Cluster& cluster, const std::vector<TensorDeclaration>& tensors,
                 const std::function<void(int step)>& disturb) {
  const auto zeros = [&] {
    Doubles all;
    for (const auto& tensor : tensors) all.emplace_back(tensor.num_elements());
    return all;
  };
  Sums sums{zeros(), {}, zeros()};
  sums.delivered.assign(cluster.config().job.workers, zeros());
  std::mutex mu;
  Failures failures;
  cluster.Run([&](Client& client) {
    const auto ids = client.Declare(tensors);
    if (!failures.Ok(ids.status(), "declare")) return;
    // A second plan version before any change, and the caller's choice instead of measurements.
    const auto more = client.Declare(std::vector{Tensor("more", 100)});
    if (!failures.Ok(more.status(), "declare")) return;
    if (client.rank() == 0) failures.Ok(client.AskForInterval(1), "ask for what is");
    std::vector<std::vector<float>> values;
    std::vector<Handle> handles(tensors.size());
    for (const auto& tensor : tensors) values.emplace_back(tensor.num_elements());
    Doubles& out = sums.delivered[client.rank()];
    const auto finish = [&](int step, std::size_t t) {
      if (!failures.Ok(client.Wait(handles[t]), "wait")) return;
      const auto ranges = client.ActiveRanges(handles[t]);
      if (!failures.Ok(ranges.status(), "active ranges")) return;
      std::vector<bool> active(values[t].size(), false);
      for (const ElementRange& range : *ranges) {
        for (std::uint64_t i = 0; i < range.count; ++i) active.at(range.offset + i) = true;
      }
      for (std::size_t i = 0; i < values[t].size(); ++i) {
        out[t][i] += values[t][i];
        if (active[i] == (values[t][i] != 0.0F)) continue;
        failures.Add(
            fmt::format("rank {} step {} tensor {} element {}", client.rank(), step, t, i));
        return;
      }
    };
    for (int step = 0; step < kSteps; ++step) {
      if (client.rank() == 0) disturb(step);
      for (std::size_t t = 0; t < tensors.size(); ++t) {
        // Rank 0 and the odd ones differ in when they wait, and so in how far ahead they run.
        if (step > 0 && client.rank() % 2 == 1) finish(step - 1, t);
        {
          const std::lock_guard lock(mu);
          for (std::size_t i = 0; i < values[t].size(); ++i) {
            // Never 0, so that an element of a sum is 0 just where nothing was sent.
            values[t][i] = static_cast<float>(
                1 + (i * 7 + client.rank() * 3 + t + static_cast<std::size_t>(step)) % 9);
            sums.handed_over[t][i] += values[t][i];
          }
        }
        const auto handle =
            client.PushPullAsync((*ids)[t], InputOf(values[t]), OutputOf(values[t]));
        if (!failures.Ok(handle.status(), "push")) return;
        handles[t] = *handle;
        if (t == 3) ChangeIfDue(client, step, failures);  // with pushes under way
      }
      if (!failures.Ok(client.EndStep(), "end of step")) return;
      for (std::size_t t = 0; t < tensors.size() && client.rank() % 2 == 0; ++t) finish(step, t);
    }
    for (std::size_t t = 0; t < tensors.size() && client.rank() % 2 == 1; ++t) {
      finish(kSteps - 1, t);
    }
    failures.Ok(client.Barrier(), "barrier");
    const Filter filter = client.plan()->filter;
    if (failures.Expect(filter.stages.size() == 1 + std::size(kChanges),
                        fmt::format("{} stages", filter.stages.size()))) {
      for (std::size_t s = 1; s < filter.stages.size(); ++s) {
        const auto& [at, interval] = kChanges[s - 1];
        const FilterStage& stage = filter.stages[s];
        const auto first = static_cast<int>(stage.first_step);
        failures.Expect(stage.interval == interval && first >= at + 8 && first < at + 30,
                        fmt::format("{} from {} on", stage.interval, stage.first_step));
      }
    }
    const ClientStats stats = client.stats();
    failures.Expect(stats.interval == 8, "the interval in the stats");
    failures.Expect(stats.held_back_units > 0, "nothing was held back");
    const std::lock_guard lock(mu);
    sums.reconnects += stats.reconnects;
    sums.resent_pushes += stats.resent_pushes;
    AddResiduals(client, *ids, sums.residuals);
  });
  RequireNone(failures);
  return sums;
}

/// On every rank, as RequireConserved.
void RequireConservedOnAll(const std::vector<TensorDeclaration>& tensors, const Sums& sums) {
  for (const Doubles& delivered : sums.delivered) {
    RequireConserved(tensors, delivered, sums.residuals, sums.handed_over);
  }
}

bool ChangesAt(int step) {
  return std::any_of(std::begin(kChanges), std::end(kChanges),
                     [&](const Asked& asked) { return asked.step == step; });
}

TEST_CASE("of integers nothing is lost when the interval changes, bit for bit",
          "[integration][covap]") {
  // Of the kinds of message that a change takes one is lost on its way; a heartbeat stands for
  // none.
  struct Case {
    std::uint32_t workers;
    FilterAssign assign;
    MessageKind lost;
  };
  const Case given = GENERATE(Case{1, FilterAssign::kBalanced, MessageKind::kHeartbeat},
                              Case{2, FilterAssign::kBalanced, MessageKind::kHeartbeat},
                              Case{3, FilterAssign::kIndex, MessageKind::kHeartbeat},
                              Case{2, FilterAssign::kIndex, MessageKind::kAskInterval},
                              Case{3, FilterAssign::kBalanced, MessageKind::kAskStep},
                              Case{2, FilterAssign::kBalanced, MessageKind::kStep},
                              Case{2, FilterAssign::kIndex, MessageKind::kPlan});
  const bool zmq = given.workers == 2 && given.lost == MessageKind::kHeartbeat;
  CAPTURE(given.workers, static_cast<int>(given.assign), MessageKindName(given.lost), zmq);
  const std::vector<TensorDeclaration> tensors = Tensors(ReduceOp::kSum);
  Config config = AutoConfig(given.workers, 2);
  config.compression.filter.assign = given.assign;
  Cluster cluster(config, zmq ? TransportKind::kZmq : TransportKind::kInproc);
  const Sums sums = SumIntegers(cluster, tensors, [&](int step) {
    if (zmq || !ChangesAt(step)) return;
    cluster.network().CutAt(
        "inproc://s0l0", [lost = given.lost](const Header& header) { return header.kind == lost; });
  });
  RequireConservedOnAll(tensors, sums);
}

TEST_CASE("TCP connections that break in mid-message lose nothing of what the filter handles",
          "[integration][covap][faults]") {
  const auto assign = GENERATE(FilterAssign::kBalanced, FilterAssign::kIndex);
  CAPTURE(static_cast<int>(assign));
  std::vector<TensorDeclaration> tensors = Tensors(ReduceOp::kSum);
  tensors.push_back(Tensor("cut", 150001, DType::kFloat32, ReduceOp::kSum));  // into 10 units
  Config config = AutoConfig(2);  // one server and one lane: everything goes through the proxy
  config.compression.filter.assign = assign;
  Cluster cluster(config, TransportKind::kZmq);
  TcpProxy proxy(PortOf(cluster.RootAddress()));
  cluster.config().endpoint = proxy.address();
  CounterRng rng(TestSeed());
  std::uint64_t duplicates = 0;
  const Sums sums = SumIntegers(cluster, tensors, [&](int step) {
    // After some bytes of a step: within a header, a payload, between messages. On the way there
    // pushes are lost, on the way back replies and receipts, with what is under way the other way.
    // Both workers together have 2 MB each way in a step of interval 1, 250 KB of interval 8.
    const std::uint64_t bytes = 1 + rng.NextBelow(250'000);
    if (ChangesAt(step)) {
      proxy.CutAfterBytes(1 + bytes % 1000, /*restore=*/true);
    } else if (step % 5 == 1) {
      proxy.CutAfterBytes(bytes, /*restore=*/true);
    } else if (step % 5 == 3) {
      proxy.CutBackAfterBytes(bytes, /*restore=*/true);
    }
    duplicates = cluster.server(0).stats().duplicate_pushes;
  });
  CAPTURE(sums.reconnects, sums.resent_pushes, duplicates);
  CHECK(sums.reconnects >= 50);
  CHECK(sums.resent_pushes >= 50);
  // A push that had arrived, but whose receipt was lost.
  CHECK(duplicates >= 1);
  RequireConservedOnAll(tensors, sums);
  for (const Status& status : cluster.JoinServers()) {
    INFO(status.ToString());
    REQUIRE(status.ok());
  }
}

/// Rank 0's results of all steps, and the plan at the end.
struct Run {
  std::vector<std::vector<float>> results;
  Plan plan;
};

Run RunWithChanges(const Config& config, bool asks) {
  const std::vector<TensorDeclaration> tensors = Tensors(ReduceOp::kAverage);
  Cluster cluster(config, TransportKind::kInproc);
  Run run;
  Failures failures;
  cluster.Run([&](Client& client) {
    const auto ids = client.Declare(tensors);
    if (!failures.Ok(ids.status(), "declare")) return;
    std::vector<std::vector<float>> values;
    for (const auto& tensor : tensors) values.emplace_back(tensor.num_elements());
    if (asks && client.rank() == 0) failures.Ok(client.AskForInterval(1), "ask for what is");
    for (int step = 0; step < kSteps; ++step) {
      for (std::size_t t = 0; t < tensors.size(); ++t) {
        CounterRng rng(
            HashCombine(HashCombine(client.rank(), t), static_cast<std::uint64_t>(step)));
        for (float& value : values[t]) value = static_cast<float>(rng.NextGaussian());
      }
      if (asks) ChangeIfDue(client, step, failures);
      PushAll(client, *ids, values, failures);
      if (client.rank() == 0) {
        run.results.insert(run.results.end(), values.begin(), values.end());
      }
    }
    if (client.rank() == 0) run.plan = *client.plan();
  });
  RequireNone(failures);
  return run;
}

TEST_CASE("the plan of a run whose interval has changed repeats it bit for bit",
          "[integration][covap]") {
  const std::string spec = GENERATE("none", "onebit");
  CAPTURE(spec);
  Config config = AutoConfig(2, 2);
  config.compression.filter.c0.reset();  // weights that depend on the step and the interval
  SetCompressor(config, spec);
  const Run first = RunWithChanges(config, true);
  REQUIRE(first.plan.filter.stages.size() == 1 + std::size(kChanges));

  const std::filesystem::path path =
      std::filesystem::temp_directory_path() / fmt::format("gradwire_plan_{:x}", RandomId());
  REQUIRE(SavePlan(first.plan, path.string()) == Status::Ok());
  Config replay = config;
  replay.plan = path.string();
  // Nobody asks, and whatever is measured meanwhile changes nothing.
  const Run second = RunWithChanges(replay, false);
  std::filesystem::remove(path);
  CHECK(second.plan.filter == first.plan.filter);
  REQUIRE(second.results == first.results);
}

TEST_CASE("a restored job goes on with its interval", "[integration][covap]") {
  const bool before_declare = GENERATE(false, true);
  CAPTURE(before_declare);
  const std::vector<TensorDeclaration> tensors = Tensors(ReduceOp::kSum);
  std::vector<std::vector<std::byte>> states(2);
  std::vector<double> out(tensors.back().num_elements());
  std::vector<double> residuals(out.size());
  std::mutex mu;
  Failures failures;
  for (int half = 0; half < 2; ++half) {
    Cluster cluster(AutoConfig(2), TransportKind::kInproc);
    cluster.Run([&](Client& client) {
      const auto restore = [&] {
        failures.Ok(client.RestoreState(states[client.rank()]), "restore");
      };
      if (half == 1 && before_declare) restore();
      const auto ids = client.Declare(tensors);
      if (!failures.Ok(ids.status(), "declare")) return;
      if (half == 1 && !before_declare) restore();
      std::vector<std::vector<float>> values;
      for (const auto& tensor : tensors) values.emplace_back(tensor.num_elements());
      if (half == 0 && client.rank() == 0) Change(client, 4, failures);
      if (half == 1 && client.rank() == 0) {
        const auto deadline = std::chrono::steady_clock::now() + seconds(30);
        while (NumStages(client) == 1 && std::chrono::steady_clock::now() < deadline) {
          std::this_thread::yield();
        }
      }
      // A measurement comes after 16 steps of an interval: these are fewer.
      for (int step = 0; step < 15; ++step) {
        for (auto& tensor : values) std::fill(tensor.begin(), tensor.end(), 1.0F);
        PushAll(client, *ids, values, failures);
        if (client.rank() != 0) continue;
        for (std::size_t i = 0; i < out.size(); ++i) out[i] += values.back()[i];
      }
      const std::vector<FilterStage> stages = client.plan()->filter.stages;
      failures.Expect(stages.size() == 2 && stages.back().interval == 4,
                      fmt::format("{} stages in half {}", stages.size(), half));
      failures.Expect(client.stats().interval == 4, fmt::format("half {}", half));
      if (half == 1) failures.Expect(stages.back().first_step > 15, "a stage before the restore");
      const auto saved = client.SaveState();
      if (failures.Ok(saved.status(), "save")) states[client.rank()] = *saved;
      if (half == 0) return;
      const std::lock_guard lock(mu);
      const std::vector<float> residual = client.ReadResidual(ids->back());
      for (std::size_t i = 0; i < residual.size(); ++i) residuals[i] += residual[i];
    });
    RequireNone(failures);
  }
  for (std::size_t i = 0; i < out.size(); ++i) {
    CAPTURE(i, out[i], residuals[i]);
    REQUIRE(out[i] + residuals[i] == 2 * 30);
  }
}

TEST_CASE("an interval is asked for by rank 0 and where it is auto", "[integration][covap]") {
  const bool fixed = GENERATE(false, true);
  Config config = AutoConfig(2);
  if (fixed) config.compression.filter.interval = 2;
  Cluster cluster(config, TransportKind::kInproc);
  Failures failures;
  cluster.Run([&](Client& client) {
    const auto refused = [&](std::uint32_t interval) {
      const Status status = client.AskForInterval(interval);
      failures.Expect(
          status.message() ==
              fmt::format("rank {} asks for the interval {}, expected rank 0 and 1 to 256, with a "
                          "filter whose interval is auto",
                          client.rank(), interval),
          status.ToString());
    };
    refused(0);
    refused(257);
    if (fixed || client.rank() != 0) refused(4);
    failures.Ok(client.EndStep(), "the job goes on");
  });
  RequireNone(failures);
}

TEST_CASE("no interval is larger than the number of units", "[integration][covap]") {
  Cluster cluster(AutoConfig(2), TransportKind::kInproc);
  Failures failures;
  cluster.Run([&](Client& client) {
    const auto ids = client.Declare(std::vector{Tensor("a", 5000), Tensor("b", 5000)});
    if (!failures.Ok(ids.status(), "declare")) return;
    std::vector<std::vector<float>> values(2, std::vector<float>(5000, 1.0F));
    if (client.rank() == 0) {
      failures.Ok(client.AskForInterval(200), "ask");
      while (NumStages(client) == 1) std::this_thread::yield();
      failures.Expect(client.plan()->filter.stages.back().interval == 2, "not bounded");
    }
    for (int step = 0; step < 30; ++step) PushAll(client, *ids, values, failures);
    failures.Expect(client.stats().held_back_units > 0, "nothing was held back");
  });
  RequireNone(failures);
}

TEST_CASE("a worker that has left does not keep the interval from changing",
          "[integration][covap]") {
  Cluster cluster(AutoConfig(2), TransportKind::kInproc);
  Failures failures;
  std::promise<void> has_left;
  std::thread leaver([&] {
    auto client = cluster.ConnectWorker(1);
    if (!failures.Ok(client.status(), "connect")) return;
    failures.Ok((*client)->Declare(std::vector{Tensor("a", 5000), Tensor("b", 5000)}).status(),
                "declare");
    failures.Ok((*client)->Close(), "close");
    has_left.set_value();
  });
  auto client = cluster.ConnectWorker(0);
  REQUIRE(client.ok());
  failures.Ok((*client)->Declare(std::vector{Tensor("a", 5000), Tensor("b", 5000)}).status(),
              "declare");
  has_left.get_future().wait();
  Change(**client, 2, failures);
  failures.Ok((*client)->Close(), "close");
  leaver.join();
  RequireNone(failures);
}

TEST_CASE("a step that computes nothing ends up with another interval than 1",
          "[integration][covap]") {
  // Its bytes take longer than the calls that hand them over, by far, whatever the machine does.
  Config config = AutoConfig(1);
  config.partition.bytes = 256 * 1024;
  Cluster cluster(config, TransportKind::kZmq);
  Failures failures;
  cluster.Run([&](Client& client) {
    const auto ids = client.Declare(std::vector{Tensor("w", 4'000'000)});
    if (!failures.Ok(ids.status(), "declare")) return;
    std::vector<std::vector<float>> values(1, std::vector<float>(4'000'000, 1.0F));
    const std::size_t units = client.plan()->units.size();
    for (int step = 0; step < 400 && client.stats().interval == 1; ++step) {
      PushAll(client, *ids, values, failures);
    }
    const ClientStats stats = client.stats();
    failures.Expect(
        stats.interval > 1 && stats.interval <= units,
        fmt::format("interval {} with CCR {}", stats.interval, stats.overlap.full_ccr()));
  });
  RequireNone(failures);
}

TEST_CASE("under a saved plan nobody asks for another interval", "[integration][covap]") {
  // A step that computes nothing would, as above.
  Config config = AutoConfig(1);
  config.partition.bytes = 256 * 1024;
  const std::vector<TensorDeclaration> tensors = {Tensor("w", 1'000'000)};
  const std::filesystem::path path =
      std::filesystem::temp_directory_path() / fmt::format("gradwire_plan_{:x}", RandomId());
  for (const bool replays : {false, true}) {
    CAPTURE(replays);
    std::atomic<int> asked = 0;
    Cluster cluster(config, TransportKind::kInproc);
    // The worker itself is told of no file: it is the root's.
    cluster.config().plan.clear();
    cluster.network().CutAt("inproc://s0l0", [&](const Header& header) {
      if (header.kind == MessageKind::kAskInterval) ++asked;
      return false;
    });
    Failures failures;
    cluster.Run([&](Client& client) {
      const auto ids = client.Declare(tensors);
      if (!failures.Ok(ids.status(), "declare")) return;
      if (!replays) failures.Ok(SavePlan(*client.plan(), path.string()), "save the plan");
      std::vector<std::vector<float>> values(1, std::vector<float>(1'000'000, 1.0F));
      const int steps = replays ? 60 : 400;
      for (int step = 0; step < steps && (replays || asked == 0); ++step) {
        PushAll(client, *ids, values, failures);
      }
    });
    RequireNone(failures);
    CHECK((asked > 0) == !replays);
    config.plan = path.string();
  }
  std::filesystem::remove(path);
}

Config ScriptedConfig() {
  Config config = AutoConfig(1);
  config.endpoint = "inproc://root";
  return config;
}

/// Worker 0, with two tensors, in step 5.
std::unique_ptr<Client> ClientInStepFive(InprocNetwork& network, const Config& config) {
  auto client = Client::Connect(config, 0, network.MakeLoop());
  REQUIRE(client.ok());
  REQUIRE((*client)->Declare(std::vector{Tensor("a", 5000), Tensor("b", 5000)}).ok());
  for (int i = 0; i < 5; ++i) REQUIRE((*client)->EndStep().ok());
  return std::move(client).value();
}

TEST_CASE("a worker keeps its word on how far it goes until the plan has the change",
          "[integration][covap]") {
  const auto network = MakeInprocNetwork();
  const Config config = ScriptedConfig();
  ScriptedRoot root(*network, config);
  const auto client = ClientInStepFive(*network, config);
  root.Ask(1, 3);
  REQUIRE(root.AwaitAnswer(1) == 5);
  REQUIRE(client->EndStep().ok());
  root.Ask(1, 3);  // again, as after a cut: the word that was given stands
  REQUIRE(root.AwaitAnswer(2) == 5);
  REQUIRE(client->EndStep().ok());  // step 7 begins
  auto next = std::async(std::launch::async, [&] { return client->EndStep(); });
  CHECK(next.wait_for(std::chrono::milliseconds(100)) == std::future_status::timeout);
  root.SendPlanWith(2, 8);
  REQUIRE(next.get().ok());
  CHECK(client->stats().interval == 2);
  for (int i = 0; i < 5; ++i) REQUIRE(client->EndStep().ok());  // there is nothing to keep now
  root.Ask(2, 3);
  REQUIRE(root.AwaitAnswer(3) == 13);
  root.SendPlanWith(1, 16);
  CHECK(client->Close().ok());
}

TEST_CASE("a worker that hears of an interval too late says so and ends the job",
          "[integration][covap]") {
  const auto network = MakeInprocNetwork();
  const Config config = ScriptedConfig();
  ScriptedRoot root(*network, config);
  const auto client = ClientInStepFive(*network, config);
  root.SendPlanWith(2, 5);
  const Status status = client->Barrier();  // which this root never answers
  CHECK(status.code() == StatusCode::kInternal);
  CHECK(status.message() ==
        "worker 0 is late: it is at step 5, and hears now that the interval is 2 from step 5 on "
        "(plan version 2)");
  CHECK(client->EndStep().message() == status.message());
}

}  // namespace
}  // namespace gradwire::testing
