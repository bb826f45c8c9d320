#include "common/transport/zmq_loop.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>
#include <zmq.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cassert>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <csignal>
#include <limits>
#include <mutex>
#include <string_view>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "common/base/log.h"
#include "common/transport/address.h"
#include "common/transport/framing.h"
#include "common/transport/timer_queue.h"

namespace gradwire {
namespace {

using Clock = TimerQueue::Clock;
using std::chrono::milliseconds;

constexpr milliseconds kFirstRetry{20};
constexpr milliseconds kLastRetry{1000};
/// ZeroMQ would send what was queued before a cut on the connection it makes after it. So it must
/// not make one: it waits this long, and we replace the socket at once. (Switching its retries off
/// instead would drop what was received and not yet read, such as the reason for the cut.)
constexpr int kNeverMs = 3'600'000;
constexpr int kConnectTimeoutMs = 5000;
/// Of a name with several addresses: the next one may be the right one.
constexpr int kConnectTimeoutOfSeveralMs = 1000;
/// A connection that has not finished ZeroMQ's handshake by then is closed.
constexpr int kHandshakeMs = 5000;
/// Messages of one listening-side connection that wait to be read; then TCP holds its sender back.
/// Bounds what a flood of small messages costs: 64 bytes each, 1 MiB. More than our workers have
/// under way, whose bytes credit bounds.
constexpr int kWaitingMessages = 16384;
/// Events of connections that wait to be read. Beyond them ZeroMQ's thread would stop for us.
constexpr int kWaitingEvents = 50000;
/// Connections that TCP holds ready for us: a whole job may come at once, beside strangers.
constexpr int kBacklog = 1024;
/// Messages read from one socket before the next one has its turn.
constexpr int kBatch = 32;

/// Listening peers carry ZeroMQ's number of the connection, connecting peers count from 1.
constexpr PeerId kListeningSide = PeerId{1} << 63;
constexpr std::size_t kRoutingIdBytes = 5;  // a zero and 32 bits, when ZeroMQ makes it

constexpr int kConnectionEvents = ZMQ_EVENT_HANDSHAKE_SUCCEEDED | ZMQ_EVENT_DISCONNECTED |
                                  ZMQ_EVENT_CONNECT_RETRIED | ZMQ_EVENT_HANDSHAKE_FAILED_NO_DETAIL |
                                  ZMQ_EVENT_HANDSHAKE_FAILED_PROTOCOL |
                                  ZMQ_EVENT_HANDSHAKE_FAILED_AUTH;
constexpr int kListenerEvents = ZMQ_EVENT_ACCEPTED | ZMQ_EVENT_ACCEPT_FAILED |
                                ZMQ_EVENT_DISCONNECTED | ZMQ_EVENT_HANDSHAKE_FAILED_NO_DETAIL |
                                ZMQ_EVENT_HANDSHAKE_FAILED_PROTOCOL |
                                ZMQ_EVENT_HANDSHAKE_FAILED_AUTH;

/// Repeats a call that a signal interrupted.
template <typename Call>
int Uninterrupted(Call call) {
  int result = call();
  while (result == -1 && errno == EINTR) result = call();
  return result;
}

/// Every connection costs a descriptor, and so does every stranger's: takes what there may be.
void RaiseDescriptorLimit() {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur == limit.rlim_max) return;
  limit.rlim_cur = limit.rlim_max;
  (void)setrlimit(RLIMIT_NOFILE, &limit);
}

/// How many descriptors connections without a word may hold, that others find some.
std::size_t MostSilent(std::size_t wanted) {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return wanted;
  return std::clamp<std::size_t>(limit.rlim_cur / 4, 1, std::max<std::size_t>(wanted, 1));
}

std::string Reason(int error) {
  if (error == ENODEV) return "no such address or interface on this host";
  return zmq_strerror(error);
}

// ---- Received payloads -------------------------------------------------------------------------

/// Received messages, recycled with their Blobs. Outlives the loop while somebody holds a payload.
class MessagePool {
 public:
  class Message final : public Blob {
   public:
    explicit Message(std::shared_ptr<MessagePool> pool) : pool_(std::move(pool)) {
      zmq_msg_init(&message_);
    }
    ~Message() override { zmq_msg_close(&message_); }

    zmq_msg_t* get() { return &message_; }
    ByteView bytes() {
      return {static_cast<const std::byte*>(zmq_msg_data(&message_)), zmq_msg_size(&message_)};
    }

   private:
    void Recycle() noexcept override {
      // Gives ZeroMQ's memory back now; the pool keeps empty messages.
      zmq_msg_close(&message_);
      zmq_msg_init(&message_);
      const std::shared_ptr<MessagePool> pool = pool_;  // outlives the lock
      {
        const std::lock_guard lock(pool->mu_);
        if (!pool->closed_) {
          pool->free_.push_back(this);
          return;
        }
      }
      delete this;
    }

    const std::shared_ptr<MessagePool> pool_;
    zmq_msg_t message_;
  };

  /// An empty message without a reference.
  static Message* Take(const std::shared_ptr<MessagePool>& pool) {
    {
      const std::lock_guard lock(pool->mu_);
      if (!pool->free_.empty()) {
        Message* message = pool->free_.back();
        pool->free_.pop_back();
        return message;
      }
      // Recycle() must not allocate: there is room for every message that exists.
      pool->free_.reserve(++pool->made_);
    }
    return new Message(pool);
  }

  /// From now on messages are deleted when they come back.
  void Close() {
    std::vector<Message*> free;
    {
      const std::lock_guard lock(mu_);
      closed_ = true;
      free.swap(free_);
    }
    for (Message* message : free) delete message;
  }

