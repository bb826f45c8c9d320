#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "common/base/status.h"

namespace gradwire {

/// Addresses of the form tcp://HOST:PORT, what their names resolve to, and this host's own
/// addresses. A numeric host is an IPv4 or IPv6 address in text, without brackets.
/// Threads: all functions are safe from any thread.

struct TcpAddress {
  std::string host;  // a name or a numeric address, an IPv6 address without its brackets
  std::uint16_t port = 0;

  friend bool operator==(const TcpAddress&, const TcpAddress&) = default;
};

/// "tcp://[::1]:5701" -> "::1", 5701.
/// Errors: InvalidArgument naming the text and what is wrong with it.
Result<TcpAddress> ParseTcpAddress(std::string_view text);

/// With brackets where they are needed: "tcp://[::1]:5701".
std::string FormatTcpAddress(const TcpAddress& address);
std::string FormatTcpAddress(std::string_view host, std::uint16_t port);

/// The host without the brackets of an IPv6 address, if it has them: "[::1]" -> "::1".
std::string_view WithoutBrackets(std::string_view host);

/// The numeric addresses, as tcp://HOST:PORT, that an address stands for, each once and in
/// getaddrinfo's order (the one to try first in front). A numeric address gives itself, at once; a
/// name may block for as long as the resolver's own timeouts, tens of seconds where DNS is silent.
/// Errors: Unavailable naming host and reason, InvalidArgument for what is no address.
Result<std::vector<std::string>> ResolveTcp(const std::string& address);

/// Whether the host is an address in text, so that nothing has to be looked up.
bool IsNumericHost(std::string_view host);
/// 127.0.0.0/8, ::1, ::ffff:127.0.0.0/104. False for names.
bool IsLoopback(std::string_view numeric_host);
/// 0.0.0.0, ::. False for names.
bool IsWildcard(std::string_view numeric_host);
/// Whether one may listen on it here: it is an address of this host, or a wildcard.
bool IsOwnAddress(std::string_view numeric_host);

/// The numeric host to listen on for the interface of this name: its first IPv4 address, without
/// one its first global IPv6 address.
/// Errors: InvalidArgument, listing the interfaces there are with their addresses.
Result<std::string> AddressOfInterface(const std::string& name);

/// This host's name, for people; empty if it has none.
std::string OwnHostName();

/// "lo 127.0.0.1, lo ::1, eth0 192.0.2.2": this host's interfaces with their addresses.
std::string DescribeInterfaces();

/// The numeric host that the kernel would send from to reach the address: nothing is sent. May
/// block as ResolveTcp does.
/// Errors: Unavailable naming address and reason, InvalidArgument for what is no address.
Result<std::string> LocalAddressTowards(const std::string& tcp_address);

/// What happens to a plain TCP connection to each address that this one stands for, for people:
/// "10.0.0.1:5701 refused the connection; [fd00::1]:5701: Network is unreachable", or why the name
/// does not resolve. Takes `timeout_ms` at most, beside what ResolveTcp may take.
std::string DescribeReachability(const std::string& tcp_address, int timeout_ms);

}  // namespace gradwire
