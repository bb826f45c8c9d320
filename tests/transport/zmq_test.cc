// What only the loop over ZeroMQ has to stand: strangers, damage, silence, real sockets.

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>
#include <zmq.h>

#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "common/base/random.h"
#include "common/transport/address.h"
#include "tests/catch.h"
#include "tests/transport/loop_fixture.h"

namespace gradwire {
namespace {

constexpr std::size_t kMiB = std::size_t{1} << 20;

/// A DEALER of ZeroMQ's own, that says what it likes.
class Stranger {
 public:
  explicit Stranger(const std::string& address, std::string_view routing_id = {})
      : context_(zmq_ctx_new()), socket_(zmq_socket(context_, ZMQ_DEALER)) {
    const int linger = 10000;
    zmq_setsockopt(socket_, ZMQ_LINGER, &linger, sizeof(linger));
    if (!routing_id.empty()) {
      zmq_setsockopt(socket_, ZMQ_ROUTING_ID, routing_id.data(), routing_id.size());
    }
    zmq_connect(socket_, address.c_str());
  }
  ~Stranger() {
    zmq_close(socket_);
    zmq_ctx_term(context_);
  }
  void Say(const std::vector<std::vector<std::byte>>& frames) {
    for (std::size_t i = 0; i < frames.size(); ++i) {
      zmq_send(socket_, frames[i].data(), frames[i].size(),
               i + 1 < frames.size() ? ZMQ_SNDMORE : 0);
    }
  }