 private:
  std::mutex mu_;
  std::vector<Message*> free_;  // guarded by mu_
  std::size_t made_ = 0;        // guarded by mu_
  bool closed_ = false;         // guarded by mu_
};

// ---- Sockets -----------------------------------------------------------------------------------

/// A socket that is read when its descriptor says so or when it was used otherwise: ZeroMQ's
/// descriptor tells of a change once, and any call on the socket may swallow the news.
struct Socket {
  void* handle = nullptr;
  int descriptor = -1;
  bool check = true;  // must be read until empty before the loop may sleep

  void Adopt(void* socket) {
    handle = socket;
    std::size_t size = sizeof(descriptor);
    zmq_getsockopt(handle, ZMQ_FD, &descriptor, &size);
    check = true;
  }
  void Close() {
    if (handle != nullptr) zmq_close(handle);
    handle = nullptr;
    descriptor = -1;
  }
};

struct Connection {
  PeerId peer = 0;
  std::string address;
  std::vector<std::string> candidates;  // numeric; what the address stands for
  std::size_t candidate = 0;            // the one in use
  bool was_ever_up = false;
  Socket dealer;
  Socket monitor;
  bool up = false;
  bool given_up = false;  // by Disconnect; removed at the end of the pass
  milliseconds retry = kFirstRetry;
};

/// A connection to the listener that has not brought a valid message yet.
struct Silent {
  int descriptor;  // ZeroMQ's, and its number: it may be closed at any time
  std::uint64_t number;
  Clock::time_point since;
};

/// One thread that owns every socket; see Loop for the contract.
class ZmqLoop final : public Loop {
 public:
  explicit ZmqLoop(const ZmqLoopOptions& options)
      : options_(options),
        context_(zmq_ctx_new()),
        wake_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)),
        spare_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
    zmq_ctx_set(context_, ZMQ_IO_THREADS, 1);
    zmq_ctx_set(context_, ZMQ_MAX_SOCKETS, 16384);  // three for each connection
    zmq_msg_init(&frame_);
  }

  ~ZmqLoop() override {
    Stop(0);
    zmq_msg_close(&frame_);
    if (wake_ != -1) close(wake_);
    if (spare_ != -1) close(spare_);
    messages_->Close();
  }

  Result<std::string> Listen(const std::string& address) override;
  Status Start(LoopHandler* handler, const std::string& thread_name) override;
  Result<PeerId> Connect(const std::string& address) override;
  void Disconnect(PeerId peer) override;
  Status Send(PeerId to, const Header& header, Payload payload) override;
  std::string SenderAddress() override;
  void Post(Task task) override;
  void PostAfter(int delay_ms, Task task) override;
  void Stop(int linger_ms) override;
  TrafficCounters traffic() const override;

 private:
  void Run();
  bool RunPosted();
  bool RunTimers();
  bool ReadMonitors();
  bool ReadSockets();
  void Sleep();
  void CloseSockets(int linger_ms);
  void RemoveGivenUp();

  Status Open(Connection& connection);
  void Close(Connection& connection);
  void Retry(Connection& connection);
  bool ReadMonitor(Connection& connection);
  void ReadListenerMonitor();
  void OnListenerEvent(int event, int value);
  void Heard(zmq_msg_t* frame);
  void CloseSilent(std::uint64_t number);
  void CloseTooManySilent();
  void CloseSilentForLong();
  void AttemptFailed(Connection& connection);
  void OnConnectionLost(Connection& connection);
  void SetOptions(void* socket, std::string_view address);
  Status AttachMonitor(Socket& socket, Socket& monitor, int events);

  bool ReadMessage(void* socket, PeerId from);
  bool Receive(void* socket, zmq_msg_t* frame);
  void DropRest(void* socket, zmq_msg_t* last);
  void Count(std::uint64_t StrangerCounters::*kind);
  void Refuse(std::uint64_t StrangerCounters::*kind, PeerId from, std::string_view reason);

  const ZmqLoopOptions options_;
  void* const context_;
  const int wake_;   // eventfd
  const int spare_;  // a descriptor to look at a connection with, when there are none left
  const std::shared_ptr<MessagePool> messages_ = std::make_shared<MessagePool>();

  std::mutex stop_mu_;    // one Stop at a time
  bool stopped_ = false;  // guarded by stop_mu_
  std::thread thread_;    // set by Start, joined under stop_mu_

  std::mutex mu_;
  std::vector<Task> posted_;  // guarded by mu_
  bool sleeping_ = false;     // guarded by mu_; whoever posts must wake the thread
  bool stopping_ = false;     // guarded by mu_
  int linger_ms_ = 0;         // guarded by mu_

  std::atomic<std::uint64_t> sent_bytes_{0};
  std::atomic<std::uint64_t> received_bytes_{0};
  std::atomic<std::uint64_t> sent_messages_{0};
  std::atomic<std::uint64_t> received_messages_{0};
  std::atomic<std::uint64_t> refused_messages_{0};
  mutable std::mutex strangers_mu_;
  StrangerCounters strangers_;  // guarded by strangers_mu_

  // The loop's thread only (Listen, before Start, the caller's).
  LoopHandler* handler_ = nullptr;
  std::string thread_name_;
  Socket router_;
  Socket router_monitor_;
  std::vector<std::unique_ptr<Connection>> connections_;  // by peer - 1; null once given up
  bool some_given_up_ = false;
  TimerQueue timers_;
  std::vector<Task> running_;  // posted_ and this take turns, so that neither allocates
  std::vector<pollfd> poll_;
  zmq_msg_t frame_;  // the frame being read
  std::uint64_t next_monitor_ = 0;
  LogLimiter refusal_log_;
  LogLimiter connection_log_;
  LogLimiter accept_log_;
  std::vector<Silent> silent_;  // oldest first, at most max_silent_ after each pass
  std::size_t max_silent_ = 1;
  std::uint64_t next_silent_ = 0;
  bool handshake_failed_ = false;  // of the connection whose end is told next
  bool accept_failed_ = false;
  bool look_at_silent_ = false;
  bool look_is_planned_ = false;
};

