#include "tests/transport/tcp_proxy.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <mutex>
#include <optional>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

namespace gradwire {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::size_t kBufferBytes = 64 * 1024;

[[noreturn]] void Fail(const char* what) {
  throw std::system_error(errno, std::generic_category(), what);
}

sockaddr_in Loopback(std::uint16_t port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(port);
  return address;
}

/// One direction of a connection.
struct Flow {
  int from = -1;
  int to = -1;
  std::vector<std::byte> buffer = std::vector<std::byte>(kBufferBytes);
  std::size_t begin = 0;  // buffered: [begin, end)
  std::size_t end = 0;
  bool ended = false;  // `from` will send no more
};

struct Pair {
  Flow to_target;
  Flow back;
};

void SetNonBlocking(int fd) { fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK); }

/// Closes with a reset: what is under way is lost on both sides.
void Reset(const Pair& pair) {
  const linger hard{1, 0};
  for (const int fd : {pair.to_target.from, pair.to_target.to}) {
    setsockopt(fd, SOL_SOCKET, SO_LINGER, &hard, sizeof(hard));
    close(fd);
  }
}

}  // namespace

class TcpProxy::Impl {
 public:
  explicit Impl(std::uint16_t target_port) : target_port_(target_port) {
    listener_ = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (listener_ == -1) Fail("socket");
    sockaddr_in address = Loopback(0);
    socklen_t size = sizeof(address);
    if (bind(listener_, reinterpret_cast<sockaddr*>(&address), size) == -1) Fail("bind");
    if (listen(listener_, 64) == -1) Fail("listen");
    if (getsockname(listener_, reinterpret_cast<sockaddr*>(&address), &size) == -1) {
      Fail("getsockname");
    }
    port_ = ntohs(address.sin_port);
    wake_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (wake_ == -1) Fail("eventfd");
    thread_ = std::thread([this] { Run(); });
  }

  ~Impl() {
    {
      const std::lock_guard lock(mu_);
      stop_ = true;
    }
    Wake();
    thread_.join();
    for (const Pair& pair : pairs_) Reset(pair);
    close(listener_);
    close(wake_);
  }

  std::uint16_t port() const { return port_; }

  void CutNow() {
    const std::lock_guard lock(mu_);
    cut_ = true;
    ResetAll();
  }

  void Restore() {
    const std::lock_guard lock(mu_);
    cut_ = false;
  }

  void StallFor(int ms) {
    {
      const std::lock_guard lock(mu_);
      stalled_until_ = Clock::now() + std::chrono::milliseconds(ms);
    }
    Wake();
  }

  void CutAfterBytes(std::uint64_t bytes, bool restore) { CutAfter(cut_after_, bytes, restore); }
  void CutBackAfterBytes(std::uint64_t bytes, bool restore) {
    CutAfter(cut_back_after_, bytes, restore);
  }

  std::atomic<std::uint64_t> to_target{0};
  std::atomic<std::uint64_t> back{0};
  std::atomic<std::uint64_t> accepted{0};

 private:
  void Wake() const { eventfd_write(wake_, 1); }

  void CutAfter(std::optional<std::uint64_t>& budget, std::uint64_t bytes, bool restore) {
    {
      const std::lock_guard lock(mu_);
      budget = bytes;
      restore_at_once_ = restore;
    }
    Wake();
  }

  // Holds mu_.
  void ResetAll() {
    for (const Pair& pair : pairs_) Reset(pair);
    pairs_.clear();
    ++generation_;
  }

  void Run() {
    std::vector<pollfd> fds;
    for (;;) {
      fds.clear();
      int timeout_ms = -1;
      std::uint64_t generation = 0;
      {
        const std::lock_guard lock(mu_);
        if (stop_) return;
        generation = generation_;
        fds.push_back({wake_, POLLIN, 0});
        fds.push_back({listener_, POLLIN, 0});
        const auto stalled =
            std::chrono::ceil<std::chrono::milliseconds>(stalled_until_ - Clock::now());
        if (stalled.count() > 0) {
          timeout_ms = static_cast<int>(stalled.count());
          fds.pop_back();
        } else {
          for (const Pair& pair : pairs_) {
            AddTo(fds, pair.to_target, pair.back);
            AddTo(fds, pair.back, pair.to_target);
          }
        }
      }
      if (poll(fds.data(), static_cast<nfds_t>(fds.size()), timeout_ms) == -1 && errno != EINTR) {
        return;
      }
      const std::lock_guard lock(mu_);
      eventfd_t count = 0;
      eventfd_read(wake_, &count);
      if (Clock::now() < stalled_until_) continue;
      Accept();
      if (generation == generation_) Forward();
    }
  }

