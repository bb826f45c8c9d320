#include "common/transport/address.h"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstring>
#include <memory>
#include <optional>
#include <system_error>
#include <utility>

namespace gradwire {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::string_view kScheme = "tcp://";

// A description that lists more attempts than this helps nobody.
constexpr std::size_t kMostAttempts = 8;

std::string Reason(int error) { return std::generic_category().message(error); }

class FileDescriptor {
 public:
  explicit FileDescriptor(int fd) : fd_(fd) {}
  FileDescriptor(FileDescriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  FileDescriptor(const FileDescriptor&) = delete;
  FileDescriptor& operator=(const FileDescriptor&) = delete;
  FileDescriptor& operator=(FileDescriptor&&) = delete;
  ~FileDescriptor() { Close(); }
  int get() const { return fd_; }
  void Close() {
    if (fd_ != -1) close(std::exchange(fd_, -1));
  }

 private:
  int fd_;
};

struct SocketAddress {
  sockaddr_storage storage{};
  socklen_t size = 0;

  SocketAddress() = default;
  SocketAddress(const sockaddr* address, socklen_t length)
      : size(std::min<socklen_t>(length, sizeof(storage))) {
    std::memcpy(&storage, address, size);
  }

  int family() const { return storage.ss_family; }
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }

  std::string Host() const {
    std::array<char, NI_MAXHOST> host{};
    if (getnameinfo(get(), size, host.data(), host.size(), nullptr, 0, NI_NUMERICHOST) != 0) {
      return {};
    }
    return host.data();
  }
};

// `numeric`: nothing is looked up, and a name is an error.
Result<std::vector<SocketAddress>> LookUp(const std::string& host, std::uint16_t port,
                                          bool numeric) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICSERV | (numeric ? AI_NUMERICHOST : 0);
  addrinfo* list = nullptr;
  errno = 0;
  const int error = getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &list);
  if (error != 0) {
    const std::string reason = error == EAI_SYSTEM ? Reason(errno) : gai_strerror(error);
    return Unavailable(fmt::format("cannot resolve the host '{}': {}", host, reason));
  }
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> owner(list, &freeaddrinfo);
  std::vector<SocketAddress> addresses;
  for (const addrinfo* info = list; info != nullptr; info = info->ai_next) {
    if (info->ai_family != AF_INET && info->ai_family != AF_INET6) continue;
    const SocketAddress address(info->ai_addr, info->ai_addrlen);
    // Hosts files name an address twice now and then.
    if (std::none_of(addresses.begin(), addresses.end(), [&](const SocketAddress& known) {
          return known.size == address.size &&
                 std::memcmp(&known.storage, &address.storage, known.size) == 0;
        })) {
      addresses.push_back(address);
    }
  }
  if (addresses.empty()) {
    return Unavailable(fmt::format(
        "cannot resolve the host '{}': it has neither an IPv4 nor an IPv6 address", host));
  }
  return addresses;
}

std::optional<SocketAddress> ParseNumeric(std::string_view host, std::uint16_t port = 0) {
  host = WithoutBrackets(host);
  if (host.empty() || host.find('\0') != std::string_view::npos) return std::nullopt;
  const auto addresses = LookUp(std::string(host), port, true);
  if (!addresses.ok()) return std::nullopt;
  return addresses.value().front();
}

// The IPv4 address in host order, also of an IPv4 address that is written as an IPv6 one.
std::optional<std::uint32_t> Ipv4Of(const SocketAddress& address) {
  if (address.family() == AF_INET) {
    sockaddr_in in{};
    std::memcpy(&in, &address.storage, sizeof(in));
    return ntohl(in.sin_addr.s_addr);
  }
  sockaddr_in6 in6{};
  std::memcpy(&in6, &address.storage, sizeof(in6));
  if (!IN6_IS_ADDR_V4MAPPED(&in6.sin6_addr)) return std::nullopt;
  std::uint32_t v4 = 0;
  std::memcpy(&v4, &in6.sin6_addr.s6_addr[12], sizeof(v4));
  return ntohl(v4);
}