// ---- Addresses ---------------------------------------------------------------------------------

/// Checks what ZeroMQ would only find out on its own thread, or never.
/// Errors: InvalidArgument naming address and reason.
Status CheckAddress(std::string_view address, bool listening) {
  const auto wrong = [&](std::string_view reason) {
    return InvalidArgument(
        fmt::format("address '{}' {}, expected tcp://host:port or ipc:///path", address, reason));
  };
  if (address.starts_with("ipc://")) {
    const std::string_view path = address.substr(6);
    if (path.empty()) return wrong("has no path");
    if (path.size() >= sizeof(sockaddr_un::sun_path)) {
      return wrong(fmt::format("has a path of {} bytes, more than {}", path.size(),
                               sizeof(sockaddr_un::sun_path) - 1));
    }
    return Status::Ok();
  }
  if (!address.starts_with("tcp://")) return wrong("has another transport");
  const std::string_view rest = address.substr(6);
  const std::size_t colon = rest.rfind(':');
  if (colon == std::string_view::npos || colon == 0) return wrong("lacks a host or a port");
  const std::string_view digits = rest.substr(colon + 1);
  std::uint32_t port = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), port);
  if (error != std::errc() || end != digits.data() + digits.size() || port > 65535 ||
      (port == 0 && !listening)) {
    return wrong(fmt::format("has port '{}'", digits));
  }
  return Status::Ok();
}

/// ZeroMQ takes a path over from whoever listens there; a port it refuses.
bool SomebodyListens(std::string_view path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  path.copy(address.sun_path, sizeof(address.sun_path) - 1);
  const int probe = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (probe == -1) return false;
  const bool accepted = connect(probe, reinterpret_cast<const sockaddr*>(&address),
                                static_cast<socklen_t>(sizeof(address))) == 0;
  close(probe);
  return accepted;
}

bool IsUnixSocket(int descriptor) {
  int domain = 0;
  socklen_t size = sizeof(domain);
  return getsockopt(descriptor, SOL_SOCKET, SO_DOMAIN, &domain, &size) == 0 && domain == AF_UNIX;
}

void ZmqLoop::SetOptions(void* socket, std::string_view address) {
  const auto set = [socket](int option, int value) {
    const int result = zmq_setsockopt(socket, option, &value, sizeof(value));
    assert(result == 0);
    (void)result;
  };
  // ZeroMQ counts messages, not bytes, and would block or drop: credit bounds what is under way.
  set(ZMQ_SNDHWM, 0);
  set(ZMQ_RCVHWM, socket == router_.handle ? kWaitingMessages : 0);
  set(ZMQ_BACKLOG, kBacklog);
  set(ZMQ_LINGER, 0);
  const auto max_bytes = static_cast<std::int64_t>(
      std::min<std::size_t>(options_.max_message_bytes, std::numeric_limits<std::int64_t>::max()));
  zmq_setsockopt(socket, ZMQ_MAXMSGSIZE, &max_bytes, sizeof(max_bytes));
  set(ZMQ_HANDSHAKE_IVL,
      options_.dead_after_ms > 0 ? std::min(options_.dead_after_ms, kHandshakeMs) : kHandshakeMs);
  if (options_.dead_after_ms > 0) {
    // ZeroMQ's own thread pings after every quarter of the time and takes half of it without a
    // whole message for silence: the connection is closed before the protocol above gives up, and
    // there is time to make a new one. Both sides do so, each by its own clock.
    const int interval = std::max(1, options_.dead_after_ms / 4);
    set(ZMQ_HEARTBEAT_IVL, interval);
    set(ZMQ_HEARTBEAT_TIMEOUT, std::max(1, options_.dead_after_ms / 2));
    // What a ping tells the other side: how long it may hear nothing from here. In steps of
    // 100 ms; where those are too coarse to hold a lost ping the timeout has to do.
    const int ttl = std::min(options_.dead_after_ms / 4 * 3, 6'553'500) / 100 * 100;
    set(ZMQ_HEARTBEAT_TTL, ttl >= 2 * interval ? ttl : 0);
    // A ping waits behind what the kernel does not take any more, and its timeout with it: there
    // TCP has to notice that nothing is acknowledged, or that a full receiver reads nothing.
    set(ZMQ_TCP_MAXRT, std::max(1, options_.dead_after_ms / 2));
  }
  set(ZMQ_TCP_KEEPALIVE, 1);
  set(ZMQ_TCP_KEEPALIVE_IDLE, 30);
  set(ZMQ_TCP_KEEPALIVE_INTVL, 10);
  set(ZMQ_TCP_KEEPALIVE_CNT, 3);
  // Only for addresses in brackets: with it on, a name that has both kinds of address would lead to
  // the one that nobody listens on.
  set(ZMQ_IPV6, address.find('[') != std::string_view::npos ? 1 : 0);
}

Status ZmqLoop::AttachMonitor(Socket& socket, Socket& monitor, int events) {
  const std::string name = fmt::format("inproc://monitor-{}", next_monitor_++);
  if (zmq_socket_monitor(socket.handle, name.c_str(), events) == -1) {
    return Unavailable(fmt::format("cannot watch a socket: {}", zmq_strerror(errno)));
  }
  void* pair = zmq_socket(context_, ZMQ_PAIR);
  if (pair != nullptr) zmq_setsockopt(pair, ZMQ_RCVHWM, &kWaitingEvents, sizeof(kWaitingEvents));
  if (pair == nullptr || zmq_connect(pair, name.c_str()) == -1) {
    const int error = errno;
    if (pair != nullptr) zmq_close(pair);
    return Unavailable(fmt::format("cannot watch a socket: {}", zmq_strerror(error)));
  }
  const int linger = 0;
  zmq_setsockopt(pair, ZMQ_LINGER, &linger, sizeof(linger));
  monitor.Adopt(pair);
  return Status::Ok();
}

