// The bytes a loop counts, against the bytes that cross a network card: two network namespaces
// joined by a pair of virtual cards, the server in one, the client in the other. Needs root and ip;
// says SKIPPED and returns 77 otherwise. Nothing it makes outlives it.

#include <sched.h>
#include <unistd.h>

#include <array>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

#include "tests/transport/loop_fixture.h"

namespace gradwire {
namespace {

constexpr int kSkipped = 77;

int Skip(const std::string& reason) {
  std::printf("SKIPPED: %s\n", reason.c_str());
  return kSkipped;
}

bool RunCommand(const std::string& command) {
  return std::system((command + " >/dev/null 2>&1").c_str()) == 0;  // NOLINT: fixed commands
}

/// A network namespace without a name: it lives in a thread of its own and goes with it, or with
/// the process, however that ends. What the thread starts, threads and programs, is in it as well.
class Namespace {
 public:
  Namespace() : thread_([this] { Serve(); }) {
    Run([this] {
      made_ = unshare(CLONE_NEWNET) == 0;
      tid_ = gettid();
    });
  }
  ~Namespace() {
    Run([this] { done_ = true; });
    thread_.join();
  }
  bool made() const { return made_; }
  pid_t tid() const { return tid_; }

  /// Runs `work` in the namespace and waits for its end.
  void Run(std::function<void()> work) {
    std::unique_lock lock(mu_);
    work_ = std::move(work);
    changed_.notify_all();
    changed_.wait(lock, [this] { return !work_; });
  }

 private:
  void Serve() {
    std::unique_lock lock(mu_);
    while (!done_) {
      changed_.wait(lock, [this] { return static_cast<bool>(work_); });
      work_();
      work_ = nullptr;
      changed_.notify_all();
    }
  }

  std::mutex mu_;
  std::condition_variable changed_;
  std::function<void()> work_;  // guarded by mu_
  bool done_ = false;           // this and the rest: written by the thread inside Run
  bool made_ = false;
  pid_t tid_ = 0;
  std::thread thread_;
};

/// Joins two namespaces by a pair of virtual cards, both called eth0.
bool Join(Namespace& a, Namespace& b) {
  if (!RunCommand("ip link add eth0 netns " + std::to_string(a.tid()) +
                  " type veth peer name eth0 netns " + std::to_string(b.tid()))) {
    return false;
  }
  bool up = true;
  a.Run([&up] {
    up = RunCommand("ip addr add 10.77.1.1/24 dev eth0") && RunCommand("ip link set eth0 up");
  });
  b.Run([&up] {
    up = up && RunCommand("ip addr add 10.77.1.2/24 dev eth0") && RunCommand("ip link set eth0 up");
  });
  return up;
}

struct CardBytes {
  std::uint64_t sent = 0;
  std::uint64_t received = 0;
};

/// What eth0 of the namespace has counted: Ethernet frames.
CardBytes ReadCard(Namespace& where) {
  CardBytes bytes;
  where.Run([&bytes] {
    std::ifstream file("/proc/thread-self/net/dev");
    std::string word;
    while (file >> word) {
      if (word != "eth0:") continue;
      // Eight columns of what was received, bytes first, then the same of what was sent.
      std::array<std::uint64_t, 9> columns{};
      for (std::uint64_t& column : columns) file >> column;
      bytes = {columns[8], columns[0]};
    }
  });
  return bytes;
}

int Main() {
  if (geteuid() != 0) return Skip("network namespaces need root");
  if (!RunCommand("ip -V")) return Skip("there is no ip command");
  Namespace server_side;
  Namespace client_side;
  if (!server_side.made() || !client_side.made() || !Join(server_side, client_side)) {
    return Skip("this system gives out no network namespaces");
  }

  Recorder at_server;
  Recorder at_client;
  OwnerCount owners;
  std::unique_ptr<Loop> server;
  std::unique_ptr<Loop> client;
  const ZmqLoopOptions options{.dead_after_ms = 0};  // no heartbeats beside what is counted
  std::string address;
  server_side.Run([&] {
    server = MakeZmqLoop(options);
    const auto listening = server->Listen("tcp://10.77.1.1:0");
    if (!listening.ok()) return;
    address = *listening;
    // Every push is answered with a third of its bytes.
    at_server.on_message = [&](PeerId from, const Header& header, const Payload& payload) {
      (void)server->Send(from, header, {payload.owner, payload.bytes.first(payload.size() / 3)});
    };
    (void)server->Start(&at_server, "server");
  });
  client_side.Run([&] {
    client = MakeZmqLoop(options);
    (void)client->Start(&at_client, "client");
  });
  if (address.empty()) {
    std::printf("FAILED: the loops did not start\n");
    return 1;
  }
  const PeerId peer = RunOn(*client, [&] { return client->Connect(address); }).value();
  if (!at_client.WaitForUps(1)) {
    std::printf("FAILED: no connection\n");
    return 1;
  }
  const CardBytes before = ReadCard(client_side);
  // 300 bytes: a frame whose length takes one byte or eight; 1 MiB: what a partition is.
  std::uint64_t messages = 0;
  for (int i = 0; i < 48; ++i) {
    for (const std::size_t size : {std::size_t{300}, std::size_t{90}, std::size_t{1} << 20}) {
      ++messages;
      const Status sent = RunOn(*client, [&] {
        return client->Send(peer, Link2::Numbered(messages),
                            CountedBlob::Make(&owners, size, messages));
      });
      if (!sent.ok()) {
        std::printf("FAILED: %s\n", sent.ToString().c_str());
        return 1;
      }
    }
  }
  if (!at_client.WaitForMessages(messages)) {
    std::printf("FAILED: answers are missing\n");
    return 1;
  }
  const CardBytes after = ReadCard(client_side);
  const TrafficCounters counted = client->traffic();
  client->Stop();
  server->Stop();

  int failures = 0;
  const auto compare = [&](const char* what, std::uint64_t loop, std::uint64_t card,
                           std::uint64_t other_way) {
    // The card also sees Ethernet, IP and TCP headers: 66 bytes with timestamps for each segment.
    // Segments carry 1448 bytes, or up to 64 KiB where the card takes segmentation over, and every
    // small message may be one of its own; each two segments of the other direction are
    // acknowledged with one of 66 bytes, at most.
    const std::uint64_t segments = loop / 1448 + 2 * messages + 100;
    const std::uint64_t acknowledgements = other_way / 1448 + 2 * messages + 100;
    const std::uint64_t most = loop + 66 * (segments + acknowledgements);
    const bool fits = card >= loop && card <= most;
    std::printf("%s: loop %llu, card %llu, at most %llu: %s\n", what,
                static_cast<unsigned long long>(loop), static_cast<unsigned long long>(card),
                static_cast<unsigned long long>(most), fits ? "ok" : "FAILED");
    failures += fits ? 0 : 1;
  };
  compare("sent", counted.sent_bytes, after.sent - before.sent, counted.received_bytes);
  compare("received", counted.received_bytes, after.received - before.received, counted.sent_bytes);
  return failures == 0 ? 0 : 1;
}

}  // namespace
}  // namespace gradwire

int main() { return gradwire::Main(); }
