// Addresses: their text, what they resolve to, and what this host can reach.

#include "common/transport/address.h"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <cstring>
#include <iostream>
#include <string>
#include <thread>
#include <vector>

#include "tests/catch.h"

namespace gradwire {
namespace {

/// A listening TCP socket on a free port of a loopback address.
class Listener {
 public:
  explicit Listener(int family) : fd_(socket(family, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_storage address{};
    socklen_t size = sizeof(sockaddr_in);
    if (family == AF_INET) {
      sockaddr_in in{};
      in.sin_family = AF_INET;
      in.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
      std::memcpy(&address, &in, sizeof(in));
    } else {
      sockaddr_in6 in6{};
      in6.sin6_family = AF_INET6;
      in6.sin6_addr = in6addr_loopback;
      std::memcpy(&address, &in6, sizeof(in6));
      size = sizeof(in6);
    }
    ok_ = fd_ != -1 && bind(fd_, reinterpret_cast<const sockaddr*>(&address), size) == 0 &&
          listen(fd_, 4) == 0 &&
          getsockname(fd_, reinterpret_cast<sockaddr*>(&address), &size) == 0;
    sockaddr_in in{};  // the port is at the same place in both kinds
    std::memcpy(&in, &address, sizeof(in));
    port_ = ntohs(in.sin_port);
  }
  ~Listener() { Close(); }
  void Close() {
    if (fd_ != -1) close(fd_);
    fd_ = -1;
  }
  bool ok() const { return ok_; }
  std::uint16_t port() const { return port_; }

 private:
  int fd_;
  bool ok_ = false;
  std::uint16_t port_ = 0;
};

bool HasIpv6() {
  if (IsOwnAddress("::1")) return true;
  std::cout << "SKIPPED in part: this machine has no IPv6\n";
  return false;
}

TEST_CASE("a TCP address is parsed and written back", "[transport][address]") {
  const auto check = [](const std::string& text, const std::string& host, std::uint16_t port) {
    CAPTURE(text);
    const auto parsed = ParseTcpAddress(text);
    REQUIRE(parsed.ok());
    CHECK(parsed.value() == TcpAddress{host, port});
    CHECK(FormatTcpAddress(parsed.value()) == text);
  };
  check("tcp://127.0.0.1:5701", "127.0.0.1", 5701);
  check("tcp://[::1]:5701", "::1", 5701);
  check("tcp://[fd00::1]:0", "fd00::1", 0);
  check("tcp://ps-0.example.org:65535", "ps-0.example.org", 65535);
  check("tcp://[::ffff:10.0.0.1]:1", "::ffff:10.0.0.1", 1);
  CHECK(FormatTcpAddress("[::1]", 7) == "tcp://[::1]:7");
  CHECK(FormatTcpAddress("::1", 7) == "tcp://[::1]:7");
  CHECK(FormatTcpAddress("ps", 7) == "tcp://ps:7");
}

TEST_CASE("a text that is no TCP address is refused with what is wrong", "[transport][address]") {
  const auto check = [](const std::string& text, const std::string& what) {
    CAPTURE(text, what);
    const auto parsed = ParseTcpAddress(text);
    REQUIRE_FALSE(parsed.ok());
    CHECK(parsed.status().code() == StatusCode::kInvalidArgument);
    CHECK(parsed.status().message().find("'" + text + "'") != std::string::npos);
    CHECK(parsed.status().message().find(what) != std::string::npos);
    CHECK_FALSE(ResolveTcp(text).ok());
    CHECK_FALSE(LocalAddressTowards(text).ok());
    CHECK(DescribeReachability(text, 100).find(what) != std::string::npos);
  };
  check("", "does not begin with tcp://");
  check("ipc:///run/x", "does not begin with tcp://");
  check("tcp://ps", "has no port");
  check("tcp://[::1]", "has no port");
  check("tcp://ps:", "has port ''");
  check("tcp://ps:65536", "has port '65536'");
  check("tcp://ps:-1", "has port '-1'");
  check("tcp://ps:5701x", "has port '5701x'");
  check("tcp://:5701", "has no host");
  check("tcp://a b:5701", "has a host that cannot be one");
  check("tcp://fd00::1:5701", "without brackets");
  check("tcp://[ps]:5701", "brackets around what is no IPv6 address");
  check("tcp://[127.0.0.1]:5701", "brackets around what is no IPv6 address");
  check("tcp://[::1:5701", "without brackets");
  check("tcp://ps]:5701", "brackets that are not around an address");
}

TEST_CASE("loopback and wildcard addresses are known in all their forms", "[transport][address]") {
  for (const char* host : {"127.0.0.1", "127.255.3.4", "127.0.1.1", "::1", "[::1]",
                           "0:0:0:0:0:0:0:1", "::ffff:127.0.0.1", "::ffff:127.3.2.1"}) {
    CAPTURE(host);
    CHECK(IsLoopback(host));
    CHECK(IsNumericHost(host));
    CHECK_FALSE(IsWildcard(host));
  }
  for (const char* host : {"0.0.0.0", "::", "[::]", "::ffff:0.0.0.0"}) {
    CAPTURE(host);
    CHECK(IsWildcard(host));
    CHECK_FALSE(IsLoopback(host));
    CHECK(IsNumericHost(host));
  }
  for (const char* host :
       {"128.0.0.1", "10.127.0.1", "fd00::1", "::2", "::ffff:10.0.0.1", "1::127.0.0.1"}) {
    CAPTURE(host);
    CHECK_FALSE(IsLoopback(host));
    CHECK_FALSE(IsWildcard(host));
    CHECK(IsNumericHost(host));
  }
  for (const char* host : {"", "localhost", "127.0.0.1.example.org", "[]", "::1]", "ps"}) {
    CAPTURE(host);
    CHECK_FALSE(IsLoopback(host));
    CHECK_FALSE(IsWildcard(host));
    CHECK_FALSE(IsNumericHost(host));
    CHECK_FALSE(IsOwnAddress(host));
  }
}

TEST_CASE("the host's own addresses are told from others", "[transport][address]") {
  CHECK(IsOwnAddress("127.0.0.1"));
  CHECK(IsOwnAddress("127.0.1.1"));
  CHECK(IsOwnAddress("0.0.0.0"));
  CHECK_FALSE(IsOwnAddress("203.0.113.77"));
  CHECK_FALSE(IsOwnAddress("2001:db8::77"));
  if (HasIpv6()) CHECK(IsOwnAddress("::"));
}

TEST_CASE("a numeric address resolves to itself", "[transport][address]") {
  for (const char* address : {"tcp://127.0.0.1:5701", "tcp://[::1]:5701", "tcp://203.0.113.7:0",
                              "tcp://[2001:db8::7]:1"}) {
    CAPTURE(address);
    const auto resolved = ResolveTcp(address);
    REQUIRE(resolved.ok());
    CHECK(resolved.value() == std::vector<std::string>{address});
  }
  // Another way to write it is the same address.
  REQUIRE(ResolveTcp("tcp://[0:0::1]:9").ok());
  CHECK(ResolveTcp("tcp://[0:0::1]:9").value() == std::vector<std::string>{"tcp://[::1]:9"});
}

TEST_CASE("localhost resolves to loopback addresses, each once", "[transport][address]") {
  const auto resolved = ResolveTcp("tcp://localhost:5701");
  REQUIRE(resolved.ok());
  REQUIRE_FALSE(resolved.value().empty());
  for (std::size_t i = 0; i < resolved.value().size(); ++i) {
    const std::string& address = resolved.value()[i];
    CAPTURE(address);
    const auto parsed = ParseTcpAddress(address);
    REQUIRE(parsed.ok());
    CHECK(IsLoopback(parsed.value().host));
    CHECK(parsed.value().port == 5701);
    for (std::size_t j = 0; j < i; ++j) CHECK(resolved.value()[j] != address);
  }
}

TEST_CASE("a name that does not resolve is named with the reason", "[transport][address]") {
  // .invalid never exists (RFC 6761), whatever the resolver.
  const auto resolved = ResolveTcp("tcp://nobody.invalid:5701");
  REQUIRE_FALSE(resolved.ok());
  CHECK(resolved.status().code() == StatusCode::kUnavailable);
  CHECK(resolved.status().message().find("cannot resolve the host 'nobody.invalid': ") == 0);
  CHECK(resolved.status().message().size() > 50);
  CHECK(DescribeReachability("tcp://nobody.invalid:5701", 100).find("nobody.invalid") !=
        std::string::npos);
  CHECK_FALSE(LocalAddressTowards("tcp://nobody.invalid:5701").ok());
}

TEST_CASE("an interface's address is found by its name", "[transport][address]") {
  const auto loopback = AddressOfInterface("lo");
  REQUIRE(loopback.ok());
  CHECK(IsLoopback(loopback.value()));
  CHECK(DescribeInterfaces().find("lo " + loopback.value()) != std::string::npos);
}

TEST_CASE("a wrong interface name is answered with those there are", "[transport][address]") {
  const auto wrong = AddressOfInterface("nonesuch0");
  REQUIRE_FALSE(wrong.ok());
  CHECK(wrong.status().code() == StatusCode::kInvalidArgument);
  CHECK(wrong.status().message().find("'nonesuch0'") != std::string::npos);
  CHECK(wrong.status().message().find("lo 127.0.0.1") != std::string::npos);
  CHECK_FALSE(AddressOfInterface("").ok());
}

TEST_CASE("the source address towards loopback is loopback", "[transport][address]") {
  const auto own = LocalAddressTowards("tcp://127.0.0.1:0");
  REQUIRE(own.ok());
  CHECK(own.value() == "127.0.0.1");
  if (!HasIpv6()) return;
  const auto own6 = LocalAddressTowards("tcp://[::1]:5701");
  REQUIRE(own6.ok());
  CHECK(own6.value() == "::1");
}

TEST_CASE("reachability tells who accepts, refuses and keeps silent", "[transport][address]") {
  Listener listener(AF_INET);
  REQUIRE(listener.ok());
  const std::string address = FormatTcpAddress("127.0.0.1", listener.port());
  const std::string text = fmt::format("127.0.0.1:{}", listener.port());
  CHECK(DescribeReachability(address, 5000) == text + " accepts connections");
  listener.Close();
  CHECK(DescribeReachability(address, 5000) == text + " refused the connection");
  if (!HasIpv6()) return;
  Listener listener6(AF_INET6);
  REQUIRE(listener6.ok());
  const std::string address6 = FormatTcpAddress("::1", listener6.port());
  const std::string text6 = fmt::format("[::1]:{}", listener6.port());
  CHECK(DescribeReachability(address6, 5000) == text6 + " accepts connections");
  listener6.Close();
  CHECK(DescribeReachability(address6, 5000) == text6 + " refused the connection");
}

TEST_CASE("reachability is bounded where nobody answers", "[transport][address]") {
  // A documentation address (RFC 5737): some networks are silent, some say that there is no route.
  const auto start = std::chrono::steady_clock::now();
  const std::string text = DescribeReachability("tcp://203.0.113.77:9", 200);
  const auto took = std::chrono::steady_clock::now() - start;
  CHECK(text.find("203.0.113.77:9") == 0);
  CHECK(text.size() > std::string("203.0.113.77:9").size());
  // Generous: the machine may be busy. The kernel's own limit would be two minutes.
  CHECK(took < std::chrono::seconds(20));
}

TEST_CASE("addresses may be asked for from many threads", "[transport][address]") {
  std::vector<std::thread> threads;
  std::vector<int> failures(4, 0);
  for (std::size_t t = 0; t < failures.size(); ++t) {
    threads.emplace_back([&failures, t] {
      for (int i = 0; i < 20; ++i) {
        const auto resolved = ResolveTcp("tcp://localhost:1");
        const auto own = LocalAddressTowards("tcp://127.0.0.1:1");
        if (!resolved.ok() || !own.ok() || own.value() != "127.0.0.1" ||
            DescribeInterfaces().empty() || AddressOfInterface("nonesuch0").ok()) {
          ++failures[t];
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const int count : failures) CHECK(count == 0);
}

}  // namespace
}  // namespace gradwire