  /// Waits for `flow.from` to be read, and to be written by the other direction.
  static void AddTo(std::vector<pollfd>& fds, const Flow& flow, const Flow& other) {
    const bool read = !flow.ended && flow.begin == flow.end;
    const bool write = other.begin != other.end;
    const int events = (read ? POLLIN : 0) | (write ? POLLOUT : 0);
    if (events != 0) fds.push_back({flow.from, static_cast<short>(events), 0});
  }

  static bool Done(const Flow& flow) { return flow.ended && flow.begin == flow.end; }

  void Accept() {
    for (;;) {
      const int client = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
      if (client == -1) return;
      const int target = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
      const sockaddr_in address = Loopback(target_port_);
      Pair pair;
      pair.to_target.from = pair.back.to = client;
      pair.to_target.to = pair.back.from = target;
      if (cut_ ||
          connect(target, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == -1) {
        Reset(pair);
        continue;
      }
      const int on = 1;
      setsockopt(client, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
      setsockopt(target, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
      SetNonBlocking(client);
      SetNonBlocking(target);
      ++accepted;
      pairs_.push_back(std::move(pair));
    }
  }

  void Forward() {
    for (std::size_t i = 0; i < pairs_.size();) {
      Pair& pair = pairs_[i];
      if (Move(pair.to_target, to_target, cut_after_) && Move(pair.back, back, cut_back_after_) &&
          !(Done(pair.to_target) && Done(pair.back))) {
        ++i;
        continue;
      }
      Reset(pairs_[i]);
      pairs_.erase(pairs_.begin() + static_cast<std::ptrdiff_t>(i));
    }
    if (cut_after_ == 0U || cut_back_after_ == 0U) {
      (cut_after_ == 0U ? cut_after_ : cut_back_after_).reset();
      cut_ = !restore_at_once_;
      ResetAll();
    }
  }

  /// False when the connection is broken. Writes no more than the budget has left, if there is one.
  static bool Move(Flow& flow, std::atomic<std::uint64_t>& moved,
                   std::optional<std::uint64_t>& budget) {
    if (flow.begin == flow.end && !flow.ended) {
      const ssize_t got = recv(flow.from, flow.buffer.data(), flow.buffer.size(), 0);
      if (got == -1 && errno != EAGAIN && errno != EINTR) return false;
      if (got == 0) {
        flow.ended = true;
        shutdown(flow.to, SHUT_WR);
      }
      flow.begin = 0;
      flow.end = got > 0 ? static_cast<std::size_t>(got) : 0;
    }
    std::size_t size = flow.end - flow.begin;
    if (budget) size = static_cast<std::size_t>(std::min<std::uint64_t>(size, *budget));
    if (size == 0) return true;
    const ssize_t put = send(flow.to, flow.buffer.data() + flow.begin, size, MSG_NOSIGNAL);
    if (put == -1) return errno == EAGAIN || errno == EINTR;
    flow.begin += static_cast<std::size_t>(put);
    moved += static_cast<std::uint64_t>(put);
    if (budget) *budget -= static_cast<std::uint64_t>(put);
    return true;
  }

  const std::uint16_t target_port_;
  std::uint16_t port_ = 0;
  int listener_ = -1;
  int wake_ = -1;
  std::thread thread_;

  std::mutex mu_;
  // Guarded by mu_.
  std::vector<Pair> pairs_;
  std::uint64_t generation_ = 0;  // goes up when pairs_ were reset
  bool stop_ = false;
  bool cut_ = false;
  bool restore_at_once_ = false;
  std::optional<std::uint64_t> cut_after_;
  std::optional<std::uint64_t> cut_back_after_;
  Clock::time_point stalled_until_{};
};

TcpProxy::TcpProxy(std::uint16_t target_port) : impl_(std::make_unique<Impl>(target_port)) {}
TcpProxy::~TcpProxy() = default;
std::uint16_t TcpProxy::port() const { return impl_->port(); }
std::string TcpProxy::address() const { return "tcp://127.0.0.1:" + std::to_string(port()); }
void TcpProxy::CutNow() { impl_->CutNow(); }
void TcpProxy::Restore() { impl_->Restore(); }
void TcpProxy::StallFor(int ms) { impl_->StallFor(ms); }
void TcpProxy::CutAfterBytes(std::uint64_t bytes, bool restore) {
  impl_->CutAfterBytes(bytes, restore);
}
void TcpProxy::CutBackAfterBytes(std::uint64_t bytes, bool restore) {
  impl_->CutBackAfterBytes(bytes, restore);
}
std::uint64_t TcpProxy::forwarded_to_target() const { return impl_->to_target; }
std::uint64_t TcpProxy::forwarded_back() const { return impl_->back; }
std::uint64_t TcpProxy::accepted() const { return impl_->accepted; }

std::uint16_t PortOf(const std::string& address) {
  return static_cast<std::uint16_t>(std::stoi(address.substr(address.rfind(':') + 1)));
}

}  // namespace gradwire
