#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "common/base/status.h"
#include "common/config/config.h"

namespace gradwire {

/// Where a server listens and where it tells others to find it.
struct Hosts {
  std::string listen;     // numeric; may be a wildcard
  std::string advertise;  // a name or numeric; never a wildcard
};

/// Reads server.interface, server.bind, server.advertise and endpoint against what this host is.
/// Resolves names, which may block as ResolveTcp does. Logs a warning for what works but looks
/// wrong.
/// Errors: InvalidArgument, or Unavailable for a name that does not resolve: which key, which
/// address, why, and what to set.
Result<Hosts> ChooseHosts(const Config& config, std::uint32_t index);

/// Gives a server's lanes their ports: the root's first lane the endpoint's, others those of
/// server.port_range from its start, or free ones. Never the endpoint's port to anybody else, so
/// that a server on the root's host can't take it away.
class PortChooser {
 public:
  using Listen = std::function<Result<std::string>(const std::string& address)>;

  /// `listen_host` is numeric. The configuration outlives the chooser.
  PortChooser(const Config& config, std::uint32_t index, std::string listen_host);

  /// Lanes in order from 0. Calls `listen` with one address after the other until it succeeds.
  /// Errors: what was tried, why it failed and what to do.
  Result<std::string> ListenOnLane(std::uint32_t lane, const Listen& listen);

 private:
  Status CheckRange() const;

  const Config& config_;
  const std::uint32_t index_;
  const std::string host_;
  std::uint16_t endpoint_port_ = 0;
  std::uint32_t next_port_;  // of the range; beyond its end once it is used up
};

/// The addresses of a server's lanes for people: "tcp://10.0.0.1:5701,40213", "inproc://a,
/// inproc://b".
std::string DescribeLanes(const std::vector<std::string>& addresses);

}  // namespace gradwire
