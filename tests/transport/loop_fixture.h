#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "common/base/blob.h"
#include "common/transport/inproc_loop.h"
#include "common/transport/zmq_loop.h"
#include "tests/transport/tcp_proxy.h"

namespace gradwire {

/// Long enough for the slowest machine; a test that waits so long has failed.
inline constexpr std::chrono::seconds kPatience{60};

/// Counts how often owners were released.
struct OwnerCount {
  std::atomic<int> released{0};
  /// True once `expected` were.
  bool Wait(int expected) const {
    const auto until = std::chrono::steady_clock::now() + kPatience;
    int seen = released.load();
    while (seen < expected) {
      if (std::chrono::steady_clock::now() > until) return false;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      seen = released.load();
    }
    return seen == expected;
  }
};

/// A payload whose owner reports its end. `skew` shifts the bytes to an odd address, say.
class CountedBlob final : public Blob {
 public:
  static Payload Make(OwnerCount* count, std::size_t size, std::uint64_t seed,
                      std::size_t skew = 0) {
    auto* blob = new CountedBlob(count, size + skew);
    Payload payload{BlobRef(blob), ByteView(blob->bytes_).subspan(skew)};
    for (std::size_t i = 0; i < size; ++i) blob->bytes_[skew + i] = ByteAt(seed, i);
    return payload;
  }
  static std::byte ByteAt(std::uint64_t seed, std::size_t i) {
    return static_cast<std::byte>((seed * 131 + i * 7 + (i >> 8)) & 0xff);
  }
  static bool IsIntact(ByteView bytes, std::uint64_t seed) {
    for (std::size_t i = 0; i < bytes.size(); ++i) {
      if (bytes[i] != ByteAt(seed, i)) return false;
    }
    return true;
  }

 private:
  CountedBlob(OwnerCount* count, std::size_t size) : count_(count), bytes_(size) {}
  void Recycle() noexcept override {
    OwnerCount* count = count_;
    delete this;
    count->released.fetch_add(1);
  }
  OwnerCount* const count_;
  std::vector<std::byte> bytes_;
};

/// Writes down what a loop tells, for the test's thread to wait for.
class Recorder final : public LoopHandler {
 public:
  struct Message {
    PeerId from;
    Header header;
    std::size_t size;
    bool intact;  // the bytes are those of seed header.key
  };

  /// Runs on the loop's thread after the message was written down.
  std::function<void(PeerId, const Header&, const Payload&)> on_message;
  std::function<void(PeerId)> on_up;
  std::function<void(PeerId)> on_down;
  std::function<void()> on_idle;

  void OnMessage(PeerId from, const Header& header, Payload payload) override {
    {
      const std::lock_guard lock(mu_);
      messages_.push_back(
          {from, header, payload.size(), CountedBlob::IsIntact(payload.bytes, header.key)});
    }
    changed_.notify_all();
    if (on_message) on_message(from, header, payload);
  }
  void OnUp(PeerId peer) override {
    Note([&] { log_.push_back({'u', peer}); });
    if (on_up) on_up(peer);
  }
  void OnDown(PeerId peer) override {
    Note([&] { log_.push_back({'d', peer}); });
    if (on_down) on_down(peer);
  }
  void OnIdle() override {
    Note([&] { ++idles_; });
    if (on_idle) on_idle();
  }

  bool WaitForMessages(std::size_t count) {
    return Wait([&] { return messages_.size() >= count; });
  }
  bool WaitForUps(std::size_t count) {
    return Wait([&] { return Count('u') >= count; });
  }
  bool WaitForDowns(std::size_t count) {
    return Wait([&] { return Count('d') >= count; });
  }
  bool WaitForIdles(std::size_t count) {
    return Wait([&] { return idles_ >= count; });
  }
  std::vector<Message> messages() {
    const std::lock_guard lock(mu_);
    return messages_;
  }
  std::size_t ups() {
    const std::lock_guard lock(mu_);
    return Count('u');
  }
  std::size_t downs() {
    const std::lock_guard lock(mu_);
    return Count('d');
  }
  std::size_t idles() {
    const std::lock_guard lock(mu_);
    return idles_;
  }

 private:
  template <typename Change>
  void Note(Change change) {
    {
      const std::lock_guard lock(mu_);
      change();
    }
    changed_.notify_all();
  }
  template <typename Predicate>
  bool Wait(Predicate predicate) {
    std::unique_lock lock(mu_);
    return changed_.wait_for(lock, kPatience, predicate);
  }
  std::size_t Count(char what) const {
    std::size_t n = 0;
    for (const auto& [kind, peer] : log_) n += kind == what ? 1 : 0;
    return n;
  }