in6_addr Ipv6Of(const SocketAddress& address) {
  sockaddr_in6 in6{};
  std::memcpy(&in6, &address.storage, sizeof(in6));
  return in6.sin6_addr;
}

// "10.0.0.1:5701", "[fd00::1]:5701"
std::string WithPort(const SocketAddress& address, std::uint16_t port) {
  return FormatTcpAddress(address.Host(), port).substr(kScheme.size());
}

struct InterfaceAddress {
  std::string interface;
  SocketAddress address;
};

Result<std::vector<InterfaceAddress>> InterfaceAddresses() {
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) == -1) {
    return Unavailable(fmt::format("cannot list this host's interfaces: {}", Reason(errno)));
  }
  const std::unique_ptr<ifaddrs, decltype(&freeifaddrs)> owner(list, &freeifaddrs);
  std::vector<InterfaceAddress> addresses;
  for (const ifaddrs* entry = list; entry != nullptr; entry = entry->ifa_next) {
    if (entry->ifa_addr == nullptr) continue;
    const int family = entry->ifa_addr->sa_family;
    if (family != AF_INET && family != AF_INET6) continue;
    const socklen_t size = family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
    addresses.push_back({entry->ifa_name, SocketAddress(entry->ifa_addr, size)});
  }
  return addresses;
}

// What became of one connection; 0: it stands.
std::string DescribeAttempt(int error, double seconds) {
  switch (error) {
    case 0:
      return " accepts connections";
    case ECONNREFUSED:
      return " refused the connection";
    case EINPROGRESS:
      return fmt::format(" did not answer within {:.1f} s", seconds);
    default:
      return fmt::format(": {}", Reason(error));
  }
}

// Connects to all at once, so that each has the whole time. The errno of each; EINPROGRESS for one
// that has not answered.
std::vector<int> TryConnections(const std::vector<SocketAddress>& addresses, int timeout_ms) {
  std::vector<FileDescriptor> sockets;
  std::vector<int> errors;
  for (const SocketAddress& address : addresses) {
    sockets.emplace_back(socket(address.family(), SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    const int fd = sockets.back().get();
    errors.push_back(fd == -1 || connect(fd, address.get(), address.size) == -1 ? errno : 0);
  }
  const Clock::time_point deadline = Clock::now() + std::chrono::milliseconds(timeout_ms);
  while (true) {
    std::vector<pollfd> polls;
    std::vector<std::size_t> indices;
    for (std::size_t i = 0; i < errors.size(); ++i) {
      if (errors[i] != EINPROGRESS) continue;
      polls.push_back({sockets[i].get(), POLLOUT, 0});
      indices.push_back(i);
    }
    const auto left =
        std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()).count();
    if (polls.empty() || left < 0) return errors;
    const int ready = poll(polls.data(), static_cast<nfds_t>(polls.size()), static_cast<int>(left));
    if (ready == 0 || (ready == -1 && errno != EINTR)) return errors;
    for (std::size_t p = 0; ready > 0 && p < polls.size(); ++p) {
      if (polls[p].revents == 0) continue;
      int error = 0;
      socklen_t size = sizeof(error);
      if (getsockopt(polls[p].fd, SOL_SOCKET, SO_ERROR, &error, &size) == -1) error = errno;
      errors[indices[p]] = error;
    }
  }
}

}  // namespace

std::string_view WithoutBrackets(std::string_view host) {
  if (host.size() > 2 && host.front() == '[' && host.back() == ']') {
    return host.substr(1, host.size() - 2);
  }
  return host;
}