Result<std::string> ZmqLoop::Listen(const std::string& address) {
  GRADWIRE_RETURN_IF_ERROR(CheckAddress(address, true));
  const auto refused = [&](std::string_view reason) {
    return Unavailable(fmt::format("cannot listen on {}: {}", address, reason));
  };
  if (address.starts_with("ipc://") && SomebodyListens(std::string_view(address).substr(6))) {
    return refused("another process listens there");
  }
  if (router_.handle == nullptr) {
    RaiseDescriptorLimit();
    max_silent_ = MostSilent(options_.max_silent);
    void* router = zmq_socket(context_, ZMQ_ROUTER);
    if (router == nullptr) return refused(zmq_strerror(errno));
    router_.Adopt(router);
    const int mandatory = 1;
    zmq_setsockopt(router, ZMQ_ROUTER_MANDATORY, &mandatory, sizeof(mandatory));
    GRADWIRE_RETURN_IF_ERROR(AttachMonitor(router_, router_monitor_, kListenerEvents));
  }
  SetOptions(router_.handle, address);
  if (zmq_bind(router_.handle, address.c_str()) == -1) return refused(Reason(errno));
  std::array<char, 512> endpoint{};
  std::size_t size = endpoint.size();
  if (zmq_getsockopt(router_.handle, ZMQ_LAST_ENDPOINT, endpoint.data(), &size) == -1) {
    return refused(zmq_strerror(errno));
  }
  return std::string(endpoint.data());
}

// ---- Connections -------------------------------------------------------------------------------

Status ZmqLoop::Open(Connection& connection) {
  if (connection.candidates.empty()) {
    connection.candidate = 0;
    if (connection.address.starts_with("tcp://")) {
      auto resolved = ResolveTcp(connection.address);
      if (!resolved.ok()) return resolved.status();
      connection.candidates = std::move(resolved).value();
    }
    if (connection.candidates.empty()) connection.candidates.push_back(connection.address);
  }
  const std::string& address = connection.candidates[connection.candidate];
  const bool several = connection.candidates.size() > 1;
  void* dealer = zmq_socket(context_, ZMQ_DEALER);
  if (dealer == nullptr) {
    return Unavailable(fmt::format("cannot connect to {}: {}", address, zmq_strerror(errno)));
  }
  connection.dealer.Adopt(dealer);
  SetOptions(dealer, address);
  zmq_setsockopt(dealer, ZMQ_RECONNECT_IVL, &kNeverMs, sizeof(kNeverMs));
  const int timeout_ms = several ? kConnectTimeoutOfSeveralMs : kConnectTimeoutMs;
  zmq_setsockopt(dealer, ZMQ_CONNECT_TIMEOUT, &timeout_ms, sizeof(timeout_ms));
  Status status = AttachMonitor(connection.dealer, connection.monitor, kConnectionEvents);
  if (status.ok() && zmq_connect(dealer, address.c_str()) == -1) {
    const int error = errno;
    const std::string text = fmt::format("cannot connect to {}: {}", address, Reason(error));
    status = error == EINVAL && !several ? InvalidArgument(text) : Unavailable(text);
    AttemptFailed(connection);
  }
  if (!status.ok()) Close(connection);
  return status;
}

/// The next attempt goes to the next address of the name.
void ZmqLoop::AttemptFailed(Connection& connection) {
  if (++connection.candidate < connection.candidates.size()) {
    connection.retry = kFirstRetry;  // nobody has refused that one yet
    return;
  }
  connection.candidate = 0;
  // Until it has been up the name may be new, or wrong, where names are looked up.
  if (!connection.was_ever_up) connection.candidates.clear();
}

void ZmqLoop::Close(Connection& connection) {
  connection.up = false;
  if (connection.dealer.handle != nullptr) {
    zmq_socket_monitor(connection.dealer.handle, nullptr, 0);
  }
  connection.dealer.Close();  // linger is 0: what is queued is released, never sent
  connection.monitor.Close();
}

void ZmqLoop::Retry(Connection& connection) {
  const PeerId peer = connection.peer;
  timers_.Add(Clock::now() + connection.retry, [this, peer] {
    Connection* again = connections_[peer - 1].get();
    if (again == nullptr || again->given_up) return;
    const Status status = Open(*again);
    if (!status.ok()) Retry(*again);  // short of descriptors, say: it may pass
  });
  connection.retry = std::min(2 * connection.retry, kLastRetry);
}

Result<PeerId> ZmqLoop::Connect(const std::string& address) {
  GRADWIRE_RETURN_IF_ERROR(CheckAddress(address, false));
  auto connection = std::make_unique<Connection>();
  connection->peer = connections_.size() + 1;
  connection->address = address;
  const Status status = Open(*connection);
  if (status.code() == StatusCode::kInvalidArgument) return status;
  connections_.push_back(std::move(connection));
  if (!status.ok()) Retry(*connections_.back());
  return connections_.back()->peer;
}

void ZmqLoop::Disconnect(PeerId peer) {
  if (peer == 0 || peer > connections_.size()) return;
  Connection* connection = connections_[peer - 1].get();
  if (connection == nullptr || connection->given_up) return;
  // The caller may be inside one of this connection's callbacks: it stays until the pass ends.
  connection->given_up = true;
  some_given_up_ = true;
  Close(*connection);
}

