// Connections that are cut in mid-round lose and double nothing; a worker that dies is named.

#include <fmt/format.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <regex>
#include <thread>

#include "common/base/random.h"
#include "tests/integration/cluster.h"
#include "tests/transport/tcp_proxy.h"

namespace gradwire::testing {
namespace {

constexpr std::size_t kElements = 100003;
constexpr int kRounds = 40;

struct Outcome {
  std::uint64_t digest = 0;
  std::uint64_t reconnects = 0;
  std::uint64_t resent = 0;
};

// "worker 1 at 127.0.0.1 (host n3, pid 42)": every message names a member with address and process.
std::string Named(const std::string& who, const std::string& rest) {
  return who + R"( at 127\.0\.0\.1 \(host [^ ]+, pid [0-9]+\))" + rest;
}

bool Matches(const std::string& text, const std::string& pattern) {
  return std::regex_search(text, std::regex(pattern));
}

// `disturb` runs before each of worker 0's rounds.
Outcome RunRounds(Cluster& cluster, const std::function<Config(std::uint32_t)>& config_of,
                  const std::function<void(int)>& disturb) {
  Outcome outcome;
  Failures failures;
  std::vector<std::thread> workers;
  std::array<std::uint64_t, 2> digests{};
  std::mutex mu;
  for (std::uint32_t rank = 0; rank < 2; ++rank) {
    workers.emplace_back([&, rank] {
      auto client = cluster.ConnectWorker(rank, config_of(rank));
      if (!failures.Ok(client.status(), "connect")) return;
      const std::vector<TensorDeclaration> batch = {Tensor("a", kElements), Tensor("b", 70001)};
      const auto ids = (*client)->Declare(batch);
      if (!failures.Ok(ids.status(), "declare")) return;
      std::vector<std::vector<float>> values = {std::vector<float>(kElements),
                                                std::vector<float>(70001)};
      for (int round = 0; round < kRounds; ++round) {
        if (rank == 0) disturb(round);
        std::vector<Handle> handles;
        for (std::size_t t = 0; t < 2; ++t) {
          CounterRng rng(
              HashCombine(HashCombine(TestSeed() + rank, t), static_cast<std::uint64_t>(round)));
          for (float& value : values[t]) value = static_cast<float>(rng.NextUniform()) - 0.5F;
          const auto handle =
              (*client)->PushPullAsync(ids.value()[t], InputOf(values[t]), OutputOf(values[t]));
          if (failures.Ok(handle.status(), "push")) handles.push_back(*handle);
        }
        for (const Handle& handle : handles) failures.Ok((*client)->Wait(handle), "wait");
        for (const auto& tensor : values) {
          for (const float value : tensor) {
            digests[rank] = HashCombine(digests[rank], std::bit_cast<std::uint32_t>(value));
          }
        }
      }
      {
        const std::lock_guard lock(mu);
        outcome.reconnects += (*client)->stats().reconnects;
        outcome.resent += (*client)->stats().resent_pushes;
      }
      failures.Ok((*client)->Close(), "close");
    });
  }
  for (std::thread& worker : workers) worker.join();
  const std::string text = failures.Take();
  INFO(text);
  REQUIRE(text.empty());
  REQUIRE(digests[0] == digests[1]);
  outcome.digest = digests[0];
  return outcome;
}

TEST_CASE("TCP connections cut in mid-round lose nothing and double nothing",
          "[integration][faults]") {
  const std::string spec = GENERATE("none", "onebit", "topk(ratio=0.01)");
  CAPTURE(spec);
  Config config = TestConfig(2);
  SetCompressor(config, spec);
  Outcome quiet;
  {
    Cluster cluster(config, TransportKind::kZmq);
    quiet = RunRounds(
        cluster, [&](std::uint32_t) { return cluster.config(); }, [](int) {});
  }
  Cluster cluster(config, TransportKind::kZmq);
  TcpProxy proxy(PortOf(cluster.RootAddress()));
  const auto through_proxy = [&](std::uint32_t) {
    Config through = cluster.config();
    through.endpoint = proxy.address();
    return through;
  };
  CounterRng rng(TestSeed());
  // Cuts after a random number of bytes: within a header, a payload, between messages.
  const std::uint64_t round_bytes = spec == "none" ? 2 * 170004 * 4 : 15000;
  const Outcome disturbed = RunRounds(cluster, through_proxy, [&](int round) {
    if (round % 4 == 1) proxy.CutAfterBytes(1 + rng.NextBelow(round_bytes), /*restore=*/true);
    if (round % 8 == 3) {
      proxy.CutNow();
      std::this_thread::sleep_for(std::chrono::milliseconds(30));
      proxy.Restore();
    }
  });
  REQUIRE(disturbed.reconnects >= 5);
  REQUIRE(disturbed.digest == quiet.digest);
  for (const Status& status : cluster.JoinServers()) REQUIRE(status.ok());
}

TEST_CASE("a connection that stalls for less than dead_after loses nothing and doubles nothing",
          "[integration][faults]") {
  Config config = TestConfig(2);  // gives nobody up within 10 s
  SetCompressor(config, "onebit");
  Outcome quiet;
  {
    Cluster cluster(config, TransportKind::kZmq);
    quiet = RunRounds(
        cluster, [&](std::uint32_t) { return cluster.config(); }, [](int) {});
  }
  Cluster cluster(config, TransportKind::kZmq);
  TcpProxy proxy(PortOf(cluster.RootAddress()));
  constexpr int kStallMs = 1500;
  std::chrono::steady_clock::duration stalled{};
  std::chrono::steady_clock::time_point begin;
  const Outcome disturbed = RunRounds(
      cluster,
      [&](std::uint32_t rank) {
        Config through = cluster.config();
        if (rank == 0) through.endpoint = proxy.address();
        return through;
      },
      [&](int round) {
        // No round of worker 0 ends before its stall does.
        if (round == 10 || round == 20) {
          begin = std::chrono::steady_clock::now();
          proxy.StallFor(kStallMs);
        }
        if (round == 11 || round == 21) stalled += std::chrono::steady_clock::now() - begin;
      });
  REQUIRE(stalled >= std::chrono::milliseconds(2 * kStallMs));
  REQUIRE(disturbed.digest == quiet.digest);
  for (const Status& status : cluster.JoinServers()) {
    INFO(status.ToString());
    REQUIRE(status.ok());
  }
}

TEST_CASE("any single message may be lost", "[integration][faults]") {
  // Of each kind, in each direction, on the in-process network, where one message can be chosen.
  const auto kind = GENERATE(MessageKind::kPush, MessageKind::kReply, MessageKind::kReceipt,
                             MessageKind::kDeclare, MessageKind::kPlan);
  CAPTURE(std::string(MessageKindName(kind)));
  Config config = TestConfig(2);
  SetCompressor(config, "onebit");
  Outcome quiet;
  {
    Cluster cluster(config, TransportKind::kInproc);
    quiet = RunRounds(
        cluster, [&](std::uint32_t) { return cluster.config(); }, [](int) {});
  }
  Cluster cluster(config, TransportKind::kInproc);
  const bool at_start = kind == MessageKind::kDeclare || kind == MessageKind::kPlan;
  const auto lose = [&] {
    cluster.network().CutAt("inproc://s0l0",
                            [kind](const Header& header) { return header.kind == kind; });
  };
  if (at_start) lose();
  const Outcome disturbed = RunRounds(
      cluster, [&](std::uint32_t) { return cluster.config(); },
      [&](int round) {
        if (!at_start && round % 3 == 0) lose();
      });
  REQUIRE(disturbed.reconnects >= 1);
  REQUIRE(disturbed.digest == quiet.digest);
}

TEST_CASE("a worker that vanishes is named to the others within the deadline",
          "[integration][faults]") {
  const auto kind = GENERATE(TransportKind::kInproc, TransportKind::kZmq);
  CAPTURE(ToString(kind));
  Config config = TestConfig(2);
  config.timeouts.dead_after_ms = 400;
  Cluster cluster(config, kind);
  // Worker 1's way to the server goes dead without a word.
  std::unique_ptr<TcpProxy> proxy;
  Config theirs = cluster.config();
  if (kind == TransportKind::kZmq) {
    proxy = std::make_unique<TcpProxy>(PortOf(cluster.RootAddress()));
    theirs.endpoint = proxy->address();
  }
  Status outcome;
  Failures failures;
  std::atomic<bool> ready{false};
  std::thread survivor([&] {
    auto client = cluster.ConnectWorker(0);
    if (!failures.Ok(client.status(), "connect")) return;
    const TensorDeclaration tensor = Tensor("weight", 5000);
    const auto ids = (*client)->Declare(std::span(&tensor, 1));
    if (!failures.Ok(ids.status(), "declare")) return;
    std::vector<float> values(5000, 1.0F);
    ready = true;
    outcome = PushPull(**client, ids.value()[0], InputOf(values), OutputOf(values));
  });
  std::thread victim([&] {
    auto client = cluster.ConnectWorker(1, theirs);
    if (!failures.Ok(client.status(), "connect")) return;
    const TensorDeclaration tensor = Tensor("weight", 5000);
    if (!failures.Ok((*client)->Declare(std::span(&tensor, 1)).status(), "declare")) return;
    while (!ready) std::this_thread::yield();
    if (proxy != nullptr) {
      proxy->CutNow();
    } else {
      // The in-process network cuts everybody: both workers are lost, either may be named.
      cluster.network().Cut("inproc://s0l0");
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1500));
  });
  survivor.join();
  victim.join();
  REQUIRE(failures.Take().empty());
  INFO(outcome.ToString());
  REQUIRE(outcome.code() == StatusCode::kUnavailable);
  if (kind == TransportKind::kZmq) {
    REQUIRE(Matches(
        outcome.message(),
        Named("worker 1", R"( is lost: nothing heard for [0-9.]+ s and its connection is down)")));
  }
  const std::vector<Status> servers = cluster.JoinServers();
  REQUIRE(servers[0].message().find("is lost") != std::string::npos);
}

TEST_CASE("a server that comes back to the root is not taken for lost", "[integration][faults]") {
  Config config = TestConfig(1, 2);
  config.timeouts.dead_after_ms = 500;
  config.endpoint = "tcp://127.0.0.1:0";
  auto root = Server::Start(config, 0);
  REQUIRE(root.ok());
  config.endpoint = (*root)->address();
  TcpProxy proxy(PortOf(config.endpoint));
  Config through = config;
  through.endpoint = proxy.address();
  auto other = Server::Start(through, 1);
  REQUIRE(other.ok());
  std::array<Status, 2> outcomes;
  std::thread root_thread([&] { outcomes[0] = (*root)->Run(); });
  std::thread other_thread([&] { outcomes[1] = (*other)->Run(); });
  Status pushed;
  {
    auto client = Client::Connect(config, 0);
    if (client.ok()) {
      const TensorDeclaration tensor = Tensor("weight", 50000);
      const auto ids = (*client)->Declare(std::span(&tensor, 1));
      std::vector<float> values(50000, 1.0F);
      for (int i = 0; i < 30 && ids.ok() && pushed.ok(); ++i) {
        pushed = PushPull(**client, ids.value()[0], InputOf(values), OutputOf(values));
        if (i == 5) {
          proxy.CutNow();
          proxy.Restore();
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
      }
      if (!ids.ok()) pushed = ids.status();
    } else {
      pushed = client.status();
    }
  }
  root_thread.join();
  other_thread.join();
  REQUIRE(proxy.accepted() >= 2);
  for (const Status& status : {pushed, outcomes[0], outcomes[1]}) {
    INFO(status.ToString());
    REQUIRE(status.ok());
  }
}

TEST_CASE("a worker that leaves while others wait for it is named at once",
          "[integration][faults]") {
  const std::string call = GENERATE("push-pull", "declare", "barrier");
  CAPTURE(call);
  Cluster cluster(TestConfig(2), TransportKind::kZmq);
  Failures failures;
  Status outcome;
  std::vector<std::thread> workers;
  for (std::uint32_t rank = 0; rank < 2; ++rank) {
    workers.emplace_back([&, rank] {
      auto client = cluster.ConnectWorker(rank);
      if (!failures.Ok(client.status(), "connect")) return;
      const TensorDeclaration tensor = Tensor("weight", 5000);
      const auto ids = (*client)->Declare(std::span(&tensor, 1));
      if (!failures.Ok(ids.status(), "declare") || rank == 1) return;  // 1 says goodbye
      std::vector<float> values(5000, 1.0F);
      const TensorDeclaration more = Tensor("more", 10);
      if (call == "push-pull") {
        outcome = PushPull(**client, ids.value()[0], InputOf(values), OutputOf(values));
      } else if (call == "declare") {
        outcome = (*client)->Declare(std::span(&more, 1)).status();
      } else {
        outcome = (*client)->Barrier();
      }
    });
  }
  for (std::thread& worker : workers) worker.join();
  REQUIRE(failures.Take().empty());
  INFO(outcome.ToString());
  REQUIRE(outcome.code() == StatusCode::kUnavailable);
  REQUIRE(Matches(outcome.message(), Named("worker 1", " has left, and others wait for it: ")));
  if (call == "push-pull") {
    REQUIRE(Matches(outcome.message(), R"(tensor 'weight' \(key 0\), step 0, round 0)"));
  }
}

TEST_CASE("a worker's own error reaches the others with its words", "[integration][faults]") {
  Cluster cluster(TestConfig(2), TransportKind::kZmq);
  Failures failures;
  std::array<Status, 2> outcomes;
  std::vector<std::thread> workers;
  for (std::uint32_t rank = 0; rank < 2; ++rank) {
    workers.emplace_back([&, rank] {
      auto client = cluster.ConnectWorker(rank);
      if (!failures.Ok(client.status(), "connect")) return;
      std::vector<std::byte> data(100);
      failures.Ok((*client)->Broadcast("state", data, 0), "broadcast");
      if (rank == 1) data.resize(99);
      outcomes[rank] = (*client)->Broadcast("state", data, 0);
    });
  }
  for (std::thread& worker : workers) worker.join();
  REQUIRE(failures.Take().empty());
  const std::string words = "'state' is 99 bytes on rank 1, it was 100 before";
  for (const Status& status : outcomes) {
    INFO(status.ToString());
    REQUIRE(status.message().find(words) != std::string::npos);
  }
  REQUIRE(Matches(outcomes[0].message(), Named("worker 1", ": broadcast ") + words));
}

TEST_CASE("closing completes the handles that nobody has waited for", "[integration][faults]") {
  Cluster cluster(TestConfig(2), TransportKind::kZmq);
  Failures failures;
  std::vector<std::thread> workers;
  for (std::uint32_t rank = 0; rank < 2; ++rank) {
    workers.emplace_back([&, rank] {
      auto client = cluster.ConnectWorker(rank);
      if (!failures.Ok(client.status(), "connect")) return;
      const TensorDeclaration tensor = Tensor("weight", 5000);
      const auto ids = (*client)->Declare(std::span(&tensor, 1));
      if (!failures.Ok(ids.status(), "declare")) return;
      failures.Ok((*client)->Barrier(), "barrier");
      if (rank == 1) {
        std::this_thread::sleep_for(std::chrono::milliseconds(300));
        return;
      }
      std::vector<float> values(5000, 1.0F);
      const auto handle =
          (*client)->PushPullAsync(ids.value()[0], InputOf(values), OutputOf(values));
      failures.Ok(handle.status(), "push");
      (void)(*client)->Close();
      failures.Expect((*client)->Poll(*handle), "completed");
      failures.Expect(!(*client)->Wait(*handle).ok(), "with an error");
    });
  }
  for (std::thread& worker : workers) worker.join();
  const std::string text = failures.Take();
  INFO(text);
  REQUIRE(text.empty());
}

TEST_CASE("a second life of a worker is refused by name", "[integration][faults]") {
  Cluster cluster(TestConfig(1), TransportKind::kZmq);
  cluster.Run([&](Client&) {
    const auto again = cluster.ConnectWorker(0);
    if (again.ok() || again.status().message().find("another incarnation") == std::string::npos) {
      throw std::runtime_error("not refused: " + again.status().ToString());
    }
  });
}

}  // namespace
}  // namespace gradwire::testing
