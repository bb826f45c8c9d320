// What ends a job ends it for everybody, by name: ranks that wait for each other for ever, ranks
// that do not do the same, ranks that are taken. Over real connections, in one process.

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <future>
#include <regex>
#include <thread>

#include "common/base/buffer_pool.h"
#include "common/transport/zmq_loop.h"
#include "common/wire/control.h"
#include "tests/integration/cluster.h"
#include "tests/integration/scripted_root.h"
#include "tests/transport/tcp_proxy.h"

namespace gradwire::testing {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

// Long enough for the slowest machine; a test that waits so long has failed.
constexpr std::chrono::seconds kPatience(60);

constexpr std::size_t kElements = 5000;  // is not fused

std::string Named(const std::string& who) {
  return who + R"( at 127\.0\.0\.1 \(host [^ ]+, pid [0-9]+\))";
}

void RequireOutcome(const Status& status, StatusCode code,
                    const std::vector<std::string>& patterns) {
  INFO(status.ToString());
  REQUIRE(status.code() == code);
  for (const std::string& pattern : patterns) {
    INFO(pattern);
    REQUIRE(std::regex_search(status.message(), std::regex(pattern)));
  }
}

// Every worker on a thread of its own, through Connect and `body`; what came of each.
std::vector<Status> RunWorkers(Cluster& cluster, const std::function<Status(Client&)>& body) {
  std::vector<Status> outcomes(cluster.config().job.workers);
  std::vector<std::thread> workers;
  for (std::uint32_t rank = 0; rank < outcomes.size(); ++rank) {
    workers.emplace_back([&, rank] {
      auto client = cluster.ConnectWorker(rank);
      outcomes[rank] = client.ok() ? body(**client) : client.status();
    });
  }
  for (std::thread& worker : workers) worker.join();
  return outcomes;
}

// Declares `count` tensors "t0", "t1", ...
Result<std::vector<TensorId>> DeclareMany(Client& client, std::size_t count) {
  std::vector<TensorDeclaration> batch;
  for (std::size_t t = 0; t < count; ++t) batch.push_back(Tensor(fmt::format("t{}", t), kElements));
  return client.Declare(batch);
}

// Push-pulls until the job ends with an error, or patience does.
Status PushPullUntilError(Client& client, TensorId tensor) {
  std::vector<float> values(kElements, 1.0F);
  const Clock::time_point until = Clock::now() + kPatience;
  while (Clock::now() < until) {
    GRADWIRE_RETURN_IF_ERROR(PushPull(client, tensor, InputOf(values), OutputOf(values)));
  }
  return Internal("the job has not ended");
}

// --- silence ------------------------------------------------------------------------------------

TEST_CASE("a worker whose connection stalls for longer than dead_after is lost by name",
          "[integration][contracts]") {
  Config config = TestConfig(2);
  config.timeouts.dead_after_ms = 1000;
  Cluster cluster(config, TransportKind::kZmq);
  TcpProxy proxy(PortOf(cluster.RootAddress()));
  Config through = cluster.config();
  through.endpoint = proxy.address();
  std::array<Status, 2> outcomes;
  std::vector<std::thread> workers;
  for (std::uint32_t rank = 0; rank < 2; ++rank) {
    workers.emplace_back([&, rank] {
      auto client = cluster.ConnectWorker(rank, rank == 1 ? through : cluster.config());
      if (!client.ok()) {
        outcomes[rank] = client.status();
        return;
      }
      const auto ids = DeclareMany(**client, 1);
      if (!ids.ok()) {
        outcomes[rank] = ids.status();
        return;
      }
      if (rank == 1) proxy.StallFor(static_cast<int>(milliseconds(kPatience).count()));
      outcomes[rank] = PushPullUntilError(**client, ids.value()[0]);
    });
  }
  for (std::thread& worker : workers) worker.join();
  const std::string lost =
      Named("worker 1") + " is lost: nothing heard for [0-9.]+ s and its connection is down";
  RequireOutcome(outcomes[0], StatusCode::kUnavailable, {lost});
  // Behind the stall nobody can tell it anything: it finds the server lost.
  RequireOutcome(outcomes[1], StatusCode::kUnavailable, {"server 0.* is lost"});
  RequireOutcome(cluster.JoinServers()[0], StatusCode::kUnavailable, {lost});
}

TEST_CASE("a worker whose thread computes for three times dead_after is not lost",
          "[integration][contracts]") {
  static constexpr int kDeadAfterMs = 1000;
  Config config = TestConfig(2);
  config.timeouts.dead_after_ms = kDeadAfterMs;
  Cluster cluster(config, TransportKind::kZmq);
  std::array<Status, 2> outcomes;
  std::array<Clock::duration, 2> took{};
  std::vector<std::thread> workers;
  for (std::uint32_t rank = 0; rank < 2; ++rank) {
    workers.emplace_back([&, rank] {
      outcomes[rank] = [&]() -> Status {
        ZmqLoopOptions options;
        options.dead_after_ms = kDeadAfterMs;
        auto owned = MakeZmqLoop(options);
        Loop* const loop = owned.get();  // as long as the client
        auto client = Client::Connect(cluster.config(), rank, std::move(owned));
        if (!client.ok()) return client.status();
        const auto ids = DeclareMany(**client, 1);
        if (!ids.ok()) return ids.status();
        std::vector<float> values(kElements, static_cast<float>(rank));
        const Clock::time_point begin = Clock::now();
        if (rank == 1) {
          loop->Post([] { std::this_thread::sleep_for(milliseconds(3 * kDeadAfterMs)); });
        }
        GRADWIRE_RETURN_IF_ERROR(
            PushPull(**client, ids.value()[0], InputOf(values), OutputOf(values)));
        took[rank] = Clock::now() - begin;
        if (values[0] != 0.5F) return Internal(fmt::format("{} is no average", values[0]));
        return (*client)->Close();
      }();
    });
  }
  for (std::thread& worker : workers) worker.join();
  for (const Status& status : outcomes) RequireOutcome(status, StatusCode::kOk, {});
  REQUIRE(took[1] >= milliseconds(3 * kDeadAfterMs));  // it was busy indeed
  RequireOutcome(cluster.JoinServers()[0], StatusCode::kOk, {});
}

// --- stalls -------------------------------------------------------------------------------------

TEST_CASE("a tensor that waits ends the job while others make progress, on every worker and server",
          "[integration][contracts]") {
  // Of a lane that is not the root's: what one lane finds reaches all lanes of all servers.
  Config config = TestConfig(2, 2);
  config.server.lanes = 2;
  config.timeouts.stall_warn_ms = 500;
  config.timeouts.stall_stop_ms = 1500;
  Cluster cluster(config, TransportKind::kZmq);
  constexpr std::size_t kTensors = 16;
  std::array<std::string, 2> stalled;
  std::array<int, 2> rounds{};
  const std::vector<Status> outcomes = RunWorkers(cluster, [&](Client& client) -> Status {
    const auto ids = DeclareMany(client, kTensors);
    if (!ids.ok()) return ids.status();
    const auto is_far = [](const Unit& unit) { return unit.server == 1 && unit.lane == 1; };
    const auto plan = client.plan();
    const auto& units = plan->units;
    const auto far = std::find_if(units.begin(), units.end(), is_far);
    const auto near = std::find_if_not(units.begin(), units.end(), is_far);
    if (far == units.end() || near == units.end()) return Internal("no such unit");
    const std::uint32_t waits = far->members.front().tensor;
    const std::uint32_t goes_on = near->members.front().tensor;
    stalled[client.rank()] = plan->tensors[waits].name;
    std::vector<float> values(kElements);
    if (client.rank() == 0) {
      const auto handle =
          client.PushPullAsync(ids.value()[waits], InputOf(values), OutputOf(values));
      if (!handle.ok()) return handle.status();
    }
    std::vector<float> others(kElements);
    const Clock::time_point until = Clock::now() + kPatience;
    while (Clock::now() < until) {
      GRADWIRE_RETURN_IF_ERROR(
          PushPull(client, ids.value()[goes_on], InputOf(others), OutputOf(others)));
      ++rounds[client.rank()];
    }
    return Internal("the job has not ended");
  });
  REQUIRE(!stalled[0].empty());
  REQUIRE(stalled[0] == stalled[1]);
  const std::vector<std::string> patterns = {
      R"(stalled for [0-9.]+ s \(timeouts.stall_stop\))",
      fmt::format(R"(tensor '{}' \(key [0-9]+\), step 0, round 0: open for [0-9.]+ s, )"
                  R"(ranks 0 are here, 1 missing)",
                  stalled[0]),
      "; missing: " + Named("worker 1")};
  for (const Status& status : outcomes) RequireOutcome(status, StatusCode::kTimeout, patterns);
  const std::vector<Status> servers = cluster.JoinServers();
  REQUIRE(servers.size() == 2);
  for (const Status& status : servers) RequireOutcome(status, StatusCode::kTimeout, patterns);
  for (const int count : rounds) REQUIRE(count > 0);
}

TEST_CASE("a declaration or a barrier that not all reach ends the job with both sides named",
          "[integration][contracts]") {
  const std::string call = GENERATE("declaration", "barrier", "barrier against declaration");
  CAPTURE(call);
  Config config = TestConfig(2);
  config.timeouts.stall_warn_ms = 200;
  config.timeouts.stall_stop_ms = 2500;
  Cluster cluster(config, TransportKind::kZmq);
  std::promise<void> first_is_done;
  std::shared_future<void> done = first_is_done.get_future().share();
  const std::vector<Status> outcomes = RunWorkers(cluster, [&](Client& client) -> Status {
    Status status = client.Barrier();
    if (client.rank() == 0) {
      if (status.ok()) {
        status = call == "declaration" ? DeclareMany(client, 1).status() : client.Barrier();
      }
      first_is_done.set_value();
      return status;
    }
    if (!status.ok()) return status;
    if (call == "barrier against declaration") return DeclareMany(client, 1).status();
    // It calls nothing until the job is over.
    if (done.wait_for(kPatience) != std::future_status::ready) return Internal("no end");
    return client.Barrier();
  });
  std::vector<std::string> patterns = {R"(stalled for [0-9.]+ s \(timeouts.stall_stop\))"};
  const std::string open = ": open for [0-9.]+ s, ranks ";
  if (call == "declaration") {
    patterns.push_back("declaration of tensors, batch 0" + open +
                       "0 are here, 1 missing; missing: " + Named("worker 1"));
  } else if (call == "barrier") {
    patterns.push_back("barrier 1" + open + "0 are here, 1 missing; missing: " + Named("worker 1"));
  } else {
    patterns.push_back("declaration of tensors, batch 0" + open + "1 are here, 0 missing");
    patterns.push_back("barrier 1" + open + "0 are here, 1 missing");
    patterns.push_back("; missing: " + Named("worker 0") + ", " + Named("worker 1"));
  }
  for (const Status& status : outcomes) RequireOutcome(status, StatusCode::kTimeout, patterns);
  RequireOutcome(cluster.JoinServers()[0], StatusCode::kTimeout, patterns);
}

// --- ranks that do not do the same --------------------------------------------------------------

TEST_CASE("workers that end different numbers of steps are told both", "[integration][contracts]") {
  Cluster cluster(TestConfig(2, 2), TransportKind::kZmq);
  const std::vector<Status> outcomes = RunWorkers(cluster, [](Client& client) -> Status {
    const auto ids = DeclareMany(client, 1);
    if (!ids.ok()) return ids.status();
    std::vector<float> values(kElements, 1.0F);
    GRADWIRE_RETURN_IF_ERROR(PushPull(client, ids.value()[0], InputOf(values), OutputOf(values)));
    for (std::uint32_t i = 0; i <= client.rank(); ++i) GRADWIRE_RETURN_IF_ERROR(client.EndStep());
    return PushPull(client, ids.value()[0], InputOf(values), OutputOf(values));
  });
  // Whoever comes first sets the round's step.
  const std::vector<std::string> patterns = {
      R"(tensor 't0' \(key 0\): (rank 1 pushes it in step 2, other ranks in step 1|)"
      R"(rank 0 pushes it in step 1, other ranks in step 2) \(round 1\))"};
  for (const Status& status : outcomes) {
    RequireOutcome(status, StatusCode::kInvalidArgument, patterns);
  }
  for (const Status& status : cluster.JoinServers()) {
    RequireOutcome(status, StatusCode::kInvalidArgument, patterns);
  }
}

TEST_CASE("a worker that takes fewer steps than the others is named with step and round",
          "[integration][contracts]") {
  Cluster cluster(TestConfig(2), TransportKind::kZmq);
  const std::vector<Status> outcomes = RunWorkers(cluster, [](Client& client) -> Status {
    const auto ids = DeclareMany(client, 1);
    if (!ids.ok()) return ids.status();
    std::vector<float> values(kElements, 1.0F);
    for (int step = 0; step < (client.rank() == 0 ? 5 : 3); ++step) {
      GRADWIRE_RETURN_IF_ERROR(PushPull(client, ids.value()[0], InputOf(values), OutputOf(values)));
      GRADWIRE_RETURN_IF_ERROR(client.EndStep());
    }
    return client.Close();
  });
  RequireOutcome(outcomes[1], StatusCode::kOk, {});
  const std::vector<std::string> patterns = {
      Named("worker 1") +
      R"( has left, and others wait for it: tensor 't0' \(key 0\), step 3, round 3)"};
  RequireOutcome(outcomes[0], StatusCode::kUnavailable, patterns);
  RequireOutcome(cluster.JoinServers()[0], StatusCode::kUnavailable, patterns);
}

TEST_CASE("a worker whose goodbye is acknowledged has done its part, whatever fails right after it",
          "[integration][contracts]") {
  Config config = TestConfig(1);
  config.endpoint = "inproc://root";
  for (int repeat = 0; repeat < 50; ++repeat) {
    const auto network = MakeInprocNetwork();
    ScriptedRoot root(*network, config);
    root.FailAtGoodbye();
    auto client = Client::Connect(config, 0, network->MakeLoop());
    RequireOutcome(client.status(), StatusCode::kOk, {});
    RequireOutcome((*client)->Close(), StatusCode::kOk, {});
  }
}

// --- ranks that are taken, and those that come too late -----------------------------------------

TEST_CASE("of two processes with one rank one is refused before the start, and the job goes on",
          "[integration][contracts]") {
  Cluster cluster(TestConfig(2), TransportKind::kZmq);
  const auto connect = [&](std::uint32_t rank) {
    return std::async(std::launch::async, [&, rank] { return cluster.ConnectWorker(rank); });
  };
  std::array<std::future<Result<std::unique_ptr<Client>>>, 2> twins = {connect(0), connect(0)};
  // Without rank 1 only a refusal can come back; which of the two it is nobody can know.
  const Clock::time_point until = Clock::now() + milliseconds(cluster.config().timeouts.start_ms);
  std::size_t refused = 2;
  while (refused == 2 && Clock::now() < until) {
    for (std::size_t i = 0; i < 2; ++i) {
      if (twins[i].wait_for(milliseconds(10)) == std::future_status::ready) refused = i;
    }
  }
  REQUIRE(refused < 2);
  const Status status = twins[refused].get().status();
  RequireOutcome(status, StatusCode::kInvalidArgument,
                 {Named("worker 0") + " is refused: " + Named("worker 0") +
                      " is already in the job in another incarnation",
                  "two processes were started with the same rank"});
  auto other = connect(1);
  auto first = twins[1 - refused].get();
  auto second = other.get();
  for (const auto* client : {&first, &second})
    RequireOutcome(client->status(), StatusCode::kOk, {});
  auto barrier = std::async(std::launch::async, [&] { return (*first)->Barrier(); });
  RequireOutcome((*second)->Barrier(), StatusCode::kOk, {});
  RequireOutcome(barrier.get(), StatusCode::kOk, {});
  for (const auto* client : {&first, &second})
    RequireOutcome((**client)->Close(), StatusCode::kOk, {});
  RequireOutcome(cluster.JoinServers()[0], StatusCode::kOk, {});
}

TEST_CASE("a second process with the rank of a running worker is refused, and the job goes on",
          "[integration][contracts]") {
  Cluster cluster(TestConfig(2), TransportKind::kZmq);
  Status refused;
  const std::vector<Status> outcomes = RunWorkers(cluster, [&](Client& client) -> Status {
    const auto ids = DeclareMany(client, 1);
    if (!ids.ok()) return ids.status();
    std::vector<float> values(kElements, 1.0F);
    for (int step = 0; step < 4; ++step) {
      GRADWIRE_RETURN_IF_ERROR(PushPull(client, ids.value()[0], InputOf(values), OutputOf(values)));
      // Of the other's rank, which waits in the next round meanwhile.
      if (step == 1 && client.rank() == 1) refused = cluster.ConnectWorker(0).status();
    }
    if (values[0] != 1.0F) return Internal(fmt::format("{} is no average", values[0]));
    return client.Close();
  });
  RequireOutcome(refused, StatusCode::kInvalidArgument,
                 {Named("worker 0") + " is already in the job in another incarnation",
                  "a restart inside a running job is not possible"});
  for (const Status& status : outcomes) RequireOutcome(status, StatusCode::kOk, {});
  RequireOutcome(cluster.JoinServers()[0], StatusCode::kOk, {});
}

TEST_CASE("everybody who is refused is told why, however many there are",
          "[integration][contracts]") {
  Cluster cluster(TestConfig(1), TransportKind::kInproc);
  constexpr int kStrangers = 1100;  // more than a lane remembers

  class Strangers final : public LoopHandler {
   public:
    std::unique_ptr<Loop> loop;
    std::atomic<int> told{0};

   private:
    void OnUp(PeerId peer) override {
      Header header;
      header.kind = MessageKind::kHello;
      Hello hello;
      hello.job_id = "another";
      hello.protocol_version = kProtocolVersion;
      hello.incarnation = 7;
      const std::vector<std::byte> body = Serialize(hello);
      const PooledBuffer buffer = pool_.Acquire(body.size());
      std::copy(body.begin(), body.end(), buffer.bytes().begin());
      (void)loop->Send(peer, header, buffer.Share(body.size()));
    }
    void OnMessage(PeerId, const Header& header, Payload payload) override {
      if (header.kind == MessageKind::kError &&
          AsText(payload.bytes).find("belongs to job 'another'") != std::string_view::npos) {
        ++told;
      }
    }
    BufferPool pool_;
  } strangers;
  strangers.loop = cluster.network().MakeLoop();
  REQUIRE(strangers.loop->Start(&strangers, "strangers").ok());
  strangers.loop->Post([&] {
    for (int i = 0; i < kStrangers; ++i) (void)strangers.loop->Connect("inproc://s0l0");
  });
  const Clock::time_point until = Clock::now() + kPatience;
  while (strangers.told < kStrangers && Clock::now() < until) {
    std::this_thread::sleep_for(milliseconds(5));
  }
  REQUIRE(strangers.told == kStrangers);
  strangers.loop->Stop();
  // The job has not noticed.
  const std::vector<Status> outcomes =
      RunWorkers(cluster, [](Client& client) { return client.Close(); });
  RequireOutcome(outcomes[0], StatusCode::kOk, {});
  RequireOutcome(cluster.JoinServers()[0], StatusCode::kOk, {});
}

TEST_CASE("who says hello after the job has failed is told why it has",
          "[integration][contracts]") {
  Config config = TestConfig(3);
  config.endpoint = "tcp://127.0.0.1:0";
  // Run ends a failed server soon; it is called when everybody has come.
  auto server = Server::Start(config, 0);
  REQUIRE(server.ok());
  config.endpoint = (*server)->address();
  Config other = config;
  other.job.seed = 4711;
  const std::vector<std::string> why = {"configurations differ: job.seed is 4711 on " +
                                        Named("worker 1") + ", 1 on the root"};
  RequireOutcome(Client::Connect(other, 1).status(), StatusCode::kInvalidArgument, why);
  {
    INFO("a worker that was missing");
    RequireOutcome(Client::Connect(config, 2).status(), StatusCode::kInvalidArgument, why);
  }
  {
    INFO("a second life of the one that has failed");
    RequireOutcome(Client::Connect(config, 1).status(), StatusCode::kInvalidArgument, why);
  }
  RequireOutcome((*server)->Run(), StatusCode::kInvalidArgument, why);
}

}  // namespace
}  // namespace gradwire::testing