void ZmqLoop::RemoveGivenUp() {
  if (!some_given_up_) return;
  some_given_up_ = false;
  for (std::unique_ptr<Connection>& connection : connections_) {
    if (connection != nullptr && connection->given_up) connection.reset();
  }
}

void ZmqLoop::OnConnectionLost(Connection& connection) {
  const bool was_up = connection.up;
  if (was_up) {
    // What arrived before the cut is whole and in order; the last of it often says why.
    while (!connection.given_up && ReadMessage(connection.dealer.handle, connection.peer)) {
    }
  }
  if (connection.given_up) return;
  Close(connection);
  if (!was_up) AttemptFailed(connection);
  Retry(connection);
  if (was_up) handler_->OnDown(connection.peer);
}

/// Takes one event. Returns false when there is none.
bool ZmqLoop::ReadMonitor(Connection& connection) {
  void* monitor = connection.monitor.handle;
  if (!Receive(monitor, &frame_)) return false;
  const auto event = zmq_msg_size(&frame_) >= 2 ? LoadLe<std::uint16_t>(zmq_msg_data(&frame_)) : 0;
  DropRest(monitor, &frame_);
  if (event == ZMQ_EVENT_HANDSHAKE_SUCCEEDED) {
    connection.up = true;
    connection.was_ever_up = true;
    // The one that worked is the first to be tried next time.
    std::swap(connection.candidates[0], connection.candidates[connection.candidate]);
    connection.candidate = 0;
    connection.retry = kFirstRetry;
    connection.dealer.check = true;
    handler_->OnUp(connection.peer);
  } else {
    OnConnectionLost(connection);
  }
  return true;
}

void ZmqLoop::ReadListenerMonitor() {
  while (Receive(router_monitor_.handle, &frame_)) {
    const bool whole = zmq_msg_size(&frame_) >= 6;
    const auto* data = static_cast<const std::byte*>(zmq_msg_data(&frame_));
    const int event = whole ? LoadLe<std::uint16_t>(data) : 0;
    const int value = whole ? LoadLe<std::int32_t>(data + 2) : 0;
    DropRest(router_monitor_.handle, &frame_);
    OnListenerEvent(event, value);
  }
}

/// `value` is a descriptor or, of an event that failed, an error.
void ZmqLoop::OnListenerEvent(int event, int value) {
  const auto entry = std::find_if(silent_.begin(), silent_.end(), [value](const Silent& silent) {
    return silent.descriptor == value;
  });
  switch (event) {
    case ZMQ_EVENT_ACCEPTED:
      // What comes over a Unix socket does not say by which descriptor.
      if (IsUnixSocket(value)) break;
      silent_.push_back({value, next_silent_++, Clock::now()});
      break;
    case ZMQ_EVENT_ACCEPT_FAILED:
      Count(&StrangerCounters::accept_failures);
      accept_failed_ = true;
      if (const auto suppressed = accept_log_.Admit()) {
        LogWarn("transport", "cannot take a connection",
                {Field("loop", thread_name_), Field("reason", zmq_strerror(value)),
                 Field("suppressed", *suppressed)});
      }
      break;
    case ZMQ_EVENT_HANDSHAKE_FAILED_NO_DETAIL:
      handshake_failed_ = true;
      Count(&StrangerCounters::closed_early);
      break;
    case ZMQ_EVENT_HANDSHAKE_FAILED_PROTOCOL:
    case ZMQ_EVENT_HANDSHAKE_FAILED_AUTH:
      // Told once for each rule that is broken.
      if (!std::exchange(handshake_failed_, true)) {
        Refuse(&StrangerCounters::not_zmtp, 0, "a connection did not speak ZeroMQ's protocol");
      }
      break;
    case ZMQ_EVENT_DISCONNECTED: {
      const bool told = std::exchange(handshake_failed_, false);
      if (entry == silent_.end()) break;
      silent_.erase(entry);
      if (!told) Count(&StrangerCounters::never_spoke);
      break;
    }
    default:
      break;
  }
}

/// The connection that brought this frame is not a silent one.
void ZmqLoop::Heard(zmq_msg_t* frame) {
  if (silent_.empty()) return;
  const int descriptor = zmq_msg_get(frame, ZMQ_SRCFD);
  std::erase_if(silent_,
                [descriptor](const Silent& silent) { return silent.descriptor == descriptor; });
}

/// Ends a connection that ZeroMQ has no call to end. Its descriptor may have been closed, and the
/// number be another's: ZeroMQ tells of the end before it closes, so if that has not been told
/// after the copy was made, the copy is of the right one.
void ZmqLoop::CloseSilent(std::uint64_t number) {
  const auto find = [&] {
    return std::find_if(silent_.begin(), silent_.end(),
                        [number](const Silent& silent) { return silent.number == number; });
  };
  if (find() == silent_.end()) return;
  const bool copied = dup3(find()->descriptor, spare_, O_CLOEXEC) != -1;
  ReadListenerMonitor();
  if (const auto entry = find(); entry != silent_.end()) {
    if (copied) (void)shutdown(spare_, SHUT_RDWR);
    silent_.erase(entry);
    Count(&StrangerCounters::never_spoke);
    if (const auto suppressed = connection_log_.Admit()) {
      LogWarn("transport", "closed a connection that never spoke",
              {Field("loop", thread_name_), Field("suppressed", *suppressed)});
    }
  }
  (void)dup3(wake_, spare_, O_CLOEXEC);  // lets go of the connection, keeps the number
}