Result<TcpAddress> ParseTcpAddress(std::string_view text) {
  const auto wrong = [&](std::string_view what) {
    return InvalidArgument(fmt::format("address '{}' {}, expected tcp://HOST:PORT", text, what));
  };
  if (!text.starts_with(kScheme)) return wrong("does not begin with tcp://");
  const std::string_view rest = text.substr(kScheme.size());
  const std::size_t colon = rest.rfind(':');
  if (colon == std::string_view::npos || rest.find(']', colon) != std::string_view::npos) {
    return wrong("has no port");
  }
  const std::string_view digits = rest.substr(colon + 1);
  std::uint16_t port = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), port);
  if (error != std::errc() || end != digits.data() + digits.size()) {
    return wrong(fmt::format("has port '{}'", digits));
  }
  const std::string_view host = rest.substr(0, colon);
  if (host.empty()) return wrong("has no host");
  if (host.find_first_of(std::string_view(" \t\r\n\0/", 6)) != std::string_view::npos) {
    return wrong("has a host that cannot be one");
  }
  const std::string_view bare = WithoutBrackets(host);
  if (bare.size() == host.size() && host.find(':') != std::string_view::npos) {
    return wrong("has an IPv6 address without brackets");
  }
  if (bare.find_first_of("[]") != std::string_view::npos) {
    return wrong("has brackets that are not around an address");
  }
  if (bare.size() != host.size()) {
    const auto numeric = ParseNumeric(bare);
    if (!numeric || numeric->family() != AF_INET6) {
      return wrong("has brackets around what is no IPv6 address");
    }
  }
  return TcpAddress{std::string(bare), port};
}

std::string FormatTcpAddress(std::string_view host, std::uint16_t port) {
  host = WithoutBrackets(host);
  const bool is_ipv6 = host.find(':') != std::string_view::npos;
  return fmt::format("{}{}{}{}:{}", kScheme, is_ipv6 ? "[" : "", host, is_ipv6 ? "]" : "", port);
}

std::string FormatTcpAddress(const TcpAddress& address) {
  return FormatTcpAddress(address.host, address.port);
}

Result<std::vector<std::string>> ResolveTcp(const std::string& address) {
  const auto parsed = ParseTcpAddress(address);
  if (!parsed.ok()) return parsed.status();
  const auto found = LookUp(parsed.value().host, parsed.value().port, false);
  if (!found.ok()) return found.status();
  std::vector<std::string> addresses;
  for (const SocketAddress& each : found.value()) {
    addresses.push_back(FormatTcpAddress(each.Host(), parsed.value().port));
  }
  return addresses;
}

bool IsNumericHost(std::string_view host) { return ParseNumeric(host).has_value(); }

bool IsLoopback(std::string_view numeric_host) {
  const auto address = ParseNumeric(numeric_host);
  if (!address) return false;
  if (const auto v4 = Ipv4Of(*address)) return *v4 >> 24 == 127;
  const in6_addr v6 = Ipv6Of(*address);
  return IN6_IS_ADDR_LOOPBACK(&v6) != 0;
}

bool IsWildcard(std::string_view numeric_host) {
  const auto address = ParseNumeric(numeric_host);
  if (!address) return false;
  if (const auto v4 = Ipv4Of(*address)) return *v4 == 0;
  const in6_addr v6 = Ipv6Of(*address);
  return IN6_IS_ADDR_UNSPECIFIED(&v6) != 0;
}

bool IsOwnAddress(std::string_view numeric_host) {
  // The kernel knows what a list of interfaces does not say: all of 127.0.0.0/8 is this host's.
  const auto address = ParseNumeric(numeric_host);
  if (!address) return false;
  const FileDescriptor probe(socket(address->family(), SOCK_DGRAM | SOCK_CLOEXEC, 0));
  return probe.get() != -1 && bind(probe.get(), address->get(), address->size) == 0;
}

std::string OwnHostName() {
  std::array<char, 256> name{};
  // Cut names may lack their zero.
  if (gethostname(name.data(), name.size() - 1) != 0) return {};
  return name.data();
}

