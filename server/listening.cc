#include "server/listening.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "common/base/log.h"
#include "common/transport/address.h"

namespace gradwire {
namespace {

// Addresses are numeric hosts here, without scheme and port.
Result<std::vector<std::string>> ResolveHost(std::string_view host) {
  const auto resolved = ResolveTcp(FormatTcpAddress(host, 0));
  if (!resolved.ok()) return resolved.status();
  std::vector<std::string> hosts;
  for (const std::string& address : resolved.value()) {
    auto parsed = ParseTcpAddress(address);
    if (!parsed.ok()) return parsed.status();
    hosts.push_back(std::move(parsed).value().host);
  }
  return hosts;
}

Status InKey(std::string_view key, const std::string& value, const Status& status) {
  return {status.code(), fmt::format("{} is {}: {}", key, value, status.message())};
}

std::string Join(const std::vector<std::string>& hosts) {
  return fmt::format("{}", fmt::join(hosts, ", "));
}

bool AllLoopback(const std::vector<std::string>& hosts) {
  return std::all_of(hosts.begin(), hosts.end(),
                     [](const std::string& h) { return IsLoopback(h); });
}

std::vector<std::string> OwnOnes(std::vector<std::string> hosts) {
  std::erase_if(hosts, [](const std::string& host) { return !IsOwnAddress(host); });
  return hosts;
}

bool IsIpv6(std::string_view host) { return host.find(':') != std::string_view::npos; }

// Whether who listens on `listen` is found at `host`, one of this host's addresses.
bool Covers(const std::string& listen, const std::string& host) {
  // ZeroMQ's sockets on :: take IPv4 as well.
  if (IsWildcard(listen)) return IsIpv6(listen) || !IsIpv6(host);
  return listen == host;
}

bool AnyCovered(const std::string& listen, const std::vector<std::string>& hosts) {
  return std::any_of(hosts.begin(), hosts.end(),
                     [&](const std::string& host) { return Covers(listen, host); });
}

// "'ps' (10.0.0.1, 10.0.0.2)", "10.0.0.1"
std::string Shown(std::string_view host, const std::vector<std::string>& resolved) {
  return IsNumericHost(host) ? std::string(host) : fmt::format("'{}' ({})", host, Join(resolved));
}

// Debian writes the host's own name into /etc/hosts with 127.0.1.1.
bool IsLoopbackName(std::string_view host, const std::vector<std::string>& resolved) {
  return !IsNumericHost(host) && host != "localhost" && AllLoopback(resolved);
}

Result<std::string> ChooseListenHost(const Config& config) {
  const Config::Server& server = config.server;
  const bool by_interface = !server.interface.empty();
  const std::string_view key = by_interface ? "server.interface" : "server.bind";
  const std::string& value = by_interface ? server.interface : server.bind;
  std::vector<std::string> hosts;
  if (by_interface) {
    auto host = AddressOfInterface(server.interface);
    if (!host.ok()) return InKey(key, value, host.status());
    hosts.push_back(std::move(host).value());
  } else {
    auto resolved = ResolveHost(WithoutBrackets(value));
    if (!resolved.ok()) return InKey(key, value, resolved.status());
    hosts = std::move(resolved).value();
  }
  const std::string shown = by_interface ? fmt::format("{} ({})", value, Join(hosts))
                                         : Shown(WithoutBrackets(value), hosts);
  std::vector<std::string> own = OwnOnes(hosts);
  if (own.empty()) {
    return InvalidArgument(
        fmt::format("{} is {}, which is no address of this host; its interfaces are: {}", key,
                    shown, DescribeInterfaces()));
  }
  if (!AllLoopback(hosts) && !config.security.insecure) {
    return InvalidArgument(fmt::format(
        "{} is {}, which others can reach, and nothing keeps strangers out: set security.insecure "
        "to true if that is meant",
        key, shown));
  }
  // Of a name with several: what others can reach, and of that IPv4, which everybody has.
  std::stable_sort(own.begin(), own.end(), [](const std::string& a, const std::string& b) {
    return std::pair(IsLoopback(a), IsIpv6(a)) < std::pair(IsLoopback(b), IsIpv6(b));
  });
  if (!by_interface && IsLoopbackName(value, hosts)) {
    LogWarn("server",
            "server.bind is a name of this host's loopback, which no other host can reach: see "
            "/etc/hosts, or set an address or server.interface",
            {Field("bind", value), Field("address", Join(hosts))});
  }
  return own.front();
}

// Everyone looks for the root at the endpoint, so it must lead to where the root listens.
Status CheckRootEndpoint(const Config& config, const std::string& host, const std::string& listen) {
  const auto resolved = ResolveHost(host);
  if (!resolved.ok()) return InKey("endpoint", config.endpoint, resolved.status());
  const std::string shown = Shown(host, resolved.value());
  const std::vector<std::string> own = OwnOnes(resolved.value());
  if (AnyCovered(listen, own)) return Status::Ok();
  if (own.empty()) {
    if (IsWildcard(listen) && config.server.advertise == "auto") {
      return InvalidArgument(
          fmt::format("endpoint is {}, but {} is no address of this host, where the root is "
                      "starting; its interfaces are: {}",
                      config.endpoint, shown, DescribeInterfaces()));
    }
    // Something may forward it to us.
    LogWarn("server", "the endpoint is no address of this host, where the root is starting",
            {Field("endpoint", config.endpoint), Field("address", Join(resolved.value())),
             Field("interfaces", DescribeInterfaces())});
    return Status::Ok();
  }
  if (IsLoopbackName(host, own)) {
    LogWarn("server",
            "the endpoint's name is this host's loopback here: others may find the root by it, "
            "processes on this host cannot; see /etc/hosts",
            {Field("endpoint", config.endpoint), Field("address", Join(own)),
             Field("listening", listen)});
    return Status::Ok();
  }
  const bool needs_insecure = !config.security.insecure && !IsLoopback(own.front());
  return InvalidArgument(fmt::format(
      "endpoint is {}, but the root would listen on {} only, where nobody looks for it: set {} "
      "{}{}, "
      "or the endpoint's host to {}",
      config.endpoint, listen,
      config.server.interface.empty() ? "server.bind to" : "server.interface to the one that has",
      own.front(), needs_insecure ? " (with security.insecure)" : "", listen));
}

Status CheckAdvertised(const std::string& host, const std::string& listen) {
  const auto resolved = ResolveHost(host);
  if (!resolved.ok()) return InKey("server.advertise", host, resolved.status());
  const std::vector<std::string>& hosts = resolved.value();
  const std::string shown = Shown(host, hosts);
  if (std::any_of(hosts.begin(), hosts.end(), [](const std::string& h) { return IsWildcard(h); })) {
    return InvalidArgument(
        fmt::format("server.advertise is {}, which nobody can connect to: name one of this host's "
                    "addresses: {}",
                    shown, DescribeInterfaces()));
  }
  const std::vector<std::string> own = OwnOnes(hosts);
  if (own.empty()) {
    return InvalidArgument(
        fmt::format("server.advertise is {}, which is no address of this host; its interfaces "
                    "are: {}",
                    shown, DescribeInterfaces()));
  }
  if (IsLoopbackName(host, hosts) && !IsLoopback(listen)) {
    return InvalidArgument(fmt::format(
        "server.advertise is {}, this host's own loopback, while the server listens on {}: "
        "/etc/hosts gives the name a loopback address (Debian writes 127.0.1.1 there), which leads "
        "to no other host; correct /etc/hosts, or set server.advertise to an address: {}",
        shown, listen, DescribeInterfaces()));
  }
  if (!AnyCovered(listen, own)) {
    return InvalidArgument(
        fmt::format("server.advertise is {}, but the server listens on {} only: set server.bind to "
                    "{}, or server.advertise to auto",
                    shown, listen, own.front()));
  }
  return Status::Ok();
}

// The address by which the root is reached, for a server that listens on all.
Result<std::string> OwnHostTowards(const std::string& endpoint, const std::string& listen) {
  const auto resolved = ResolveTcp(endpoint);
  if (!resolved.ok()) return InKey("endpoint", endpoint, resolved.status());
  std::vector<std::string> found;
  Status last;
  for (const std::string& address : resolved.value()) {
    auto own = LocalAddressTowards(address);
    if (!own.ok()) {
      last = own.status();
    } else if (Covers(listen, own.value())) {
      return own;
    } else {
      found.push_back(std::move(own).value());
    }
  }
  if (found.empty()) {
    return Status(last.code(), fmt::format("{}; set server.advertise, or server.bind to the "
                                           "address that others can reach: {}",
                                           last.message(), DescribeInterfaces()));
  }
  return InvalidArgument(
      fmt::format("server.bind is {}, which takes IPv4 alone, but this host's address towards the "
                  "endpoint {} is {}: set server.bind to '::', or server.advertise",
                  listen, endpoint, Join(found)));
}

// What Listen says without its "cannot listen on ADDRESS: ".
std::string ReasonOf(const Status& status, const std::string& address) {
  const std::string& text = status.message();
  const std::size_t at = text.find(address + ": ");
  return at == std::string::npos ? text : text.substr(at + address.size() + 2);
}

}  // namespace

Result<Hosts> ChooseHosts(const Config& config, std::uint32_t index) {
  const auto endpoint = ParseTcpAddress(config.endpoint);
  if (!endpoint.ok()) return InKey("endpoint", config.endpoint, endpoint.status());
  const std::string& endpoint_host = endpoint.value().host;
  if (IsWildcard(endpoint_host)) {
    return InvalidArgument(
        fmt::format("endpoint is {}, which nobody can connect to: it names the root's host, and "
                    "server.bind may be {}",
                    config.endpoint, endpoint_host));
  }
  auto listen = ChooseListenHost(config);
  if (!listen.ok()) return listen.status();
  Hosts hosts;
  hosts.listen = std::move(listen).value();
  if (index == 0) {
    GRADWIRE_RETURN_IF_ERROR(CheckRootEndpoint(config, endpoint_host, hosts.listen));
  }
  if (config.server.advertise != "auto") {
    hosts.advertise = WithoutBrackets(config.server.advertise);
    GRADWIRE_RETURN_IF_ERROR(CheckAdvertised(hosts.advertise, hosts.listen));
  } else if (!IsWildcard(hosts.listen)) {
    hosts.advertise = hosts.listen;
  } else if (index == 0) {
    hosts.advertise = endpoint_host;
  } else {
    auto own = OwnHostTowards(config.endpoint, hosts.listen);
    if (!own.ok()) return own.status();
    hosts.advertise = std::move(own).value();
  }
  return hosts;
}

PortChooser::PortChooser(const Config& config, std::uint32_t index, std::string listen_host)
    : config_(config),
      index_(index),
      host_(std::move(listen_host)),
      next_port_(config.server.port_range.first) {
  if (const auto endpoint = ParseTcpAddress(config.endpoint); endpoint.ok()) {
    endpoint_port_ = endpoint.value().port;
  }
}

Status PortChooser::CheckRange() const {
  const PortRange& range = config_.server.port_range;
  const std::uint32_t needed = config_.server.lanes - (index_ == 0 ? 1 : 0);
  const bool endpoint_inside =
      endpoint_port_ != 0 && range.first <= endpoint_port_ && endpoint_port_ <= range.last;
  const std::uint32_t there =
      std::uint32_t{range.last} - range.first + 1 - (endpoint_inside ? 1 : 0);
  if (there >= needed) return Status::Ok();
  return InvalidArgument(
      fmt::format("server.port_range {}-{} has {} port(s){}, but this server needs {} for its "
                  "lanes: widen the range",
                  range.first, range.last, there,
                  endpoint_inside ? " beside the endpoint's, which is the root's" : "", needed));
}

Result<std::string> PortChooser::ListenOnLane(std::uint32_t lane, const Listen& listen) {
  if (index_ == 0 && lane == 0) {
    const std::string address = FormatTcpAddress(host_, endpoint_port_);
    auto bound = listen(address);
    if (bound.ok()) return bound;
    return Status(
        bound.status().code(),
        fmt::format("cannot listen on {}, the endpoint's port: {}; another process has it, perhaps "
                    "an older job ('ss -ltnp' shows which): end that one, or give `endpoint` "
                    "another port, for all processes of the job",
                    address, ReasonOf(bound.status(), address)));
  }
  const PortRange& range = config_.server.port_range;
  if (range.empty()) return listen(FormatTcpAddress(host_, 0));
  GRADWIRE_RETURN_IF_ERROR(CheckRange());
  std::string last = "this server's other lanes have them";
  while (next_port_ <= range.last) {
    const auto port = static_cast<std::uint16_t>(next_port_++);
    if (port == endpoint_port_) continue;
    const std::string address = FormatTcpAddress(host_, port);
    auto bound = listen(address);
    if (bound.ok()) return bound;
    last = fmt::format("{}: {}", address, ReasonOf(bound.status(), address));
  }
  return Unavailable(
      fmt::format("no port of server.port_range {}-{} is free on {} for lane {} of server {}; the "
                  "last one tried, {}; widen the range, or end what has the ports ('ss -ltnp' "
                  "shows it)",
                  range.first, range.last, host_, lane, index_, last));
}

std::string DescribeLanes(const std::vector<std::string>& addresses) {
  std::string text;
  std::string host;
  for (const std::string& address : addresses) {
    const auto parsed = ParseTcpAddress(address);
    if (parsed.ok() && !text.empty() && parsed.value().host == host) {
      text += fmt::format(",{}", parsed.value().port);
      continue;
    }
    text += fmt::format("{}{}", text.empty() ? "" : ", ", address);
    host = parsed.ok() ? parsed.value().host : "";
  }
  return text;
}

}  // namespace gradwire