void ZmqLoop::CloseTooManySilent() {
  if (std::exchange(accept_failed_, false) && !silent_.empty()) CloseSilent(silent_.front().number);
  while (silent_.size() > max_silent_) CloseSilent(silent_.front().number);
  if (silent_.empty() || look_is_planned_ || options_.first_message_ms <= 0) return;
  look_is_planned_ = true;
  timers_.Add(silent_.front().since + milliseconds(options_.first_message_ms), [this] {
    look_is_planned_ = false;
    look_at_silent_ = true;
  });
}

/// When no message is waiting: what is there may have been said while this thread was busy.
void ZmqLoop::CloseSilentForLong() {
  if (!std::exchange(look_at_silent_, false)) return;
  const Clock::time_point before = Clock::now() - milliseconds(options_.first_message_ms);
  while (!silent_.empty() && silent_.front().since <= before) CloseSilent(silent_.front().number);
  CloseTooManySilent();
}

bool ZmqLoop::ReadMonitors() {
  bool worked = false;
  if (router_monitor_.handle != nullptr && std::exchange(router_monitor_.check, false)) {
    ReadListenerMonitor();
    CloseTooManySilent();
  }
  // By index: callbacks may add connections.
  for (std::size_t i = 0; i < connections_.size(); ++i) {
    Connection* connection = connections_[i].get();
    if (connection == nullptr) continue;
    while (connection->monitor.handle != nullptr && connection->monitor.check) {
      if (ReadMonitor(*connection)) {
        worked = true;
      } else {
        connection->monitor.check = false;
      }
    }
  }
  return worked;
}

// ---- Messages ----------------------------------------------------------------------------------

/// Receives a frame into an initialized message. False if there is none.
bool ZmqLoop::Receive(void* socket, zmq_msg_t* frame) {
  return Uninterrupted([&] { return zmq_msg_recv(frame, socket, ZMQ_DONTWAIT); }) != -1;
}

/// Reads on to the end of the message that `last` is a frame of. The parts of a message are there
/// together.
void ZmqLoop::DropRest(void* socket, zmq_msg_t* last) {
  while (zmq_msg_more(last) != 0 && Receive(socket, last)) {
  }
}

void ZmqLoop::Count(std::uint64_t StrangerCounters::*kind) {
  const std::lock_guard lock(strangers_mu_);
  ++(strangers_.*kind);
}

void ZmqLoop::Refuse(std::uint64_t StrangerCounters::*kind, PeerId from, std::string_view reason) {
  Count(kind);
  const std::uint64_t refused = refused_messages_.fetch_add(1, std::memory_order_relaxed) + 1;
  if (const auto suppressed = refusal_log_.Admit()) {
    LogWarn("transport", "refused a message",
            {Field("loop", thread_name_), Field("peer", fmt::format("{:#x}", from)),
             Field("reason", reason), Field("suppressed", *suppressed), Field("so_far", refused)});
  }
}

/// Reads a message and hands it to the handler. False if there is none.
bool ZmqLoop::ReadMessage(void* socket, PeerId from) {
  if (!Receive(socket, &frame_)) return false;
  if (socket == router_.handle) {
    const auto* id = static_cast<const std::byte*>(zmq_msg_data(&frame_));
    // A peer that chooses its own routing id is not one of ours.
    const bool ours = zmq_msg_size(&frame_) == kRoutingIdBytes && id[0] == std::byte{0};
    if (ours) from = kListeningSide | LoadLe<std::uint32_t>(id + 1);
    if (!ours || zmq_msg_more(&frame_) == 0) {
      DropRest(socket, &frame_);
      Refuse(ours ? &StrangerCounters::bad_frames : &StrangerCounters::chosen_routing_id, 0,
             ours ? "it has no frame" : "its sender chose a routing id");
      return true;
    }
    if (!Receive(socket, &frame_)) return true;
  }
  std::uint64_t received = FramedBytes(zmq_msg_size(&frame_));
  const Result<Header> header =
      ParseHeader({static_cast<const std::byte*>(zmq_msg_data(&frame_)), zmq_msg_size(&frame_)});
  Payload payload;
  bool canonical = true;  // one frame, or two of which the second is not empty
  if (zmq_msg_more(&frame_) != 0) {
    MessagePool::Message* message = MessagePool::Take(messages_);
    payload.owner = BlobRef(message);
    if (!Receive(socket, message->get())) return true;
    payload.bytes = message->bytes();
    received += FramedBytes(payload.size());
    canonical = !payload.empty() && zmq_msg_more(message->get()) == 0;
    if (zmq_msg_more(message->get()) != 0) DropRest(socket, message->get());
  }
  received_bytes_.fetch_add(received, std::memory_order_relaxed);
  if (!header.ok()) {
    Refuse(&StrangerCounters::bad_headers, from, header.status().message());
  } else if (!canonical) {
    Refuse(&StrangerCounters::bad_frames, from,
           "it has more than two frames, or an empty second one");
  } else {
    received_messages_.fetch_add(1, std::memory_order_relaxed);
    if (socket == router_.handle) Heard(&frame_);
    handler_->OnMessage(from, *header, std::move(payload));
  }
  return true;
}

std::string ZmqLoop::SenderAddress() {
  // The header's frame is still there; every frame of a message knows where it came from.
  const char* address = zmq_msg_gets(&frame_, "Peer-Address");
  // Of a path there are only numbers of user and process, behind a colon.
  return address == nullptr || *address == ':' ? "" : address;
}

bool ZmqLoop::ReadSockets() {
  bool worked = false;
  if (router_.handle != nullptr && router_.check) {
    router_.check = false;
    int left = kBatch;
    while (left > 0 && ReadMessage(router_.handle, 0)) --left;
    worked |= left < kBatch;
    if (left == 0) router_.check = true;
  }
  for (std::size_t i = 0; i < connections_.size(); ++i) {
    Connection* connection = connections_[i].get();
    // What came before OnUp waits for it.
    if (connection == nullptr || !connection->up || !connection->dealer.check) continue;
    connection->dealer.check = false;
    int left = kBatch;
    while (left > 0 && connection->up && ReadMessage(connection->dealer.handle, connection->peer)) {
      --left;
    }
    worked |= left < kBatch;
    if (left == 0) connection->dealer.check = true;
  }
  return worked;
}