std::string DescribeInterfaces() {
  const auto addresses = InterfaceAddresses();
  if (!addresses.ok()) return addresses.status().message();
  std::string text;
  for (const InterfaceAddress& each : addresses.value()) {
    text += fmt::format("{}{} {}", text.empty() ? "" : ", ", each.interface, each.address.Host());
  }
  return text.empty() ? "none that has an address" : text;
}

Result<std::string> AddressOfInterface(const std::string& name) {
  const auto addresses = InterfaceAddresses();
  if (!addresses.ok()) return addresses.status();
  for (const int family : {AF_INET, AF_INET6}) {
    for (const InterfaceAddress& each : addresses.value()) {
      if (each.interface != name || each.address.family() != family) continue;
      if (family == AF_INET6) {
        const in6_addr v6 = Ipv6Of(each.address);
        if (IN6_IS_ADDR_LINKLOCAL(&v6)) continue;  // others would need our interface's name for it
      }
      return each.address.Host();
    }
  }
  const bool exists = if_nametoindex(name.c_str()) != 0;
  return InvalidArgument(
      fmt::format("{} on this host; its interfaces are: {}",
                  exists ? fmt::format("the network interface '{}' has no address that others "
                                       "could connect to",
                                       name)
                         : fmt::format("there is no network interface '{}'", name),
                  DescribeInterfaces()));
}

Result<std::string> LocalAddressTowards(const std::string& tcp_address) {
  const auto parsed = ParseTcpAddress(tcp_address);
  if (!parsed.ok()) return parsed.status();
  // A route does not depend on the port, but there is none to port 0.
  const std::uint16_t port = std::max<std::uint16_t>(parsed.value().port, 1);
  const auto found = LookUp(parsed.value().host, port, false);
  if (!found.ok()) return found.status();
  std::string reasons;
  for (const SocketAddress& each : found.value()) {
    const FileDescriptor probe(socket(each.family(), SOCK_DGRAM | SOCK_CLOEXEC, 0));
    SocketAddress own;
    own.size = sizeof(own.storage);
    if (probe.get() != -1 && connect(probe.get(), each.get(), each.size) == 0 &&
        getsockname(probe.get(), reinterpret_cast<sockaddr*>(&own.storage), &own.size) == 0) {
      return own.Host();
    }
    reasons += fmt::format("{}{}: {}", reasons.empty() ? "" : "; ", each.Host(), Reason(errno));
  }
  return Unavailable(fmt::format("no route from this host to {}: {}", tcp_address, reasons));
}

std::string DescribeReachability(const std::string& tcp_address, int timeout_ms) {
  const auto parsed = ParseTcpAddress(tcp_address);
  if (!parsed.ok()) return parsed.status().message();
  const auto [host, port] = parsed.value();
  auto found = LookUp(host, port, false);
  if (!found.ok()) return found.status().message();
  std::vector<SocketAddress>& addresses = found.value();
  const std::size_t left_out =
      addresses.size() > kMostAttempts ? addresses.size() - kMostAttempts : 0;
  addresses.resize(addresses.size() - left_out);
  const std::vector<int> errors = TryConnections(addresses, timeout_ms);
  std::string text;
  std::string loopback;
  for (std::size_t i = 0; i < addresses.size(); ++i) {
    text += fmt::format("{}{}{}", text.empty() ? "" : "; ", WithPort(addresses[i], port),
                        DescribeAttempt(errors[i], timeout_ms / 1000.0));
    if (loopback.empty() && IsLoopback(addresses[i].Host())) loopback = addresses[i].Host();
  }
  if (left_out > 0) text += fmt::format("; and {} more", left_out);
  if (!loopback.empty() && host != "localhost" && !IsNumericHost(host)) {
    text += fmt::format(
        " ('{}' is {} on this host, its own loopback, which leads to no other host: see "
        "/etc/hosts)",
        host, loopback);
  }
  return text;
}

}  // namespace gradwire
