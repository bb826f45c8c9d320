#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "common/base/bytes.h"
#include "common/base/status.h"
#include "common/config/config.h"
#include "common/transport/loop.h"
#include "server/refusals.h"

namespace gradwire {

struct ServerStats {
  bool started = false;  // everyone was here
  TrafficCounters traffic;
  std::uint64_t rounds = 0;
  std::uint64_t nonfinite_rounds = 0;
  std::uint64_t duplicate_pushes = 0;
  RefusalCounters refused;
};

/// One server: its lanes, each a loop with the shard of keys that the plan gives it. Server 0 is
/// also the root.
/// Threads: every method is safe from any thread.
class Server {
 public:
  /// Listens on all lanes and, unless it is the root, connects to the root. The root writes every
  /// version of the plan to `save_plan_path`, if there is one. Names are resolved, which may block
  /// as long as the resolver's own timeouts.
  /// Errors: Unavailable (address, port, reason), InvalidArgument (key, address, reason).
  static Result<std::unique_ptr<Server>> Start(const Config& config, std::uint32_t index,
                                               const std::string& save_plan_path = "");

  /// The same over given loops, one a lane; lane l listens on `addresses[l]` and tells others so
  /// (tests use the in-process network).
  static Result<std::unique_ptr<Server>> Start(const Config& config, std::uint32_t index,
                                               std::vector<std::unique_ptr<Loop>> lanes,
                                               std::vector<std::string> addresses,
                                               const std::string& save_plan_path = "");
  virtual ~Server() = default;

  /// Where lane 0 listens.
  virtual std::string address() const = 0;
  /// Blocks until every worker has said goodbye, or the job has failed (its error).
  virtual Status Run() = 0;
  /// Ends the server from another thread; Run returns.
  virtual void Stop() = 0;

  virtual ServerStats stats() const = 0;
  /// The residual of a tensor's first `count` elements here, zeros where there is none; at a moment
  /// when no round is open.
  virtual std::vector<float> ReadResidual(const std::string& tensor, std::uint64_t count) = 0;
};

}  // namespace gradwire