Status ZmqLoop::Send(PeerId to, const Header& header, Payload payload) {
  assert(std::this_thread::get_id() == thread_.get_id());
  const auto unavailable = [&](std::string_view why) {
    return Unavailable(
        fmt::format("cannot send {} to peer {:#x}: {}", MessageKindName(header.kind), to, why));
  };
  Socket* socket = nullptr;
  if ((to & kListeningSide) != 0) {
    if (router_.handle == nullptr) return unavailable("nobody listens here");
    socket = &router_;
  } else {
    Connection* connection =
        to != 0 && to <= connections_.size() ? connections_[to - 1].get() : nullptr;
    if (connection == nullptr) return unavailable("there is no such connection");
    if (!connection->up) return unavailable("the connection is down");
    socket = &connection->dealer;
  }
  socket->check = true;
  const auto send = [&](const void* data, std::size_t size, int flags) {
    return Uninterrupted([&] { return zmq_send(socket->handle, data, size, flags); });
  };
  if (socket == &router_) {
    std::array<std::byte, kRoutingIdBytes> id{};
    StoreLe(id.data() + 1, static_cast<std::uint32_t>(to));
    if (send(id.data(), id.size(), ZMQ_DONTWAIT | ZMQ_SNDMORE) == -1) {
      return unavailable(errno == EHOSTUNREACH ? "it is gone" : zmq_strerror(errno));
    }
  }
  const HeaderBytes header_bytes = SerializeHeader(header);
  const int more = payload.empty() ? 0 : ZMQ_SNDMORE;
  if (send(header_bytes.view().data(), header_bytes.view().size(), ZMQ_DONTWAIT | more) == -1) {
    return unavailable(zmq_strerror(errno));
  }
  if (!payload.empty()) {
    int result = 0;
    if (payload.owner && payload.size() >= kZeroCopyBytes) {
      Blob* owner = payload.owner.get();
      owner->Ref();  // given back by ZeroMQ, on whatever thread it lets go of the bytes
      zmq_msg_t message;
      // ZeroMQ only reads what it sends.
      zmq_msg_init_data(
          &message, const_cast<std::byte*>(payload.bytes.data()), payload.size(),
          [](void*, void* hint) { static_cast<Blob*>(hint)->Unref(); }, owner);
      result = Uninterrupted([&] { return zmq_msg_send(&message, socket->handle, ZMQ_DONTWAIT); });
      if (result == -1) {
        const int error = errno;
        zmq_msg_close(&message);
        errno = error;
      }
    } else {
      result = send(payload.bytes.data(), payload.size(), ZMQ_DONTWAIT);
    }
    if (result == -1) return unavailable(zmq_strerror(errno));
  }
  sent_bytes_.fetch_add(MessageBytes(header_bytes.view().size(), payload.size()),
                        std::memory_order_relaxed);
  sent_messages_.fetch_add(1, std::memory_order_relaxed);
  return Status::Ok();
}

// ---- The thread --------------------------------------------------------------------------------