 private:
  void* const context_;
  void* const socket_;
};

/// A plain TCP connection to a port of 127.0.0.1.
class RawConnection {
 public:
  explicit RawConnection(std::uint16_t port) : fd_(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    address.sin_port = htons(port);
    connected_ = connect(fd_, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0;
    const timeval patience{30, 0};
    setsockopt(fd_, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
  }
  ~RawConnection() { close(fd_); }
  bool connected() const { return connected_; }
  void Say(ByteView bytes) { (void)!send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL); }
  /// Reads so many bytes; false if they don't come.
  bool Read(std::size_t count) {
    std::vector<std::byte> bytes(count);
    return recv(fd_, bytes.data(), count, MSG_WAITALL) == static_cast<ssize_t>(count);
  }
  /// Reads until the other side closes (true) or says nothing for 30 s.
  bool WaitForEnd() {
    std::vector<std::byte> bytes(4096);
    for (;;) {
      const ssize_t got = recv(fd_, bytes.data(), bytes.size(), 0);
      if (got == 0 || (got == -1 && errno == ECONNRESET)) return true;
      if (got == -1) return false;
    }
  }

 private:
  const int fd_;
  bool connected_ = false;
};

std::vector<std::byte> Text(std::string_view text) {
  const ByteView bytes = AsBytes(text);
  return {bytes.begin(), bytes.end()};
}

std::vector<std::byte> HeaderFrame(std::uint64_t number) {
  const HeaderBytes bytes = SerializeHeader(Link2::Numbered(number));
  return {bytes.view().begin(), bytes.view().end()};
}

bool WaitForRefusals(const Loop& loop, std::uint64_t count) {
  const auto until = std::chrono::steady_clock::now() + kPatience;
  while (loop.traffic().refused_messages < count) {
    if (std::chrono::steady_clock::now() > until) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return loop.traffic().refused_messages == count;
}

TEST_CASE("what is not a message is refused, counted, and harms nobody", "[transport][zmq]") {
  ZmqFabric fabric;
  Link2 link(fabric);
  REQUIRE(link.Start());
  Stranger stranger(link.listening);
  std::vector<std::byte> other_version = HeaderFrame(1);
  REQUIRE(other_version[0] == std::byte{1 << 3});  // field 1, the protocol version
  other_version[1] = std::byte{2};
  const std::vector<std::vector<std::vector<std::byte>>> bad = {
      {Text("hello")},                                          // no protobuf
      {{}},                                                     // an empty header
      {std::vector<std::byte>(kMaxHeaderBytes + 1)},            // too long
      {std::vector<std::byte>(kMiB)},                           // much too long
      {other_version},                                          // another protocol
      {HeaderFrame(1), {}},                                     // an empty payload frame
      {HeaderFrame(1), Text("payload"), Text("and more")},      // three frames
      {HeaderFrame(1), Text("a"), Text("b"), {}, Text("c")},    // five
      {Text("hello"), std::vector<std::byte>(kMiB), Text("x")}  // everything at once
  };
  std::uint64_t refused = 0;
  for (const auto& frames : bad) {
    CAPTURE(refused);
    stranger.Say(frames);
    REQUIRE(WaitForRefusals(*link.server, ++refused));
    // The same stranger may say something right the next moment.
    stranger.Say({HeaderFrame(refused), Text("x")});
    REQUIRE(link.at_server.WaitForMessages(refused));
  }
  REQUIRE(link.at_server.messages().size() == bad.size());
  REQUIRE(link.Send(1000, {}).ok());
  REQUIRE(link.at_server.WaitForMessages(bad.size() + 1));
  REQUIRE(link.at_server.messages().back().header.key == 1000);
}

TEST_CASE("a peer that chooses its routing id is refused", "[transport][zmq]") {
  ZmqFabric fabric;
  Link2 link(fabric);
  REQUIRE(link.Start());
  {
    Stranger stranger(link.listening, "me");
    stranger.Say({HeaderFrame(1)});
    REQUIRE(WaitForRefusals(*link.server, 1));
  }
  REQUIRE(link.Send(2, {}).ok());
  REQUIRE(link.at_server.WaitForMessages(1));
  REQUIRE(link.at_server.messages()[0].header.key == 2);
}

TEST_CASE("random headers from a stranger never harm a loop", "[transport][zmq][fuzz]") {
  const char* text = std::getenv("GRADWIRE_TEST_SEED");
  const std::uint64_t seed = text != nullptr ? std::strtoull(text, nullptr, 0) : RandomId();
  std::printf("GRADWIRE_TEST_SEED=%llu\n", static_cast<unsigned long long>(seed));
  CAPTURE(seed);
  CounterRng rng(seed);
  ZmqFabric fabric;
  Link2 link(fabric);
  REQUIRE(link.Start());
  Stranger stranger(link.listening);
  constexpr std::uint64_t kMessages = 2000;
  for (std::uint64_t i = 0; i < kMessages; ++i) {
    std::vector<std::vector<std::byte>> frames(1 + rng.NextBelow(3));
    for (auto& frame : frames) {
      frame = HeaderFrame(rng.Next());
      frame[rng.NextBelow(frame.size())] = static_cast<std::byte>(rng.NextBelow(256));
    }
    stranger.Say(frames);
  }
  const auto until = std::chrono::steady_clock::now() + kPatience;
  std::uint64_t seen = 0;
  while (seen < kMessages && std::chrono::steady_clock::now() < until) {
    const TrafficCounters traffic = link.server->traffic();
    seen = traffic.refused_messages + traffic.received_messages;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  REQUIRE(seen == kMessages);
  REQUIRE(link.server->traffic().refused_messages > 0);
}

TEST_CASE("other protocols on the port harm nobody", "[transport][zmq]") {
  ZmqFabric fabric;
  Link2 link(fabric);
  REQUIRE(link.Start());
  const std::uint16_t port = PortOf(link.listening);
  std::vector<std::byte> zmtp = Text(std::string_view("\xff\0\0\0\0\0\0\0\1\x7f\3", 11));
  std::vector<std::byte> wrong_mechanism = zmtp;
  wrong_mechanism.resize(64);
  std::memcpy(wrong_mechanism.data() + 12, "GSSAPI", 6);
  std::vector<std::byte> bad_command = zmtp;
  bad_command.resize(64);
  std::memcpy(bad_command.data() + 12, "NULL", 4);
  for (const std::byte b : Text(std::string_view("\4\3xyz", 5))) bad_command.push_back(b);
  CounterRng rng(1);
  std::vector<std::byte> noise(100000);
  for (std::byte& b : noise) b = static_cast<std::byte>(rng.NextBelow(256));
  const std::vector<std::vector<std::byte>> strange = {
      Text("GET / HTTP/1.1\r\nHost: localhost\r\nUser-Agent: curl/7.88\r\n\r\n"),
      Text("\x16\x03\x01\x02\x01\x01\xfc\x03\x03"),
      Text("SSH-2.0-OpenSSH_9.2\r\n"),
      noise,
      zmtp,
      wrong_mechanism,
      bad_command,
      {}};
  {
    std::vector<std::unique_ptr<RawConnection>> connections;
    for (const auto& bytes : strange) {
      connections.push_back(std::make_unique<RawConnection>(port));
      REQUIRE(connections.back()->connected());
      connections.back()->Say(bytes);
    }
    // While they are open, and after they went.
    REQUIRE(link.Send(1, {}).ok());
    REQUIRE(link.at_server.WaitForMessages(1));
    // These two break ZeroMQ's handshake: they are counted and closed.
    REQUIRE(connections[5]->WaitForEnd());
    REQUIRE(connections[6]->WaitForEnd());
  }
  REQUIRE(link.Send(2, {}).ok());
  REQUIRE(link.at_server.WaitForMessages(2));
  const auto until = std::chrono::steady_clock::now() + kPatience;
  while (link.server->traffic().refused_messages < 2 && std::chrono::steady_clock::now() < until) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  REQUIRE(link.server->traffic().refused_messages >= 2);
  for (const Recorder::Message& message : link.at_server.messages()) REQUIRE(message.intact);
  REQUIRE(link.at_server.messages().size() == 2);
}

TEST_CASE("a connection to what does not speak ZeroMQ is tried again", "[transport][zmq]") {
  // A listener that accepts and answers in HTTP.
  const int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  REQUIRE(bind(listener, reinterpret_cast<const sockaddr*>(&address), size) == 0);
  REQUIRE(listen(listener, 8) == 0);
  REQUIRE(getsockname(listener, reinterpret_cast<sockaddr*>(&address), &size) == 0);
  const timeval patience{30, 0};
  setsockopt(listener, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
  Recorder recorder;
  const auto loop = MakeZmqLoop({});
  REQUIRE(loop->Start(&recorder, "client").ok());
  const std::string target = "tcp://127.0.0.1:" + std::to_string(ntohs(address.sin_port));
  REQUIRE(RunOn(*loop, [&] { return loop->Connect(target); }).ok());
  for (int attempt = 0; attempt < 3; ++attempt) {
    const int accepted = accept(listener, nullptr, nullptr);
    REQUIRE(accepted != -1);
    const std::string_view answer = "HTTP/1.1 400 Bad Request\r\n\r\n";
    REQUIRE(send(accepted, answer.data(), answer.size(), MSG_NOSIGNAL) > 0);
    close(accepted);
  }
  loop->Stop();
  close(listener);
  REQUIRE(recorder.ups() == 0);
  REQUIRE(recorder.downs() == 0);
}

TEST_CASE("a frame beyond the limit ends its connection, not the loop", "[transport][zmq]") {
  ZmqLoopOptions options;
  options.max_message_bytes = kMiB;
  ZmqFabric fabric(options);
  Link2 link(fabric);
  OwnerCount owners;
  REQUIRE(link.Start());
  REQUIRE(link.Send(1, CountedBlob::Make(&owners, kMiB, 1)).ok());
  REQUIRE(link.at_server.WaitForMessages(1));
  REQUIRE(link.Send(2, CountedBlob::Make(&owners, kMiB + 1, 2)).ok());
  REQUIRE(link.at_client.WaitForDowns(1));
  REQUIRE(link.at_client.WaitForUps(2));
  REQUIRE(link.Send(3, CountedBlob::Make(&owners, kMiB, 3)).ok());
  REQUIRE(link.at_server.WaitForMessages(2));
  REQUIRE(link.at_server.messages()[1].header.key == 3);
  REQUIRE(link.at_server.messages()[1].intact);
  REQUIRE(owners.Wait(3));
}

TEST_CASE("a cut in the middle of a message leaves no part of it", "[transport][zmq]") {
  ZmqFabric fabric;
  Link2 link(fabric);
  OwnerCount owners;
  REQUIRE(link.Start());
  int owned = 0;
  for (std::uint64_t cut = 1; cut <= 5; ++cut) {
    REQUIRE(link.Send(2 * cut, {}).ok());
    fabric.proxy(link.route).CutAfterBytes(cut * 300001, /*restore=*/true);
    REQUIRE(link.Send(2 * cut + 1, CountedBlob::Make(&owners, 4 * kMiB, 2 * cut + 1)).ok());
    ++owned;
    REQUIRE(link.at_client.WaitForDowns(cut));
    REQUIRE(link.at_client.WaitForUps(cut + 1));
  }
  REQUIRE(link.Send(100, {}).ok());
  for (std::size_t seen = 0; seen == 0 || link.at_server.messages().back().header.key != 100;) {
    REQUIRE(link.at_server.WaitForMessages(seen + 1));
    seen = link.at_server.messages().size();
  }
  for (const Recorder::Message& message : link.at_server.messages()) {
    REQUIRE(message.header.key % 2 == 0);
    REQUIRE(message.size == 0);
  }
  REQUIRE(owners.Wait(owned));
}

/// How long until the connecting side is told of a silence, and until a Send of the listening side
/// fails. `stall` makes the silence.
struct SilenceNoticed {
  std::chrono::milliseconds connecting{-1};
  std::chrono::milliseconds listening{-1};
};

SilenceNoticed WatchSilence(Link2& link, PeerId from, const std::function<void()>& stall) {
  const auto begin = std::chrono::steady_clock::now();
  const auto since = [begin] {
    return std::chrono::ceil<std::chrono::milliseconds>(std::chrono::steady_clock::now() - begin);
  };
  stall();
  SilenceNoticed noticed;
  while (since() < kPatience && (noticed.connecting.count() < 0 || noticed.listening.count() < 0)) {
    if (noticed.connecting.count() < 0 && link.at_client.downs() > 0) noticed.connecting = since();
    if (noticed.listening.count() < 0 && !RunOn(*link.server, [&] {
                                            return link.server->Send(from, Link2::Numbered(1), {});
                                          }).ok()) {
      noticed.listening = since();
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return noticed;
}

TEST_CASE("a silent peer is taken for lost by both sides", "[transport][zmq]") {
  ZmqLoopOptions options;
  options.dead_after_ms = GENERATE(200, 1000);
  CAPTURE(options.dead_after_ms);
  ZmqFabric fabric(options);
  Link2 link(fabric);
  REQUIRE(link.Start());
  REQUIRE(link.Send(1, {}).ok());
  REQUIRE(link.at_server.WaitForMessages(1));
  const PeerId from = link.at_server.messages()[0].from;
  // Nothing is closed; bytes just stop, as with a pulled cable or a stopped process.
  const SilenceNoticed noticed =
      WatchSilence(link, from, [&] { fabric.proxy(link.route).StallFor(3600 * 1000); });
  REQUIRE(noticed.connecting.count() >= 0);
  REQUIRE(noticed.listening.count() >= 0);
  // 0.75 of dead_after on a machine with nothing else to do; a busy one gets some more, but the
  // deadlines of others, such as keepalive's minute, would still be seen.
  const auto most = std::chrono::milliseconds(options.dead_after_ms * 3 / 4 + 5000);
  REQUIRE(noticed.connecting < most);
  REQUIRE(noticed.listening < most);
  // Not at once either: one late packet is no silence.
  REQUIRE(noticed.connecting.count() >= options.dead_after_ms / 4);
  REQUIRE(noticed.listening.count() >= options.dead_after_ms / 4);
  fabric.proxy(link.route).StallFor(0);
  REQUIRE(link.at_client.WaitForUps(2));
}

TEST_CASE("a loop that is busy for long is not taken for lost", "[transport][zmq]") {
  ZmqLoopOptions options;
  options.dead_after_ms = 1000;
  ZmqFabric fabric(options);
  Link2 link(fabric);
  REQUIRE(link.Start());
  REQUIRE(link.Send(1, {}).ok());
  REQUIRE(link.at_server.WaitForMessages(1));
  const PeerId from = link.at_server.messages()[0].from;
  // ZeroMQ's own threads answer meanwhile.
  for (Loop* busy : {link.server.get(), link.client.get()}) {
    RunOn(*busy, [&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(3 * options.dead_after_ms));
    });
  }
  REQUIRE(link.Send(2, {}).ok());
  REQUIRE(link.at_server.WaitForMessages(2));
  REQUIRE(link.at_server.messages()[1].from == from);
  REQUIRE(
      RunOn(*link.server, [&] { return link.server->Send(from, Link2::Numbered(3), {}); }).ok());
  REQUIRE(link.at_client.WaitForMessages(1));
  REQUIRE(link.at_client.downs() == 0);
}

TEST_CASE("an idle connection is not taken for lost", "[transport][zmq]") {
  ZmqLoopOptions options;
  options.dead_after_ms = 2400;
  ZmqFabric fabric(options);
  Link2 link(fabric);
  REQUIRE(link.Start());
  // Nothing but ZeroMQ's heartbeats, every 600 ms, for longer than dead_after: a PING is 9 bytes
  // and so is the PONG that answers the other side's.
  const TcpProxy& proxy = fabric.proxy(link.route);
  const std::uint64_t enough = proxy.forwarded_to_target() + 12 * 9;
  const auto begin = std::chrono::steady_clock::now();
  const auto until = begin + kPatience;
  while (proxy.forwarded_to_target() < enough && std::chrono::steady_clock::now() < until) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  REQUIRE(proxy.forwarded_to_target() >= enough);
  REQUIRE(std::chrono::steady_clock::now() - begin >
          std::chrono::milliseconds(options.dead_after_ms));
  REQUIRE(link.at_client.downs() == 0);
  REQUIRE(link.client->traffic().sent_messages == 0);
}

TEST_CASE("a message knows the address it came from", "[transport][zmq]") {
  std::string sender = "never asked";
  {
    ZmqFabric fabric;
    Link2 link(fabric);
    link.at_server.on_message = [&](PeerId, const Header&, const Payload&) {
      sender = link.server->SenderAddress();
    };
    OwnerCount owners;
    REQUIRE(link.Start());
    REQUIRE(link.Send(1, CountedBlob::Make(&owners, kMiB, 1)).ok());
    REQUIRE(link.at_server.WaitForMessages(1));
    link.server->Stop();
  }
  REQUIRE(sender == "127.0.0.1");
  {
    InprocFabric fabric;
    Link2 link(fabric);
    link.at_server.on_message = [&](PeerId, const Header&, const Payload&) {
      sender = link.server->SenderAddress();
    };
    REQUIRE(link.Start());
    REQUIRE(link.Send(1, {}).ok());
    REQUIRE(link.at_server.WaitForMessages(1));
    link.server->Stop();
  }
  REQUIRE(sender.empty());
}

/// Waits until a counter has reached a value.
bool WaitForStrangers(const Loop& loop, std::uint64_t StrangerCounters::*kind,
                      std::uint64_t count) {
  const auto until = std::chrono::steady_clock::now() + kPatience;
  while (loop.traffic().strangers.*kind < count) {
    if (std::chrono::steady_clock::now() > until) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

/// ZMTP 3.0's greeting with the mechanism NULL, and a READY of a DEALER.
std::vector<std::byte> Greeting() {
  std::vector<std::byte> bytes = Text(std::string_view("\xff\0\0\0\0\0\0\0\1\x7f\3\0NULL", 16));
  bytes.resize(64);
  return bytes;
}
std::vector<std::byte> GreetingAndReady() {
  std::vector<std::byte> bytes = Greeting();
  const std::string_view ready("\4\x1c\5READY\x0bSocket-Type\0\0\0\6DEALER", 30);
  for (const std::byte b : Text(ready)) bytes.push_back(b);
  return bytes;
}

/// A ROUTER's greeting and READY; it takes messages once it has sent them.
constexpr std::size_t kAnswerBytes = 64 + 43;

TEST_CASE("each kind of stranger is counted as what it is", "[transport][zmq]") {
  ZmqLoopOptions options;
  options.dead_after_ms = 1000;
  options.first_message_ms = 1500;
  ZmqFabric fabric(options);
  Link2 link(fabric);
  REQUIRE(link.Start());
  REQUIRE(link.Send(1, {}).ok());
  REQUIRE(link.at_server.WaitForMessages(1));
  RawConnection connection(PortOf(link.listening));
  REQUIRE(connection.connected());
  SECTION("half a greeting") {
    connection.Say(ByteView(Greeting()).first(20));
    REQUIRE(connection.WaitForEnd());
    REQUIRE(WaitForStrangers(*link.server, &StrangerCounters::closed_early, 1));
  }
  SECTION("another mechanism") {
    std::vector<std::byte> bytes = Greeting();
    std::memcpy(bytes.data() + 12, "ROTX", 4);
    connection.Say(bytes);
    REQUIRE(connection.WaitForEnd());
    REQUIRE(WaitForStrangers(*link.server, &StrangerCounters::not_zmtp, 1));
  }
  SECTION("a handshake and then silence, heartbeats left unanswered or not") {
    connection.Say(GreetingAndReady());
    REQUIRE(connection.WaitForEnd());
    REQUIRE(WaitForStrangers(*link.server, &StrangerCounters::never_spoke, 1));
  }
  SECTION("an old ZeroMQ without a handshake or heartbeats, and then silence") {
    // An empty routing id as version 1.0 of the protocol has it.
    connection.Say(Text(std::string_view("\1\0", 2)));
    REQUIRE(connection.WaitForEnd());
    const auto ended = [&] {
      const StrangerCounters counted = link.server->traffic().strangers;
      return counted.never_spoke + counted.closed_early;
    };
    const auto until = std::chrono::steady_clock::now() + kPatience;
    while (ended() == 0 && std::chrono::steady_clock::now() < until) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    REQUIRE(ended() > 0);
  }
  SECTION("a frame of 2^40 bytes") {
    connection.Say(GreetingAndReady());
    REQUIRE(connection.Read(kAnswerBytes));
    connection.Say(Text(std::string_view("\2\0\0\1\0\0\0\0\0", 9)));
    REQUIRE(connection.WaitForEnd());
    REQUIRE(WaitForStrangers(*link.server, &StrangerCounters::never_spoke, 1));
  }
  SECTION("a header that is none") {
    connection.Say(GreetingAndReady());
    REQUIRE(connection.Read(kAnswerBytes));
    connection.Say(Text(std::string_view("\0\3abc", 5)));
    REQUIRE(WaitForStrangers(*link.server, &StrangerCounters::bad_headers, 1));
    REQUIRE(connection.WaitForEnd());
  }
  SECTION("a message before our side of the handshake is done") {
    std::vector<std::byte> bytes = GreetingAndReady();
    for (const std::byte b : Text(std::string_view("\0\3abc", 5))) bytes.push_back(b);
    connection.Say(bytes);
    REQUIRE(connection.WaitForEnd());
    REQUIRE(WaitForStrangers(*link.server, &StrangerCounters::not_zmtp, 1));
  }
  CAPTURE(link.server->traffic().strangers.Describe());
  REQUIRE(!link.server->traffic().strangers.Describe().empty());
  REQUIRE(link.Send(2, {}).ok());
  REQUIRE(link.at_server.WaitForMessages(2));
  REQUIRE(link.at_client.downs() == 0);
}

TEST_CASE("many silent connections make room for those that speak", "[transport][zmq]") {
  ZmqLoopOptions options;
  options.max_silent = 8;
  ZmqFabric fabric(options);
  Link2 link(fabric);
  REQUIRE(link.Start());
  REQUIRE(link.Send(1, {}).ok());
  REQUIRE(link.at_server.WaitForMessages(1));
  constexpr std::size_t kSilent = 40;
  std::vector<std::unique_ptr<RawConnection>> silent;
  for (std::size_t i = 0; i < kSilent; ++i) {
    silent.push_back(std::make_unique<RawConnection>(PortOf(link.listening)));
    REQUIRE(silent.back()->connected());
  }
  REQUIRE(
      WaitForStrangers(*link.server, &StrangerCounters::never_spoke, kSilent - options.max_silent));
  REQUIRE(silent.front()->WaitForEnd());
  REQUIRE(link.Send(2, {}).ok());
  REQUIRE(link.at_server.WaitForMessages(2));
  REQUIRE(link.at_client.downs() == 0);
}

TEST_CASE("a name is tried at every address it has", "[transport][zmq]") {
  const auto resolved = ResolveTcp("tcp://localhost:1");
  if (!resolved.ok()) {
    WARN("this host does not know localhost: " << resolved.status().ToString());
    return;
  }
  // Whichever comes first, at most one of them has somebody who listens.
  for (const std::string& address : *resolved) {
    CAPTURE(address);
    Recorder at_server;
    Recorder at_client;
    const auto server = MakeZmqLoop({});
    const std::string any = address.substr(0, address.rfind(':')) + ":0";
    const auto listening = server->Listen(any);
    if (!listening.ok()) {
      WARN(listening.status().ToString());
      continue;
    }
    REQUIRE(server->Start(&at_server, "server").ok());
    const auto client = MakeZmqLoop({});
    REQUIRE(client->Start(&at_client, "client").ok());
    const std::string name = "tcp://localhost:" + std::to_string(PortOf(*listening));
    const PeerId peer = RunOn(*client, [&] { return client->Connect(name); }).value();
    REQUIRE(at_client.WaitForUps(1));
    REQUIRE(RunOn(*client, [&] { return client->Send(peer, Link2::Numbered(1), {}); }).ok());
    REQUIRE(at_server.WaitForMessages(1));
    client->Stop();
    server->Stop();
  }
}

TEST_CASE("a path works like a port", "[transport][zmq]") {
  const std::string path =
      "/tmp/gradwire-test-" + std::to_string(getpid()) + "-" + std::to_string(RandomId());
  const std::string address = "ipc://" + path;
  Recorder at_server;
  Recorder at_client;
  // Nobody is closed as one that never speaks: over a path they can't be told apart.
  ZmqLoopOptions options;
  options.first_message_ms = 50;
  options.max_silent = 1;
  const auto server = MakeZmqLoop(options);
  REQUIRE(server->Listen(address).value() == address);
  const auto other = MakeZmqLoop({});
  const Status taken = other->Listen(address).status();
  REQUIRE(taken.code() == StatusCode::kUnavailable);
  REQUIRE(taken.message() == "cannot listen on " + address + ": another process listens there");
  REQUIRE(server->Start(&at_server, "server").ok());
  const auto client = MakeZmqLoop({});
  REQUIRE(client->Start(&at_client, "client").ok());
  const PeerId peer = RunOn(*client, [&] { return client->Connect(address); }).value();
  REQUIRE(at_client.WaitForUps(1));
  OwnerCount owners;
  REQUIRE(RunOn(*client, [&] {
            return client->Send(peer, Link2::Numbered(9), CountedBlob::Make(&owners, kMiB, 9));
          }).ok());
  REQUIRE(at_server.WaitForMessages(1));
  REQUIRE(at_server.messages()[0].intact);
  const PeerId second = RunOn(*client, [&] { return client->Connect(address); }).value();
  REQUIRE(at_client.WaitForUps(2));
  std::this_thread::sleep_for(std::chrono::milliseconds(4 * options.first_message_ms));
  for (const PeerId each : {peer, second}) {
    REQUIRE(RunOn(*client, [&] { return client->Send(each, Link2::Numbered(10), {}); }).ok());
  }
  REQUIRE(at_server.WaitForMessages(3));
  REQUIRE(at_client.downs() == 0);
  REQUIRE(server->traffic().strangers.never_spoke == 0);
  client->Stop();
  server->Stop();
  unlink(path.c_str());
}

TEST_CASE("an IPv6 address in brackets works", "[transport][zmq]") {
  Recorder at_server;
  Recorder at_client;
  const auto server = MakeZmqLoop({});
  const Result<std::string> address = server->Listen("tcp://[::1]:0");
  if (!address.ok()) {
    WARN("this host has no IPv6 loopback: " << address.status().ToString());
    return;
  }
  REQUIRE(address->starts_with("tcp://[::1]:"));
  REQUIRE(server->Start(&at_server, "server").ok());
  const auto client = MakeZmqLoop({});
  REQUIRE(client->Start(&at_client, "client").ok());
  REQUIRE(RunOn(*client, [&] { return client->Connect(*address); }).ok());
  REQUIRE(at_client.WaitForUps(1));
  client->Stop();
  server->Stop();
}

TEST_CASE("an address of another host can't be listened on", "[transport][zmq]") {
  const auto loop = MakeZmqLoop({});
  const Status status = loop->Listen("tcp://192.0.2.1:0").status();
  REQUIRE(status.code() == StatusCode::kUnavailable);
  REQUIRE(status.message().starts_with("cannot listen on tcp://192.0.2.1:0: "));
}

}  // namespace
}  // namespace gradwire