  std::mutex mu_;
  std::condition_variable changed_;
  std::vector<Message> messages_;
  std::vector<std::pair<char, PeerId>> log_;
  std::size_t idles_ = 0;
};

/// Runs `work` on the loop's thread and returns what it returns.
template <typename Work>
auto RunOn(Loop& loop, Work work) -> decltype(work()) {
  using Value = decltype(work());
  const auto done = std::make_shared<std::promise<Value>>();
  std::future<Value> value = done->get_future();
  loop.Post([done, work]() mutable {
    if constexpr (std::is_void_v<Value>) {
      work();
      done->set_value();
    } else {
      done->set_value(work());
    }
  });
  if (value.wait_for(kPatience) != std::future_status::ready) {
    throw std::runtime_error("the loop did not run a posted task");
  }
  return value.get();
}

/// A kind of transport, with a way to break its connections.
class Fabric {
 public:
  virtual ~Fabric() = default;
  virtual std::unique_ptr<Loop> MakeLoop() = 0;
  /// An address to listen on that nobody uses.
  virtual std::string FreshAddress() = 0;
  /// Where to connect to reach a listener, so that Cut breaks it.
  virtual std::string Route(const std::string& listening) { return listening; }
  virtual void Cut(const std::string& route) = 0;
  virtual void Restore(const std::string& route) = 0;
};

class ZmqFabric final : public Fabric {
 public:
  explicit ZmqFabric(ZmqLoopOptions options = {}) : options_(options) {}
  std::unique_ptr<Loop> MakeLoop() override { return MakeZmqLoop(options_); }
  std::string FreshAddress() override { return "tcp://127.0.0.1:0"; }
  std::string Route(const std::string& listening) override {
    auto proxy = std::make_unique<TcpProxy>(PortOf(listening));
    const std::string address = proxy->address();
    proxies_[address] = std::move(proxy);
    return address;
  }
  void Cut(const std::string& route) override { proxies_.at(route)->CutNow(); }
  void Restore(const std::string& route) override { proxies_.at(route)->Restore(); }
  TcpProxy& proxy(const std::string& route) { return *proxies_.at(route); }

 private:
  const ZmqLoopOptions options_;
  std::map<std::string, std::unique_ptr<TcpProxy>> proxies_;
};

class InprocFabric final : public Fabric {
 public:
  std::unique_ptr<Loop> MakeLoop() override { return network_->MakeLoop(); }
  std::string FreshAddress() override { return "inproc://" + std::to_string(next_++); }
  void Cut(const std::string& route) override { network_->Cut(route); }
  void Restore(const std::string& route) override { network_->Restore(route); }
  InprocNetwork& network() { return *network_; }

 private:
  const std::unique_ptr<InprocNetwork> network_ = MakeInprocNetwork();
  int next_ = 0;
};

inline std::unique_ptr<Fabric> MakeFabric(const std::string& name) {
  if (name == "zmq") return std::make_unique<ZmqFabric>();
  return std::make_unique<InprocFabric>();
}

/// A loop that listens and one that is connected to it.
struct Link2 {
  explicit Link2(Fabric& fabric)
      : server(fabric.MakeLoop()),
        client(fabric.MakeLoop()),
        listening(server->Listen(fabric.FreshAddress()).value()),
        route(fabric.Route(listening)) {}

  /// After the handlers' callbacks have been set.
  bool Start() {
    if (!server->Start(&at_server, "server").ok()) return false;
    if (!client->Start(&at_client, "client").ok()) return false;
    peer = RunOn(*client, [this] { return client->Connect(route); }).value();
    return at_client.WaitForUps(1);
  }

  /// Sends from the client a message that tells its number and its payload's seed.
  Status Send(std::uint64_t number, Payload payload) {
    return RunOn(*client, [&] { return client->Send(peer, Numbered(number), std::move(payload)); });
  }
  /// Sends messages without payload, the numbers first to last.
  Status SendEmpty(std::uint64_t first, std::uint64_t last) {
    return RunOn(*client, [this, first, last]() -> Status {
      for (std::uint64_t number = first; number <= last; ++number) {
        GRADWIRE_RETURN_IF_ERROR(client->Send(peer, Numbered(number), {}));
      }
      return Status::Ok();
    });
  }
  static Header Numbered(std::uint64_t number) {
    Header header;
    header.kind = MessageKind::kPush;
    header.key = number;
    header.sequence = number;
    return header;
  }

  // Handlers outlive their loops.
  Recorder at_server;
  Recorder at_client;
  std::unique_ptr<Loop> server;
  std::unique_ptr<Loop> client;
  std::string listening;
  std::string route;
  PeerId peer = 0;
};

}  // namespace gradwire