Status ZmqLoop::Start(LoopHandler* handler, const std::string& thread_name) {
  const std::lock_guard lock(stop_mu_);
  if (stopped_ || thread_.joinable()) return InvalidArgument("the loop was started before");
  if (wake_ == -1 || spare_ == -1 || context_ == nullptr) {
    return Unavailable("cannot start a loop: no descriptors left");
  }
  handler_ = handler;
  thread_name_ = thread_name;
  // Signals belong to the program's own threads; a thread inherits the mask.
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  // Send asserts on thread_'s id: the thread waits until it is set.
  Status status;
  {
    const std::lock_guard posted_lock(mu_);
    try {
      thread_ = std::thread([this] { Run(); });
      pthread_setname_np(thread_.native_handle(), thread_name.substr(0, 15).c_str());
    } catch (const std::system_error& error) {
      status = Unavailable(fmt::format("cannot start thread {}: {}", thread_name, error.what()));
    }
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return status;
}

void ZmqLoop::Run() {
  bool idle_told = false;
  for (;;) {
    const bool posted = RunPosted();
    {
      // Everything that was posted before Stop has run.
      const std::lock_guard lock(mu_);
      if (stopping_ && posted_.empty()) break;
    }
    bool worked = posted;
    worked |= RunTimers();
    worked |= ReadMonitors();
    worked |= ReadSockets();
    RemoveGivenUp();
    if (worked) {
      idle_told = false;
    } else if (!idle_told) {
      idle_told = true;
      CloseSilentForLong();
      handler_->OnIdle();
    } else {
      Sleep();
    }
  }
  timers_.Clear();
  int linger_ms = 0;
  {
    const std::lock_guard lock(mu_);
    linger_ms = linger_ms_;
  }
  CloseSockets(linger_ms);
}

bool ZmqLoop::RunPosted() {
  {
    const std::lock_guard lock(mu_);
    running_.swap(posted_);
  }
  for (Task& task : running_) {
    task();
    task = nullptr;  // what it holds goes now
  }
  const bool ran = !running_.empty();
  running_.clear();
  return ran;
}

bool ZmqLoop::RunTimers() {
  if (!timers_.NextDue()) return false;
  const Clock::time_point now = Clock::now();
  bool ran = false;
  while (std::optional<Task> task = timers_.TakeDue(now)) {
    (*task)();
    ran = true;
  }
  return ran;
}

/// Waits for a descriptor, the next timer or a posted task. Every socket has been read until empty
/// since it was last used, so its descriptor will tell of the next message.
void ZmqLoop::Sleep() {
  {
    const std::lock_guard lock(mu_);
    if (!posted_.empty() || stopping_) return;
    sleeping_ = true;
  }
  poll_.clear();
  poll_.push_back({wake_, POLLIN, 0});
  bool unread = false;
  const auto add = [&](const Socket& socket) {
    if (socket.handle == nullptr) return;
    unread |= socket.check;
    poll_.push_back({socket.descriptor, POLLIN, 0});
  };
  add(router_);
  add(router_monitor_);
  for (const std::unique_ptr<Connection>& connection : connections_) {
    if (connection == nullptr) continue;
    add(connection->monitor);
    if (connection->up) add(connection->dealer);
  }
  int timeout_ms = -1;
  if (unread) {
    timeout_ms = 0;
  } else if (const std::optional<Clock::time_point> due = timers_.NextDue()) {
    const auto left = std::chrono::ceil<milliseconds>(*due - Clock::now()).count();
    timeout_ms = static_cast<int>(std::clamp<std::int64_t>(left, 0, kNeverMs));
  }
  // An interruption is as good as a wake-up.
  const int ready = poll(poll_.data(), static_cast<nfds_t>(poll_.size()), timeout_ms);
  {
    const std::lock_guard lock(mu_);
    sleeping_ = false;
  }
  if (ready <= 0) return;
  std::size_t next = 0;
  if (poll_[next++].revents != 0) {
    eventfd_t count = 0;
    eventfd_read(wake_, &count);
  }
  const auto take = [&](Socket& socket) {
    if (socket.handle == nullptr) return;
    if (poll_[next++].revents != 0) socket.check = true;
  };
  take(router_);
  take(router_monitor_);
  for (const std::unique_ptr<Connection>& connection : connections_) {
    if (connection == nullptr) continue;
    take(connection->monitor);
    if (connection->up) take(connection->dealer);
  }
}

void ZmqLoop::Post(Task task) {
  bool wake = false;
  {
    const std::lock_guard lock(mu_);
    if (stopping_) return;
    posted_.push_back(std::move(task));
    wake = std::exchange(sleeping_, false);
  }
  if (wake) eventfd_write(wake_, 1);
}

void ZmqLoop::PostAfter(int delay_ms, Task task) {
  timers_.Add(Clock::now() + milliseconds(std::max(0, delay_ms)), std::move(task));
}

void ZmqLoop::CloseSockets(int linger_ms) {
  const auto linger = [linger_ms](void* socket) {
    if (socket != nullptr) zmq_setsockopt(socket, ZMQ_LINGER, &linger_ms, sizeof(linger_ms));
  };
  for (const std::unique_ptr<Connection>& connection : connections_) {
    if (connection == nullptr) continue;
    if (connection->up) linger(connection->dealer.handle);
    Close(*connection);
  }
  connections_.clear();
  linger(router_.handle);
  if (router_.handle != nullptr) zmq_socket_monitor(router_.handle, nullptr, 0);
  router_.Close();
  router_monitor_.Close();
}

void ZmqLoop::Stop(int linger_ms) {
  const std::lock_guard stop_lock(stop_mu_);
  if (stopped_) return;
  stopped_ = true;
  bool wake = false;
  {
    const std::lock_guard lock(mu_);
    stopping_ = true;
    linger_ms_ = std::max(0, linger_ms);
    wake = std::exchange(sleeping_, false);
  }
  if (wake) eventfd_write(wake_, 1);
  if (thread_.joinable()) {
    thread_.join();
  } else {
    // Never started: nothing was posted that could run.
    CloseSockets(0);
    const std::lock_guard lock(mu_);
    posted_.clear();
  }
  // Returns when every socket is gone and with it every byte of ours.
  if (context_ != nullptr) {
    Uninterrupted([this] { return zmq_ctx_term(context_); });
  }
}

TrafficCounters ZmqLoop::traffic() const {
  TrafficCounters counters;
  counters.sent_bytes = sent_bytes_.load(std::memory_order_relaxed);
  counters.received_bytes = received_bytes_.load(std::memory_order_relaxed);
  counters.sent_messages = sent_messages_.load(std::memory_order_relaxed);
  counters.received_messages = received_messages_.load(std::memory_order_relaxed);
  counters.refused_messages = refused_messages_.load(std::memory_order_relaxed);
  const std::lock_guard lock(strangers_mu_);
  counters.strangers = strangers_;
  return counters;
}

}  // namespace

StrangerCounters& StrangerCounters::operator+=(const StrangerCounters& other) {
  not_zmtp += other.not_zmtp;
  closed_early += other.closed_early;
  never_spoke += other.never_spoke;
  chosen_routing_id += other.chosen_routing_id;
  bad_frames += other.bad_frames;
  bad_headers += other.bad_headers;
  accept_failures += other.accept_failures;
  return *this;
}

std::string StrangerCounters::Describe() const {
  std::string text;
  const auto add = [&text](std::string_view name, std::uint64_t count) {
    if (count == 0) return;
    text += fmt::format("{}{}={}", text.empty() ? "" : " ", name, count);
  };
  add("not_zmtp", not_zmtp);
  add("closed_early", closed_early);
  add("never_spoke", never_spoke);
  add("chosen_routing_id", chosen_routing_id);
  add("bad_frames", bad_frames);
  add("bad_headers", bad_headers);
  add("accept_failures", accept_failures);
  return text;
}

std::unique_ptr<Loop> MakeZmqLoop(const ZmqLoopOptions& options) {
  return std::make_unique<ZmqLoop>(options);
}

}  // namespace gradwire
