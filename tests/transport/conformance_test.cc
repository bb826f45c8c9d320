// One suite for every transport: what Loop promises.

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

#include "tests/catch.h"
#include "tests/transport/loop_fixture.h"

namespace gradwire {
namespace {

constexpr std::size_t kMiB = std::size_t{1} << 20;

TEST_CASE("messages arrive whole, once and in order, whatever their size",
          "[transport][conformance]") {
  const auto fabric = MakeFabric(GENERATE(as<std::string>{}, "zmq", "inproc"));
  Link2 link(*fabric);
  OwnerCount owners;
  // Around the sizes where the framing, ZeroMQ's own storage or ours changes.
  const std::vector<std::size_t> sizes = {0,
                                          1,
                                          32,
                                          33,
                                          34,
                                          255,
                                          256,
                                          4097,
                                          8191,
                                          8192,
                                          65535,
                                          kZeroCopyBytes,
                                          kZeroCopyBytes + 1,
                                          kMiB,
                                          8 * kMiB,
                                          3};
  // The server sends everything back.
  link.at_server.on_message = [&](PeerId from, const Header& header, const Payload& payload) {
    (void)link.server->Send(from, header, payload);
  };
  REQUIRE(link.Start());
  int owned = 0;
  std::uint64_t number = 0;
  for (int round = 0; round < 3; ++round) {
    for (const std::size_t size : sizes) {
      ++number;
      Payload payload;
      if (size > 0) {
        // An odd address now and then.
        payload = CountedBlob::Make(&owners, size, number, static_cast<std::size_t>(round));
        ++owned;
      }
      REQUIRE(link.Send(number, std::move(payload)).ok());
    }
  }
  REQUIRE(link.at_server.WaitForMessages(number));
  REQUIRE(link.at_client.WaitForMessages(number));
  for (Recorder* recorder : {&link.at_server, &link.at_client}) {
    const auto messages = recorder->messages();
    REQUIRE(messages.size() == number);
    for (std::size_t i = 0; i < messages.size(); ++i) {
      CAPTURE(i);
      REQUIRE(messages[i].header == Link2::Numbered(i + 1));
      REQUIRE(messages[i].size == sizes[i % sizes.size()]);
      REQUIRE(messages[i].intact);
      REQUIRE(messages[i].from == messages[0].from);
    }
  }
  REQUIRE(owners.Wait(owned));
  const TrafficCounters sent = link.client->traffic();
  const TrafficCounters received = link.server->traffic();
  REQUIRE(sent.sent_messages == number);
  REQUIRE(received.received_messages == number);
  REQUIRE(sent.sent_bytes == received.received_bytes);
  REQUIRE(received.sent_bytes == sent.received_bytes);
  REQUIRE(received.refused_messages == 0);
}

TEST_CASE("a received payload may be kept beyond its loop", "[transport][conformance]") {
  const auto fabric = MakeFabric(GENERATE(as<std::string>{}, "zmq", "inproc"));
  const std::size_t size = GENERATE(std::size_t{5}, std::size_t{5000}, std::size_t{2} * 1048576);
  OwnerCount owners;
  std::mutex mu;
  std::vector<Payload> kept;
  {
    Link2 link(*fabric);
    link.at_server.on_message = [&](PeerId, const Header&, const Payload& payload) {
      const std::lock_guard lock(mu);
      kept.push_back(payload);
    };
    REQUIRE(link.Start());
    for (std::uint64_t i = 1; i <= 8; ++i) {
      REQUIRE(link.Send(i, CountedBlob::Make(&owners, size, i)).ok());
    }
    REQUIRE(link.at_server.WaitForMessages(8));
    link.server->Stop();
    link.client->Stop();
  }
  const std::lock_guard lock(mu);
  REQUIRE(kept.size() == 8);
  for (std::size_t i = 0; i < kept.size(); ++i) {
    REQUIRE(kept[i].size() == size);
    REQUIRE(CountedBlob::IsIntact(kept[i].bytes, i + 1));
  }
  kept.clear();
  REQUIRE(owners.Wait(8));
}

TEST_CASE("Stop releases what was not sent", "[transport][conformance]") {
  const auto fabric = MakeFabric(GENERATE(as<std::string>{}, "zmq", "inproc"));
  OwnerCount owners;
  Link2 link(*fabric);
  std::promise<void> release;
  std::shared_future<void> released = release.get_future().share();
  // A server that reads nothing more.
  link.at_server.on_message = [released](PeerId, const Header&, const Payload&) {
    released.wait();
  };
  REQUIRE(link.Start());
  constexpr int kMessages = 64;
  REQUIRE(link.Send(1, {}).ok());
  for (std::uint64_t i = 2; i <= kMessages + 1; ++i) {
    REQUIRE(link.Send(i, CountedBlob::Make(&owners, kMiB, i)).ok());
  }
  link.client->Stop();
  // Not "soon": when Stop has returned the caller may free its memory.
  REQUIRE(owners.released.load() == kMessages);
  release.set_value();
}

TEST_CASE("Stop with time to linger lets everything leave", "[transport][conformance]") {
  const auto fabric = MakeFabric(GENERATE(as<std::string>{}, "zmq", "inproc"));
  OwnerCount owners;
  Link2 link(*fabric);
  REQUIRE(link.Start());
  constexpr int kMessages = 48;
  for (std::uint64_t i = 1; i <= kMessages; ++i) {
    REQUIRE(link.Send(i, CountedBlob::Make(&owners, kMiB, i)).ok());
  }
  link.client->Stop(60000);
  REQUIRE(link.at_server.WaitForMessages(kMessages));
  REQUIRE(owners.Wait(kMessages));
}

TEST_CASE("a message for nobody is refused and its owner released", "[transport][conformance]") {
  const auto fabric = MakeFabric(GENERATE(as<std::string>{}, "zmq", "inproc"));
  OwnerCount owners;
  Link2 link(*fabric);
  REQUIRE(link.Start());
  // 0 is nobody, 77 was never connected, the last is no listening peer.
  for (const PeerId nobody : {PeerId{0}, PeerId{77}, (PeerId{1} << 63) | 12345}) {
    for (Loop* loop : {link.server.get(), link.client.get()}) {
      for (const std::size_t size : {std::size_t{10}, kMiB}) {
        const int before = owners.released.load();
        const Status status = RunOn(*loop, [&] {
          return loop->Send(nobody, Link2::Numbered(1), CountedBlob::Make(&owners, size, 1));
        });
        REQUIRE(status.code() == StatusCode::kUnavailable);
        REQUIRE(status.message().find("Push") != std::string::npos);
        REQUIRE(owners.released.load() == before + 1);
      }
    }
  }
}

TEST_CASE("a cut is told, the connection comes back, and nothing arrives late",
          "[transport][conformance]") {
  const auto fabric = MakeFabric(GENERATE(as<std::string>{}, "zmq", "inproc"));
  OwnerCount owners;
  Link2 link(*fabric);
  link.at_server.on_message = [&](PeerId from, const Header& header, const Payload&) {
    (void)link.server->Send(from, header, {});
  };
  REQUIRE(link.Start());
  std::uint64_t number = 0;
  int owned = 0;
  std::uint64_t last_before_cut = 0;
  // Every connection carries at least one message.
  REQUIRE(link.Send(++number, {}).ok());
  REQUIRE(link.at_client.WaitForMessages(1));
  for (std::size_t cut = 1; cut <= 4; ++cut) {
    // In full flow: some of it arrives, a suffix is lost.
    for (int i = 0; i < 32; ++i) {
      ++number;
      REQUIRE(link.Send(number, CountedBlob::Make(&owners, kMiB / 2, number)).ok());
      ++owned;
    }
    fabric->Cut(link.route);
    // What is sent into the cut is lost or refused, never late.
    for (int i = 0; i < 8; ++i) {
      ++number;
      (void)link.Send(number, CountedBlob::Make(&owners, kMiB / 2, number));
      ++owned;
    }
    REQUIRE(link.at_client.WaitForDowns(cut));
    ++number;
    const Status status = link.Send(number, CountedBlob::Make(&owners, 8, number));
    ++owned;
    REQUIRE(status.code() == StatusCode::kUnavailable);
    last_before_cut = number;
    fabric->Restore(link.route);
    REQUIRE(link.at_client.WaitForUps(cut + 1));
    ++number;
    REQUIRE(link.Send(number, CountedBlob::Make(&owners, 8, number)).ok());
    ++owned;
    // The first answer after the cut answers the first message after it.
    const std::uint64_t expected = number;
    for (std::size_t seen = 0;;) {
      REQUIRE(link.at_client.WaitForMessages(seen + 1));
      const auto messages = link.at_client.messages();
      seen = messages.size();
      REQUIRE(messages.back().header.key <= expected);
      if (messages.back().header.key == expected) break;
    }
  }
  REQUIRE(last_before_cut < number);
  // The server: a new peer after each cut; per peer in order without a gap, whole.
  const auto messages = link.at_server.messages();
  std::map<PeerId, std::uint64_t> last;
  for (const Recorder::Message& message : messages) {
    REQUIRE(message.intact);
    const auto [entry, is_new] = last.try_emplace(message.from, message.header.key);
    if (!is_new) {
      REQUIRE(message.header.key == entry->second + 1);
      entry->second = message.header.key;
    }
  }
  REQUIRE(last.size() == 5);
  // The client: answers in order, none twice.
  std::uint64_t previous = 0;
  for (const Recorder::Message& message : link.at_client.messages()) {
    REQUIRE(message.header.key > previous);
    previous = message.header.key;
  }
  REQUIRE(owners.Wait(owned));
}

TEST_CASE("a listening side learns of a gone peer when it sends", "[transport][conformance]") {
  const auto fabric = MakeFabric(GENERATE(as<std::string>{}, "zmq", "inproc"));
  OwnerCount owners;
  Link2 link(*fabric);
  REQUIRE(link.Start());
  REQUIRE(link.Send(1, {}).ok());
  REQUIRE(link.at_server.WaitForMessages(1));
  const PeerId gone = link.at_server.messages()[0].from;
  fabric->Cut(link.route);
  int sent = 0;
  Status status;
  const auto until = std::chrono::steady_clock::now() + kPatience;
  while (status.ok() && std::chrono::steady_clock::now() < until) {
    status = RunOn(*link.server, [&] {
      return link.server->Send(gone, Link2::Numbered(1), CountedBlob::Make(&owners, kMiB, 1));
    });
    ++sent;
  }
  REQUIRE(status.code() == StatusCode::kUnavailable);
  REQUIRE(owners.Wait(sent));
}

TEST_CASE("what a peer said last is heard before it is down", "[transport][conformance]") {
  const auto fabric = MakeFabric(GENERATE(as<std::string>{}, "zmq", "inproc"));
  Link2 link(*fabric);
  std::vector<std::uint64_t> heard;  // client's thread
  std::promise<std::vector<std::uint64_t>> at_down;
  link.at_client.on_message = [&](PeerId, const Header& header, const Payload&) {
    heard.push_back(header.key);
  };
  link.at_client.on_down = [&](PeerId) { at_down.set_value(heard); };
  link.at_server.on_message = [&](PeerId from, const Header&, const Payload&) {
    for (std::uint64_t i = 1; i <= 100; ++i) {
      (void)link.server->Send(from, Link2::Numbered(i), {});
    }
  };
  REQUIRE(link.Start());
  REQUIRE(link.Send(1, {}).ok());
  REQUIRE(link.at_server.WaitForMessages(1));
  RunOn(*link.server, [] {});  // the answers are queued
  link.server->Stop(60000);
  auto heard_at_down = at_down.get_future();
  REQUIRE(heard_at_down.wait_for(kPatience) == std::future_status::ready);
  REQUIRE(heard_at_down.get().size() == 100);
}

TEST_CASE("a connection may be made before anybody listens", "[transport][conformance]") {
  const auto fabric = MakeFabric(GENERATE(as<std::string>{}, "zmq", "inproc"));
  std::string address;
  {
    const auto loop = fabric->MakeLoop();
    address = loop->Listen(fabric->FreshAddress()).value();
  }
  Recorder at_client;
  Recorder at_server;
  const auto client = fabric->MakeLoop();
  REQUIRE(client->Start(&at_client, "client").ok());
  const PeerId peer = RunOn(*client, [&] { return client->Connect(address); }).value();
  const Status early = RunOn(*client, [&] { return client->Send(peer, Link2::Numbered(1), {}); });
  REQUIRE(early.code() == StatusCode::kUnavailable);
  const auto server = fabric->MakeLoop();
  REQUIRE(server->Listen(address).value() == address);
  REQUIRE(server->Start(&at_server, "server").ok());
  REQUIRE(at_client.WaitForUps(1));
  REQUIRE(RunOn(*client, [&] { return client->Send(peer, Link2::Numbered(2), {}); }).ok());
  REQUIRE(at_server.WaitForMessages(1));
  REQUIRE(at_server.messages()[0].header.key == 2);
  client->Stop();
  server->Stop();
}

TEST_CASE("a server that is replaced is found again", "[transport][conformance]") {
  const auto fabric = MakeFabric(GENERATE(as<std::string>{}, "zmq", "inproc"));
  Recorder at_client;
  std::string address = fabric->FreshAddress();
  const auto client = fabric->MakeLoop();
  REQUIRE(client->Start(&at_client, "client").ok());
  PeerId peer = 0;
  // Many times: the client notices the end of one server while the next one begins.
  for (std::uint64_t life = 1; life <= 20; ++life) {
    Recorder at_server;
    const auto server = fabric->MakeLoop();
    address = server->Listen(address).value();
    REQUIRE(server->Start(&at_server, "server").ok());
    if (life == 1) peer = RunOn(*client, [&] { return client->Connect(address); }).value();
    REQUIRE(at_client.WaitForUps(life));
    const Status sent =
        RunOn(*client, [&] { return client->Send(peer, Link2::Numbered(life), {}); });
    REQUIRE(sent.ok());
    REQUIRE(at_server.WaitForMessages(1));
    REQUIRE(at_server.messages()[0].header.key == life);
    server->Stop();
    REQUIRE(at_client.WaitForDowns(life));
  }
  client->Stop();
}

TEST_CASE("an address that is taken is refused by name", "[transport][conformance]") {
  const auto fabric = MakeFabric(GENERATE(as<std::string>{}, "zmq", "inproc"));
  const auto first = fabric->MakeLoop();
  const auto second = fabric->MakeLoop();
  const std::string address = first->Listen(fabric->FreshAddress()).value();
  const Status status = second->Listen(address).status();
  REQUIRE(status.code() == StatusCode::kUnavailable);
  REQUIRE(status.message() == "cannot listen on " + address + ": Address already in use");
}

TEST_CASE("an address that can't be one is refused", "[transport][conformance]") {
  const std::string name = GENERATE(as<std::string>{}, "zmq", "inproc");
  const auto fabric = MakeFabric(name);
  const auto loop = fabric->MakeLoop();
  Recorder recorder;
  REQUIRE(loop->Listen("smoke://signals").status().code() == StatusCode::kInvalidArgument);
  REQUIRE(loop->Start(&recorder, "loop").ok());
  for (const std::string bad :
       {"", "smoke://signals", "tcp://", "tcp://host", "tcp://host:", "tcp://host:0",
        "tcp://host:65536", "tcp://host:12x", "tcp://:12", "ipc://", "inproc://"}) {
    CAPTURE(bad);
    const Status status = RunOn(*loop, [&] { return loop->Connect(bad); }).status();
    REQUIRE(status.code() == StatusCode::kInvalidArgument);
    REQUIRE(status.message().find("'" + bad + "'") != std::string::npos);
  }
  loop->Stop();
}

TEST_CASE("Disconnect ends a connection for good", "[transport][conformance]") {
  const auto fabric = MakeFabric(GENERATE(as<std::string>{}, "zmq", "inproc"));
  OwnerCount owners;
  Link2 link(*fabric);
  SECTION("between messages") {
    REQUIRE(link.Start());
    RunOn(*link.client, [&] { link.client->Disconnect(link.peer); });
  }
  SECTION("inside its own callback") {
    link.at_client.on_up = [&](PeerId peer) { link.client->Disconnect(peer); };
    REQUIRE(link.Start());
  }
  SECTION("inside a message of many") {
    link.at_server.on_message = [&](PeerId from, const Header& header, const Payload&) {
      for (int i = 0; i < 100; ++i) (void)link.server->Send(from, header, {});
    };
    link.at_client.on_message = [&](PeerId from, const Header&, const Payload&) {
      link.client->Disconnect(from);
    };
    REQUIRE(link.Start());
    REQUIRE(link.Send(1, {}).ok());
    REQUIRE(link.at_client.WaitForMessages(1));
  }
  SECTION("while it is down") {
    REQUIRE(link.Start());
    fabric->Cut(link.route);
    REQUIRE(link.at_client.WaitForDowns(1));
    RunOn(*link.client, [&] { link.client->Disconnect(link.peer); });
    fabric->Restore(link.route);
  }
  const std::size_t ups = link.at_client.ups();
  const std::size_t messages = link.at_client.messages().size();
  const Status status = link.Send(2, CountedBlob::Make(&owners, kMiB, 2));
  REQUIRE(status.code() == StatusCode::kUnavailable);
  REQUIRE(owners.released.load() == 1);
  // A new connection of the same loop works, and the old one stays silent.
  link.at_client.on_up = nullptr;
  const PeerId old = link.peer;
  const PeerId other =
      RunOn(*link.client, [&] { return link.client->Connect(link.route); }).value();
  REQUIRE(other != old);
  REQUIRE(link.at_client.WaitForUps(ups + 1));
  REQUIRE(
      RunOn(*link.client, [&] { return link.client->Send(other, Link2::Numbered(3), {}); }).ok());
  RunOn(*link.client, [&] { link.client->Disconnect(old); });
  REQUIRE(link.at_client.messages().size() >= messages);
  link.client->Stop();
  REQUIRE(link.at_client.ups() == ups + 1);
}

TEST_CASE("tasks posted from many threads run in each thread's order", "[transport][conformance]") {
  const auto fabric = MakeFabric(GENERATE(as<std::string>{}, "zmq", "inproc"));
  const auto loop = fabric->MakeLoop();
  Recorder recorder;
  constexpr int kThreads = 4;
  constexpr int kTasks = 5000;
  std::array<int, kThreads> next{};  // the loop's thread
  bool in_order = true;              // the loop's thread
  std::vector<std::thread> threads;
  std::thread::id loop_thread;
  const auto post_all = [&](std::size_t t) {
    for (int i = 0; i < kTasks; ++i) {
      loop->Post([&, t, i] {
        in_order = in_order && next[t] == i && std::this_thread::get_id() == loop_thread;
        ++next[t];
      });
    }
  };
  loop->Post([&] { loop_thread = std::this_thread::get_id(); });  // before Start: it waits
  REQUIRE(loop->Start(&recorder, "loop").ok());
  for (std::size_t t = 0; t < kThreads; ++t) threads.emplace_back(post_all, t);
  for (std::thread& thread : threads) thread.join();
  loop->Stop();  // runs what was posted before it
  REQUIRE(in_order);
  for (const int count : next) REQUIRE(count == kTasks);
  // Posted after Stop: dropped, together with what it holds.
  OwnerCount owners;
  std::atomic<bool> ran{false};
  loop->Post([&ran, payload = CountedBlob::Make(&owners, 1, 1)] { ran = true; });
  REQUIRE(!ran.load());
  REQUIRE(owners.released.load() == 1);
}

TEST_CASE("delayed tasks run in the order of their times", "[transport][conformance]") {
  const auto fabric = MakeFabric(GENERATE(as<std::string>{}, "zmq", "inproc"));
  const auto loop = fabric->MakeLoop();
  Recorder recorder;
  REQUIRE(loop->Start(&recorder, "loop").ok());
  std::vector<int> order;
  std::promise<void> done;
  const auto begin = std::chrono::steady_clock::now();
  std::chrono::steady_clock::time_point end;
  RunOn(*loop, [&] {
    loop->PostAfter(60, [&] {
      order.push_back(3);
      end = std::chrono::steady_clock::now();
      done.set_value();
    });
    loop->PostAfter(0, [&] { order.push_back(0); });
    loop->PostAfter(30, [&] { order.push_back(1); });
    loop->PostAfter(30, [&] {
      order.push_back(2);
      loop->PostAfter(-5, [] {});
    });
  });
  REQUIRE(done.get_future().wait_for(kPatience) == std::future_status::ready);
  // Never too early; how late is the machine's affair.
  REQUIRE(end - begin >= std::chrono::milliseconds(60));
  // What is not due when the loop stops is dropped with what it holds.
  OwnerCount owners;
  std::atomic<bool> ran{false};
  RunOn(*loop, [&] {
    loop->PostAfter(3600 * 1000,
                    [&ran, payload = CountedBlob::Make(&owners, 1, 1)] { ran = true; });
  });
  loop->Stop();
  REQUIRE(!ran.load());
  REQUIRE(order == std::vector<int>{0, 1, 2, 3});
  REQUIRE(owners.released.load() == 1);
}

TEST_CASE("idleness is told after every burst and not before its end", "[transport][conformance]") {
  const auto fabric = MakeFabric(GENERATE(as<std::string>{}, "zmq", "inproc"));
  Link2 link(*fabric);
  // Receipts as the server gives them: batched, flushed when nothing waits. If idleness were not
  // told after a message, the client would wait for ever.
  std::uint64_t last = 0;
  PeerId from = 0;
  link.at_server.on_message = [&](PeerId peer, const Header& header, const Payload&) {
    from = peer;
    last = header.key;
  };
  link.at_server.on_idle = [&] {
    if (last == 0) return;
    (void)link.server->Send(from, Link2::Numbered(last), {});
    last = 0;
  };
  REQUIRE(link.Start());
  std::uint64_t number = 0;
  for (int burst = 0; burst < 50; ++burst) {
    REQUIRE(link.SendEmpty(number + 1, number + 100).ok());
    number += 100;
    for (std::size_t seen = link.at_client.messages().size();;) {
      const auto messages = link.at_client.messages();
      seen = messages.size();
      if (seen > 0 && messages.back().header.key == number) break;
      REQUIRE(link.at_client.WaitForMessages(seen + 1));
    }
  }
  // An idle loop sleeps: it isn't told again and again.
  const std::size_t idles = link.at_server.idles();
  REQUIRE(idles <= 2 * number + 100);
}

TEST_CASE("many connections of one loop keep apart", "[transport][conformance]") {
  const auto fabric = MakeFabric(GENERATE(as<std::string>{}, "zmq", "inproc"));
  constexpr std::size_t kServers = 5;
  std::array<Recorder, kServers> at_server;
  std::vector<std::unique_ptr<Loop>> servers;
  std::vector<std::string> addresses;
  for (std::size_t s = 0; s < kServers; ++s) {
    servers.push_back(fabric->MakeLoop());
    addresses.push_back(servers[s]->Listen(fabric->FreshAddress()).value());
    at_server[s].on_message = [s, loop = servers[s].get()](PeerId from, const Header& header,
                                                           const Payload&) {
      Header answer = header;
      answer.rank = static_cast<std::uint32_t>(s);
      (void)loop->Send(from, answer, {});
    };
    REQUIRE(servers[s]->Start(&at_server[s], "server").ok());
  }
  Recorder at_client;
  const auto client = fabric->MakeLoop();
  REQUIRE(client->Start(&at_client, "client").ok());
  std::vector<PeerId> peers;
  for (const std::string& address : addresses) {
    peers.push_back(RunOn(*client, [&] { return client->Connect(address); }).value());
  }
  REQUIRE(at_client.WaitForUps(kServers));
  const Status sent = RunOn(*client, [&]() -> Status {
    for (std::uint64_t i = 1; i <= 500; ++i) {
      GRADWIRE_RETURN_IF_ERROR(client->Send(peers[i % kServers], Link2::Numbered(i), {}));
    }
    return Status::Ok();
  });
  REQUIRE(sent.ok());
  REQUIRE(at_client.WaitForMessages(500));
  std::map<PeerId, std::uint64_t> last;
  for (const Recorder::Message& message : at_client.messages()) {
    REQUIRE(message.header.rank == message.header.key % kServers);
    REQUIRE(message.from == peers[message.header.rank]);
    REQUIRE(message.header.key > last[message.from]);
    last[message.from] = message.header.key;
  }
  client->Stop();
  for (auto& server : servers) server->Stop();
}

TEST_CASE("Stop in full flow from both sides ends cleanly", "[transport][conformance]") {
  const auto fabric = MakeFabric(GENERATE(as<std::string>{}, "zmq", "inproc"));
  for (int repeat = 0; repeat < 5; ++repeat) {
    OwnerCount owners;
    std::atomic<int> made{0};
    {
      Link2 link(*fabric);
      link.at_server.on_message = [&](PeerId from, const Header& header, const Payload& payload) {
        (void)link.server->Send(from, header, payload);
      };
      // The client keeps a window full for ever.
      link.at_client.on_message = [&](PeerId from, const Header& header, const Payload&) {
        ++made;
        (void)link.client->Send(from, header, CountedBlob::Make(&owners, 100000, header.key));
      };
      REQUIRE(link.Start());
      for (std::uint64_t i = 1; i <= 8; ++i) {
        ++made;
        REQUIRE(link.Send(i, CountedBlob::Make(&owners, 100000, i)).ok());
      }
      REQUIRE(link.at_client.WaitForMessages(50));
      std::thread other([&] { link.server->Stop(repeat % 2 == 0 ? 0 : 50); });
      link.client->Stop(repeat % 3 == 0 ? 0 : 50);
      link.client->Stop();  // twice is once
      other.join();
    }
    REQUIRE(owners.Wait(made.load()));
  }
}

TEST_CASE("a loop that was never started can be destroyed", "[transport][conformance]") {
  const auto fabric = MakeFabric(GENERATE(as<std::string>{}, "zmq", "inproc"));
  OwnerCount owners;
  {
    const auto loop = fabric->MakeLoop();
    REQUIRE(loop->Listen(fabric->FreshAddress()).ok());
    loop->Post([payload = CountedBlob::Make(&owners, 1, 1)] {});
  }
  REQUIRE(owners.released.load() == 1);
}

}  // namespace
}  // namespace gradwire
